"""Ticks of depth exploration from traces: by hand, their bounds, and those of the lattice decoder."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

from sde_gym.decoding.dex import dex
from sde_gym.errors import InputError
from sde_gym.evaluation.dex_ticks import candidates, dex_ticks, match_stages
from sde_gym.models import LayeredModel
from sde_gym.prompts import Prompt
from sde_gym.traces import TraceSet
from sde_gym.traces.ead import earliest_depths
from sde_gym.traces.recorder import record
from tests.builders import written_traces
from tests.decoding.conftest import agreeing_model
from tests.dex_sets import all_depths, with_depths


def by_hand(tokens: list[int]) -> TraceSet:
    """Second-best tokens are the best ones plus 100."""
    return written_traces(tokens, [(1, 1), (9, 2), (9, 9), (4, 4)], end="budget", depths=(2, 4), num_layers=6)


def test_by_hand() -> None:
    count = dex_ticks(by_hand([1, 2, 3, 4]), (2, 4, 6), heads=(1.0, 2.0))
    assert count.stage.tolist() == [0, 1, 2, 0]
    assert count.ticks.tolist() == [3 + 1 + 2 + 3]
    assert count.ticks_per_token == 9 / 4
    assert count.depth.tolist() == [2, 4, 6, 2]
    assert count.depth_speedup == 6 / 3.5
    assert count.slowest_stage == 4.0
    assert count.tick_speedup == pytest.approx(8 / (4 * 9 / 4))
    assert count.layer_speedup == pytest.approx(6 / (2 * 9 / 4))
    assert count.lattice_bound == 7
    assert (count.explorers, count.num_layers, count.resolution) == (3, 6, 2)
    single = dex_ticks(by_hand([1, 2, 3, 4]), (2, 4, 6), single_exit=True)
    assert single.stage.tolist() == [0, 2, 2, 0]
    assert single.ticks.tolist() == [3 + 1 + 3 + 3]


def test_decs_by_hand() -> None:
    traces = by_hand([1, 2, 109, 4])
    assert candidates(traces, (2, 4, 6)).tolist() == [[1, 101], [9, 2], [9, 109], [4, 104]]
    assert candidates(traces, (2, 4, 6), decs=False).tolist() == [[1, 1], [9, 2], [9, 9], [4, 4]]
    assert match_stages(traces, (2, 4, 6)).tolist() == [0, 1, 1, 0]
    assert match_stages(traces, (2, 4, 6), decs=False).tolist() == [0, 1, 2, 0]


def test_one_explorer_is_plain_decoding() -> None:
    traces = all_depths()
    count = dex_ticks(traces, (8,), heads=(1.0, 2.0))
    assert count.ticks.tolist() == traces.lengths.tolist()
    assert count.tick_speedup == count.layer_speedup == count.depth_speedup == 1.0


@pytest.mark.parametrize("decs", [True, False])
@pytest.mark.parametrize("p_match", [0.4, 0.9])
def test_the_resolution_bounds_the_overhead_of_every_token(decs: bool, p_match: float) -> None:
    traces = all_depths(p_match=p_match)
    ead = earliest_depths(traces)
    for explorers in range(1, 6):
        for below in combinations(range(1, 8), explorers - 1):
            count = dex_ticks(traces, (*below, 8), decs=decs)
            rounded = np.array(count.exploration_set)[np.searchsorted(count.exploration_set, ead)]
            assert (count.depth <= rounded).all()
            assert (count.depth - ead <= count.resolution - 1).all()


def test_the_bound_holds_on_a_coarser_grid() -> None:
    traces = with_depths(all_depths(p_match=0.8), (1, 4, 6))
    ead = earliest_depths(traces)
    for chosen in ((4, 8), (1, 6, 8), (1, 4, 6, 8)):
        count = dex_ticks(traces, chosen)
        assert (count.depth - ead <= count.resolution - 1).all()


def test_decs_finds_every_token_as_early_and_no_candidate_twice() -> None:
    traces = all_depths(p_match=0.3, vocabulary=12)
    chosen = (1, 2, 4, 5, 7, 8)
    found = candidates(traces, chosen)
    assert all(len({*row}) == 5 for row in found.tolist())
    with_decs, without = match_stages(traces, chosen), match_stages(traces, chosen, decs=False)
    assert (with_decs <= without).all()
    assert (with_decs < without).any()
    np.testing.assert_array_equal(found[:, 0], traces.top_ids[:, 0, 0])


def test_a_set_that_holds_another_proposes_no_token_deeper() -> None:
    traces = all_depths()
    for coarse, fine in (((8,), (4, 8)), ((4, 8), (2, 4, 6, 8)), ((3, 8), (3, 4, 8))):
        deeper = dex_ticks(traces, coarse, decs=False).depth - dex_ticks(traces, fine, decs=False).depth
        assert (deeper >= 0).all()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[LayeredModel, TraceSet]:
    """A tiny model whose exit heads see half of its vocabulary, and its texts at every depth."""
    model = agreeing_model(eos_token_id=7, compact=list(range(0, 40, 2)))
    model.tokenizer = Letters()
    with torch.no_grad():  # token 0 is the padding token, whose zeros make every logit a tie
        model.hf.model.embed_tokens.weight[0] = -model.hf.model.embed_tokens.weight[1]
    prompts = [Prompt(f"p{i}", "letters", chr(ord("0") + 3 * i), "") for i in range(8)]
    folder: Path = tmp_path_factory.mktemp("recorded") / "all"
    return model, record(model, prompts, folder, range(1, 6), max_new_tokens=24, overrun=0)


class Letters:
    """A tokenizer of 40 letters, which is all that the tiny model knows."""

    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - ord("0") for letter in text]}


@pytest.mark.parametrize("chosen", [(6,), (3, 6), (2, 4, 6), (1, 2, 5, 6), (1, 2, 3, 4, 5, 6)])
@pytest.mark.parametrize(("decs", "single_exit"), [(True, False), (False, False), (False, True)])
def test_the_lattice_takes_as_many_ticks(
    recorded: tuple[LayeredModel, TraceSet], chosen: tuple[int, ...], decs: bool, single_exit: bool
) -> None:
    model, traces = recorded
    count = dex_ticks(traces, chosen, decs=decs, single_exit=single_exit)
    for text in range(len(traces)):
        prompt = traces.prompt_tokens[text]
        assert prompt is not None
        result = dex(
            model,
            prompt.tolist(),
            chosen,
            24,
            decs=decs,
            single_exit=single_exit,
        )
        rows = slice(traces.start[text], traces.start[text + 1])
        assert result.tokens == traces.tokens_of(text).tolist()
        assert result.selected == count.stage[rows].tolist()
        assert result.depths == count.depth[rows].tolist()
        assert result.ticks == count.ticks[text]
        assert max(result.round_tokens) <= count.lattice_bound


def test_what_is_refused() -> None:
    traces = all_depths(num_layers=12, k=4, overrun=0)
    with pytest.raises(InputError, match="at most 5, or no DECS"):
        dex_ticks(traces, (1, 2, 3, 4, 5, 12))
    assert dex_ticks(traces, (1, 2, 3, 4, 5, 12), decs=False).explorers == 6
    with pytest.raises(InputError, match="must end at the last layer"):
        dex_ticks(traces, (1, 2))
    with pytest.raises(InputError, match="heads"):
        dex_ticks(traces, (6, 12), heads=(-1.0, 0.0))
