"""The command line: every stage runs, and bad input gives one sentence and exit status 2."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from sde_gym.cli import app
from sde_gym.errors import InputError
from sde_gym.files import write_text
from sde_gym.options import settings_command, with_settings
from sde_gym.settings import DEFAULT_DRAFT_LENGTH, setting
from sde_gym.terminal import INTERRUPTED, SentenceGroup, progress_bars, results_table
from sde_gym.traces import load_traces

LAYERS = 4


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random-weight Llama of 4 layers and a byte-level tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from sde_gym.models.corpus import END_OF_TEXT, train_tokenizer

    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = train_tokenizer(["def f(x):\n    return x + 1\n"] * 4, 300)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT).save_pretrained(folder)
    return folder


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"id": "one", "task": "code", "prompt": "def f(x):"}\n'
        '{"id": "two", "task": "prose", "prompt": "x + 1"}\n'
    )
    return path


def run(*arguments: object) -> Any:
    """The result of `sde-gym ARGUMENTS`; a fault of the program is raised here."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def refused(*arguments: object) -> str:
    """The sentence with which `sde-gym ARGUMENTS` refuses its input."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return str(result.stderr)


def usage_error(*arguments: object) -> str:
    """What `sde-gym ARGUMENTS` says of options it cannot take, without the frame."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert "Usage: " in result.stderr
    return unframed(result.stderr)


def unframed(shown: str) -> str:
    """A text without the frames and line breaks that depend on the terminal's width."""
    return re.sub(r"[\s│╭╮╰╯─]+", " ", shown)


# Stages on a tiny model


def test_train_a_probe_and_record_with_it(tiny_model: Path, prompt_file: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    result = run(
        "train-probe", "--model", model, "--prompts", prompt_file, "--out", model, "--depths", "1,3",
        "--max-new-tokens", 8, "--folds", 2, "--threads", 1,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert re.search(r"│ 3 +│ +\d+\.\d% +│", result.stdout)
    recorded = run(
        "record", "--model", model, "--prompts", prompt_file, "--out", tmp_path / "t", "--depths", "1,3",
        "--max-new-tokens", 6, "--threads", 1,
    )  # fmt: skip
    assert recorded.exit_code == 0, recorded.output
    assert load_traces(tmp_path / "t").probe is not None
    said = refused("train-probe", "--model", model, "--prompts", prompt_file, "--out", model, "--folds", 3)
    assert "2 prompts are left for 3 folds" in said


def test_record_then_look_at_the_traces(tiny_model: Path, prompt_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "traces"
    arguments = (
        "record", "--model", tiny_model, "--prompts", prompt_file, "--out", out, "--depths", "1,3",
        "--max-new-tokens", 6, "--threads", 1,
    )  # fmt: skip
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert f"{out}: 2 texts" in result.stdout
    again = run(*arguments)  # nothing is left to do
    assert again.stdout == result.stdout
    shown = run("traces", "info", out).stdout
    assert re.search(r"^layers +4$", shown, re.MULTILINE)
    assert re.search(r"^tasks +code 1, prose 1$", shown, re.MULTILINE)
    assert re.search(r"│ 1 +│ +\d+\.\d% +│", shown)
    assert re.search(r"│ 3 +│ +\d+\.\d% +│", shown)


def test_limit_and_default_depths(tiny_model: Path, prompt_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "traces"
    run("record", "--model", tiny_model, "--prompts", prompt_file, "--out", out, "--limit", 1,
        "--max-new-tokens", 4, "--threads", 1)  # fmt: skip
    shown = run("traces", "info", out).stdout
    assert re.search(r"^texts +1$", shown, re.MULTILINE)
    assert re.findall(r"^│ (\d+) ", shown, re.MULTILINE) == ["1", "2", "3"]


def test_calibrate_and_check(tiny_model: Path, prompt_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "cost.json"
    result = run(
        "calibrate", "--model", tiny_model, "--prompts", prompt_file, "--out", out, "--depths", "1,3",
        "--max-draft", 2, "--max-new-tokens", 24, "--repeats", 2, "--threads", 1, "--check", 1,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    for part in ("layer, 1 token", "later draft pass to depth 3, a layer", "exit head", "fixed, a round"):
        assert part in result.stdout
    assert re.search(r"static\(3, 2\) +│ \d+\.\d\dx +│ \d+\.\d\dx +│ [+-]\d+\.\d%", result.stdout)
    saved = json.loads(out.read_text())
    assert saved["num_layers"] == LAYERS
    assert saved["draft_depths"] == [1, 3]
    assert len(saved["layer"]) == 3
    assert saved["provenance"]["hardware"]["threads"] == 1


def test_generate_is_the_same_text_plainly_and_speculatively(tiny_model: Path) -> None:
    common = ("generate", "--model", tiny_model, "--prompt", "def f(x):", "--max-new-tokens", 12,
              "--threads", 1)  # fmt: skip
    plain, static = run(*common), run(*common, "--exit-depth", 2, "--draft-length", 3)
    assert plain.exit_code == static.exit_code == 0, plain.output + static.output
    assert plain.stdout.startswith("def f(x):")
    assert len(plain.stdout) > len("def f(x):\n")
    assert static.stdout == plain.stdout
    assert re.search(
        r"\d+ tokens, [\d.]+ tokens/s after the first, \d+ of \d+ drafts accepted", static.stderr
    )
    assert "drafts" not in plain.stderr
    assert "is full" not in plain.stderr
    from sde_gym.models import load_model

    one = run(*common[:5], "--max-new-tokens", 1, "--threads", 1)
    assert one.stderr.strip().endswith("1 token")
    full = run(*common[:5], "--max-new-tokens", 10_000, "--threads", 1)
    model = load_model(tiny_model)
    limit = model.context_limit
    assert full.exit_code == 0
    assert f"the context of {limit} tokens is full" in " ".join(full.stderr.split())
    last = run(*common[:5], "--max-new-tokens", limit - len(model.encode("def f(x):")), "--threads", 1)
    assert "is full" not in last.stderr


@pytest.mark.parametrize(
    ("option", "message"),
    [(("--texts", 3), "texts must be at least 20"), (("--no-drawn",), "draw_answers=False"),
     (("--prompts", "nothing.jsonl"), "nothing.jsonl")],
)  # fmt: skip
def test_adapters_need_no_depths_and_bad_settings_are_told_first(
    tiny_model: Path, tmp_path: Path, option: tuple[Any, ...], message: str
) -> None:
    out = tmp_path / "adapters"
    result = run("train-adapters", "--model", tiny_model, *option, "--threads", 1, "--out", out)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert not list(out.glob("*"))


def test_record_train_generate(tiny_model: Path, prompt_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("d3rlpy")
    from safetensors.torch import load_file, save_file

    traces, policy = tmp_path / "traces", tmp_path / "policy"
    run("record", "--model", tiny_model, "--prompts", prompt_file, "--out", traces, "--depths", "1,2,3",
        "--max-new-tokens", 10, "--threads", 1)  # fmt: skip
    trained = run(
        "train", "--traces", traces, "--out", policy, "--episodes", 8, "--gradient-steps", 4,
        "--evaluate-every", 2, "--hidden", "8", "--batch-size", 4, "--threads", 1,
    )  # fmt: skip
    assert trained.exit_code == 0, trained.output
    assert re.search(r"policy of step [24], mean return -?[\d.]+", trained.stdout)
    common = ("generate", "--model", tiny_model, "--prompt", "def f(x):", "--max-new-tokens", 10,
              "--threads", 1)  # fmt: skip
    learned = run(*common, "--policy", policy)
    assert learned.exit_code == 0, learned.output
    assert learned.stdout == run(*common).stdout
    assert "note:" not in learned.stderr
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    weights = load_file(other / "model.safetensors")
    save_file({name: tensor * 1.01 for name, tensor in weights.items()}, other / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    elsewhere = run(*common[:2], other, *common[3:], "--policy", policy)
    assert elsewhere.exit_code == 0, elsewhere.output
    assert "was trained on tiny with other weights" in elsewhere.stderr


def test_demo_passes_its_settings_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from sde_gym.evaluation.demo import DemoSettings

    calls: list[Any] = []

    def run_demo(settings: Any, out: Path, progress: Any) -> dict[str, Any]:
        progress("a stage", 0, 2)
        calls.append((settings, out))
        return {
            "rows": [{"method": "ar", "tokens_per_second": 10.0, "speedup": 1.0, "identical_to_ar": True}]
        }

    monkeypatch.setattr("sde_gym.evaluation.demo.run_demo", run_demo)
    result = run("demo", "--out", tmp_path / "d", "--seed", 5, "--depths", "1,2")
    assert result.exit_code == 0, result.output
    assert calls == [(DemoSettings(seed=5, depths=(1, 2)), tmp_path / "d")]
    assert "same" in result.stdout
    assert f"{tmp_path / 'd' / 'report.html'}: the report" in result.stdout


def test_train_lm_passes_its_settings_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from sde_gym.models.lm_training import LMTrainingSettings

    calls: list[Any] = []

    def train_lm(settings: Any, out: Path, threads: int, progress: Any) -> dict[str, Any]:
        progress({"step": 1, "steps": 2, "loss": 5.0, "tokens_per_second": 9.0})
        calls.append((settings, out, threads))
        return {"bits_per_byte": 1.5, "agreement": {"1": 0.25}}

    monkeypatch.setattr("sde_gym.models.lm_training.train_lm", train_lm)
    result = run("train-lm", "--out", tmp_path, "--layers", 20, "--threads", 1)
    assert result.exit_code == 0, result.output
    assert calls == [(LMTrainingSettings(layers=20), tmp_path, 1)]
    assert "1.500 bits per byte" in result.stdout
    assert "depth   1: agrees with the final layer on 25.0%" in result.stdout
    assert (tmp_path / "log.jsonl").read_text().count("\n") == 1


def test_generate_says_how_long_a_static_draft_is() -> None:
    shown = " ".join(run("generate", "--help").output.replace("│", " ").split())
    assert f"Always draft at this depth, {DEFAULT_DRAFT_LENGTH} tokens or --draft-length" in shown
    assert f"Always draft so many tokens; {DEFAULT_DRAFT_LENGTH} if not given" in shown


def test_generate_takes_a_prompt_from_a_file(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("x = [1]\n")
    result = run("generate", "--model", tiny_model, "--prompt-file", path, "--max-new-tokens", 2,
                 "--threads", 1)  # fmt: skip
    assert result.stdout.startswith("x = [1]\n")


def test_prompts_are_counted_and_shown(prompt_file: Path) -> None:
    counted = run("prompts", prompt_file).stdout
    assert re.search(r"│ code +│ 1 +│ one", counted)
    assert re.search(r"│ all +│ 2 ", counted)
    assert run("prompts", prompt_file, "--show", "two").stdout == "x + 1\n"


def test_results_are_shown_as_a_table() -> None:
    rows = [
        {"method": "ar", "tokens_per_second": 100.0, "speedup": 1.0, "identical_to_ar": True},
        {"method": "lede", "tokens_per_second": 150.0, "speedup": 1.5, "acceptance_rate": 0.8,
         "mean_exit_depth": 3, "mean_draft_length": 4, "identical_to_ar": False,
         "identical_prompts": 1, "prompts": 2},
    ]  # fmt: skip
    rows.append({"method": "assistant_early_exit", "tokens_per_second": 90.0, "speedup": 0.9,
                 "exit_depth": 12, "draft_length": 12, "identical_to_ar": True})  # fmt: skip
    console = Console(width=90, record=True, file=io.StringIO())
    console.print(results_table(rows))
    text = console.export_text()
    narrow = Console(width=80, record=True, file=io.StringIO())
    narrow.print(results_table([row for row in rows if row["identical_to_ar"]]))
    assert "…" not in narrow.export_text()  # nothing is cut at 80 characters
    lines = [re.split(r"  +", line.strip()) for line in text.splitlines()]
    assert ["ar", "100.0", "1.00×", "–", "–", "–", "yes"] in lines
    assert ["lede", "150.0", "1.50×", "80.0%", "3.00", "4.00", "no, 1 of 2 are"] in lines
    assert ["assistant_early_exit 12,12", "90.0", "0.90×", "–", "–", "–", "yes"] in lines


def test_progress_bars_show_every_stage_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal in (True, False):
        stream = io.StringIO()
        console = Console(file=stream, force_terminal=terminal, width=100)
        monkeypatch.setattr("sde_gym.terminal.Console", lambda stderr, console=console: console)
        with progress_bars() as advance:
            advance("first", 0, 2)
            advance("first", 2, 2, "done")
            advance("second", 1, 4)
        assert ("first" in stream.getvalue() and "second" in stream.getvalue()) == terminal


def test_models_are_listed() -> None:
    shown = run("models", "list").stdout
    assert "stdlib-20m" in shown
    assert "smollm2-135m" in shown


# Bad input


def test_unknown_model(tmp_path: Path) -> None:
    for command in ("generate --prompt x", f"record --out {tmp_path / 'o'} --prompts chat"):
        message = refused(*command.split(), "--model", "no-such-model")
        assert "'no-such-model'" in message
        assert "stdlib-20m" in message
    assert "smollm2-135m" in refused("models", "pull", "stdlib-21m")


def test_missing_files(tmp_path: Path, tiny_model: Path) -> None:
    missing = tmp_path / "missing"
    assert str(missing) in refused("prompts", missing)
    assert str(missing) in refused("record", "--out", tmp_path / "o", "--prompts", missing)
    assert str(missing) in refused("traces", "info", missing)
    assert f"{missing}: no such file" in refused("generate", "--prompt-file", missing)
    assert str(missing) in refused("generate", "--prompt", "x", "--policy", missing, "--model", tiny_model)
    assert str(missing) in refused("train", "--traces", missing, "--out", tmp_path / "o")


def test_a_folder_in_place_of_a_file(tmp_path: Path) -> None:
    assert str(tmp_path) in refused("prompts", tmp_path)
    assert f"{tmp_path}: is a directory" in refused("generate", "--prompt-file", tmp_path)


def test_empty_prompts(tmp_path: Path, tiny_model: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert str(empty) in refused("prompts", empty)
    assert str(empty) in refused("record", "--out", tmp_path / "o", "--prompts", empty)
    assert f"{empty}: the file is empty" in refused("generate", "--prompt-file", empty)
    assert "prompt" in refused("generate", "--prompt", "", "--model", tiny_model)


def test_a_malformed_line_is_named_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": \n')
    for command in (("prompts", path), ("record", "--out", tmp_path / "o", "--prompts", path)):
        message = refused(*command)
        assert str(path) in message
        assert re.search(r"\bline 3\b|:3\b", message)


def test_depths_out_of_range(tiny_model: Path, prompt_file: Path, tmp_path: Path) -> None:
    for depth in (0, LAYERS, -1):
        message = refused("generate", "--model", tiny_model, "--prompt", "x", "--exit-depth", depth)
        assert f"--exit-depth is {depth}" in message
        assert "1..3" in message
    record = ("record", "--model", tiny_model, "--prompts", prompt_file, "--out", tmp_path / "o")
    assert "1..3" in refused(*record, "--depths", "1,4")
    assert "'1,x'" in refused(*record, "--depths", "1,x")
    assert "increasing" in refused(*record, "--depths", "2,1")


def test_wrong_dtype_and_device(tiny_model: Path) -> None:
    generate = ("generate", "--model", tiny_model, "--prompt", "x")
    assert "'float8'" in refused(*generate, "--dtype", "float8")
    assert "'tpu'" in refused(*generate, "--device", "tpu")


def test_cut_weights(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(tiny_model, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert str(folder) in refused("generate", "--model", folder, "--prompt", "x")


def test_cut_traces(toy_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(toy_folder, folder)
    path = sorted(folder.glob("*.parquet"))[0]
    path.write_bytes(path.read_bytes()[:-10])
    assert path.name in refused("traces", "info", folder)


def test_prompt_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9")
    assert "not UTF-8 text (byte 3)" in refused("generate", "--prompt-file", path)


def test_a_prompt_with_half_a_surrogate_pair(tiny_model: Path) -> None:
    # What Python makes of a byte on the command line that is not UTF-8, and half of an escape.
    for prompt, words in (("\udcff", r"'\udcff' at character 0"), ("f(\ud800)", r"'\ud800' at character 2")):
        assert words in refused("generate", "--model", tiny_model, "--prompt", prompt)


def test_a_demo_that_fails_late_is_one_sentence(
    tiny_model: Path, prompt_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("d3rlpy")

    def train_policy(*_: Any, **__: Any) -> None:
        raise InputError("too late")

    monkeypatch.setattr("sde_gym.evaluation.demo.train_policy", train_policy)
    test_prompts, out = tmp_path / "test.jsonl", tmp_path / "demo"
    arguments = (
        "demo", "--out", out, "--model", tiny_model, "--train-prompts", prompt_file,
        "--test-prompts", test_prompts, "--max-new-tokens", 8, "--depths", "1,2", "--threads", 1,
    )  # fmt: skip
    test_prompts.write_text(json.dumps({"prompt": "<>" * 100}) + "\n")  # the context holds 128 tokens
    assert "context" in refused(*arguments)
    test_prompts.write_text('{"prompt": "x = 1"}\n')
    assert refused(*arguments) == "error: too late\n"
    assert (out / "traces" / "manifest.json").is_file()  # the stage before was over


def test_unknown_prompt_id(prompt_file: Path) -> None:
    message = refused("prompts", prompt_file, "--show", "three")
    assert "'three'" in message
    assert "'one'" in message


def test_bad_settings(tmp_path: Path) -> None:
    assert "layers must be at least 1, not 0" in refused("train-lm", "--out", tmp_path, "--layers", 0)
    assert "--hidden '64,x'" in refused("train", "--out", tmp_path / "o", "--hidden", "64,x")


def test_options_that_exclude_each_other() -> None:
    assert "exactly one of" in usage_error("generate")
    assert "exactly one of" in usage_error("generate", "--prompt", "x", "--prompt-file", "y")
    assert "leave out" in usage_error("generate", "--prompt", "x", "--policy", "p", "--exit-depth", 2)
    assert "needs --exit-depth" in usage_error("generate", "--prompt", "x", "--draft-length", 2)
    assert "drafter of its own" in usage_error("generate", "--prompt", "x", "--skips", "s", "--exit-depth", 2)
    assert "--repeats: every text is decoded once" in refused("bench", "exact", "--repeats", 5)
    assert "explorers: 0 explorers" in refused("dex", "--explorers", 0)
    assert "explorers: of the sweep only" in refused("dex", "--explorers", 2)
    assert "policy: of the sweep only" in refused("dex", "--policy", "trunc")


def test_a_folder_in_place_of_a_file_to_write_is_refused_first(tmp_path: Path) -> None:
    for command in (
        "bench decode --json", "bench decode --plot", "bench env --json", "bench train --json",
        "bench record --json", "dex --json", "search-skips --out", "calibrate --out",
    ):  # fmt: skip
        assert "is a directory" in usage_error(*command.split(), tmp_path)
    file = tmp_path / "file"
    file.write_text("")
    for command in ("bench decode", "bench exact", "tune", "demo", "train", "record"):
        assert "is a file" in usage_error(*command.split(), "--out", file)
    with pytest.raises(InputError, match="is a folder; name a file"):
        write_text(tmp_path, "x")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_options_that_do_not_exist_or_do_not_fit(tmp_path: Path) -> None:
    assert "No such option: --layerz" in usage_error("train-lm", "--out", tmp_path, "--layerz", 2)
    assert "Missing option '--out'" in usage_error("train-lm")
    assert "Invalid value for '--layers'" in usage_error("train-lm", "--out", tmp_path, "--layers", "x")
    assert "Invalid value for '--limit'" in usage_error("record", "--out", tmp_path, "--limit", 0)
    few = usage_error("record", "--out", tmp_path, "--max-new-tokens", 1)
    assert "Invalid value for '--max-new-tokens'" in few
    assert re.search(r"greater than or equal to 2|x>=2", few)


# How the command line is made


def test_help_of_every_command() -> None:
    listed = run("--help").stdout
    for name in typer.main.get_command(app).commands:  # type: ignore[attr-defined]
        assert name in listed
        result = run(name, "--help")
        assert result.exit_code == 0, result.output
        assert "Usage: sde-gym" in result.stdout


def test_help_loads_no_heavy_library() -> None:
    heavy = ("torch", "transformers", "pyarrow", "matplotlib", "d3rlpy")
    code = (
        "import sys, sde_gym.cli\nsys.argv = ['sde-gym', '--help']\ntry:\n    sde_gym.cli.main()\n"
        f"except SystemExit:\n    print('loaded', [name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip().endswith("loaded []")


def test_defaults_are_those_of_the_recorder() -> None:
    from sde_gym.settings import DEFAULT_NEW_TOKENS
    from sde_gym.traces import recorder

    for name in ("record", "models compact"):  # restated in light settings so that --help stays quick
        shown = unframed(run(*name.split(), "--help").stdout)
        assert f"[default: {recorder.DEFAULT_NEW_TOKENS}]" in shown
    assert recorder.DEFAULT_NEW_TOKENS == DEFAULT_NEW_TOKENS


def test_python_m_and_version() -> None:
    from sde_gym import __version__

    done = subprocess.run(
        [sys.executable, "-m", "sde_gym", "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == f"sde_gym {__version__}\n"


@dataclasses.dataclass(frozen=True)
class StageSettings:
    rounds: int = setting(3, "how many rounds")
    rate: float = setting(0.5, "the rate")
    name: str = setting("plain", "a word")
    careful: bool = setting(True, "take care")
    depths: tuple[int, ...] = setting((1, 2), "the depths")
    cap: int | None = setting(None, "an upper limit")

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise InputError(f"rounds must be at least 1, not {self.rounds}")


def stage_app(body: Any) -> tuple[typer.Typer, list[Any]]:
    """An app with one command made from `StageSettings`, and the list of what it was called with."""
    stage = typer.Typer(cls=SentenceGroup)
    calls: list[Any] = []

    @stage.callback()
    def common() -> None:
        """Makes the app a group."""

    def command(settings: Any, out: Annotated[Path, typer.Option()] = Path("here")) -> None:
        """Does nothing."""
        calls.append((settings, out))
        body()

    settings_command(stage, "stage", f"{__name__}:StageSettings")(command)
    return stage, calls


def test_options_are_the_fields_of_the_settings() -> None:
    stage, calls = stage_app(lambda: None)
    runner = CliRunner()
    assert runner.invoke(stage, ["stage"]).exit_code == 0
    assert calls.pop() == (StageSettings(), Path("here"))
    given = "stage --out there --rounds 7 --rate -0.25 --name x --no-careful --depths 3,4,5 --cap 9"
    assert runner.invoke(stage, given.split()).exit_code == 0
    assert calls.pop() == (StageSettings(7, -0.25, "x", False, (3, 4, 5), 9), Path("there"))
    helped = runner.invoke(stage, ["stage", "--help"]).stdout
    for field in dataclasses.fields(StageSettings):
        assert field.metadata["help"] in helped
    refused = runner.invoke(stage, ["stage", "--rounds", "0"])
    assert (refused.exit_code, refused.stderr) == (2, "error: rounds must be at least 1, not 0\n")
    assert calls == []


def test_a_setting_and_an_option_of_one_name_clash_at_once() -> None:
    def command(settings: Any, rate: float = 1.0) -> None:
        """Never called."""

    with pytest.raises(ValueError, match="rate"):
        with_settings(command, StageSettings)


def test_an_interrupt_is_one_sentence() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    stage, _ = stage_app(interrupt)
    result = CliRunner().invoke(stage, ["stage"])
    assert result.exit_code == INTERRUPTED
    assert "interrupted" in result.stderr
    assert "Traceback" not in result.output


def test_warnings_of_the_package_are_one_plain_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import warnings

    from sde_gym.prompts import library

    _, references = library.read_references()
    some = [one for one in references if one.module in ("queue.py", "heapq.py", "shlex.py", "token.py")]
    wrong = [dataclasses.replace(one, sha256="0" * 16) for one in some[:1]]
    monkeypatch.setattr(library, "read_references", lambda: ({}, wrong + some[1:]))
    monkeypatch.setattr(library, "MINIMUM_PER_SPLIT", 1)
    library._load_once.cache_clear()
    before = warnings.showwarning
    try:
        result = run("prompts", "stdlib")
    finally:
        library._load_once.cache_clear()
    assert result.exit_code == 0, result.output
    assert re.fullmatch(
        rf"note: \d+ of {len(some)} prompts differ in this interpreter's library .*\n", result.stderr
    )
    assert warnings.showwarning is before

    def foreign() -> None:
        warnings.warn("of others", stacklevel=1)

    stage, _ = stage_app(foreign)
    with pytest.warns(UserWarning, match="of others"):
        assert "note:" not in CliRunner().invoke(stage, ["stage"]).stderr


def test_a_fault_keeps_its_traceback() -> None:
    def fault() -> None:
        raise ZeroDivisionError("ours")

    stage, _ = stage_app(fault)
    assert isinstance(CliRunner().invoke(stage, ["stage"]).exception, ZeroDivisionError)


def test_a_missing_extra_is_named() -> None:
    def missing() -> None:
        raise ModuleNotFoundError("No module named 'd3rlpy'", name="d3rlpy.algos")

    stage, _ = stage_app(missing)
    result = CliRunner().invoke(stage, ["stage"])
    assert result.exit_code == 2
    assert "sde_gym[offline]" in result.stderr
