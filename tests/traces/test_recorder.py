"""Recording: what is stored is what the model says, and an interrupted recording resumes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch

from sde_gym.decoding import autoregressive
from sde_gym.errors import InputError
from sde_gym.models import LayeredModel
from sde_gym.prompts import Prompt
from sde_gym.traces import load_traces, recorder
from sde_gym.traces.recorder import record
from tests.decoding.conftest import agreeing_model

DEPTHS = (1, 2, 4)


class Letters:
    """A tokenizer of 40 letters, which is all that the tiny model knows."""

    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) - ord("0") for c in text]}

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(i + ord("0")) for i in ids)


@pytest.fixture(scope="module")
def model() -> LayeredModel:
    model = agreeing_model(compact=list(range(0, 40, 2)))
    model.tokenizer = Letters()
    return model


PROMPTS = [Prompt(f"p{i}", "letters" if i % 2 else "more", "0AB"[: 1 + i % 3] + "5", "") for i in range(10)]


def test_every_row_is_the_models_own_prediction(model: LayeredModel, tmp_path: Path) -> None:
    traces = record(model, PROMPTS, tmp_path / "t", DEPTHS, max_new_tokens=12, batch_size=4)
    assert traces.text_ids == [p.id for p in PROMPTS]
    assert traces.tasks == [p.task for p in PROMPTS]
    vocabulary = model.compact_vocabulary
    assert vocabulary is not None
    for n, prompt in enumerate(PROMPTS):
        ids = model.encode(prompt.text)
        text = autoregressive(model, ids, 12).tokens
        rows = slice(int(traces.start[n]), int(traces.start[n + 1]))
        assert traces.token[rows].tolist() == text
        with torch.no_grad():
            body = model.hf.model
            states = body(
                torch.tensor([ids + text[:-1]]), output_hidden_states=True, use_cache=False
            ).hidden_states
        for column, depth in enumerate(DEPTHS):
            logits = model.hf.lm_head(body.norm(states[depth]))[0, len(ids) - 1 :, vocabulary]
            log_p = torch.log_softmax(logits.double(), -1)
            best, order = log_p.sort(-1, descending=True)
            np.testing.assert_array_equal(traces.top_ids[rows, column], vocabulary[order[:, :8]])
            np.testing.assert_allclose(traces.top_logprobs[rows, column], best[:, :8].detach(), atol=1e-4)
            np.testing.assert_allclose(
                traces.entropy[rows, column], -(log_p.exp() * log_p).sum(-1).detach(), atol=1e-4
            )
            np.testing.assert_array_equal(
                traces.match[rows, column], vocabulary[order[:, 0]].numpy() == np.array(text)
            )
        np.testing.assert_array_equal(traces.final_ids[rows, 0], text)


@pytest.mark.parametrize(("eos", "together"), [((), 256), ((8, 13), 256), ((8, 13), 3)])
def test_overrun_is_what_a_depth_drafts_behind_its_mistakes(
    tmp_path: Path, eos: tuple[int, ...], together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every branch, token by token, against uncached passes over the text with the wrong tokens in it."""
    monkeypatch.setattr("sde_gym.traces.recorder._BRANCHES", together)
    model = agreeing_model(list(eos) or None, context=19, compact=list(range(0, 40, 2)))
    model.tokenizer = Letters()
    traces = record(model, PROMPTS, tmp_path / "t", DEPTHS, max_new_tokens=15, overrun=4)
    vocabulary = model.compact_vocabulary
    branches = 0
    for n, prompt in enumerate(PROMPTS):
        ids = model.encode(prompt.text)
        text = traces.tokens_of(n).tolist()
        budget = min(15, 19 - len(ids) + 1)
        for t in range(len(text)):
            for column, depth in enumerate(DEPTHS):
                entry = (int(traces.start[n]) + t) * len(DEPTHS) + column
                first, end = traces.branch_start[entry : entry + 2]
                hypothesis = [*text[:t], int(traces.top_ids[traces.start[n] + t, column, 0])]
                if t == 0 or hypothesis[-1] == text[t]:
                    assert first == end
                    continue
                expected = []
                while len(expected) < 4 and len(hypothesis) < budget and hypothesis[-1] not in eos:
                    with torch.no_grad():
                        states = model.hf.model(
                            torch.tensor([ids + hypothesis]), output_hidden_states=True, use_cache=False
                        ).hidden_states
                        logits = model.hf.lm_head(model.hf.model.norm(states[depth]))[0, -1, vocabulary]
                    log_p = torch.log_softmax(logits.double(), -1)
                    best, order = log_p.sort(descending=True)
                    expected.append(int(vocabulary[order[0]]))
                    row = first + len(expected) - 1
                    np.testing.assert_allclose(traces.overrun_logprobs[row], best[:8], atol=1e-4)
                    entropy = float(-(log_p.exp() * log_p).sum())
                    assert traces.overrun_entropy[row] == pytest.approx(entropy, abs=1e-4)
                    hypothesis.append(expected[-1])
                assert traces.overrun_proposal[first:end].tolist() == expected
                branches += len(expected) > 1
    assert branches > 50


def test_without_overrun_nothing_is_stored_behind_mistakes(model: LayeredModel, tmp_path: Path) -> None:
    traces = record(model, PROMPTS[:2], tmp_path / "t", DEPTHS, max_new_tokens=6, overrun=0)
    assert not traces.match[1:].all()
    assert traces.branch_start.tolist() == [0] * (len(traces.token) * 3 + 1)
    assert not list((tmp_path / "t").glob("overrun-*"))
    with pytest.raises(InputError, match="recorded with overrun 0"):
        record(model, PROMPTS, tmp_path / "t", DEPTHS, max_new_tokens=6)


def test_a_killed_recording_resumes_to_the_same_set(model: LayeredModel, tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    def kill(done: int, total: int, tokens: int) -> None:
        if done >= 4:
            raise Killed

    whole = record(model, PROMPTS, tmp_path / "whole", DEPTHS, max_new_tokens=12, batch_size=4)
    with pytest.raises(Killed):
        record(model, PROMPTS, tmp_path / "t", DEPTHS, max_new_tokens=12, batch_size=4, progress=kill)
    seen: list[int] = []
    again = record(
        model, PROMPTS, tmp_path / "t", DEPTHS, max_new_tokens=12, batch_size=4,
        progress=lambda done, total, tokens: seen.append(done),
    )  # fmt: skip
    assert seen == [8, 10]
    assert again.text_ids == whole.text_ids
    np.testing.assert_array_equal(again.token, whole.token)
    np.testing.assert_allclose(again.top_logprobs, whole.top_logprobs, atol=1e-5)
    np.testing.assert_array_equal(again.branch_start, whole.branch_start)
    np.testing.assert_array_equal(again.overrun_proposal, whole.overrun_proposal)


def test_it_is_plain_parquet(model: LayeredModel, tmp_path: Path) -> None:
    record(model, PROMPTS[:2], tmp_path / "t", DEPTHS, max_new_tokens=6)
    table = parquet.read_table(sorted((tmp_path / "t").glob("positions-*.parquet"))[0])
    frame = table.to_pandas() if _has_pandas() else None
    assert table.num_rows == 12
    assert {"text", "position", "token", "d1_ids", "d4_match"} <= set(table.column_names)
    if frame is not None:
        assert len(frame) == 12


def _has_pandas() -> bool:
    from importlib.util import find_spec

    return find_spec("pandas") is not None


def test_text_cut_from_the_library_is_not_copied(
    model: LayeredModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(source: str) -> str:
        if source != "reference":
            raise InputError("no reference")
        return "0A"

    monkeypatch.setattr(recorder, "resolve_source", resolve)
    prompts = [Prompt("a", "t", "0A", "reference"), Prompt("b", "t", "0BB", "file.jsonl")]
    record(model, prompts, tmp_path / "t", DEPTHS, max_new_tokens=4)
    traces = load_traces(tmp_path / "t")
    assert traces.prompts == [None, "0BB"]
    assert traces.prompt_tokens[0] is None
    assert traces.prompt_tokens[1].tolist() == model.encode("0BB")
    assert traces.sources == ["reference", "file.jsonl"]


def test_only_the_texts_asked_for_come_back(model: LayeredModel, tmp_path: Path) -> None:
    record(model, PROMPTS, tmp_path / "t", DEPTHS, max_new_tokens=4)
    again = record(model, PROMPTS[3:5], tmp_path / "t", DEPTHS, max_new_tokens=4)
    assert again.text_ids == ["p3", "p4"]
    assert len(load_traces(tmp_path / "t")) == len(PROMPTS)


def test_another_text_under_a_known_id_is_refused(model: LayeredModel, tmp_path: Path) -> None:
    record(model, PROMPTS[:2], tmp_path / "t", DEPTHS, max_new_tokens=4)
    with pytest.raises(InputError, match="'p1' was recorded with another text"):
        record(model, [Prompt("p1", "t", "777", "")], tmp_path / "t", DEPTHS, max_new_tokens=4)
    with pytest.raises(InputError, match="same id"):
        record(model, [PROMPTS[0], PROMPTS[0]], tmp_path / "t", DEPTHS, max_new_tokens=4)


def test_a_prompt_that_cannot_be_encoded_is_named_before_work_starts(
    model: LayeredModel, tmp_path: Path
) -> None:
    prompts = [*PROMPTS[:2], Prompt("long", "t", "0" * 300, "")]
    with pytest.raises(InputError, match=r"prompt 'long': .*300 tokens"):
        record(model, prompts, tmp_path / "t", DEPTHS, max_new_tokens=4)
    assert not (tmp_path / "t").exists()


def test_another_model_or_other_depths_do_not_mix(model: LayeredModel, tmp_path: Path) -> None:
    record(model, PROMPTS[:2], tmp_path / "t", DEPTHS, max_new_tokens=4)
    with pytest.raises(InputError, match="depths"):
        record(model, PROMPTS, tmp_path / "t", (1, 2), max_new_tokens=4)
    other = agreeing_model(compact=list(range(0, 40, 2)))
    other.tokenizer = Letters()
    with torch.no_grad():
        other.hf.model.norm.weight.mul_(1.5)
    with pytest.raises(InputError, match="model_hash"):
        record(other, PROMPTS, tmp_path / "t", DEPTHS, max_new_tokens=4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompts": []}, "no prompts"),
        ({"depths": (0, 2)}, r"1\.\.5"),
        ({"depths": (2, 6)}, r"1\.\.5"),
        ({"max_new_tokens": 1}, "max_new_tokens 1"),
        ({"k": 1}, "k 1"),
        ({"k": 21}, "k 21 exceeds the 20"),
        ({"batch_size": 0}, "batch_size 0"),
        ({"overrun": -1}, "overrun: -1 is below 0"),
    ],
)
def test_bad_arguments_are_refused(
    model: LayeredModel, tmp_path: Path, change: dict[str, object], words: str
) -> None:
    arguments = {"prompts": PROMPTS, "depths": DEPTHS, "max_new_tokens": 4, **change}
    with pytest.raises(InputError, match=words):
        record(model, out=tmp_path / "t", **arguments)  # type: ignore[arg-type]
    assert not (tmp_path / "t").exists()
