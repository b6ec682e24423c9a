"""The lattice decoder: states on every branch, where texts end, what is recorded, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

from sde_gym.decoding import autoregressive
from sde_gym.decoding.dex import DexResult, Lattice, Node, dex, exploration_set
from sde_gym.decoding.dex.candidates import Proposer
from sde_gym.decoding.dex.explorers import LocalExplorers
from sde_gym.decoding.dex.machine import Machine, State
from sde_gym.decoding.dex.picture import lattice_lanes, lattice_picture
from sde_gym.decoding.rules import GenerationRules
from sde_gym.errors import InputError
from sde_gym.models import LayeredModel
from tests.decoding.conftest import agreeing_model

PROMPT = [5, 35, 3]
DEPTHS = (1, 2, 4, 6)


# ---------------------------------------------------------------- the states of every branch


@pytest.mark.parametrize("garbage", [False, True], ids=["cleared at once", "cleared at times"])
def test_every_branch_has_exact_states_at_every_tick(
    model: LayeredModel, garbage: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each lattice token's state is that of an uncached pass over the text down its branch."""
    depths, budget = (1, 2, 4, 6), 14
    if not garbage:
        drop = LocalExplorers.drop

        def drop_and_clear(self: LocalExplorers, nodes: Any) -> None:
            drop(self, nodes)
            self._clear_away()

        monkeypatch.setattr(LocalExplorers, "drop", drop_and_clear)
    with torch.inference_mode():
        lattice = Lattice(PROMPT, len(depths), budget)
        explorers = LocalExplorers(model, depths, Proposer(model, None, True), PROMPT)
        result = DexResult(model.num_layers, exploration_set=depths)
        machine = Machine(
            lattice, explorers, result, rules=None, eos_token_ids=(), on_tokens=None, record=False
        )
        seen = 0
        while machine.state is not State.DONE:
            machine.step()
            if machine.state is not State.COLLAPSE:
                for node in lattice.alive:
                    seen += check_state(model, explorers, lattice, node)
    assert seen > 120


def check_state(model: LayeredModel, explorers: LocalExplorers, lattice: Lattice, node: Node) -> bool:
    """Compare one lattice token's state, if it has been run, and its slot's place in the tree."""
    slot = explorers.slots.get(node.number)
    if slot is None:
        assert node.stage == 0
        return False
    depth = explorers.depths[node.stage - 1]
    assert explorers.sequence.depths[slot] == depth
    assert explorers.sequence.tokens[slot] == node.token
    fresh = model.sequence()
    fresh.append(lattice.text(node))
    fresh.advance(depth)
    found = explorers.sequence.hidden(depth, slots=[slot])
    torch.testing.assert_close(found, fresh.hidden(depth), rtol=1e-4, atol=1e-4)
    return True


def test_the_cache_stays_small(model: LayeredModel) -> None:
    """Dropped branches do not pile up over a long text."""
    lattice = Lattice(PROMPT, 6, 150)
    explorers = LocalExplorers(model, (1, 2, 3, 4, 5, 6), Proposer(model, None, True), PROMPT)
    result = DexResult(6, exploration_set=explorers.depths)
    longest = 0
    with torch.inference_mode():
        machine = Machine(
            lattice, explorers, result, rules=None, eos_token_ids=(), on_tokens=None, record=False
        )
        while machine.state is not State.DONE:
            machine.step()
            longest = max(longest, len(explorers.sequence) - len(lattice.ids))
    assert result.tokens == autoregressive(model, PROMPT, 150).tokens
    assert longest < 63 + 16 + (153 + 63) // 8
    assert result.lattice_tokens > 2000


# ---------------------------------------------------------------- the lattice by hand


def test_a_lattice_by_hand() -> None:
    """Three stages; the second stage's candidate wins, and its child with it."""
    lattice = Lattice([7], 3, 10)
    root = lattice.anchor
    (a,) = lattice.expand({0: 1})
    assert [lattice.at(stage) for stage in range(3)] == [[a], [root], []]
    assert [node.token for node in lattice.expand({0: 2, 1: 5})] == [2, 5]
    b = root.branches[2]
    assert lattice.text(b) == [7, 2]
    assert lattice.text(a.branches[5]) == [7, 1, 5]
    lattice.expand({0: 2, 1: 6, 2: 8, 3: 9})
    assert root.candidates == [1, 2, 2]
    assert set(root.branches) == {1, 2}
    assert lattice.commit() == (b, 1)
    dropped = lattice.collapse(b)
    assert {node.token for node in dropped} == {1, 5, 6, 9}
    assert all(node.dropped and node.ended == 3 for node in dropped)
    assert not root.dropped
    assert lattice.ids == [7, 2]
    assert lattice.anchor is b
    assert [(node.token, node.stage) for node in lattice.alive] == [(2, 1), (8, 0)]


def test_no_match_starts_anew_behind_the_final_token() -> None:
    lattice = Lattice([7], 2, 10)
    lattice.expand({0: 1})
    lattice.expand({0: 4, 1: 3})
    selected, stage = lattice.commit()
    assert (selected.token, selected.proposed_at, stage) == (4, 1, 1)
    lattice.collapse(selected)
    assert lattice.alive == [selected]
    assert selected.stage == 0


# ---------------------------------------------------------------- where texts end


@pytest.mark.parametrize("depths", [(6,), (3, 6), DEPTHS])
def test_end_of_text(model: LayeredModel, depths: tuple[int, ...]) -> None:
    """The text ends where plain decoding's does, and nothing is run behind an end-of-text candidate."""
    text = autoregressive(model, PROMPT, 40).tokens
    for end in sorted({text[3], text[11], text[20]}):
        ending = agreeing_model(eos_token_id=end)
        result = dex(ending, PROMPT, depths, 40, record=True)
        assert result.tokens == autoregressive(ending, PROMPT, 40).tokens
        assert result.tokens[-1] == end
        ends = [node for node in result.nodes if node.token == end and node.index >= 0]
        assert ends
        assert all(node.stage == 0 and not node.branches for node in ends)


def test_an_end_of_text_in_the_lattice_that_loses_changes_nothing(model: LayeredModel) -> None:
    text = autoregressive(model, PROMPT, 30).tokens
    record = dex(model, PROMPT, DEPTHS, 30, record=True)
    never = {node.token for node in record.nodes} - set(text)
    ending = agreeing_model(eos_token_id=sorted(never))
    result = dex(ending, PROMPT, DEPTHS, 30, record=True)
    assert (result.tokens, result.ticks) == (text, record.ticks)
    assert result.lattice_tokens < record.lattice_tokens
    assert any(node.token in never for node in result.nodes)


@pytest.mark.parametrize("budget", [0, 1, 2, 3, 5])
def test_the_budget(model: LayeredModel, budget: int) -> None:
    """Nothing is run that could only follow the last token."""
    result = dex(model, PROMPT, DEPTHS, budget, record=True)
    assert result.tokens == autoregressive(model, PROMPT, budget).tokens
    assert result.ticks == (0 if not budget else 4 + sum(i + 1 for i in result.selected[:-1]))
    assert all(node.stage == 0 for node in result.nodes if node.index >= budget - 1)
    assert [node.token for node in result.nodes if node.emitted and node.index >= 0] == result.tokens
    if budget == 1:
        assert result.lattice_tokens == 4


def test_the_context_limit() -> None:
    short = agreeing_model(context=24)
    result = dex(short, PROMPT, DEPTHS, 100)
    assert result.tokens == autoregressive(short, PROMPT, 100).tokens
    assert len(result.tokens) == 22


def test_tokens_are_told_as_they_come(model: LayeredModel) -> None:
    told: list[list[int]] = []
    result = dex(model, PROMPT, DEPTHS, 9, on_tokens=told.append)
    assert told == [[token] for token in result.tokens]
    assert result.fates[0] == "prefill"
    assert {("accepted" if depth < 6 else "final") for depth in result.depths[1:]} == set(result.fates[1:])
    assert result.prefill_seconds > 0
    assert result.seconds == result.prefill_seconds + result.decode_seconds


@pytest.mark.parametrize("decs", [True, False])
def test_greedy_with_processors_and_criteria(model: LayeredModel, decs: bool) -> None:
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.4), NoRepeatNGramLogitsProcessor(2)])
    made = GenerationRules(40, (), processors, lambda ids, _: torch.tensor([ids.shape[1] >= 33]))
    plain = autoregressive(model, PROMPT, 60, rules=made)
    result = dex(model, PROMPT, DEPTHS, 60, rules=made, decs=decs)
    assert result.tokens == plain.tokens != autoregressive(model, PROMPT, 30).tokens
    assert len(result.tokens) == 30
    assert result.ticks < 4 * 30


# ---------------------------------------------------------------- the record


def test_the_record_tells_the_whole_story(model: LayeredModel) -> None:
    result = dex(model, PROMPT, DEPTHS, 25, record=True)
    assert dex(model, PROMPT, DEPTHS, 25).nodes == []
    assert [node.number for node in result.nodes] == list(range(len(result.nodes)))
    emitted = [node for node in result.nodes if node.emitted]
    assert [node.token for node in emitted] == result.tokens
    assert [node.emitted for node in emitted] == result.commit_ticks
    assert [node.index for node in emitted] == list(range(25))
    assert all(node.dropped != (node.emitted is not None) for node in result.nodes)
    for tick, count in enumerate(result.tick_tokens, 1):
        ran = [n for n in result.alive_at(tick) if n.runs and n.born < tick]
        assert len(ran) == count
        assert all(1 <= node.stage_at(tick) <= 4 for node in ran)
    for node in result.nodes:
        assert node.stage == (node.stage_at(node.ended) if node.ended is not None else 0)
        if node.parent is not None:
            assert node.parent.candidates[node.proposed_at] == node.token
            assert node.parent.stage_at(node.born) == node.proposed_at + 1
            assert node.index == node.parent.index + 1


def test_the_picture(model: LayeredModel, tmp_path: Path) -> None:
    result = dex(model, PROMPT, DEPTHS, 12, record=True)
    for tokens in (None, 5):
        path = tmp_path / f"{tokens}.png"
        lattice_picture(result, path, lambda ids: " $" + "".join(chr(0x4E00 + i) for i in ids), tokens)
        assert path.read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "5.png").stat().st_size < (tmp_path / "None.png").stat().st_size
    with pytest.raises(InputError, match="record=True"):
        lattice_picture(dex(model, PROMPT, DEPTHS, 5), tmp_path / "none.png", str)


def test_bars_of_the_picture_do_not_lie_over_one_another(model: LayeredModel) -> None:
    result = dex(model, PROMPT, DEPTHS, 20, record=True)
    lanes = lattice_lanes(result.nodes, result.ticks)
    taken: set[tuple[int, int]] = set()
    for node in result.nodes:
        end = result.ticks if node.ended is None else node.ended
        cells = {(lanes[node.number], tick) for tick in range(node.born, end)}
        assert not cells & taken
        taken |= cells
    rows = [lanes[node.number] for node in result.nodes if node.emitted is not None]
    assert rows == sorted(rows)  # the text reads downwards


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((), r"empty; the shortest one is \(6,\)"),
        ((2, 2, 6), "does not rise .2 follows 2.; sort"),
        ((4, 2, 6), "does not rise .2 follows 4."),
        ((0, 3, 6), "depth 0 has no layer in front of it; begin at 1"),
        ((-2, 6), "depth -2"),
        ((2, 4), "must end at the last layer, 6, .* append it"),
        ((2, 6, 9), "must end at the last layer, 6, .* leave out what is deeper"),
        ((1, 2, 3, 4, 5, 6, 7), "7 explorers for 6 layers"),
        (7, r"7 cannot share 6 layers; give a number in 1\.\.6"),
        (0, "0 cannot share"),
        ((2.5, 6), "2.5 is not a whole number"),
        ((True, 6), "True is not a whole number"),
        ("2,6", "'2,6' is neither"),
        (None, "None is neither"),
    ],
)
def test_an_exploration_set_that_does_not_fit(model: LayeredModel, given: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        dex(model, PROMPT, given, 5)


def test_an_exploration_set_that_does() -> None:
    assert exploration_set(torch.tensor([2, 6]), 6) == (2, 6)  # type: ignore[arg-type]
    assert exploration_set(3, 6) == (2, 4, 6)
    assert exploration_set(1, 6) == exploration_set([6], 6) == (6,)


@pytest.mark.parametrize(
    ("prompt", "budget", "words"),
    [([], 5, "no tokens"), ([1] * 256, 5, "shorten"), ([1], -1, "at least 0"), ([40], 5, "token ids must")],
)
def test_a_request_that_makes_no_sense(
    model: LayeredModel, prompt: list[int], budget: int, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        dex(model, prompt, DEPTHS, budget)


def test_near_ties_are_counted(model: LayeredModel, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = autoregressive(model, PROMPT, 20, count_near_ties=True)
    assert dex(model, PROMPT, 3, 20, count_near_ties=True).near_ties == plain.near_ties
    monkeypatch.setattr("sde_gym.decoding.dex.candidates.NEAR_TIE", 1e9)
    assert dex(model, PROMPT, 3, 20, count_near_ties=True).near_ties == 20
    assert dex(model, PROMPT, 3, 20).near_ties == 0
