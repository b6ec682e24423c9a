"""The exit probe: what it computes, its file, and that training finds what there is to find."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from safetensors.numpy import load_file, save_file

from sde_gym.errors import InputError
from sde_gym.models.layered import LayeredModel
from sde_gym.models.loading import PROBE_FILE, load_model
from sde_gym.models.probe import (
    HEAD_INPUTS,
    METADATA_KEY,
    ExitProbe,
    head_inputs,
    load_probe,
    save_probe,
)
from sde_gym.models.probe_training import (
    ProbeData,
    ProbeSettings,
    collect_probe_data,
    fit_probe,
    logistic,
    train_probe,
)
from sde_gym.prompts import Prompt

DEPTHS = (1, 3)


@pytest.fixture(scope="module")
def model() -> LayeredModel:
    return LayeredModel(tiny_models.llama(), None, "tiny")


def random_probe(model: LayeredModel, seed: int = 0, **changes: Any) -> ExitProbe:
    rng = np.random.default_rng(seed)
    known = {"model": model.name, "model_hash": model.weights_hash(), "head": model.head_hash()}
    weight = rng.normal(size=(len(DEPTHS), model.hidden_size + len(HEAD_INPUTS)))
    return ExitProbe(DEPTHS, weight, rng.normal(size=len(DEPTHS)), **{**known, **changes})


def test_it_is_a_logistic_regression_on_state_and_head() -> None:
    probe = ExitProbe([2, 5], [[0, 0, 0, 0, 0, 0], [1, -2, 0.5, 0, 0.25, 2]], [0, -1])
    assert probe.width == 2
    states = np.array([[3.0, 1.0], [0.5, 0.0]], np.float32)
    p = np.array([[0.5, 0.25], [0.8, 0.1]])
    logprobs, entropy = np.log(p).astype(np.float32), np.array([2.0, 1.0], np.float32)
    np.testing.assert_allclose(
        head_inputs(logprobs, entropy),
        [[np.log(0.5), np.log(0.25), 2.0, 0.25], [np.log(0.8), np.log(0.1), 1.0, 0.7]],
        rtol=1e-6,
    )
    logit = [
        3.0 - 2.0 + 0.5 * np.log(0.5) + 0.25 * 2.0 + 2 * 0.25 - 1.0,
        0.5 + 0.5 * np.log(0.8) + 0.25 * 1.0 + 2 * 0.7 - 1.0,
    ]
    found = probe(5, states, logprobs, entropy)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-np.array(logit))), rtol=1e-6)
    assert probe(2, states, logprobs, entropy).tolist() == [0.5, 0.5]
    with pytest.raises(InputError, match=r"depth 3 is none of \[2, 5\]"):
        probe(3, states, logprobs, entropy)


@pytest.mark.parametrize(
    ("depths", "weight", "bias", "message"),
    [
        ([], np.zeros((0, 6)), [], "do not rise"),
        ([2, 1], np.zeros((2, 6)), [0, 0], "do not rise"),
        ([1, 2], np.zeros((1, 6)), [0, 0], "do not fit 2 depths"),
        ([1], np.zeros((1, 4)), [0], "do not fit 1 depths"),
        ([1], np.full((1, 6), np.nan), [0], "not finite"),
    ],
)
def test_a_probe_that_cannot_be_is_refused(
    depths: list[int], weight: np.ndarray, bias: list[float], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        ExitProbe(depths, weight, bias)


def test_the_file_gives_back_the_probe(model: LayeredModel, tmp_path: Path) -> None:
    probe = random_probe(model, report={"texts": 3})
    path = save_probe(tmp_path, probe)
    assert path == tmp_path / PROBE_FILE
    for place in (path, tmp_path):
        loaded = load_probe(place)
        np.testing.assert_array_equal(loaded.weight, probe.weight)
        np.testing.assert_array_equal(loaded.bias, probe.bias)
        for name in ("depths", "model", "model_hash", "head", "dtype", "identity", "report"):
            assert getattr(loaded, name) == getattr(probe, name), name
    assert json.loads((tmp_path / "probe.json").read_text())["identity"] == probe.identity
    assert random_probe(model, seed=1).identity != probe.identity


def test_files_that_are_no_probe_are_refused(model: LayeredModel, tmp_path: Path) -> None:
    path = save_probe(tmp_path, random_probe(model))
    content = path.read_bytes()
    tensors = load_file(path)
    length = int.from_bytes(content[:8], "little")
    meta = json.loads(json.loads(content[8 : 8 + length])["__metadata__"][METADATA_KEY])

    def refused(message: str) -> None:
        with pytest.raises(InputError, match=message):
            load_probe(path)

    def write(**changes: Any) -> None:
        save_file(tensors, path, {METADATA_KEY: json.dumps({**meta, **changes})})

    path.write_bytes(content[:-3])
    refused("not a safetensors file, or a cut one")
    save_file(tensors, path)
    refused("not a probe file")
    write(format_version=9)
    refused("format version 9; this package reads version 1")
    write(depths="12")
    refused("depths is '12', expected a value of type list")
    write(inputs=["state"])
    refused("reads state; this package gives state, logprob1")
    write(identity="0" * 16)
    refused("the file is altered")
    path.unlink()
    refused("no such file")


def test_it_is_attached_to_its_own_model_only(model: LayeredModel) -> None:
    mine = LayeredModel(tiny_models.llama(), None, "mine")
    assert mine.probe is None
    probe = random_probe(model)
    mine.attach_probe(probe)  # the same weights
    assert mine.probe is probe
    other = LayeredModel(tiny_models.llama(seed=1), None, "other")
    with pytest.raises(InputError, match=r"trained for the weights .* train a probe for this model"):
        other.attach_probe(probe)
    compact = LayeredModel(tiny_models.llama(), None, "compact", compact_vocabulary=range(50))
    with pytest.raises(InputError, match="trained for the exit heads full"):
        compact.attach_probe(probe)
    with pytest.raises(InputError, match="made for states of 2 numbers"):
        other.attach_probe(ExitProbe([1], np.zeros((1, 6)), [0]))
    assert other.probe is None


def test_a_model_brings_the_probe_of_its_folder(model: LayeredModel, tmp_path: Path) -> None:
    model.hf.save_pretrained(tmp_path)
    assert load_model(tmp_path).probe is None
    probe = random_probe(model)
    save_probe(tmp_path, probe)
    loaded = load_model(tmp_path)
    assert loaded.probe is not None
    assert loaded.probe.identity == probe.identity
    # In another dtype the weights are rounded, and nothing tells whose they were.
    assert load_model(tmp_path, dtype="bfloat16").probe is None
    save_probe(tmp_path, random_probe(model, model_hash="0" * 16))
    with pytest.raises(
        InputError, match=r"probe\.safetensors: .*trained for the weights 0000.*or remove the file"
    ):
        load_model(tmp_path)


def test_logistic_regression_is_at_its_minimum() -> None:
    rng = np.random.default_rng(0)
    x = np.column_stack([rng.normal(size=(400, 3)) * [1, 20, 0.1], np.ones(400)])
    y = rng.random(400) < 1 / (1 + np.exp(-(x @ [1.0, 0.2, 5.0, -0.5])))
    penalty = np.array([1.0, 0.5, 2.0, 1e-3])
    found = logistic(x, y, penalty)
    gradient = x.T @ (1 / (1 + np.exp(-x @ found)) - y) + penalty * found
    np.testing.assert_allclose(gradient, 0.0, atol=1e-4)
    np.testing.assert_allclose(logistic(x, y, penalty, start=found + 3.0), found, atol=1e-4)
    certain = logistic(x, np.ones(400, bool), penalty)  # nothing to tell apart
    assert np.isfinite(certain).all()


def test_training_data_are_what_the_heads_see_and_say(model: LayeredModel) -> None:
    prompts = [[5, 7, 9], [11, 2]]
    data = collect_probe_data(model, prompts, DEPTHS, 8, batch_size=1)
    assert data.text.tolist() == [0] * 7 + [1] * 7
    assert data.states.shape == (14, 2, model.hidden_size)
    with torch.no_grad():
        body = model.hf.model
        for number, prompt in enumerate(prompts):
            tokens = model.hf.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=8,
                do_sample=False, pad_token_id=0,
            )[0]  # fmt: skip
            states = body(tokens[None, :-1], output_hidden_states=True, use_cache=False).hidden_states
            for column, depth in enumerate(DEPTHS):
                seen = body.norm(states[depth][0, len(prompt) :])
                log_p = torch.log_softmax(model.hf.lm_head(seen), -1)
                best, ids = log_p.topk(2)
                rows = data.text == number
                np.testing.assert_allclose(data.states[rows, column], seen, atol=1e-4)
                np.testing.assert_allclose(data.inputs[rows, column, :2], best, atol=1e-4)
                expected = (ids[:, 0] == tokens[len(prompt) + 1 :]).numpy()
                np.testing.assert_array_equal(data.match[rows, column], expected)


def planted(model: LayeredModel) -> ProbeData:
    """Matches that follow from one direction of the state at the first depth, from nothing at the other."""
    rng = np.random.default_rng(3)
    n = 600
    states = rng.normal(size=(n, 2, model.hidden_size)).astype(np.float32)
    inputs = rng.normal(size=(n, 2, len(HEAD_INPUTS))).astype(np.float32)
    match = np.column_stack([rng.random(n) < 1 / (1 + np.exp(-3 * states[:, 0, 5])), rng.random(n) < 0.5])
    return ProbeData(np.repeat(np.arange(20), n // 20), states, inputs, match)


def test_a_fit_finds_what_is_there_and_nothing_else(model: LayeredModel) -> None:
    settings = ProbeSettings(ridges=(1.0, 10.0, 100.0, 1e4))
    probe = fit_probe(model, planted(model), DEPTHS, settings)
    something, nothing = probe.report["depths"]
    assert something["auc"] > 0.8
    assert something["ridge"] < 1e4
    assert np.abs(probe.weight[0]).argmax() == 5
    assert 0.4 < nothing["auc"] < 0.6
    assert nothing["ridge"] == 1e4
    assert sum(something["reliability"]["rows"]) == 600
    again = fit_probe(model, planted(model), DEPTHS, settings)
    np.testing.assert_array_equal(again.weight, probe.weight)
    probe.check(model)


def test_from_prompts_to_a_probe_that_loads(model: LayeredModel, tmp_path: Path) -> None:
    prompts = [Prompt(id=f"{n}", task="toy", text=str(n)) for n in range(7)]
    seen: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as patch:  # the model has no tokenizer
        patch.setattr(model, "encode", lambda text: [int(text) + 1, 4])
        settings = ProbeSettings(depths=DEPTHS, skip=1, limit=5, max_new_tokens=6, folds=3)
        probe = train_probe(model, prompts, tmp_path, settings, lambda *done: seen.append(done))
        with pytest.raises(InputError, match="1 prompts are left for 3 folds"):
            train_probe(model, prompts[:2], tmp_path, settings)
    assert seen == [(5, 5)]
    assert load_probe(tmp_path).identity == probe.identity
    assert probe.report["texts"] == 5
    assert probe.report["settings"]["skip"] == 1
    model_like = LayeredModel(tiny_models.llama(), None, "tiny")
    model_like.attach_probe(probe)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"folds": 1}, "folds: 1 is below 2"),
        ({"max_new_tokens": 1}, "max_new_tokens: 1 is below 2"),
        ({"skip": -1}, "skip: -1 is below 0"),
        ({"limit": 0}, "limit: 0 is below 1"),
        ({"ridges": ()}, "must rise"),
        ({"ridges": (10.0, 1.0)}, "must rise"),
        ({"ridges": (0.0, 1.0)}, "above 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ProbeSettings(**changes)
