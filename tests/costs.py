"""A cost model for any test that needs one other than the unit model."""

from __future__ import annotations

from sde_gym.models.cost import CostModel


def uneven_cost(num_layers: int, max_draft: int = 12) -> CostModel:
    """A model in which nothing is free and no two parts cost the same."""
    tokens = max_draft + 1
    return CostModel(
        name="uneven",
        unit="seconds",
        num_layers=num_layers,
        layer=tuple(1.0 + 0.05 * n for n in range(tokens)),
        draft_depths=(1, 3),
        first_draft=(1.1, 3.0),
        later_draft=(0.5, 1.3),
        exit_head=0.3,
        final_head=tuple(0.8 + 0.01 * n for n in range(tokens)),
        fixed_proposal=0.07,
        fixed_decision=0.11,
        fixed_blind_decision=0.02,
        fixed_round=0.23,
        plain_token=num_layers + 1.0,
        provenance={"machine": "none", "threads": 1},
    )
