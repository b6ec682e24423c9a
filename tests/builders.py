"""Trace sets made without a model, for any test that needs one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sde_gym.traces import SCHEMA_VERSION, TraceSet, TraceWriter
from sde_gym.traces.overrun import Overrun, most_rows
from sde_gym.traces.schema import TraceSettings

EOS = 0
"""The end-of-text id of all sets made here."""

TASKS = ("function", "docstring", "test")


def _manifest(
    num_layers: int, depths: Sequence[int], k: int, max_new_tokens: int, context_limit: int, overrun: int
) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "model": "toy",
        "model_hash": "0" * 64,
        "num_layers": num_layers,
        "depths": list(depths),
        "eos_token_ids": [EOS],
        "max_new_tokens": max_new_tokens,
        "context_limit": context_limit,
        "head": "full",
        "dtype": "float32",
        "k": k,
        "overrun": overrun,
        "package_version": "0",
        "created": "2026-01-01T00:00:00+00:00",
        "skipped": [],
        "shards": [],
    }


def random_traces(
    seed: int = 0,
    texts: int = 6,
    *,
    num_layers: int = 8,
    depths: Sequence[int] = (2, 3, 6),
    k: int = 8,
    max_new_tokens: int = 20,
    vocabulary: int = 40,
    p_match: float = 0.7,
    p_eos: float = 0.1,
    overrun: int = 0,
    probe: bool = False,
) -> TraceSet:
    """A seeded random set with texts of every kind of end and of 2..max_new_tokens tokens.

    Proposals match with probability `p_match`, and distributions are sharper where they do, so
    that confidence says something. Wrong proposals, and those behind them, are end-of-text with
    probability `p_eos`. With `probe` there are an exit probe's probabilities, too, drawn at random.
    """
    rng = np.random.default_rng(seed)
    m = len(depths)
    ends = [("eos", "budget", "context")[n % 3] for n in range(texts)]
    lengths = [
        max_new_tokens if end == "budget" else int(rng.integers(2, max_new_tokens + 1)) for end in ends
    ]
    start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    rows = int(start[-1])
    token = rng.integers(1, vocabulary, rows)
    for number, end in enumerate(ends):
        if end == "eos":
            token[start[number + 1] - 1] = EOS

    def distribution(best: np.ndarray, sharpness: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids and log-probabilities of the k best, and the entropy; `best` comes first."""
        rows = len(best)
        logits = rng.normal(size=(rows, vocabulary)) * sharpness[:, None]
        logits[np.arange(rows), best] = logits.max(axis=1) + rng.uniform(0.1, 2.0, rows) * sharpness
        logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        order = np.argsort(-logprobs, axis=1)
        entropy = -(np.exp(logprobs) * logprobs).sum(axis=1)
        return order[:, :k], np.take_along_axis(logprobs, order, axis=1)[:, :k], entropy

    top_ids = np.empty((rows, m, k), dtype=np.int32)
    top_logprobs = np.empty((rows, m, k), dtype=np.float32)
    entropy = np.empty((rows, m), dtype=np.float32)
    for index in range(m):
        matches = rng.random(rows) < p_match
        wrong = np.where(rng.random(rows) < p_eos, EOS, rng.integers(1, vocabulary, rows))
        best = np.where(matches, token, wrong)
        ids, logprobs, spread = distribution(best, np.where(matches, 2.5, 1.0))
        top_ids[:, index], top_logprobs[:, index], entropy[:, index] = ids, logprobs, spread
    final_ids, final_logprobs, _ = distribution(token, np.full(rows, 3.0))
    context_limit = max_new_tokens + 10
    prompt_lengths = [
        context_limit - length + 1 if end == "context" else 3 + n % 4
        for n, (end, length) in enumerate(zip(ends, lengths, strict=True))
    ]
    manifest = _manifest(num_layers, depths, k, max_new_tokens, context_limit, overrun)
    most = np.concatenate(
        [
            most_rows(
                top_ids[start[n] : start[n + 1], :, 0],
                token[start[n] : start[n + 1]],
                prompt_lengths[n],
                TraceSettings.from_manifest(manifest, "toy"),
            )
            for n in range(texts)
        ]
    ).ravel()
    branches = [_branch(rng, int(rows), vocabulary, p_eos) for rows in most]
    behind = np.array([proposal for branch in branches for proposal in branch], dtype=np.int64)
    _, behind_logprobs, behind_entropy = distribution(behind, np.full(len(behind), 1.0))
    more: dict[str, Any] = {}
    if probe:
        drawn = np.random.default_rng((seed, 1))
        manifest["probe"] = "f" * 16
        more["probe"] = drawn.random((rows, m), dtype=np.float32)
        more["overrun_probe"] = drawn.random(len(behind), dtype=np.float32)
    return TraceSet(
        manifest={**manifest, "texts": texts},
        depths=tuple(depths),
        num_layers=num_layers,
        k=k,
        start=start,
        token=token.astype(np.int32),
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        entropy=entropy,
        match=top_ids[:, :, 0] == token[:, None],
        final_ids=final_ids.astype(np.int32),
        final_logprobs=final_logprobs.astype(np.float32),
        final_gap=(final_logprobs[:, 0] - final_logprobs[:, 1]).astype(np.float32),
        branch_start=np.concatenate([[0], np.cumsum([len(branch) for branch in branches])]).astype(np.int64),
        overrun_proposal=behind.astype(np.int32),
        overrun_logprobs=behind_logprobs.astype(np.float32),
        overrun_entropy=behind_entropy.astype(np.float32),
        text_ids=[f"toy/{n}" for n in range(texts)],
        tasks=[TASKS[n % len(TASKS)] for n in range(texts)],
        ends=ends,
        prompt_tokens=[
            None if n % 2 else rng.integers(1, vocabulary, length).astype(np.int32)
            for n, length in enumerate(prompt_lengths)
        ],
        prompt_lengths=prompt_lengths,
        prompts=[None if n % 2 else f"prompt {n}" for n in range(texts)],
        sources=[f"toy:{n}" for n in range(texts)],
        **more,
    )


def _branch(rng: np.random.Generator, most: int, vocabulary: int, p_eos: float) -> list[int]:
    """What is proposed behind a wrong proposal: `most` tokens, fewer if one ends the text."""
    proposals: list[int] = []
    while len(proposals) < most and EOS not in proposals:
        proposals.append(EOS if rng.random() < p_eos else int(rng.integers(1, vocabulary)))
    return proposals


def written_traces(
    tokens: Sequence[int],
    proposals: Sequence[Sequence[int]],
    *,
    end: str,
    depths: Sequence[int],
    num_layers: int,
    max_new_tokens: int | None = None,
    branches: Mapping[tuple[int, int], Sequence[int]] | None = None,
    overrun: int = 0,
) -> TraceSet:
    """One text written out by hand, for tables worked on paper.

    Args:
        tokens: y_0 .. y_{T-1}.
        proposals: for each position, the proposal at each depth.
        end: "eos", "budget" or "context".
        depths: candidate depths, rising.
        num_layers: L.
        max_new_tokens: recorded budget; T if not given.
        branches: proposals behind the wrong one at (position, index of the depth).
        overrun: most rows of a branch, 0 for a set without.

    The surprise (-log p of the best token) at row t and depth index i is (10 t + i + 1) / 100, at
    the last layer (10 t) / 100; the second-best token is two nats less probable and so on, the
    entropy is (10 t + i) / 50. At step j behind that proposal the surprise is larger by j / 1000, the
    entropy is j.
    """
    length, m, k = len(tokens), len(depths), 8
    budget = max_new_tokens or length
    context_limit = length + 2 if end == "context" else budget + 10
    row, index = np.arange(length)[:, None], np.arange(m)[None, :]
    steps = 2.0 * np.arange(k)
    token = np.array(tokens, dtype=np.int32)
    top_ids = np.array(proposals, dtype=np.int32)[:, :, None] + 100 * np.arange(k, dtype=np.int32)
    steps_behind = [
        [branches[t, i] if branches and (t, i) in branches else [] for i in range(m)] for t in range(length)
    ]
    behind = [
        (proposal, (10 * t + i + 1) / 100 + j / 1000, float(j))
        for t in range(length)
        for i in range(m)
        for j, proposal in enumerate(steps_behind[t][i], start=1)
    ]
    counts = [len(steps_behind[t][i]) for t in range(length) for i in range(m)]
    return TraceSet(
        manifest={**_manifest(num_layers, depths, k, budget, context_limit, overrun), "texts": 1},
        depths=tuple(depths),
        num_layers=num_layers,
        k=k,
        start=np.array([0, length], dtype=np.int64),
        token=token,
        top_ids=top_ids,
        top_logprobs=(-(10 * row + index + 1)[:, :, None] / 100 - steps).astype(np.float32),
        entropy=((10 * row + index) / 50).astype(np.float32),
        match=top_ids[:, :, 0] == token[:, None],
        final_ids=token[:, None] + 100 * np.arange(k, dtype=np.int32),
        final_logprobs=(-row / 10 - steps).astype(np.float32),
        final_gap=np.full(length, 2.0, dtype=np.float32),
        branch_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        overrun_proposal=np.array([row[0] for row in behind], dtype=np.int32),
        overrun_logprobs=np.array([-row[1] - steps for row in behind], dtype=np.float32).reshape(-1, k),
        overrun_entropy=np.array([row[2] for row in behind], dtype=np.float32),
        text_ids=["written"],
        tasks=["function"],
        ends=[end],
        prompt_tokens=[np.array([5, 6, 7], dtype=np.int32)],
        prompt_lengths=[3],
        prompts=["by hand"],
        sources=["toy:written"],
    )


def store_traces(folder: Path, traces: TraceSet, *, texts_per_shard: int = 2) -> Path:
    """Write a set through `TraceWriter`; returns the folder."""
    with open_writer(folder, traces, texts_per_shard=texts_per_shard) as writer:
        for text in range(len(traces)):
            writer.add_text(**text_arguments(traces, text))
    return folder


def open_writer(folder: Path, traces: TraceSet, **changes: Any) -> TraceWriter:
    """A writer with the settings of this set, but for `changes`."""
    size = {"texts_per_shard": changes.pop("texts_per_shard")} if "texts_per_shard" in changes else {}
    settings = TraceSettings.from_manifest({**traces.manifest, **changes}, "toy")
    return TraceWriter(folder, settings, **size)


def text_arguments(traces: TraceSet, text: int) -> dict[str, Any]:
    """One text of a set, as the arguments of `TraceWriter.add_text`."""
    rows = slice(traces.start[text], traces.start[text + 1])
    arrays = ("token", "final_ids", "final_logprobs", "final_gap", "top_ids", "top_logprobs", "entropy")
    return {
        "text_id": traces.text_ids[text],
        "task": traces.tasks[text],
        "source": traces.sources[text],
        "prompt": traces.prompts[text],
        "prompt_tokens": traces.prompt_tokens[text],
        "prompt_length": traces.prompt_lengths[text],
        "end": traces.ends[text],
        **{name: getattr(traces, name)[rows] for name in arrays},
        "overrun": _overrun_of(traces, text) if traces.overrun else None,
        "probe": None if traces.probe is None else traces.probe[rows],
    }


def _overrun_of(traces: TraceSet, text: int) -> Overrun:
    m = len(traces.depths)
    bounds = traces.branch_start[traces.start[text] * m : traces.start[text + 1] * m + 1]
    rows = slice(bounds[0], bounds[-1])
    return Overrun(
        np.diff(bounds).reshape(-1, m),
        traces.overrun_proposal[rows],
        traces.overrun_logprobs[rows],
        traces.overrun_entropy[rows],
        None if traces.overrun_probe is None else traces.overrun_probe[rows],
    )
