"""A causal language model opened up: embed, run any range of layers, score at any depth."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from sde_gym.checks import shown, whole_number
from sde_gym.errors import InputError
from sde_gym.models.heads import Adapter, ExitHeads
from sde_gym.models.lean import LEAN_FAMILY, LeanStack, RMSNorm
from sde_gym.models.modular import MODULAR_FAMILY, ModularStack
from sde_gym.models.sequence import Sequence as DepthSequence
from sde_gym.models.slots import Rows, SlotCache

if TYPE_CHECKING:
    from sde_gym.models.probe import ExitProbe


class LayerStack(Protocol):
    """What `LayeredModel` needs of an architecture."""

    window_kinds: tuple[int | None, ...]

    def new_cache(self, capacity: int) -> SlotCache: ...

    def embed(self, tokens: Sequence[int]) -> Tensor: ...

    def run(self, hidden: Tensor, first: int, stop: int, rows: Rows, cache: SlotCache) -> Tensor: ...


class LayeredModel:
    """A decoder-only transformers model whose layers can be run one range at a time.

    Args:
        hf: an `AutoModelForCausalLM` instance in evaluation mode.
        tokenizer: its tokenizer, or None if only token ids will be used.
        name: what traces and reports call the model.
        compact_vocabulary: token ids of the exit heads below depth L; None = all.
        adapters: per-token maps applied before the head at some depths.

    Attributes:
        probe: how far to trust the exit heads, see `sde_gym.models.probe`; None unless attached.

    Raises:
        InputError: the architecture is not supported; the message names what is missing.
    """

    def __init__(
        self,
        hf: Any,
        tokenizer: Any = None,
        name: str = "",
        compact_vocabulary: Sequence[int] | None = None,
        adapters: Mapping[int, Adapter] | None = None,
    ) -> None:
        kind = getattr(getattr(hf, "config", None), "model_type", type(hf).__name__)
        if kind in LEAN_FAMILY:
            _require_parts(hf, kind)
            self.stack: LayerStack = LeanStack(hf)
        elif kind in MODULAR_FAMILY:
            _require_parts(hf, kind)
            self.stack = ModularStack(hf)
        else:
            raise InputError(
                f"architecture {kind!r} is not supported: {_missing(hf)}; "
                f"supported: {', '.join(LEAN_FAMILY + MODULAR_FAMILY)}"
            )
        self.hf = hf
        self.tokenizer = tokenizer
        self.name = name or getattr(hf.config, "_name_or_path", "") or kind
        self.num_layers: int = len(hf.model.layers)
        self.hidden_size: int = hf.config.hidden_size
        self.vocab_size: int = hf.get_input_embeddings().weight.shape[0]
        self.context_limit: int = hf.config.max_position_embeddings
        self.eos_token_ids = _eos_token_ids(hf)
        head = hf.get_output_embeddings()
        self.dtype: torch.dtype = head.weight.dtype
        self.device: torch.device = head.weight.device
        norm = hf.model.norm
        if isinstance(self.stack, LeanStack):
            norm = RMSNorm(norm.weight, self.stack.epsilon)
        self.heads = ExitHeads(
            norm,
            head.weight,
            getattr(head, "bias", None),
            self.num_layers,
            self.eos_token_ids,
            getattr(hf.config, "final_logit_softcapping", None),
            compact_vocabulary,
            adapters,
        )
        self.probe: ExitProbe | None = None
        self._weights_hash: str | None = None

    @property
    def compact_vocabulary(self) -> Tensor | None:
        """Full-vocabulary ids of the compact exit heads, int64, or None."""
        return self.heads.compact_vocabulary

    def check_depths(self, depths: Sequence[int]) -> tuple[int, ...]:
        """Candidate exit depths as a tuple; InputError unless 1 <= d_1 < ... < d_m < L."""
        if isinstance(depths, (str, bytes, Mapping)) or not isinstance(depths, Iterable):
            raise InputError(
                f"depths: {shown(depths)} is no list of depths; give one out of 1..{self.num_layers - 1}"
            )
        found = tuple(whole_number("depths", depth) for depth in getattr(depths, "tolist", lambda: depths)())
        if not found or any(b <= a for a, b in pairwise(found)):
            raise InputError(f"depths must be increasing and not empty, not {found}")
        if found[0] < 1 or found[-1] >= self.num_layers:
            raise InputError(
                f"depths {found} must lie in 1..{self.num_layers - 1}: "
                f"{self.name} has {self.num_layers} layers"
            )
        return found

    def sequence(self, capacity: int = 256) -> DepthSequence:
        """A new, empty depth frontier."""
        return DepthSequence(self, capacity)

    def encode(self, text: str, any_length: bool = False) -> list[int]:
        """Token ids of a prompt; a chat model's prompt becomes one user turn.

        Args:
            text: of the prompt.
            any_length: take prompts that the context does not hold, too.

        Raises:
            InputError: empty text, no tokenizer, or more tokens than the context holds.
        """
        if self.tokenizer is None:
            raise InputError(f"model {self.name!r} has no tokenizer; pass token ids instead of text")
        if not isinstance(text, str) or not text:
            raise InputError(f"the prompt must be a non-empty string, not {text!r}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(
                f"the prompt holds {text[error.start]!a} at character {error.start}, which is no "
                "Unicode text; give it as UTF-8"
            ) from None
        if getattr(self.tokenizer, "chat_template", None):
            ids = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
            )["input_ids"]
        else:
            ids = self.tokenizer(text)["input_ids"]
        if len(ids) >= self.context_limit and not any_length:
            raise InputError(
                f"the prompt has {len(ids)} tokens; the context holds {self.context_limit}: shorten it"
            )
        return [int(i) for i in ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, end-of-text tokens left out."""
        if self.tokenizer is None:
            raise InputError(f"model {self.name!r} has no tokenizer")
        text: str = self.tokenizer.decode([i for i in ids if i not in self.eos_token_ids])
        return text

    def attach_probe(self, probe: ExitProbe) -> None:
        """Use this exit probe from now on.

        Raises:
            InputError: it was trained for other weights, other exit heads, or another width.
        """
        probe.check(self)
        self.probe = probe

    def weights_hash(self) -> str:
        """16 hex digits that identify the weights.

        Every tensor's name, shape and some thousands of values spread evenly over it enter the hash:
        quick at any size, and different for any two models that were trained apart.
        """
        if self._weights_hash is None:
            digest = hashlib.sha256()
            for name, tensor in sorted(self.hf.state_dict().items()):
                flat = tensor.detach().reshape(-1)
                step = max(1, flat.numel() // 4096)
                digest.update(f"{name}{tuple(tensor.shape)}".encode())
                digest.update(flat[::step].to(torch.float32).cpu().numpy().tobytes())
            self._weights_hash = digest.hexdigest()[:16]
        return self._weights_hash

    def head_hash(self) -> str:
        """16 hex digits that identify the exit heads' vocabulary and adapters; "full" without either.

        Raises:
            InputError: an adapter that is no `torch.nn.Module`, so that nothing identifies it.
        """
        ids = self.compact_vocabulary
        if ids is None and not self.heads.adapters:
            return "full"
        digest = hashlib.sha256(b"" if ids is None else ids.cpu().numpy().tobytes())
        for depth, adapter in sorted(self.heads.adapters.items()):
            if not isinstance(adapter, torch.nn.Module):
                raise InputError(f"the adapter at depth {depth} must be a torch.nn.Module to be identified")
            for name, tensor in sorted(adapter.state_dict().items()):
                digest.update(f"{depth}{name}{tuple(tensor.shape)}".encode())
                digest.update(tensor.detach().to(torch.float32).cpu().numpy().tobytes())
        return digest.hexdigest()[:16]


def _eos_token_ids(hf: Any) -> tuple[int, ...]:
    """All ids that end a text, as `generate` reads them."""
    found = getattr(getattr(hf, "generation_config", None), "eos_token_id", None)
    if found is None:
        found = getattr(hf.config, "eos_token_id", None)
    if found is None:
        return ()
    return (int(found),) if isinstance(found, int) else tuple(int(i) for i in found)


def _missing(hf: Any) -> str:
    config = getattr(hf, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder, not a decoder-only language model"
    try:
        _require_parts(hf, "it")
    except InputError as error:
        return str(error)
    return "its layers have not been checked against this package's depth frontier"


def _require_parts(hf: Any, kind: str) -> None:
    """Refuse a model that lacks a part which the depth frontier uses."""
    if not hasattr(hf, "model") or not hasattr(hf, "get_output_embeddings"):
        raise InputError(
            f"{kind} has no `model` body with a language-model head (AutoModelForCausalLM is expected)"
        )
    for part in ("layers", "norm", "embed_tokens", "rotary_emb"):
        if not hasattr(hf.model, part):
            raise InputError(f"{kind} has no `model.{part}`")
    if hf.get_output_embeddings() is None:
        raise InputError(f"{kind} has no language-model head")
    if not hasattr(hf.model.layers[0], "mlp") or not hasattr(hf.model.layers[0].mlp, "gate_proj"):
        raise InputError(f"{kind} has no gated MLP (`mlp.gate_proj`); a mixture of experts has several")
