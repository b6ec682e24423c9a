"""Search the sublayers that Draft & Verify's own drafter should skip.

As Zhang et al. (2023) do it: Bayesian optimisation over one binary variable a sublayer, 2 L of them; what is
maximised is the speed-up. They time generation. Here it is computed (`skip_score`), so that a search can
be repeated.

Every evaluation is written down, so that a search that was stopped goes on. What is tried next depends on
the seed, on the number of the evaluation and on what was found before, and on nothing else: stopped or
not, the same seed gives the same file.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sde_gym.errors import InputError
from sde_gym.evaluation.skip_score import SkipEvaluator, SkipScore
from sde_gym.files import write_text
from sde_gym.models.cost import UNIT, CostModel
from sde_gym.models.layered import LayeredModel
from sde_gym.models.skipping import SkipSet
from sde_gym.settings import DEFAULT_MAX_DRAFT, DEFAULT_NEW_TOKENS, is_number

if TYPE_CHECKING:
    import optuna

#: Evaluations before anything is learned from them.
FIRST = 32

#: Most of the sublayers that a random set skips.
_MOST_SKIPPED = 0.6


@dataclass(frozen=True)
class Trial:
    """One evaluation.

    Attributes:
        skip: the skip set.
        score: what it promises.
    """

    skip: SkipSet
    score: SkipScore

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"attention": list(self.skip.attention), "mlp": list(self.skip.mlp), **asdict(self.score)}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Trial:
        """What `to_json` gave.

        Raises:
            TypeError, KeyError, InputError: something else.
        """
        values = dict(row)
        skip = SkipSet(tuple(values.pop("attention")), tuple(values.pop("mlp")))
        score = SkipScore(**values)
        for name, value in asdict(score).items():
            if not is_number(value) or not math.isfinite(value):
                raise TypeError(f"{name} is {value!r}")
        return cls(skip, score)


#: Progress callback: evaluations done, in all, best speed-up so far.
Progress = Callable[[int, int, float], None]


def trials_path(out: Path) -> Path:
    """Where the evaluations behind a skip set's file are written down."""
    return out.with_name(out.name + ".trials.jsonl")


def search_skips(
    model: LayeredModel,
    prompts: Sequence[Sequence[int]],
    evaluations: int,
    out: Path | str,
    *,
    seed: int = 0,
    max_new_tokens: int = DEFAULT_NEW_TOKENS,
    max_draft: int = DEFAULT_MAX_DRAFT,
    cost: str | Path | CostModel = UNIT,
    progress: Progress | None = None,
) -> tuple[Trial, list[Trial]]:
    """Find a skip set and write it.

    The first `FIRST` evaluations skip nothing, then all layers behind some depth (which proposes what
    an early exit there does), evenly spread over half of them, then random sublayers, from few to many. From
    there on optuna's tree-structured Parzen estimator proposes.

    Args:
        model: any `LayeredModel` whose stack can skip sublayers.
        prompts: token ids, none of which results are reported on.
        evaluations: in all, those of an earlier run included (Zhang et al.: 1000). Where more are there
            already, nothing is evaluated and all of them count.
        out: JSON file of the best skip set (`load_skip_set`); the evaluations go into `trials_path(out)`
            one by one, and are taken up from there.
        seed: of the search.
        max_new_tokens, max_draft, cost: as for `SkipEvaluator`.
        progress: called after every evaluation.

    Returns:
        The best evaluation (the first of several that are as good), and all of them in order.

    Raises:
        InputError: a number out of range, a file of another search, an `out` whose evaluations are gone, or
            optuna missing.
    """
    _import_optuna()
    if evaluations < 1 or seed < 0:
        raise InputError(f"evaluations must be at least 1 and seed at least 0, not {evaluations} and {seed}")
    target = Path(out)
    log = trials_path(target)
    evaluator = SkipEvaluator(model, prompts, max_new_tokens=max_new_tokens, max_draft=max_draft, cost=cost)
    header = {
        "sde_gym_skip_search": 1,
        "model": model.name,
        "weights_hash": model.weights_hash(),
        "num_layers": model.num_layers,
        "texts": _digest(prompts, evaluator.texts),
        "max_draft": max_draft,
        "cost": _digest([repr(evaluator.cost)]),
        "seed": seed,
    }
    trials = _read_trials(log, header)
    if target.exists() and not trials:
        raise InputError(
            f"{target}: is there, but not the evaluations behind it ({log.name}), so a worse set might "
            "replace a better one; choose another --out, or remove it"
        )
    search = _Search(model.num_layers, seed, trials)
    known = {trial.skip: trial.score for trial in trials}
    for number in range(len(trials), evaluations):
        skip = search.propose(number)
        if skip not in known:
            known[skip] = evaluator(skip)
        trials.append(Trial(skip, known[skip]))
        search.learn(trials[-1])
        rows = [header, *(trial.to_json() for trial in trials)]
        write_text(log, "".join(json.dumps(row) + "\n" for row in rows))
        if progress is not None:
            progress(number + 1, evaluations, max(trial.score.speedup for trial in trials))
    best = max(trials, key=lambda trial: trial.score.speedup)
    facts = {**header, "evaluations": len(trials), "prompts": len(prompts), **asdict(best.score)}
    best.skip.save(target, model.num_layers, facts)
    return best, trials


class _Search:
    """Proposes skip sets: a pure function of the seed, the evaluation's number and all evaluations before."""

    def __init__(self, num_layers: int, seed: int, trials: Sequence[Trial]) -> None:
        self._optuna = _import_optuna()
        self.num_layers = num_layers
        self.seed = seed
        self._space: dict[str, Any] = {
            f"{name} {layer}": self._optuna.distributions.CategoricalDistribution((False, True))
            for name in ("attention", "mlp")
            for layer in range(num_layers)
        }
        self._study: optuna.Study = self._optuna.create_study(direction="maximize")
        self._asked: optuna.Trial | None = None  # proposed by the study, and not evaluated yet
        for trial in trials:
            self.learn(trial)

    def propose(self, number: int) -> SkipSet:
        """The skip set of evaluation `number`, from 0; those before have been learned."""
        rng = np.random.default_rng((self.seed, number))
        if number == 0:
            return SkipSet()
        if number < FIRST // 2:
            kept = round(self.num_layers * number / (FIRST // 2))
            tail = tuple(range(kept, self.num_layers))
            return SkipSet(tail, tail)
        if number < FIRST:
            skipped = rng.random(2 * self.num_layers) < rng.uniform(0, _MOST_SKIPPED)
            return self._set(dict(zip(self._space, skipped.tolist(), strict=True)))
        # A sampler of its own for each evaluation: one that had lived on would know how often it was asked.
        self._study.sampler = self._optuna.samplers.TPESampler(
            n_startup_trials=0, seed=int(rng.integers(2**31))
        )
        self._asked = self._study.ask(self._space)
        return self._set(self._asked.params)

    def learn(self, trial: Trial) -> None:
        """Enter the evaluation of what was proposed, or one of an earlier run."""
        value = trial.score.speedup
        if self._asked is not None:
            self._study.tell(self._asked, value)
            self._asked = None
            return
        layers = range(self.num_layers)
        params = {f"attention {layer}": layer in trial.skip.attention for layer in layers}
        params |= {f"mlp {layer}": layer in trial.skip.mlp for layer in layers}
        entry = self._optuna.trial.create_trial(params=params, distributions=self._space, value=value)
        self._study.add_trial(entry)

    def _set(self, params: dict[str, bool]) -> SkipSet:
        layers = range(self.num_layers)
        return SkipSet(
            tuple(layer for layer in layers if params[f"attention {layer}"]),
            tuple(layer for layer in layers if params[f"mlp {layer}"]),
        )


def _import_optuna() -> Any:
    """The library, quiet; InputError if it is missing."""
    try:
        import optuna
    except ImportError:
        raise InputError(
            "searching skip sets needs optuna; install sde_gym with its extra: pip install 'sde_gym[search]'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _digest(*parts: Any) -> str:
    """16 hex digits that identify plain values."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _read_trials(path: Path, header: dict[str, Any]) -> list[Trial]:
    """The evaluations of an earlier run of this search, none if there was none.

    Raises:
        InputError: the file is another search's or damaged.
    """
    if not path.exists():
        return []
    try:
        found, *rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        different = sorted(name for name in header if found.get(name) != header[name])
        trials = [Trial.from_json(row) for row in rows]
        for trial in trials:
            if not different:
                trial.skip.check(header["num_layers"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(
            f"{path}: not the evaluations of a search ({error}); remove it and the skip set beside it"
        ) from None
    if different:
        raise InputError(
            f"{path}: holds the evaluations of another search (other {', '.join(different)}); choose another "
            "--out, or remove it and the skip set beside it"
        )
    return trials
