"""What decoding costs: the time of its parts on one machine, or in units of a layer.

A draft pass that follows another finds its layers' weights still in the cache and takes less time
than one that streams them; many tokens in one pass cost more than one, but not as many times more.
So the parts are kept apart, as the table below says. Nothing is measured here:
`sde_gym.evaluation.calibration` does that and `sde-gym calibrate` calls it. The default, `unit_cost`,
counts layers.

| part | what it covers |
|---|---|
| `layer` | one layer over n tokens, its weights streamed: n = 1 a plain step, more a verification |
| `first_draft` | the layers of the first draft pass after a verification, from none up to a depth |
| `later_draft` | the same for the draft passes that follow, their layers still in the cache |
| `exit_head` | the exit head for one token |
| `final_head` | the full head for n tokens |
| `fixed_proposal` | choosing a proposal and giving it a slot |
| `fixed_decision` | one decision of a controller that reads a head: features and policy |
| `fixed_blind_decision` | one decision of a controller that reads no head |
| `fixed_round` | slots, masks and Python of one verification |
| `plain_token` | one token of plain decoding, everything included: the yardstick of a speed-up |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sde_gym.errors import InputError
from sde_gym.files import read_json, write_json
from sde_gym.settings import DEFAULT_MAX_DRAFT

if TYPE_CHECKING:
    from sde_gym.models.layered import LayeredModel

COST_VERSION = 1
"""Version of the file format."""

UNIT = "unit"
"""Name of the default model: a layer costs 1 however many tokens pass it, a head what its size is."""

UNITS = ("layers", "seconds")


@dataclass(frozen=True)
class CostModel:
    """Costs of the parts of decoding; the module's table says what each covers.

    Attributes:
        name: of the language model, or "unit".
        unit: "seconds" or "layers", what all costs are in.
        num_layers: L.
        layer: for n = 1..N tokens.
        draft_depths: depths at which draft passes were measured, rising.
        first_draft: at each of these depths; never falling.
        later_draft: the same.
        exit_head: for one token.
        final_head: for n = 1..N tokens.
        fixed_proposal: per proposal.
        fixed_decision: per decision, a head being read; at least `fixed_blind_decision`.
        fixed_blind_decision: per decision without.
        fixed_round: per round.
        plain_token: per token of plain decoding.
        provenance: how the numbers came about: model, weights, machine, threads, spread. Plain JSON.

    Raises:
        InputError: a cost that is negative or not finite, or tables that do not fit each other.
    """

    name: str
    unit: str
    num_layers: int
    layer: tuple[float, ...]
    draft_depths: tuple[int, ...]
    first_draft: tuple[float, ...]
    later_draft: tuple[float, ...]
    exit_head: float
    final_head: tuple[float, ...]
    fixed_proposal: float
    fixed_decision: float
    fixed_blind_decision: float
    fixed_round: float
    plain_token: float
    provenance: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for name in ("layer", "first_draft", "later_draft", "final_head"):
            for value in getattr(self, name):
                _check_cost(name, value)
        for entry in fields(self):
            if entry.name.startswith("fixed_") or entry.name in ("exit_head", "plain_token"):
                _check_cost(entry.name, getattr(self, entry.name))
        if self.unit not in UNITS:
            raise InputError(f"unit: {self.unit!r} is not one of {', '.join(UNITS)}")
        if self.num_layers < 1 or not self.layer or self.plain_token == 0:
            raise InputError(
                f"a cost model needs at least one layer, costs for at least one token and a plain_token "
                f"above 0; got {self.num_layers}, {len(self.layer)} and {self.plain_token}"
            )
        if len(self.final_head) != len(self.layer):
            raise InputError(
                f"final_head: {len(self.final_head)} entries, but layer has {len(self.layer)}; "
                "both are for 1, 2, ... tokens"
            )
        depths = self.draft_depths
        rising = all(low < high for low, high in pairwise((0, *depths)))
        if not depths or not rising or depths[-1] > self.num_layers:
            raise InputError(f"draft_depths: {list(depths)} is not rising within 1..{self.num_layers}")
        for name in ("first_draft", "later_draft"):
            costs = getattr(self, name)
            if len(costs) != len(depths) or any(a > b for a, b in pairwise(costs)):
                raise InputError(
                    f"{name}: {list(costs)} must be one cost for each of the {len(depths)} draft_depths, "
                    "never falling"
                )
        if self.fixed_decision < self.fixed_blind_decision:
            raise InputError(
                f"fixed_decision: {self.fixed_decision} is below fixed_blind_decision, "
                f"{self.fixed_blind_decision}; a decision that reads a head does more"
            )

    @property
    def max_draft(self) -> int:
        """Longest draft whose verification has a cost: N - 1 proposals."""
        return len(self.layer) - 1

    def draft_pass(self, depth: ArrayLike, *, first: bool) -> NDArray[np.float64]:
        """Cost of one token's layers from none to `depth`, int (n,), as float64 (n,).

        Linear between the depths that were measured, and from there to L at the deepest one's rate.
        """
        deepest = self.draft_depths[-1]
        costs = self.first_draft if first else self.later_draft
        at, known = [0, *self.draft_depths], [0.0, *costs]
        if deepest < self.num_layers:
            at.append(self.num_layers)
            known.append(costs[-1] * self.num_layers / deepest)
        return np.interp(np.asarray(depth, dtype=np.float64), at, known)

    def speedup(self, tokens: float, cost: float) -> float:
        """Simulated speed-up: plain decoding's cost of `tokens` over `cost`; 1.0 before either.

        Args:
            tokens: emitted after prefill.
            cost: of what was done for them, in this model's unit.
        """
        return float(self.plain_token * tokens / cost) if cost > 0 else 1.0

    def speedups(self, tokens: NDArray[np.int64], cost: NDArray[np.float64]) -> NDArray[np.float64]:
        """The same for n texts, (n,) each, as float64 (n,)."""
        return np.divide(self.plain_token * tokens, cost, out=np.ones(len(cost)), where=cost > 0)

    def check(self, num_layers: int, max_draft: int) -> None:
        """Raise InputError unless the model fits L layers and drafts of `max_draft` tokens."""
        if num_layers != self.num_layers:
            raise InputError(
                f"cost: {self.name!r} is for a model of {self.num_layers} layers, not {num_layers}; "
                "calibrate the model that the traces are from"
            )
        if max_draft > self.max_draft:
            raise InputError(
                f"cost: {self.name!r} has costs for drafts of up to {self.max_draft} tokens, but max_draft "
                f"is {max_draft}; calibrate with a larger max_draft"
            )

    def save(self, path: Path | str) -> None:
        """Write it as JSON, atomically."""
        write_json(Path(path), {"sde_gym_cost_model": COST_VERSION, **asdict(self)})


def load_cost(path: Path | str) -> CostModel:
    """Read what `CostModel.save` wrote.

    Raises:
        InputError: no such file, another version, or an entry that is missing, unknown or at fault;
            the message names the file.
    """
    where = Path(path)
    found = read_json(where)
    if not isinstance(found, dict) or "sde_gym_cost_model" not in found:
        raise InputError(f"{where}: not a cost model; `sde-gym calibrate` writes one")
    version = found.pop("sde_gym_cost_model")
    if version != COST_VERSION:
        raise InputError(
            f"{where}: version {version!r} of the format, but this package reads {COST_VERSION}; "
            "calibrate again"
        )
    names = {entry.name for entry in fields(CostModel)}
    if set(found) != names:
        wrong = sorted(set(found) ^ names)
        raise InputError(f"{where}: {', '.join(wrong)} missing or unknown; calibrate again")
    try:
        for entry in fields(CostModel):
            kinds: tuple[type, ...] = {
                "str": (str,), "int": (int,), "float": (int, float), "Mapping[str, Any]": (dict,)
            }.get(str(entry.type), (list,))  # fmt: skip
            value = found[entry.name]
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise InputError(f"{entry.name}: {value!r} is not a {entry.type}")
        tuples = {name: tuple(value) for name, value in found.items() if isinstance(value, list)}
        return CostModel(**{**found, **tuples})
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def unit_cost(
    num_layers: int,
    *,
    exit_head: float = 0.0,
    final_head: float = 0.0,
    max_draft: int = DEFAULT_MAX_DRAFT,
) -> CostModel:
    """A layer costs 1 however many tokens pass it, a head what its size is, nothing else anything.

    Args:
        num_layers: L.
        exit_head: parameters of the exit head over those of a layer; 0 where that is not known.
        final_head: the same for the full head.
        max_draft: longest draft.
    """
    tokens = max_draft + 1
    return CostModel(
        name=UNIT,
        unit="layers",
        num_layers=num_layers,
        layer=(1.0,) * tokens,
        draft_depths=(num_layers,),
        first_draft=(float(num_layers),),
        later_draft=(float(num_layers),),
        exit_head=float(exit_head),
        final_head=(float(final_head),) * tokens,
        fixed_proposal=0.0,
        fixed_decision=0.0,
        fixed_blind_decision=0.0,
        fixed_round=0.0,
        plain_token=num_layers + float(final_head),
    )


def unit_cost_of(model: LayeredModel, max_draft: int = DEFAULT_MAX_DRAFT) -> CostModel:
    """The unit model with the heads of a language model in it, by their number of parameters."""
    exit_head, final_head = head_sizes(model)
    return unit_cost(model.num_layers, exit_head=exit_head, final_head=final_head, max_draft=max_draft)


def head_sizes(model: LayeredModel, compact: bool = True) -> tuple[float, float]:
    """Parameters of an exit head and of the full head, each over those of a layer.

    Args:
        model: whose heads. If depths have adapters, the largest is counted as part of every exit head.
        compact: exit heads of its compact vocabulary, if it has one, not full ones.
    """
    layer = _parameters(model.hf.model.layers[0])
    vocabulary = model.compact_vocabulary if compact else None
    columns = model.vocab_size if vocabulary is None else len(vocabulary)
    adapter = max((_parameters(each) for each in model.heads.adapters.values()), default=0)
    return (columns * model.hidden_size + adapter) / layer, model.vocab_size * model.hidden_size / layer


def _parameters(part: Any) -> int:
    """Parameters of a module; none of a plain function."""
    return sum(each.numel() for each in part.parameters()) if hasattr(part, "parameters") else 0


def resolve_cost(
    cost: str | Path | CostModel, num_layers: int, max_draft: int, heads: tuple[float, float] = (0.0, 0.0)
) -> CostModel:
    """The cost model behind an argument.

    Args:
        cost: "unit", the path of a calibrated JSON file, or a model.
        num_layers: L.
        max_draft: longest draft that it must know.
        heads: of "unit": what an exit head and the full head cost in layers, see `head_sizes`.

    Raises:
        InputError: none of these, or one that does not fit.
    """
    if isinstance(cost, str) and cost == UNIT:
        return unit_cost(num_layers, exit_head=heads[0], final_head=heads[1], max_draft=max_draft)
    if isinstance(cost, CostModel):
        found = cost
    elif isinstance(cost, (str, Path)) and str(cost):
        found = load_cost(cost)
    else:
        raise InputError(f"cost: {cost!r} is neither {UNIT!r} nor the path of a calibrated cost model")
    found.check(num_layers, max_draft)
    return found


def _check_cost(name: str, value: Any) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not math.isfinite(value)
        or value < 0
    ):
        raise InputError(f"{name}: {value!r} is not a finite cost of at least 0")
