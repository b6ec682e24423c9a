"""What each step costs under a cost model, by table look-up.

A step is charged for what it causes: the round's first step for the walk to d_1, a step that reads a
head or proposes from it for that head (once), a step that feeds a proposal for its draft pass, and
the step that ends a round for the verification.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sde_gym.models.cost import CostModel
from sde_gym.policies.observation import Action, Phase

if TYPE_CHECKING:
    from sde_gym.envs.rewards import StepOutcome


class StepCosts:
    """Costs of all steps that there are, for m candidate depths, in the cost model's unit.

    Args:
        model: what the parts cost; it must fit (`CostModel.check`).
        depths: the m candidate depths.
        max_draft: longest draft.
        reads: bool (2, m), by `Phase` and depth index, whether a head is read for the decision; or
            one for all.

    Attributes:
        model: as given.
        reads: bool (2, m).
        action: float64 (2, 2, m), by `Phase`, `Action` and depth index: of the decision, the head
            and the walk of SELECT, a plain step of the last layer included.
        feed: float64 (m,), of running a proposal to l*, by depth index.
        verify: float64 (m, max_draft + 2), of a verification by the depth index of l* and the
            tokens that go on to L; 0 for none.
    """

    def __init__(
        self, model: CostModel, depths: Sequence[int], max_draft: int, reads: ArrayLike = True
    ) -> None:
        model.check(model.num_layers, max_draft)
        depth = np.array(depths, dtype=np.int64)
        self.model = model
        self.reads = np.broadcast_to(np.asarray(reads, dtype=bool), (2, len(depth)))
        first = model.draft_pass(depth, first=True)
        layer, final_head = np.array(model.layer), np.array(model.final_head)

        head = np.where(self.reads, model.exit_head, 0.0)
        decision = np.where(self.reads, model.fixed_decision, model.fixed_blind_decision)
        self.action = np.repeat((head + decision)[:, None, :], 2, axis=1)
        # A head that nobody read is needed after all to propose from it.
        self.action[:, Action.EXIT] += model.fixed_proposal + np.where(self.reads, 0.0, model.exit_head)
        walk = self.action[Phase.SELECT]
        walk[:, 0] += first[0]
        walk[Action.CONTINUE, :-1] += np.diff(first)
        walk[Action.CONTINUE, -1] += (
            (model.num_layers - depth[-1]) * layer[0] + final_head[0] + model.fixed_round
        )
        self.feed = model.draft_pass(depth, first=False)
        self.verify = np.zeros((len(depth), max_draft + 2))
        tokens = max_draft + 1
        self.verify[:, 1:] = (
            (model.num_layers - depth)[:, None] * layer[:tokens] + final_head[:tokens] + model.fixed_round
        )

    def __call__(self, outcome: StepOutcome) -> NDArray[np.float64]:
        """Cost of a step in each of n lanes, float64 (n,)."""
        index = outcome.depth_index
        return (
            self.action[outcome.phase, outcome.action, index]
            + self.feed[index] * outcome.fed
            + self.verify[index, outcome.verified]
        )
