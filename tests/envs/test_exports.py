"""What the packages `policies` and `envs` offer by name, and that offering it costs nothing."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest


@pytest.mark.parametrize("package", ["sde_gym.policies", "sde_gym.envs"])
def test_every_name_is_there(package: str) -> None:
    module = import_module(package)
    for name in module.__all__:
        assert getattr(module, name).__name__ == name
        assert name in dir(module)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = module.nothing


def test_importing_the_packages_loads_nothing_heavy() -> None:
    code = (
        "import sys, sde_gym, sde_gym.policies, sde_gym.envs\n"
        "print([name for name in ('torch', 'pyarrow', 'safetensors', 'd3rlpy', 'sde_gym.envs.lede')"
        " if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
