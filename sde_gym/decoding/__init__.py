"""Decode with a real model: plainly, or speculatively under a controller."""

from __future__ import annotations

from sde_gym.decoding.autoregressive import autoregressive
from sde_gym.decoding.batch import speculative_batch
from sde_gym.decoding.generate import generate
from sde_gym.decoding.huggingface import huggingface
from sde_gym.decoding.result import DecodeResult, Rejection, Round
from sde_gym.decoding.skipping import skipping
from sde_gym.decoding.speculative import speculative

__all__ = [
    "DecodeResult",
    "Rejection",
    "Round",
    "autoregressive",
    "generate",
    "huggingface",
    "skipping",
    "speculative",
    "speculative_batch",
]
