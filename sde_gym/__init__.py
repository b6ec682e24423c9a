"""sde_gym: self-speculative decoding of a real language model as a reinforcement-learning problem.

Importing this package registers its environments with gymnasium and loads neither torch nor any
learning library.
"""

from gymnasium.envs.registration import register, registry

__version__ = "0.1.0"

if "sde_gym/LEDE-v0" not in registry:
    register(
        id="sde_gym/LEDE-v0",
        entry_point="sde_gym.envs.lede:LEDEEnv",
        vector_entry_point="sde_gym.envs.vector:LEDEVectorEnv",
    )
if "sde_gym/LEDELive-v0" not in registry:
    register(id="sde_gym/LEDELive-v0", entry_point="sde_gym.envs.live:LEDELiveEnv")
if "sde_gym/LEDEWallClock-v0" not in registry:
    register(
        id="sde_gym/LEDEWallClock-v0",
        entry_point="sde_gym.envs.wallclock:LEDEWallClockEnv",
        nondeterministic=True,
    )
