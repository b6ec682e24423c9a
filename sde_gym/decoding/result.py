"""What a decoder returns: the tokens, and how each of them came about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from sde_gym.checks import token_ids, whole_number
from sde_gym.errors import InputError

if TYPE_CHECKING:
    from sde_gym.models.layered import LayeredModel

#: "prefill": token 0, from the prompt's last state; "accepted": a draft that the final layer
#: confirmed; "final": the final layer's own token (plain step, correction or bonus).
Fate = Literal["prefill", "accepted", "final"]

#: Two logits that are closer than this may change places with the order of summation (float32).
NEAR_TIE = 1e-3


@dataclass(frozen=True, slots=True)
class Round:
    """One draft and its verification."""

    exit_depth: int  # l*, the deepest where each token has its own; L where nothing was drafted
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Rejection:
    """A proposal that was not accepted: the token that `depth` proposed for `tokens[position]`."""

    position: int
    depth: int
    token: int


@dataclass(slots=True)
class DecodeResult:
    """Generated tokens with their history, counters and times.

    Attributes:
        tokens: generated ids, the end-of-text id included if it was reached.
        depths: per token, the depth that proposed it (L for the final layer's own).
        fates: per token.
        rounds: in order; empty for plain decoding.
        rejected: proposals that were not accepted, in order.
        num_layers: L.
        prefill_seconds, decode_seconds: wall clock; token 0 belongs to prefill.
        controller_seconds: part of decode_seconds spent in features and controller.
        idle_head_seconds: part of it spent in exit heads that proposed nothing; 0 on a GPU, where
            launching one says nothing about its time.
        layer_passes: layers x tokens run in decoding (prefill excluded).
        sequential_layers: layers run one after the other, a batch of tokens counted once.
        head_calls: exit and final heads evaluated, a batch counted once.
        decisions: controller decisions.
        untimed_tokens: leading tokens that came out before the decode clock started.
        near_ties: emitted tokens whose two best final logits are closer than `NEAR_TIE`, where they
            were counted: the only ones that another order of summation may change.
    """

    num_layers: int
    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    fates: list[Fate] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    rejected: list[Rejection] = field(default_factory=list)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    controller_seconds: float = 0.0
    idle_head_seconds: float = 0.0
    layer_passes: int = 0
    sequential_layers: int = 0
    head_calls: int = 0
    decisions: int = 0
    untimed_tokens: int = 1
    near_ties: int = 0

    @property
    def drafted(self) -> int:
        """Proposals made."""
        return sum(r.drafted for r in self.rounds)

    @property
    def accepted(self) -> int:
        """Proposals accepted."""
        return sum(r.accepted for r in self.rounds)

    def emit(self, token: int, depth: int, fate: Fate) -> None:
        """Append a token."""
        self.tokens.append(token)
        self.depths.append(depth)
        self.fates.append(fate)


def check_model(model: Any) -> None:
    """Raise InputError unless it is a `LayeredModel`, or whatever has the parts of one."""
    if isinstance(model, type) or not hasattr(model, "check_depths"):
        kind = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise InputError(
            f"model: {kind} is no LayeredModel; give what load_model returns, or LayeredModel(model) of a "
            "transformers model"
        )


def check_request(model: LayeredModel, prompt: Sequence[int], max_new_tokens: int) -> int:
    """The token budget of a request: `max_new_tokens`, or less where the context ends.

    Raises:
        InputError: no `LayeredModel`, a prompt that is no list of token ids, is empty or fills the
            context, or a budget that is no whole number of at least 0.
    """
    check_model(model)
    prompt = token_ids("prompt", prompt)
    if not prompt:
        raise InputError("the prompt has no tokens; at least one is needed")
    max_new_tokens = whole_number("max_new_tokens", max_new_tokens)
    if max_new_tokens < 0:
        raise InputError(f"max_new_tokens must be at least 0, not {max_new_tokens}")
    if len(prompt) >= model.context_limit:
        raise InputError(
            f"the prompt has {len(prompt)} tokens and the context holds {model.context_limit}: shorten it"
        )
    # The last token emitted is never fed, so prompt + budget may exceed the context by one.
    return min(max_new_tokens, model.context_limit - len(prompt) + 1)
