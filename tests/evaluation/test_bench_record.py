"""The benchmark of recording: that it measures what it says, not how long anything takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sde_gym.errors import InputError
from sde_gym.evaluation.bench_record import GENERATION, bench_record, kinds
from sde_gym.models.generation import generate_greedy
from sde_gym.models.layered import LayeredModel
from sde_gym.prompts import Prompt
from tests.models.tiny_models import llama


class Letters:
    """A tokenizer of one token a letter."""

    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % 50 for letter in text]}


@pytest.fixture(scope="module")
def model() -> LayeredModel:
    return LayeredModel(llama(seed=1), tokenizer=Letters(), name="tiny", compact_vocabulary=range(30))


PROMPTS = [Prompt("a", "task", "some prompt"), Prompt("b", "task", "another, longer one")]


def test_every_kind_is_measured_as_often(model: LayeredModel, tmp_path: Path) -> None:
    notes: list[tuple[int, int, str]] = []
    found = bench_record(
        model, PROMPTS, depths=[1, 2], max_new_tokens=12, repeats=2, progress=lambda *note: notes.append(note)
    )
    names = [GENERATION, *kinds(model, [1, 2])]
    assert [row.name for row in found.rows] == names
    assert [name for _, _, name in notes] == names * 2
    assert notes[-1][:2] == (9, 10)
    assert found.depths == (1, 2)
    ids = [model.encode(prompt.text) for prompt in PROMPTS]
    assert found.tokens == sum(map(len, generate_greedy(model, ids, 12)))
    plain, *recorded = found.rows
    assert plain.ratios == (1.0, 1.0)
    assert plain.bytes_a_token == 0
    for row in recorded:
        for seconds, of_plain, ratio in zip(row.seconds, plain.seconds, row.ratios, strict=True):
            assert ratio == pytest.approx(seconds / of_plain)
    sizes = {row.name: row.bytes_a_token for row in recorded}
    assert sizes["without overrun, all layers"] > sizes["without overrun"] > 0
    assert sizes["overrun 11"] > sizes["without overrun"]

    found.save(tmp_path / "cost.json")
    saved = json.loads((tmp_path / "cost.json").read_text())
    assert [row["name"] for row in saved["rows"]] == names


@pytest.mark.parametrize("wrong", [{"prompts": []}, {"prompts": PROMPTS, "repeats": 0}])
def test_nothing_to_measure(model: LayeredModel, wrong: dict[str, object]) -> None:
    with pytest.raises(InputError, match="both must be at least 1"):
        bench_record(model, **wrong)  # type: ignore[arg-type]
