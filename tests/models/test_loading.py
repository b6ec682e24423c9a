"""`load_model`: what it finds, what it gives back, and every way in which it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file

from sde_gym.errors import InputError
from sde_gym.models import LayeredModel, loading
from sde_gym.models.loading import available_models, cache_folder, load_model

TEXT = "def f(x):\n    return x + 1\n"


def save(model: Any, folder: Path) -> Path:
    """Write a model's folder, with a byte-level tokenizer of 257 entries."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model.save_pretrained(folder)
    vocabulary = {"<|endoftext|>": 0}
    for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[byte] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good folder; tests that spoil one take a copy."""
    return save(tiny_models.llama(), tmp_path_factory.mktemp("saved") / "tiny-llama")


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "tiny-llama"))


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The hub's client must fail at once, and nothing of the user's own caches may be seen."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("SDE_GYM_CACHE", str(tmp_path / "cache"))


def change_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **changes}))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


# ------------------------------------------------------------------ what is given back


def test_a_folder_is_loaded_ready_for_use(folder: Path) -> None:
    model = load_model(folder)
    assert (model.name, model.num_layers, model.vocab_size) == ("tiny-llama", 4, 300)
    assert model.dtype == torch.float32
    assert model.device == torch.device("cpu")
    assert not model.hf.training
    assert not any(parameter.requires_grad for parameter in model.hf.parameters())
    assert model.hf.config._attn_implementation == "sdpa"
    assert model.decode(model.encode(TEXT)) == TEXT
    assert model.compact_vocabulary is None
    for name, tensor in tiny_models.llama().state_dict().items():
        assert torch.equal(model.hf.state_dict()[name], tensor)
    assert load_model(str(folder)).weights_hash() == model.weights_hash()


def test_bfloat16_is_loaded_as_such(folder: Path) -> None:
    assert load_model(folder, dtype="bfloat16").dtype == torch.bfloat16


def test_soft_capped_attention_is_loaded_with_the_kernel_that_can_do_it(tmp_path: Path) -> None:
    model = load_model(save(tiny_models.gemma2(), tmp_path / "gemma"))
    assert model.hf.config._attn_implementation == "eager"


def test_shards_are_read(tmp_path: Path) -> None:
    tiny_models.llama().save_pretrained(tmp_path, max_shard_size="100KB")
    assert not (tmp_path / "model.safetensors").exists()
    model = load_model(tmp_path)
    assert model.tokenizer is None
    assert torch.equal(model.hf.lm_head.weight, tiny_models.llama().lm_head.weight)


def test_a_compact_vocabulary_beside_the_weights_is_used(folder: Path) -> None:
    file = folder / "compact_vocabulary.json"
    file.write_text(json.dumps({"ids": [7, 3, 5], "vocab_size": 300}))
    vocabulary = load_model(folder).compact_vocabulary
    assert vocabulary is not None
    assert vocabulary.tolist() == [3, 5, 7]
    file.write_text(json.dumps({"ids": [7, 3, 5], "vocab_size": 299}))
    with pytest.raises(InputError, match="vocabulary of 299 tokens, not 300"):
        load_model(folder)
    file.write_text(json.dumps({"ids": [7, 300]}))
    with pytest.raises(InputError, match=r"0\.\.299"):
        load_model(folder)


def test_progress_bars_are_as_they_were_before(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from transformers.utils import logging

    before = (logging.get_verbosity(), logging.is_progress_bar_enabled())
    load_model(folder)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    assert capfd.readouterr().err == ""


# ------------------------------------------------------------------ names


def test_named_models_come_from_the_package_and_the_cache(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    monkeypatch.setattr(loading, "DATA", data)
    assert {model.name: model.present for model in available_models()} == {
        "stdlib-20m": False,
        "smollm2-135m": False,
        "smollm2-135m-adapters": False,
    }
    assert all(model.description for model in available_models())
    with pytest.raises(InputError, match="stdlib-20m is not on this machine; it ships with the package"):
        load_model("stdlib-20m")
    with pytest.raises(InputError, match=r"run `sde-gym models pull smollm2-135m` once"):
        load_model("smollm2-135m")
    shutil.copytree(saved, data / "stdlib-20m")
    shutil.copytree(saved, cache_folder() / "models" / "smollm2-135m")
    shipped = data / "smollm2-135m" / "compact_vocabulary.json"
    shipped.parent.mkdir()
    shipped.write_text(json.dumps({"ids": [1, 2], "vocab_size": 300}))
    assert all(model.present for model in available_models())
    assert load_model("stdlib-20m").name == "stdlib-20m"
    pulled = load_model("smollm2-135m")
    assert pulled.name == "smollm2-135m"
    assert pulled.compact_vocabulary is not None
    assert pulled.compact_vocabulary.tolist() == [1, 2]


@pytest.mark.parametrize("name", ["gpt-5", "stdlib", "", "a/b/c", "./nowhere", "/nowhere/at-all", "x/y z"])
def test_an_unknown_name_is_answered_with_those_that_exist(name: str) -> None:
    known = "stdlib-20m, smollm2-135m, smollm2-135m-adapters"
    with pytest.raises(InputError, match=f"expected one of {known}, or an existing folder"):
        load_model(name)


def test_the_cache_folder_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("SDE_GYM_CACHE")
    assert cache_folder() == tmp_path / "xdg" / "sde_gym"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "sde_gym"
    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert cache_folder() == tmp_path / "local" / "sde_gym"


def test_a_hub_model_is_fetched_without_code_and_pickles(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def fetch(hub_id: str, allow_patterns: list[str]) -> str:
        asked.update(id=hub_id, patterns=allow_patterns)
        return str(saved)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert load_model("owner/model-1.5").name == "owner/model-1.5"
    assert asked["id"] == "owner/model-1.5"
    wanted = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.json", "tokenizer.model"]
    refused = ["modeling_x.py", "pytorch_model.bin", "original/consolidated.safetensors"]
    found = [name for name in wanted + refused if any(fnmatch(name, p) for p in asked["patterns"])]
    assert found == wanted


def test_an_unreachable_hub_is_said_in_one_sentence() -> None:
    with pytest.raises(InputError) as caught:
        load_model("owner/model")
    message = str(caught.value)
    assert "the hub cannot be reached" in message
    assert "stdlib-20m" in message
    assert "\n" not in message


# ------------------------------------------------------------------ damaged folders


def test_a_file_is_not_a_model(folder: Path) -> None:
    with pytest.raises(InputError, match="is a file"):
        load_model(folder / "model.safetensors")


def test_missing_and_malformed_configurations(folder: Path) -> None:
    path = folder / "config.json"
    good = path.read_text()
    path.write_text(good[: len(good) // 2])
    with pytest.raises(InputError, match="not a JSON file"):
        load_model(folder)
    path.write_text("[1, 2]")
    with pytest.raises(InputError, match="expected a JSON object"):
        load_model(folder)
    path.write_text(json.dumps({"model_type": "no-such-thing"}))
    with pytest.raises(InputError, match="not a configuration of transformers"):
        load_model(folder)
    path.unlink()
    with pytest.raises(InputError, match=r"holds no config\.json"):
        load_model(folder)


def test_code_in_a_folder_is_never_run(folder: Path) -> None:
    marker = folder / "ran"
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    change_json(folder / "config.json", model_type="evil", auto_map={"AutoConfig": "evil.Config"})
    with pytest.raises(InputError):
        load_model(folder)
    assert not marker.exists()


@pytest.mark.parametrize("kept", [0, 5, 2000, -1])
def test_truncated_weights(folder: Path, kept: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(InputError, match=r"model\.safetensors: truncated or damaged weights"):
        load_model(folder)


def test_missing_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match="holds no weights"):
        load_model(folder)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(InputError, match="pickled weights are not read"):
        load_model(folder)


def test_a_missing_or_damaged_shard(tmp_path: Path) -> None:
    tiny_models.llama().save_pretrained(tmp_path, max_shard_size="100KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    with pytest.raises(InputError, match=f"{shard.name}: truncated"):
        load_model(tmp_path)
    shard.unlink()
    with pytest.raises(InputError, match=f"{shard.name}: no such file"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(InputError, match="weight_map"):
        load_model(tmp_path)


def test_weights_that_do_not_fit_their_configuration(folder: Path) -> None:
    """transformers would make up the missing ones and drop the surplus ones with a warning."""
    good = (folder / "config.json").read_text()
    change_json(folder / "config.json", num_hidden_layers=3)
    with pytest.raises(InputError, match=r"config\.json has no place for model\.layers\.3\..* and 8 more"):
        load_model(folder)
    change_json(folder / "config.json", num_hidden_layers=5)
    with pytest.raises(InputError, match=r"lacks model\.layers\.4\."):
        load_model(folder)
    (folder / "config.json").write_text(good)
    change_json(folder / "config.json", intermediate_size=81)
    with pytest.raises(InputError, match=r"another shape for model\.layers\.0\.mlp"):
        load_model(folder)
    (folder / "config.json").write_text(good)
    change_weights(folder, lambda weights: weights.pop("model.layers.2.mlp.up_proj.weight"))
    with pytest.raises(InputError, match=r"lacks model\.layers\.2\.mlp\.up_proj\.weight$"):
        load_model(folder)


def test_tokenizers(folder: Path) -> None:
    path = folder / "tokenizer.json"
    good = path.read_text()
    path.write_text(good[:100])
    with pytest.raises(InputError, match="the tokenizer cannot be read"):
        load_model(folder)
    content = json.loads(good)
    content["model"]["vocab"]["large"] = 300
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match="largest id is 300, but the model's vocabulary has only 300"):
        load_model(folder)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    model = load_model(folder)
    assert model.tokenizer is None
    with pytest.raises(InputError, match="no tokenizer"):
        model.encode(TEXT)


def test_quantised_weights_are_refused(folder: Path) -> None:
    change_json(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(InputError, match="quantised weights"):
        load_model(folder)


@pytest.mark.parametrize(
    ("factory", "missing"),
    [
        (tiny_models.t5, "t5 is an encoder-decoder"),
        (tiny_models.gpt2, "'gpt2' is not supported: it has no `model` body"),
        (tiny_models.mixtral, "'mixtral' is not supported: it has no gated MLP"),
    ],
)
def test_an_unsupported_architecture_is_refused_by_name(
    factory: Callable[[], Any], missing: str, tmp_path: Path
) -> None:
    factory().save_pretrained(tmp_path)
    with pytest.raises(InputError, match=missing):
        load_model(tmp_path)


# ------------------------------------------------------------------ dtype and device


@pytest.mark.parametrize("dtype", ["float16", "float64", "int8", "", "torch.float32"])
def test_other_dtypes_are_refused_on_the_cpu(folder: Path, dtype: str) -> None:
    with pytest.raises(InputError, match="dtype on cpu must be one of float32, bfloat16, not"):
        load_model(folder, dtype=dtype)


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "mps", "", "cpu:0"])
def test_unknown_devices_are_refused(folder: Path, device: str) -> None:
    with pytest.raises(InputError, match="device must be cpu, cuda or cuda:N"):
        load_model(folder, device=device)


def test_cuda_is_refused_where_there_is_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="device cuda needs CUDA"):
        load_model(folder, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InputError, match=r"device cuda:2 does not exist: this machine has cuda:0\.\.cuda:1"):
        load_model(folder, device="cuda:2")
    with pytest.raises(InputError, match="dtype on cuda:1 must be one of float32, bfloat16, float16"):
        load_model(folder, dtype="float8", device="cuda:1")


def test_a_model_that_was_opened_can_still_be_saved(tmp_path: Path) -> None:
    hf = tiny_models.llama()
    expected = {name: tensor.clone() for name, tensor in hf.state_dict().items()}
    LayeredModel(hf)
    hf.save_pretrained(tmp_path)
    found = type(hf).from_pretrained(tmp_path).state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)
