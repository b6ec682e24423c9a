"""Cases worked on paper where a draft goes on behind a wrong proposal; no number is the engine's.

All use L = 8, depths 2 and 4, and texts from `written_traces` (`tests.builders`), whose features are
plain functions of where they stand. Over row t, surprise / entropy / confidence are

    depth 2   10 t + 1 hundredths   0.20 t          4 + the surprise (the other tokens lie 2, 4, 6, 8
    depth 4   10 t + 2 hundredths   0.20 t + 0.02   4 + the surprise  nats below the best: mean 4)
    L         10 t hundredths

and j tokens behind a wrong proposal of row t, at its depth: j thousandths more surprise, entropy j.
A right proposal earns 1.75 at depth 2 and 1.5 at depth 4, a rejected one -1.25 and -1.5, `continue`
-0.01, and a token of the last layer 1, paid to the action that brings it. Where nothing else is said
`trace` is the mean of two tokens.
"""

from __future__ import annotations

from typing import Any

import pytest

from sde_gym.traces import TraceSet
from sde_gym.traces.overrun import check_overrun
from sde_gym.traces.schema import TraceSettings
from tests.builders import EOS, text_arguments, written_traces
from tests.envs.by_hand import CONTINUE, DRAFT, EXIT, OVER, SELECT, WRONG, Step, check_table

DEPTHS = (2, 4)
START = (SELECT, 2, 0, 4.11, 0.2, 0.0)
"""Row 1 at depth 2; token 0, of the last layer, is alone in the window, and its surprise is 0."""


def recorded_traces(
    tokens: list[int],
    drafts: dict[tuple[int, int], list[int]],
    *,
    end: str = "budget",
    recorded: int | None = None,
    overrun: int = 11,
) -> TraceSet:
    """A text with its wrong proposals: by (position, depth), that proposal and those behind it.

    What stands there has to be what a recorder would leave: no row too few, none too many.
    """
    proposals = [[drafts.get((t, depth), [token])[0] for depth in DEPTHS] for t, token in enumerate(tokens)]
    branches = {(t, DEPTHS.index(depth)): draft[1:] for (t, depth), draft in drafts.items()}
    traces = written_traces(
        tokens, proposals, end=end, depths=DEPTHS, num_layers=8, max_new_tokens=recorded,
        branches=branches, overrun=overrun,
    )  # fmt: skip
    text, settings = text_arguments(traces, 0), TraceSettings.from_manifest(traces.manifest, "by hand")
    best = text["top_ids"][:, :, 0]
    check_overrun("by hand", text["overrun"], best, traces.token, text["prompt_length"], settings)
    return traces


def play(traces: TraceSet, steps: list[Step], **settings: Any) -> None:
    """Check a table: action, reward, (phase, depth, draft length, confidence, entropy, trace), counters."""
    check_table(traces, START, steps, ("confidence", "entropy", "trace"), **{"window": 2, **settings})


def test_full_draft_all_right() -> None:
    """What lies behind the wrong proposals of depth 4 is no matter at depth 2."""
    play(
        recorded_traces([1, 2, 3, 4, 5, 6], {(2, 4): [WRONG, 8, 7], (4, 4): [WRONG, 8]}, overrun=2),
        [
            (EXIT, 1.75, (DRAFT, 2, 1, 4.21, 0.4, 0.055), (4, 4, 2, 0)),  # (0.00 + 0.11) / 2
            (EXIT, 1.75, (DRAFT, 2, 2, 4.31, 0.6, 0.16), (6, 6, 3, 0)),  # (0.11 + 0.21) / 2
            # The third of three: 2 layers, no head. Then 6 layers of 4 tokens, 2 of the next round;
            # final head, next head. (0.31 + 0.40) / 2
            (EXIT, 1.75 + 1, (SELECT, 2, 0, 4.51, 1.0, 0.355), (34, 16, 5, 4)),
            (EXIT, 1.75, OVER, (40, 22, 6, 5)),  # the last that the budget allows: not fed
        ],
        max_draft=3,
    )


def test_full_draft_with_a_wrong_proposal_inside() -> None:
    """Two of three are rejected, all three paid for; the third is not scored."""
    play(
        recorded_traces([1, 2, 3, 4, 5, 6], {(2, 2): [WRONG, 8, 7]}, overrun=2),
        [
            (EXIT, 1.75, (DRAFT, 2, 1, 4.21, 0.4, 0.055), (4, 4, 2, 0)),  # (0.00 + 0.11) / 2
            (EXIT, -1.25, (DRAFT, 2, 2, 4.211, 1.0, 0.16), (6, 6, 3, 0)),  # (0.11 + 0.21) / 2
            # 2 layers, 6 of 4 tokens, 2 of the next round. y_1 of depth 2, the correction y_2 of L
            (EXIT, -1.25 + 1, (SELECT, 2, 0, 4.31, 0.6, 0.155), (34, 16, 5, 2)),  # (0.11 + 0.20) / 2
            (CONTINUE, -0.01, (SELECT, 4, 0, 4.32, 0.62, 0.155), (36, 18, 6, 2)),
            (EXIT, 1.5, (DRAFT, 4, 1, 4.42, 0.82, 0.26), (40, 22, 7, 2)),  # (0.20 + 0.32) / 2
            # 4 layers of 2 tokens, 2 of the next round
            (CONTINUE, -0.01 + 1, (SELECT, 2, 0, 4.51, 1.0, 0.36), (50, 28, 9, 4)),  # (0.32 + 0.40) / 2
            (EXIT, 1.75, OVER, (56, 34, 10, 5)),
        ],
        max_draft=3,
    )


FIRST_IS_WRONG = recorded_traces([1, 2, 3, 4, 5], {(1, 2): [WRONG, 8, 7, 6]})


def test_mismatch_at_the_first_proposal_drafted_on() -> None:
    play(
        FIRST_IS_WRONG,
        [
            (EXIT, -1.25, (DRAFT, 2, 1, 4.111, 1.0, 0.055), (4, 4, 2, 0)),  # (0.00 + 0.11) / 2
            (EXIT, -1.25, (DRAFT, 2, 2, 4.112, 2.0, 0.1105), (6, 6, 3, 0)),  # (0.11 + 0.111) / 2
            # 6 layers of y_0 and two proposals, 2 of the next round; the correction y_1 counts at L
            (CONTINUE, -0.01 + 1, (SELECT, 2, 0, 4.21, 0.4, 0.05), (26, 14, 5, 1)),  # (0.00 + 0.10) / 2
            (EXIT, 1.75, (DRAFT, 2, 1, 4.31, 0.6, 0.155), (28, 16, 6, 1)),  # (0.10 + 0.21) / 2
            (EXIT, 1.75, (DRAFT, 2, 2, 4.41, 0.8, 0.26), (30, 18, 7, 1)),  # (0.21 + 0.31) / 2
            (EXIT, 1.75, OVER, (48, 24, 8, 4)),  # not fed; 6 layers of 3 tokens
        ],
    )


def test_credit_round_pays_the_rejected_at_verification() -> None:
    play(
        FIRST_IS_WRONG,
        [
            (EXIT, 0.0, (DRAFT, 2, 1, 4.111, 1.0, 0.055), (4, 4, 2, 0)),
            (EXIT, 0.0, (DRAFT, 2, 2, 4.112, 2.0, 0.1105), (6, 6, 3, 0)),
            (CONTINUE, -1.51, (SELECT, 2, 0, 4.21, 0.4, 0.05), (26, 14, 5, 1)),  # -1.25 - 1.25 - 0.01 + 1
            (EXIT, 0.0, (DRAFT, 2, 1, 4.31, 0.6, 0.155), (28, 16, 6, 1)),
            (CONTINUE, 2.74, (SELECT, 2, 0, 4.41, 0.8, 0.255), (42, 24, 8, 3)),  # 1.75 - 0.01 + 1
            (EXIT, 1.75, OVER, (48, 30, 9, 4)),
        ],
        credit="round",
    )


def test_mismatch_at_a_middle_proposal_drafted_on() -> None:
    play(
        recorded_traces([1, 2, 3, 4, 5, 6], {(2, 2): [WRONG, 8, 7, 6]}),
        [
            (EXIT, 1.75, (DRAFT, 2, 1, 4.21, 0.4, 0.055), (4, 4, 2, 0)),  # (0.00 + 0.11) / 2
            (EXIT, -1.25, (DRAFT, 2, 2, 4.211, 1.0, 0.16), (6, 6, 3, 0)),  # (0.11 + 0.21) / 2
            (EXIT, -1.25, (DRAFT, 2, 3, 4.212, 2.0, 0.2105), (8, 8, 4, 0)),  # (0.21 + 0.211) / 2
            # 6 layers of 4 tokens, 2 of the next round
            (CONTINUE, -0.01 + 1, (SELECT, 2, 0, 4.31, 0.6, 0.155), (34, 16, 6, 2)),  # (0.11 + 0.20) / 2
            (CONTINUE, -0.01, (SELECT, 4, 0, 4.32, 0.62, 0.155), (36, 18, 7, 2)),
            # Nothing was drafted: 4 layers of one token, 2 of the next round
            (CONTINUE, -0.01 + 1, (SELECT, 2, 0, 4.41, 0.8, 0.25), (42, 24, 9, 3)),  # (0.20 + 0.30) / 2
            (EXIT, 1.75, (DRAFT, 2, 1, 4.51, 1.0, 0.355), (44, 26, 10, 3)),  # (0.30 + 0.41) / 2
            (CONTINUE, -0.01 + 1, OVER, (56, 32, 11, 5)),  # 6 layers of 2 tokens
        ],
    )


def test_end_of_text_proposed_wrong_behind_a_wrong_proposal_then_right() -> None:
    """It forces the verification in either case, and is not fed."""
    play(
        recorded_traces([1, 2, 3, EOS], {(1, 2): [WRONG, 8, EOS]}, end="eos", recorded=10),
        [
            (EXIT, -1.25, (DRAFT, 2, 1, 4.111, 1.0, 0.055), (4, 4, 2, 0)),  # (0.00 + 0.11) / 2
            (EXIT, -1.25, (DRAFT, 2, 2, 4.112, 2.0, 0.1105), (6, 6, 3, 0)),  # (0.11 + 0.111) / 2
            # Not fed: 6 layers of y_0 and the two before it, 2 of the next round
            (EXIT, -1.25 + 1, (SELECT, 2, 0, 4.21, 0.4, 0.05), (26, 14, 5, 1)),  # (0.00 + 0.10) / 2
            (EXIT, 1.75, (DRAFT, 2, 1, 4.31, 0.6, 0.155), (28, 16, 6, 1)),  # (0.10 + 0.21) / 2
            (EXIT, 1.75, OVER, (40, 22, 7, 3)),  # right: 6 layers of 2 tokens, no bonus
        ],
    )


def test_end_of_text_proposed_wrong() -> None:
    """In the middle of a draft, then first of a round. Nothing is recorded behind it: it is not fed."""
    play(
        recorded_traces(
            [1, 2, 3, 4, EOS], {(2, 2): [EOS], (3, 2): [EOS], (3, 4): [EOS]}, end="eos", recorded=10
        ),
        [
            (EXIT, 1.75, (DRAFT, 2, 1, 4.21, 0.4, 0.055), (4, 4, 2, 0)),
            # 6 layers of y_0 and y_1, 2 of the next round
            (EXIT, -1.25 + 1, (SELECT, 2, 0, 4.31, 0.6, 0.155), (18, 12, 4, 2)),  # (0.11 + 0.20) / 2
            (CONTINUE, -0.01, (SELECT, 4, 0, 4.32, 0.62, 0.155), (20, 14, 5, 2)),
            # 4 layers of y_2 alone, 2 of the next round
            (EXIT, -1.5 + 1, (SELECT, 2, 0, 4.41, 0.8, 0.25), (26, 20, 7, 3)),  # (0.20 + 0.30) / 2
            (EXIT, 1.75, OVER, (32, 26, 8, 4)),
        ],
    )


def test_text_of_two_tokens() -> None:
    """One proposal, the last one allowed: nothing can be drafted on behind it."""
    traces = recorded_traces([1, 2], {(1, 2): [WRONG]})
    play(traces, [(EXIT, -1.25 + 1, OVER, (8, 8, 2, 1))])
    deeper: Step = (CONTINUE, -0.01, (SELECT, 4, 0, 4.12, 0.22, 0.0), (4, 4, 2, 0))
    play(traces, [deeper, (EXIT, 1.5, OVER, (8, 8, 3, 1))])
    play(traces, [deeper, (CONTINUE, -0.01 + 1, OVER, (8, 8, 3, 1))])


@pytest.mark.parametrize(("end", "recorded"), [("budget", None), ("context", 10)])
def test_budget_with_two_tokens_left_behind_a_wrong_proposal(end: str, recorded: int | None) -> None:
    """The second proposal is the last one allowed: not fed. The context limit counts as a budget."""
    play(
        recorded_traces([1, 2, 3], {(1, 2): [WRONG, 8]}, end=end, recorded=recorded),
        [
            (EXIT, -1.25, (DRAFT, 2, 1, 4.111, 1.0, 0.055), (4, 4, 2, 0)),
            # 6 layers of y_0 and the first proposal, 2 of the next round
            (EXIT, -1.25 + 1, (SELECT, 2, 0, 4.21, 0.4, 0.05), (18, 12, 4, 1)),  # (0.00 + 0.10) / 2
            (EXIT, 1.75, OVER, (24, 18, 5, 2)),  # one is left
        ],
    )


def test_budget_with_three_tokens_left_behind_a_wrong_proposal() -> None:
    traces = recorded_traces([1, 2, 3, 4], {(1, 2): [WRONG, 8, 7]})
    steps: list[Step] = [
        (EXIT, -1.25, (DRAFT, 2, 1, 4.111, 1.0, 0.055), (4, 4, 2, 0)),
        (EXIT, -1.25, (DRAFT, 2, 2, 4.112, 2.0, 0.1105), (6, 6, 3, 0)),  # (0.11 + 0.111) / 2
        # The third is the last one allowed: 6 layers of 3 tokens, 2 of the next round
        (EXIT, -1.25 + 1, (SELECT, 2, 0, 4.21, 0.4, 0.05), (26, 14, 5, 1)),
        (EXIT, 1.75, (DRAFT, 2, 1, 4.31, 0.6, 0.155), (28, 16, 6, 1)),  # (0.10 + 0.21) / 2; two are left
    ]
    play(traces, [*steps, (EXIT, 1.75, OVER, (40, 22, 7, 3))])  # 6 layers of 2 tokens
    play(traces, [*steps, (CONTINUE, -0.01 + 1, OVER, (40, 22, 7, 3))])


def test_budget_ends_behind_a_wrong_second_proposal() -> None:
    play(
        recorded_traces([1, 2, 3, 4], {(2, 2): [WRONG, 8]}),
        [
            (EXIT, 1.75, (DRAFT, 2, 1, 4.21, 0.4, 0.055), (4, 4, 2, 0)),
            (EXIT, -1.25, (DRAFT, 2, 2, 4.211, 1.0, 0.16), (6, 6, 3, 0)),  # (0.11 + 0.21) / 2
            (EXIT, -1.25 + 1, (SELECT, 2, 0, 4.31, 0.6, 0.155), (26, 14, 5, 2)),  # 6 layers of 3 tokens
            (CONTINUE, -0.01, (SELECT, 4, 0, 4.32, 0.62, 0.155), (28, 16, 6, 2)),
            (CONTINUE, -0.01 + 1, OVER, (32, 20, 7, 3)),
        ],
    )


def test_continue_at_the_last_depth_then_a_wrong_draft_from_there() -> None:
    play(
        recorded_traces([1, 2, 3, 4], {(2, 4): [WRONG, 8]}),
        [
            (CONTINUE, -0.01, (SELECT, 4, 0, 4.12, 0.22, 0.0), (4, 4, 2, 0)),
            # 4 layers more, 2 of the next round; y_1 of L
            (CONTINUE, -0.01 + 1, (SELECT, 2, 0, 4.21, 0.4, 0.05), (10, 10, 4, 1)),  # (0.00 + 0.10) / 2
            (CONTINUE, -0.01, (SELECT, 4, 0, 4.22, 0.42, 0.05), (12, 12, 5, 1)),
            (EXIT, -1.5, (DRAFT, 4, 1, 4.221, 1.0, 0.16), (16, 16, 6, 1)),  # (0.10 + 0.22) / 2
            # 4 layers of 2 tokens, 2 of the next round
            (CONTINUE, -0.01 + 1, (SELECT, 2, 0, 4.31, 0.6, 0.15), (26, 22, 8, 2)),  # (0.10 + 0.20) / 2
            (EXIT, 1.75, OVER, (32, 28, 9, 3)),
        ],
    )


def test_what_rejected_tokens_pushed_out_of_the_window_enters_again() -> None:
    """Of three: three rejected tokens had pushed out y_0 and y_1, which count again with the correction."""
    play(
        recorded_traces([1, 2, 3, 4, 5, 6], {(2, 2): [WRONG, 8, 7, 6]}),
        [
            (EXIT, 1.75, (DRAFT, 2, 1, 4.21, 0.4, (0.0 + 0.11) / 2), (4, 4, 2, 0)),
            (EXIT, -1.25, (DRAFT, 2, 2, 4.211, 1.0, (0.0 + 0.11 + 0.21) / 3), (6, 6, 3, 0)),
            (EXIT, -1.25, (DRAFT, 2, 3, 4.212, 2.0, (0.11 + 0.21 + 0.211) / 3), (8, 8, 4, 0)),
            (EXIT, -1.25, (DRAFT, 2, 4, 4.213, 3.0, (0.21 + 0.211 + 0.212) / 3), (10, 10, 5, 0)),
            # 6 layers of 5 tokens, 2 of the next round
            (CONTINUE, -0.01 + 1, (SELECT, 2, 0, 4.31, 0.6, (0.0 + 0.11 + 0.20) / 3), (42, 18, 7, 2)),
            (EXIT, 1.75, (DRAFT, 2, 1, 4.41, 0.8, (0.11 + 0.20 + 0.31) / 3), (44, 20, 8, 2)),
            (EXIT, 1.75, (DRAFT, 2, 2, 4.51, 1.0, (0.20 + 0.31 + 0.41) / 3), (46, 22, 9, 2)),
            (CONTINUE, -0.01 + 1, OVER, (64, 28, 10, 5)),  # 6 layers of 3 tokens; the bonus is the last
        ],
        window=3,
    )
