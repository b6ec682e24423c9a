"""The `LayeredModel` of a transformers model that is someone else's: made once, and again if it changed.

Our layers read weights and do not call the modules that hold them. A module that does more than its class
says (a hook, a replaced `forward`, an adapter around a linear map) would be passed by without a word, so
such a model is refused.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from sde_gym.errors import InputError
from sde_gym.models.layered import LayeredModel

#: What tells whether a model is still the one that a `LayeredModel` was made of: its modules in order, and
#: of each parameter and buffer where it lies, how often it was changed in place, and its type.
Fingerprint = tuple[tuple[int | str, ...], ...]

#: By transformers model, the `LayeredModel` made of it, which refers back to it weakly.
_OPENED: weakref.WeakKeyDictionary[Any, tuple[LayeredModel, Fingerprint]] = weakref.WeakKeyDictionary()

#: Where transformers defines the hooks that it puts on models itself. They look (hidden states that were
#: asked for once) or ask for gradients, and change no value.
_HARMLESS_HOOKS = ("transformers.utils.output_capturing", "transformers.modeling_utils")


def opened(hf: Any) -> LayeredModel:
    """The `LayeredModel` of a transformers model, made anew only if its modules or weights have changed.

    A change in place that goes by `tensor.data` leaves no mark and is not noticed.

    Raises:
        InputError: an architecture that is not supported, modules that are not plain ones (quantised,
            LoRA, a wrapped head), or weights on several devices.
    """
    known = _OPENED.get(hf)
    if known is not None and known[1] == fingerprint(hf):
        return known[0]
    devices = {str(parameter.device) for parameter in hf.parameters()}
    if len(devices) > 1 or "meta" in devices:
        raise InputError(f"the model's weights lie on {', '.join(sorted(devices))}; put them on one device")
    for name, module in getattr(getattr(hf, "model", None), "layers", torch.nn.Module()).named_modules():
        if hasattr(module, "in_features") and type(module) is not torch.nn.Linear:
            raise InputError(
                f"layers.{name} is a {type(module).__name__}, not a plain linear map; merge adapters "
                "(merge_and_unload) and load the weights unquantised"
            )
    for part, found, plain in (
        ("language-model head", hf.get_output_embeddings(), torch.nn.Linear),
        ("token embedding", hf.get_input_embeddings(), torch.nn.Embedding),
    ):
        if found is not None and not isinstance(found, plain):
            raise InputError(
                f"the {part} is a {type(found).__name__}, not a {plain.__name__}; put the model's own "
                "one back"
            )
    layered = LayeredModel(hf)
    layered.hf = weakref.proxy(hf)  # else it would keep the model alive, and with it its own entry
    _OPENED[hf] = (layered, fingerprint(hf))
    return layered


def check_untouched(hf: Any) -> None:
    """Refuse a model with a module that does something else than its class says.

    Raises:
        InputError: a forward hook, a forward pre-hook or a replaced `forward`; the message names the module.
    """
    for name, module in hf.named_modules():
        found = None
        if not all(map(_harmless, module._forward_hooks.values())):
            found = "a forward hook"
        elif not all(map(_harmless, module._forward_pre_hooks.values())):
            found = "a forward pre-hook"
        elif not _own_forward(module):
            found = "a forward of its own, put in the place of its class's"
        if found is not None:
            raise InputError(
                f"{name or 'the model'} has {found}, which this decoder would pass by: it reads the weights "
                "and does not call the modules; remove it, or call generate without custom_generate"
            )


def fingerprint(hf: Any) -> Fingerprint:
    """See `Fingerprint`."""
    marks: list[tuple[int | str, ...]] = []
    for name, module in hf.named_modules(remove_duplicate=False):  # the same layer may stand in two places
        marks.append((name, id(module)))
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                version = 0 if tensor.is_inference() else tensor._version
                marks.append((tensor.data_ptr(), version, str(tensor.dtype)))
    return tuple(marks)


def _harmless(hook: Any) -> bool:
    return getattr(hook, "__module__", None) in _HARMLESS_HOOKS


def _own_forward(module: torch.nn.Module) -> bool:
    """Whether `forward` is the class's, or that one compiled."""
    if "forward" not in vars(module):
        return True
    replaced = vars(module)["forward"]
    replaced = getattr(replaced, "_torchdynamo_orig_callable", replaced)
    return getattr(replaced, "__func__", None) is type(module).forward
