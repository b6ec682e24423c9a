"""Train an exit probe along the text that its language model writes.

Each prompt is continued greedily, as the recorder does it, and the text is run through the model once
more: at every depth and position, what the exit head sees and says, and whether its best token is the
text's next one. One logistic regression a depth is fitted to that, by Newton's method, with a ridge on
the weights of the state.

1. Only the true text is used, not what a depth drafts behind its own mistakes: the probe says how
   probable a match is where everything before is right, so that a draft's chance is the product over its
   proposals. Off the text it is extrapolated.
2. The ridge is chosen by cross-validation over prompts, and every figure reported is of predictions for
   prompts that the fit did not see. The probe itself is fitted to all of them.
3. A policy that learns from texts on which its probe was trained would learn to trust it too much: leave
   out the prompts of its trace set with `skip`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sde_gym.errors import InputError
from sde_gym.models.generation import generate_greedy
from sde_gym.models.heads import summarise
from sde_gym.models.layered import LayeredModel
from sde_gym.models.probe import HEAD_INPUTS, ExitProbe, head_inputs, save_probe
from sde_gym.models.reliability import figures, log_loss
from sde_gym.prompts import Prompt
from sde_gym.settings import DEFAULT_DEPTHS, DEFAULT_NEW_TOKENS, at_least_one, check_settings, setting

#: Progress callback: prompts done, prompts in all.
Progress = Callable[[int, int], None]

_HEAD_RIDGE = 1.0  # of the few inputs that the head gives, standardised: next to none
_BIAS_RIDGE = 1e-3  # keeps it finite where all proposals match, or none does


@dataclass(frozen=True)
class ProbeSettings:
    """How an exit probe is trained."""

    depths: tuple[int, ...] | None = setting(None, f"Exit depths; else those of {DEFAULT_DEPTHS} it has.")
    skip: int = setting(0, "Leave out the first N prompts: those of the trace set that policies learn from.")
    limit: int | None = setting(None, "Use at most N prompts.")
    max_new_tokens: int = setting(DEFAULT_NEW_TOKENS, "Most tokens generated per prompt.")
    ridges: tuple[float, ...] = setting(
        (1e2, 1e3, 3e3, 1e4, 3e4, 1e5, 1e6), "Ridges tried on the state's weights, rising."
    )
    folds: int = setting(5, "Parts that the prompts are split into, to choose the ridge and to measure.")
    seed: int = setting(0, "Of the split.")

    def __post_init__(self) -> None:
        check_settings(
            self, ["max_new_tokens", "folds"], lambda n: n >= 2, "{name}: {value} is below 2; give 2 or more"
        )
        check_settings(self, ["skip"], lambda n: n >= 0, "{name}: {value} is below 0")
        if self.limit is not None:
            check_settings(self, ["limit"], at_least_one, "{name}: {value} is below 1")
        rising = list(self.ridges) == sorted(set(self.ridges))
        if not self.ridges or not rising or not 0 < self.ridges[0] <= self.ridges[-1] < float("inf"):
            raise InputError(f"ridges: {list(self.ridges)} must rise, all above 0 and finite")


@dataclass(frozen=True, eq=False)
class ProbeData:
    """What n predictions of a model's own text looked like, at m depths.

    Attributes:
        text: int64 (n,), number of the prompt.
        states: float32 (n, m, width), what the exit head saw.
        inputs: float32 (n, m, 4), `HEAD_INPUTS`.
        match: bool (n, m), whether the head's best token is the text's.
    """

    text: NDArray[np.int64]
    states: NDArray[np.float32]
    inputs: NDArray[np.float32]
    match: NDArray[np.bool_]


def train_probe(
    model: LayeredModel,
    prompts: Sequence[Prompt],
    out: Path | str,
    settings: ProbeSettings,
    progress: Progress | None = None,
) -> ExitProbe:
    """Train a probe and write it.

    Args:
        model: its own probe, if it has one, does not matter.
        prompts: to continue, `settings.skip` and `settings.limit` of which are left out.
        out: folder for `probe.safetensors` and its readable copy; a model's own folder makes
            `load_model` attach it.
        settings: how.
        progress: called after every batch of prompts.

    Raises:
        InputError: fewer prompts than folds, depths out of range, or a prompt that does not fit.
    """
    chosen = prompts[settings.skip :][: settings.limit]
    if len(chosen) < settings.folds:
        raise InputError(
            f"{len(chosen)} prompts are left for {settings.folds} folds; give more, or fewer folds (--folds)"
        )
    depths = settings.depths or [depth for depth in DEFAULT_DEPTHS if depth < model.num_layers]
    candidates = model.check_depths(depths)
    encoded = [model.encode(prompt.text) for prompt in chosen]
    data = collect_probe_data(model, encoded, candidates, settings.max_new_tokens, progress=progress)
    probe = fit_probe(model, data, candidates, settings)
    save_probe(out, probe)
    return probe


@torch.inference_mode()
def collect_probe_data(
    model: LayeredModel,
    prompts: Sequence[list[int]],
    depths: Sequence[int],
    max_new_tokens: int,
    *,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> ProbeData:
    """What every depth sees and says along greedy continuations of prompts, token 0 left out.

    Args:
        model: any.
        prompts: token ids.
        depths: m, rising, below L.
        max_new_tokens: per prompt.
        batch_size: prompts generated at once.
        progress: called after every batch.

    Raises:
        InputError: no text has a second token.
    """
    rows: list[tuple[NDArray[Any], ...]] = []
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        texts = generate_greedy(model, batch, max_new_tokens)
        for number, (prompt, text) in enumerate(zip(batch, texts, strict=True), start):
            if len(text) > 1:  # prefill decides token 0
                seen = _score_text(model, prompt, text, depths)
                rows.append((np.full(len(text) - 1, number), *seen))
        if progress is not None:
            progress(start + len(batch), len(prompts))
    if not rows:
        raise InputError("no text has two tokens, so there is nothing to train on; give other prompts")
    return ProbeData(*(np.concatenate(column) for column in zip(*rows, strict=True)))


def _score_text(
    model: LayeredModel, prompt: list[int], text: list[int], depths: Sequence[int]
) -> tuple[NDArray[Any], ...]:
    """States, inputs and matches of tokens 1 .. T - 1 of one text, as in `ProbeData`."""
    count, target = len(text) - 1, np.array(text[1:])
    sequence = model.sequence(len(prompt) + count)
    sequence.append(prompt + text[:-1])
    states, inputs, match = [], [], []
    for depth in depths:
        sequence.advance(depth)
        seen = model.heads.states(sequence.hidden(depth, count), depth)
        logits = model.heads.project(seen, depth)
        ids, logprobs, entropy = summarise(logits, 2, model.heads.vocabulary(depth))
        states.append(seen.float().cpu().numpy())
        inputs.append(head_inputs(logprobs.cpu().numpy(), entropy.cpu().numpy()))
        match.append(ids[:, 0].cpu().numpy() == target)
    return np.stack(states, 1), np.stack(inputs, 1), np.stack(match, 1)


def fit_probe(
    model: LayeredModel, data: ProbeData, depths: Sequence[int], settings: ProbeSettings
) -> ExitProbe:
    """Fit one logistic regression a depth; same data and settings, same probe.

    Args:
        model: whose hashes the probe carries.
        data: of these m depths.
        depths: the m depths.
        settings: ridges, folds and seed are used.

    Raises:
        InputError: fewer texts than folds.
    """
    texts = np.unique(data.text)
    if len(texts) < settings.folds:
        raise InputError(f"{len(texts)} texts of two tokens for {settings.folds} folds; give more prompts")
    order = np.random.default_rng(settings.seed).permutation(len(texts))
    fold = (order % settings.folds)[np.searchsorted(texts, data.text)]
    weights, biases, report = [], [], []
    for index, depth in enumerate(depths):
        rows = np.concatenate([data.states[:, index], data.inputs[:, index]], axis=1)
        weight, bias, found = _fit_depth(rows, data.match[:, index], fold, settings.ridges)
        weights.append(weight)
        biases.append(bias)
        report.append({"depth": int(depth), **found})
    return ExitProbe(
        depths,
        np.stack(weights),
        np.array(biases),
        model=model.name,
        model_hash=model.weights_hash(),
        head=model.head_hash(),
        dtype=str(model.dtype).removeprefix("torch."),
        report={"settings": asdict(settings), "texts": len(texts), "depths": report},
    )


def _fit_depth(
    rows: NDArray[np.float32], match: NDArray[np.bool_], fold: NDArray[np.int64], ridges: Sequence[float]
) -> tuple[NDArray[np.float64], float, dict[str, Any]]:
    """Weight (inputs,) and bias for rows (n, inputs) as they are, and what cross-validation says of them."""
    mean, spread = rows.mean(axis=0, dtype=np.float64), rows.std(axis=0, dtype=np.float64)
    spread[spread == 0.0] = 1.0
    x = np.column_stack([(rows - mean) / spread, np.ones(len(rows))])
    penalty = np.full(x.shape[1], _HEAD_RIDGE)
    penalty[-1] = _BIAS_RIDGE
    state = slice(0, rows.shape[1] - len(HEAD_INPUTS))
    best: tuple[float, float, NDArray[np.float64]] | None = None
    start: dict[int, NDArray[np.float64]] = {}
    for ridge in reversed(ridges):  # from the strongest: each fit starts from the one before
        penalty[state] = ridge
        predicted = np.empty(len(x))
        for part in np.unique(fold):
            inside = fold != part
            start[part] = logistic(x[inside], match[inside], penalty, start.get(part))
            predicted[~inside] = _sigmoid(x[~inside] @ start[part])
        loss = log_loss(predicted, match)
        if best is not None and loss > best[0]:
            break  # weaker ones only fit the texts at hand better
        best = (loss, ridge, predicted)
    assert best is not None
    penalty[state] = best[1]
    fitted = logistic(x, match, penalty)
    weight = fitted[:-1] / spread
    return weight, float(fitted[-1] - weight @ mean), {"ridge": best[1], **figures(best[2], match)}


def logistic(
    x: NDArray[np.float64],
    y: NDArray[np.bool_],
    penalty: NDArray[np.float64],
    start: NDArray[np.float64] | None = None,
    steps: int = 50,
) -> NDArray[np.float64]:
    """Logistic regression with a ridge, by Newton's method: the weights, float64 (f,).

    Minimises sum log(1 + exp(-s x w)) + sum penalty w^2 / 2 over rows, s = 1 where y else -1.

    Args:
        x: float64 (n, f), a column of ones among them if there is to be a bias.
        y: bool (n,).
        penalty: float64 (f,), all above 0, so that there is one minimum.
        start: weights to start from; zeros if not given.
        steps: most steps of Newton's method.
    """
    sign = np.where(y, 1.0, -1.0)

    def cost(weights: NDArray[np.float64]) -> float:
        return float(np.logaddexp(0.0, -sign * (x @ weights)).sum() + (penalty * weights**2).sum() / 2)

    weights = np.zeros(x.shape[1]) if start is None else start
    now = cost(weights)
    for _ in range(steps):
        probability = _sigmoid(x @ weights)
        gradient = x.T @ (probability - y) + penalty * weights
        curvature = (x.T * (probability * (1.0 - probability))) @ x + np.diag(penalty)
        step = np.linalg.solve(curvature, gradient)
        length = 1.0
        while (then := cost(weights - length * step)) > now and length > 1e-6:
            length /= 2  # far from the minimum a full step may overshoot
        if then >= now:
            break
        gain, weights, now = now - then, weights - length * step, then
        if gain < 1e-9 * len(x):
            break
    return weights


def _sigmoid(logit: NDArray[np.float64]) -> NDArray[np.float64]:
    probability: NDArray[np.float64] = 1.0 / (1.0 + np.exp(-np.clip(logit, -60.0, 60.0)))
    return probability
