"""Look-up tables that replay reads, made once from a trace set and shared by all lanes."""

from __future__ import annotations

import numpy as np

from sde_gym.errors import InputError
from sde_gym.policies.observation import observation_rows
from sde_gym.traces import TraceSet
from sde_gym.traces.schema import text_budget

RECORDED_FEATURES = ("confidence", "entropy", "top1", "margin", "stable", "probe")
"""Features that depend on the trace's row and the depth alone, not on how one got there."""


class Tables:
    """What replay needs to know about every position and candidate depth.

    Tables of what depths say are flat: entry row * m + index for P rows and m depths, then the R rows
    recorded behind wrong proposals, entry P m + r.

    Args:
        traces: recorded texts.
        depths: candidate depths, m of the recorded ones.
        names: features of the observation.
        k: log-probabilities that `confidence` averages.
        max_new_tokens: token budget of a text.

    Attributes:
        depth: int64 (m,), the depths.
        gap: int64 (m,), layers from each depth to the next, from the last one to L.
        match: bool (P m + R,), whether the proposal is right; never behind a wrong one.
        ends_text: bool (P m + R,), whether the proposal is an end-of-text token.
        surprise: float64 (P m + R,), -log p of the proposal, nats.
        branch: int64 (P m,), entry of the first row recorded behind a wrong proposal.
        final_surprise: float64 (P,), -log p of the last layer's best token, nats.
        start: int64 (N + 1,), first row of each text.
        limit: int64 (N,), tokens of each text that are replayed.
        budget: int64 (N,), tokens that its budget and the context limit allow, at least `limit`.
        playable: bool (N,), whether it is an episode: at least one token is decided on.
        names: those of `RECORDED_FEATURES` that were asked for.
        features: float32 (P m + R, len(names)), clipped.

    Raises:
        InputError: the feature `probe`, of traces without.
    """

    def __init__(
        self, traces: TraceSet, depths: tuple[int, ...], names: tuple[str, ...], k: int, max_new_tokens: int
    ) -> None:
        columns = [traces.depths.index(depth) for depth in depths]
        self.depth = np.array(depths, dtype=np.int64)
        self.gap = np.diff(np.append(self.depth, traces.num_layers))
        ids = traces.top_ids[:, columns]
        logprobs = traces.top_logprobs[:, columns]
        behind = len(traces.overrun_proposal)
        off_text = np.zeros(behind, dtype=bool)
        proposals = np.concatenate([ids[:, :, 0].ravel(), traces.overrun_proposal])
        best = np.concatenate([logprobs.reshape(-1, traces.k), traces.overrun_logprobs])
        self.match = np.concatenate([traces.match[:, columns].ravel(), off_text])
        self.ends_text = np.isin(proposals, traces.eos_token_ids)
        self.surprise = -best[:, 0].astype(np.float64)
        entries = ids.shape[0] * ids.shape[1]
        branches = traces.branch_start[:-1].reshape(-1, len(traces.depths))[:, columns]
        self.branch = entries + branches.ravel()
        self.final_surprise = -traces.final_logprobs[:, 0].astype(np.float64)
        self.start = traces.start
        self.limit = np.minimum(traces.lengths, max_new_tokens)
        self.budget = text_budget(max_new_tokens, traces.manifest["context_limit"], traces.prompt_lengths)
        self.playable = self.limit >= 2

        self.names = tuple(name for name in names if name in RECORDED_FEATURES)
        probe = None
        if "probe" in names:
            if traces.probe is None or traces.overrun_probe is None:
                raise InputError(
                    "observation: the feature 'probe' was asked for, but these traces were recorded without "
                    "an exit probe; leave it out, or train a probe for the model (`sde-gym train-probe`) and "
                    "record again"
                )
            probe = np.concatenate([traces.probe[:, columns].ravel(), traces.overrun_probe])
        stable = np.zeros(ids.shape[:2], dtype=bool)
        stable[:, 1:] = ids[:, 1:, 0] == ids[:, :-1, 0]
        self.features = observation_rows(
            self.names,
            entries + behind,
            top_logprobs=best,
            entropy=np.concatenate([traces.entropy[:, columns].ravel(), traces.overrun_entropy]),
            stable=np.concatenate([stable.ravel(), off_text]),
            probe=probe,
            k=k,
        )
