"""Trace sets made without a model, for any test that needs one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sde_gym.traces import SCHEMA_VERSION, TraceSet, TraceWriter

EOS = 0
"""The end-of-text id of all sets made here."""

TASKS = ("function", "docstring", "test")


def _manifest(
    num_layers: int, depths: Sequence[int], k: int, max_new_tokens: int, context_limit: int
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
        "overrun": 0,
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
) -> TraceSet:
    """A seeded random set with texts of every kind of end and of 2..max_new_tokens tokens.

    Proposals match with probability `p_match`, and distributions are sharper where they do, so
    that confidence says something. Wrong proposals are end-of-text with probability `p_eos`.
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
    return TraceSet(
        manifest={**_manifest(num_layers, depths, k, max_new_tokens, context_limit), "texts": texts},
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
    )


def written_traces(
    tokens: Sequence[int],
    proposals: Sequence[Sequence[int]],
    *,
    end: str,
    depths: Sequence[int],
    num_layers: int,
    max_new_tokens: int | None = None,
) -> TraceSet:
    """One text written out by hand, for tables worked on paper.

    Args:
        tokens: y_0 .. y_{T-1}.
        proposals: for each position, the proposal at each depth.
        end: "eos", "budget" or "context".
        depths: candidate depths, rising.
        num_layers: L.
        max_new_tokens: recorded budget; T if not given.

    The surprise (-log p of the best token) at row t and depth index i is (10 t + i + 1) / 100, at
    the last layer (10 t) / 100; the second-best token is two nats less probable and so on, the
    entropy is (10 t + i) / 50.
    """
    length, m, k = len(tokens), len(depths), 8
    budget = max_new_tokens or length
    context_limit = length + 2 if end == "context" else budget + 10
    row, index = np.arange(length)[:, None], np.arange(m)[None, :]
    steps = 2.0 * np.arange(k)
    token = np.array(tokens, dtype=np.int32)
    top_ids = np.array(proposals, dtype=np.int32)[:, :, None] + 100 * np.arange(k, dtype=np.int32)
    return TraceSet(
        manifest={**_manifest(num_layers, depths, k, budget, context_limit), "texts": 1},
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
    names = ("model", "model_hash", "num_layers", "depths", "eos_token_ids", "max_new_tokens")
    names += ("context_limit", "head", "dtype", "k")
    return TraceWriter(folder, **{**{name: traces.manifest[name] for name in names}, **changes})


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
    }
