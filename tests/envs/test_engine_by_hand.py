"""Cases worked on paper, without overrun: every number below was written down before the engine ran.

All use L = 8, depths 2 and 4, window 2 and texts from `written_traces`: the surprise at row t is
(10 t + 1) / 100 at depth 2, (10 t + 2) / 100 at depth 4 and 10 t / 100 at the last layer. A right
proposal earns 1.75 at depth 2 and 1.5 at depth 4, a wrong one -1.25 and -1.5; every token of the
last layer earns 1. A round ends at its first wrong proposal; `test_overrun_by_hand` drafts on behind it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sde_gym.envs.engine import ReplayEngine
from tests.builders import EOS, written_traces
from tests.envs.by_hand import CONTINUE, DRAFT, EXIT, OVER, SELECT, WRONG, State, Step, check_table


def play(
    tokens: list[int],
    wrong: dict[int, int],
    steps: list[Step],
    *,
    end: str = "budget",
    start: State = (SELECT, 2, 0, 0.0),
    recorded: int | None = None,
    **settings: Any,
) -> None:
    """Check a table; `wrong` gives the positions whose proposals differ from the text, and theirs."""
    proposals = [[wrong.get(t, token)] * 2 for t, token in enumerate(tokens)]
    traces = written_traces(tokens, proposals, end=end, depths=(2, 4), num_layers=8, max_new_tokens=recorded)
    check_table(traces, start, steps, ("trace",), **{"window": 2, **settings})


def test_full_draft_of_max_draft() -> None:
    """The third of three is run to l*, not scored; all are right, so the last layer adds a bonus."""
    play(
        [1, 2, 3, 4, 5, 6],
        {},
        [
            (EXIT, 1.75, (DRAFT, 2, 1, 0.055), (4, 4, 2, 0)),  # trace: (0.00 + 0.11) / 2
            (EXIT, 1.75, (DRAFT, 2, 2, 0.16), (6, 6, 3, 0)),  # (0.11 + 0.21) / 2
            # +2 for the third proposal, 6 layers for 4 tokens, +2 for the next round; final head, next head
            (EXIT, 2.75, (SELECT, 2, 0, 0.355), (34, 16, 5, 4)),  # (0.31 + 0.40) / 2
            (EXIT, 1.75, OVER, (40, 22, 6, 5)),  # the last token allowed: not fed, no bonus
        ],
        max_draft=3,
    )


def test_mismatch_at_the_first_proposal() -> None:
    play(
        [1, 2, 3],
        {1: WRONG},
        [
            # reset 2, the proposal 2, 6 layers for 2 tokens, the next round 2
            (EXIT, -1.25 + 1, (SELECT, 2, 0, 0.05), (18, 12, 3, 1)),  # (0.00 + 0.10) / 2: the correction's
            (CONTINUE, -0.01, (SELECT, 4, 0, 0.05), (20, 14, 4, 1)),
            (EXIT, 1.5, OVER, (24, 18, 5, 2)),
        ],
    )


def test_mismatch_at_a_middle_proposal() -> None:
    """The draft before it keeps its depth's surprise in the window, the correction counts at L."""
    play(
        [1, 2, 3, 4, 5],
        {2: WRONG},
        [
            (EXIT, 1.75, (DRAFT, 2, 1, 0.055), (4, 4, 2, 0)),
            # the proposal 2, 6 layers for 3 tokens, the next round 2; (0.11 + 0.20) / 2
            (EXIT, -1.25 + 1, (SELECT, 2, 0, 0.155), (26, 14, 4, 2)),
            (EXIT, 1.75, (DRAFT, 2, 1, 0.255), (28, 16, 5, 2)),  # (0.20 + 0.31) / 2
            (CONTINUE, 0.99, OVER, (40, 22, 6, 4)),
        ],
    )


def test_window_after_a_rejection_reaches_back() -> None:
    """With a window of three, what the rejected token had pushed out counts again: y_0 at L."""
    play(
        [1, 2, 3, 4],
        {2: WRONG},
        [
            (EXIT, 1.75, (DRAFT, 2, 1, 0.055), (4, 4, 2, 0)),
            (EXIT, -0.25, (SELECT, 2, 0, (0.0 + 0.11 + 0.20) / 3), (26, 14, 4, 2)),
            (EXIT, 1.75, OVER, (32, 20, 5, 3)),
        ],
        window=3,
    )


def test_end_of_text_proposed_right() -> None:
    """Neither fed nor scored, and no bonus."""
    play(
        [1, 2, EOS],
        {},
        [
            (EXIT, 1.75, (DRAFT, 2, 1, 0.055), (4, 4, 2, 0)),
            (EXIT, 1.75, OVER, (16, 10, 3, 2)),  # 6 layers for 2 tokens
        ],
        end="eos",
        recorded=10,
    )


def test_end_of_text_proposed_wrong() -> None:
    """Not fed either: only the round's first token goes to L, and corrects it."""
    play(
        [1, 2, EOS],
        {1: EOS},
        [
            (EXIT, -1.25 + 1, (SELECT, 2, 0, 0.05), (10, 10, 3, 1)),  # 2, 6 layers for 1 token, 2
            (CONTINUE, -0.01, (SELECT, 4, 0, 0.05), (12, 12, 4, 1)),
            (CONTINUE, 0.99, OVER, (16, 16, 5, 2)),
        ],
        end="eos",
        recorded=10,
    )


def test_end_of_text_as_a_bonus() -> None:
    play(
        [1, 2, EOS],
        {},
        [
            (EXIT, 1.75, (DRAFT, 2, 1, 0.055), (4, 4, 2, 0)),
            (CONTINUE, 0.99, OVER, (16, 10, 3, 2)),
        ],
        end="eos",
        recorded=10,
    )


def test_budget_with_one_token_left() -> None:
    """A text of two tokens: the one proposal is not fed."""
    play([1, 2], {}, [(EXIT, 1.75, OVER, (8, 8, 2, 1))])
    play([1, 2], {1: WRONG}, [(EXIT, -0.25, OVER, (8, 8, 2, 1))])
    play(
        [1, 2],
        {},
        [(CONTINUE, -0.01, (SELECT, 4, 0, 0.0), (4, 4, 2, 0)), (CONTINUE, 0.99, OVER, (8, 8, 3, 1))],
    )


def test_budget_with_two_tokens_left() -> None:
    first: Step = (EXIT, 1.75, (DRAFT, 2, 1, 0.055), (4, 4, 2, 0))
    play([1, 2, 3], {}, [first, (EXIT, 1.75, OVER, (16, 10, 3, 2))])  # the second is not fed, no bonus
    play([1, 2, 3], {2: WRONG}, [first, (EXIT, -0.25, OVER, (16, 10, 3, 2))])
    play([1, 2, 3], {}, [first, (CONTINUE, 0.99, OVER, (16, 10, 3, 2))])


def test_budget_with_three_tokens_left() -> None:
    drafts: list[Step] = [
        (EXIT, 1.75, (DRAFT, 2, 1, 0.055), (4, 4, 2, 0)),
        (EXIT, 1.75, (DRAFT, 2, 2, 0.16), (6, 6, 3, 0)),
    ]
    play([1, 2, 3, 4], {}, [*drafts, (EXIT, 1.75, OVER, (24, 12, 4, 3))])  # 6 layers for 3 tokens
    play([1, 2, 3, 4], {}, [*drafts, (CONTINUE, 0.99, OVER, (24, 12, 4, 3))])


def test_budget_below_the_recording_cuts_the_text() -> None:
    play(
        [1, 2, 3, 4, 5, EOS],
        {},
        [(EXIT, 1.75, (DRAFT, 2, 1, 0.055), (4, 4, 2, 0)), (EXIT, 1.75, OVER, (16, 10, 3, 2))],
        end="eos",
        recorded=10,
        max_new_tokens=3,
    )


def test_budget_equal_to_max_draft_leaves_no_bonus() -> None:
    """The second of two is the last allowed: not fed. With one token more it is, and a bonus follows."""
    first: Step = (EXIT, 1.75, (DRAFT, 2, 1, 0.055), (4, 4, 2, 0))
    play([1, 2, 3], {}, [first, (EXIT, 1.75, OVER, (16, 10, 3, 2))], max_draft=2)
    play([1, 2, 3, 4], {}, [first, (EXIT, 2.75, OVER, (24, 12, 3, 3))], max_draft=2)


def test_continue_at_the_last_depth() -> None:
    """Emits the last layer's token; nothing was drafted."""
    play(
        [1, 2, 3],
        {},
        [
            (CONTINUE, -0.01, (SELECT, 4, 0, 0.0), (4, 4, 2, 0)),
            (CONTINUE, 0.99, (SELECT, 2, 0, 0.05), (10, 10, 4, 1)),  # 4 layers more, then 2 of the next round
            (EXIT, 1.75, OVER, (16, 16, 5, 2)),
        ],
    )


def test_final_token_reward_zero_is_the_literal_variant() -> None:
    play(
        [1, 2, 3],
        {},
        [
            (CONTINUE, -0.01, (SELECT, 4, 0, 0.0), (4, 4, 2, 0)),
            (CONTINUE, -0.01, (SELECT, 2, 0, 0.05), (10, 10, 4, 1)),
            (EXIT, 1.75, OVER, (16, 16, 5, 2)),
        ],
        final_token_reward=0.0,
    )


def test_credit_round_pays_at_verification() -> None:
    play(
        [1, 2, 3, 4, 5],
        {3: WRONG},
        [
            (CONTINUE, -0.01, (SELECT, 4, 0, 0.0), (4, 4, 2, 0)),
            (EXIT, 0.0, (DRAFT, 4, 1, 0.06), (8, 8, 3, 0)),  # (0.00 + 0.12) / 2
            (EXIT, 0.0, (DRAFT, 4, 2, 0.17), (12, 12, 4, 0)),
            # 1.5 + 1.5 - 1.5 + 1; the proposal 4, 4 layers for 4 tokens, the next round 2
            (EXIT, 2.5, (SELECT, 2, 0, 0.26), (34, 22, 6, 3)),  # (0.22 + 0.30) / 2
            (EXIT, 1.75, OVER, (40, 28, 7, 4)),
        ],
        credit="round",
    )


def test_acceptance_and_chain() -> None:
    traces = written_traces(
        [1, 2, 3, 4, 5, 6],
        [[token if t != 2 else WRONG] * 2 for t, token in enumerate([1, 2, 3, 4, 5, 6])],
        end="budget",
        depths=(2, 4),
        num_layers=8,
    )
    engine = ReplayEngine(traces, observation=("acceptance", "chain", "stable", "confidence"))
    rows = [engine.reset_lanes([0], [0])[0]]
    for action in (EXIT, EXIT, CONTINUE, EXIT, CONTINUE):
        rows.append(engine.step([action])[0][0])
    # confidence: the surprise plus the mean of 0, 2, 4, 6, 8
    expected = [
        (1.0, 0.0, 0.0, 4.11),
        (1.0, 0.11, 0.0, 4.21),  # one right proposal
        (0.5, 0.0, 0.0, 4.31),  # then a wrong one: one of two
        (0.5, 0.0, 1.0, 4.32),  # deeper, with the same proposal
        (0.5, 0.32, 0.0, 4.42),  # DRAFT at depth 4: stable is 0
        (2 / 3, 0.0, 0.0, 4.51),
    ]
    np.testing.assert_allclose(rows, expected, atol=1e-6)
