"""`python -m sde_gym` is `sde-gym`."""

from sde_gym.cli import main

if __name__ == "__main__":
    main()
