"""Cost models: worked out by hand, saved and loaded, and refused where they cannot be right."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

from sde_gym.errors import InputError
from sde_gym.models.cost import CostModel, load_cost, resolve_cost, unit_cost, unit_cost_of
from tests.costs import uneven_cost
from tests.pages import first_column, marked, read_page


def test_a_draft_pass_is_interpolated() -> None:
    cost = uneven_cost(9)
    # 1.1 at depth 1, 3.0 at 3, and from there 1.0 a layer.
    assert cost.draft_pass([0, 1, 2, 3, 6, 9], first=True).tolist() == pytest.approx(
        [0, 1.1, 2.05, 3.0, 6.0, 9.0]
    )
    assert cost.draft_pass([1, 2, 3, 6], first=False).tolist() == pytest.approx([0.5, 0.9, 1.3, 2.6])


def test_speedup() -> None:
    assert uneven_cost(9).speedup(6, 20.0) == 3.0
    assert uneven_cost(9).speedup(0, 0.0) == 1.0
    assert isinstance(uneven_cost(9).speedup(6, 20), float)


def test_the_unit_model_counts_layers_and_heads_by_size() -> None:
    cost = unit_cost(24, exit_head=0.25, final_head=2, max_draft=3)
    assert cost.layer == (1.0,) * 4
    assert cost.draft_pass([1, 7, 24], first=True).tolist() == [1, 7, 24]
    assert cost.draft_pass([1, 7, 24], first=False).tolist() == [1, 7, 24]
    assert (cost.exit_head, cost.final_head, cost.plain_token) == (0.25, (2.0,) * 4, 26.0)
    assert cost.max_draft == 3
    assert unit_cost(24).plain_token == 24.0


def test_the_unit_model_of_a_language_model() -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from sde_gym.models.layered import LayeredModel

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=8, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    cost = unit_cost_of(LayeredModel(LlamaForCausalLM(config).eval(), compact_vocabulary=range(10)), 5)
    layer = 8 * 8 * 2 + 8 * 4 * 2 + 3 * 8 * 16 + 2 * 8  # query and out, key and value, MLP, norms
    assert cost.exit_head == 10 * 8 / layer
    assert cost.final_head == (40 * 8 / layer,) * 6


def test_saving_keeps_everything(tmp_path: Path) -> None:
    cost = uneven_cost(9)
    path = tmp_path / "new" / "cost.json"
    cost.save(path)
    loaded = load_cost(path)
    assert loaded == cost
    assert loaded.provenance == cost.provenance
    assert resolve_cost(str(path), 9, 12) == resolve_cost(path, 9, 12) == cost
    assert [file.name for file in path.parent.iterdir()] == ["cost.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sde_gym_cost_model": 2}, "version 2 of the format, but this package reads 1"),
        ({"sde_gym_cost_model": None}, "not a cost model"),
        ({"layer": None}, "layer missing or unknown"),
        ({"extra": 1}, "extra missing or unknown"),
        ({"layer": 1.0}, "layer: 1.0 is not a tuple"),
        ({"exit_head": "0.3"}, "exit_head: '0.3' is not a float"),
        ({"exit_head": -0.3}, "exit_head: -0.3 is not a finite cost"),
        ({"final_head": [1.0]}, "final_head: 1 entries, but layer has 13"),
        ({"layer": ["a"] * 13}, "layer: 'a' is not a finite cost"),
        ({"num_layers": True}, "num_layers: True is not a int"),
        ({"draft_depths": [3, 1]}, r"draft_depths: \[3, 1\] is not rising within 1..9"),
        ({"draft_depths": [3, 10]}, "draft_depths: "),
        ({"first_draft": [2.0, 1.0]}, "first_draft: .* never falling"),
        ({"later_draft": [2.0]}, "later_draft: .* one cost for each of the 2 draft_depths"),
        ({"fixed_decision": 0.01}, "fixed_decision: 0.01 is below fixed_blind_decision"),
        ({"unit": "hours"}, "unit: 'hours' is not one of layers, seconds"),
        ({"plain_token": 0.0}, "plain_token above 0"),
    ],
)
def test_a_file_at_fault_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    content = {"sde_gym_cost_model": 1, **asdict(uneven_cost(9)), **change}
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))
    with pytest.raises(InputError, match=message) as error:
        load_cost(path)
    assert str(error.value).startswith(f"{path}: ")


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        load_cost(tmp_path / "missing.json")
    (tmp_path / "list.json").write_text("[1, 2]")
    with pytest.raises(InputError, match="not a cost model; `sde-gym calibrate` writes one"):
        load_cost(tmp_path / "list.json")


def test_resolving() -> None:
    assert resolve_cost("unit", 24, 5) == unit_cost(24, max_draft=5)
    assert resolve_cost(uneven_cost(9), 9, 12) == uneven_cost(9)
    with pytest.raises(InputError, match="'uneven' is for a model of 9 layers, not 8"):
        resolve_cost(uneven_cost(9), 8, 12)
    with pytest.raises(InputError, match="drafts of up to 12 tokens, but max_draft is 13"):
        resolve_cost(uneven_cost(9), 9, 13)
    for wrong in (3, None, ""):
        with pytest.raises(InputError, match="is neither 'unit' nor the path"):
            resolve_cost(wrong, 9, 12)  # type: ignore[arg-type]


def test_nan_is_no_cost() -> None:
    with pytest.raises(InputError, match="exit_head: nan"):
        replace(uneven_cost(9), exit_head=float("nan"))


def test_the_page_explains_every_field() -> None:
    page = read_page("cost")
    parts = first_column(marked(page, "parts"))
    names = [entry.name for entry in fields(CostModel)]
    assert parts == [name for name in names if name not in ("name", "unit", "num_layers", "provenance")]
    for name in set(names) - set(parts):
        assert f"`{name}`" in page
