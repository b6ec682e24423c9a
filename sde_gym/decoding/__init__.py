"""Decode with a real model: plainly, or speculatively under a controller."""

from __future__ import annotations

from sde_gym.decoding.autoregressive import autoregressive
from sde_gym.decoding.result import DecodeResult, Round
from sde_gym.decoding.speculative import speculative

__all__ = ["DecodeResult", "Round", "autoregressive", "speculative"]
