"""What the package promises as a whole: quick imports, one version, documentation that holds."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer

import sde_gym

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
INSTALL = 'pip install -c constraints.txt -e ".[all]"'


def run_python(code: str) -> str:
    """What `code` prints in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_loads_no_learning_library() -> None:
    learning = ("d3rlpy", "minari", "ray", "stable_baselines3", "gguf", "h5py", "torch", "transformers")
    loaded = run_python(f"import sys, sde_gym; print([name for name in {learning!r} if name in sys.modules])")
    assert loaded == "[]"


@pytest.mark.parametrize("module", ["models.loading", "traces", "policies", "decoding", "envs"])
def test_the_core_loads_no_learning_library(module: str) -> None:
    learning = ("d3rlpy", "minari", "ray", "stable_baselines3")
    code = f"import sys, sde_gym.{module}; print([name for name in {learning!r} if name in sys.modules])"
    assert run_python(code) == "[]"


def test_import_takes_less_than_a_second_beyond_torch_and_gymnasium() -> None:
    code = """
import time, torch, gymnasium
started = time.process_time()
import sde_gym
print(time.process_time() - started)
"""
    assert float(run_python(code)) < 1.0


def test_registering_twice_is_quiet() -> None:
    code = "import importlib, warnings, sde_gym; warnings.simplefilter('error'); importlib.reload(sde_gym)"
    assert run_python(code) == ""


def test_version_is_one() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"]
    source = (ROOT / PROJECT["tool"]["hatch"]["version"]["path"]).read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)
    assert version == sde_gym.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|(a|b|rc)\d+)?", version)


def test_readme_gives_the_two_commands_once() -> None:
    blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    assert lines.count(f"{INSTALL} && sde-gym demo") == 1
    assert lines.count(f"{INSTALL} && pytest") == 1


@pytest.mark.skipif(not (ROOT / ".ci" / "run").is_file(), reason="these sources come without .ci/run")
def test_continuous_integration_takes_its_command_from_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (pattern,) = re.findall(r"grep -E '([^']+)' README\.md", script)
    found = [line for line in README.splitlines() if re.search(pattern, line)]
    assert found == [f"{INSTALL} && pytest"]
    assert 'eval "$commands"' in script
    assert "pip install" not in script.replace(pattern, "").replace("'pip install ... && pytest'", "")


def test_readme_python_example_runs() -> None:
    (code,) = re.findall(r"<!-- test -->\n```python\n(.*?)```", README, re.DOTALL)
    assert len(code.splitlines()) <= 12
    total, _, info = run_python(code).partition(" ")
    assert float(total) != 0.0
    assert info.startswith("{")


def test_readme_names_folders_and_commands_that_exist() -> None:
    from sde_gym.cli import app

    for folder in re.findall(r"^\| `(\w+/\w+)` \|", README, re.MULTILINE):
        assert (ROOT / folder / "__init__.py").is_file(), folder
    commands = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    used = set(re.findall(r"^sde-gym ([\w-]+)", README, re.MULTILINE))
    assert used
    assert used <= commands


def normal(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_requirement_has_a_tested_version_in_its_range() -> None:
    from packaging.requirements import Requirement

    pins = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            pins[normal(name)] = version
    assert pins["torch"] == "2.13.0"
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"], *(item for items in extras.values() for item in items)]
    for requirement in map(Requirement, wanted):
        if requirement.name == PROJECT["project"]["name"]:
            assert requirement.extras <= set(extras)
            continue
        assert requirement.specifier, f"{requirement.name} has no range"
        assert requirement.specifier.contains(pins[normal(requirement.name)]), requirement


def test_every_package_imported_is_declared() -> None:
    from importlib.metadata import packages_distributions

    from packaging.requirements import Requirement

    extras = PROJECT["project"]["optional-dependencies"]
    core = {normal(Requirement(item).name) for item in PROJECT["project"]["dependencies"]}
    everything = core | {normal(Requirement(item).name) for items in extras.values() for item in items}
    providers = packages_distributions()
    own = {"agents", "sde_gym", "tests", "tiny_models", *sys.stdlib_module_names}
    seen = set()
    for folder in ("sde_gym", "agents", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names: list[str] = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.level == 0:
                    names = [node.module or ""]
                for name in {name.partition(".")[0] for name in names} - own:
                    found = {normal(provider) for provider in providers.get(name, [name])}
                    assert found & everything, f"{path}: {name}"
                    seen |= found
    assert core <= seen, f"declared, but not imported: {core - seen}"


def test_repository_names_no_index_host() -> None:
    for name in ("pyproject.toml", "constraints.txt", ".ci/run"):
        if not (ROOT / name).is_file():
            continue
        text = (ROOT / name).read_text(encoding="utf-8")
        assert not re.search(r"https?://|--index-url|--find-links", text), name


def test_package_is_typed() -> None:
    assert (Path(sde_gym.__file__).parent / "py.typed").is_file()
