"""Says that an optimizer leaves quantized experts as they are, which nothing in flax would."""

import inspect
import sys
import warnings
import weakref
from typing import Any

import jax
from flax import nnx
from flax.nnx import filterlib

_INIT = inspect.unwrap(nnx.Optimizer.__init__).__code__
_told: "weakref.WeakSet[nnx.Optimizer[Any]]" = weakref.WeakSet()  # one line each, however many layers its model has


class FrozenExpertsWarning(UserWarning):
    """An optimizer moves less than it seems to: quantized experts have no gradient, or a model has no adapters."""


def warn_of_frozen_experts(label: str, scheme: str) -> None:
    """Warn if this is called while an ``nnx.Optimizer`` collects the parameters of a layer with quantized experts.

    A filter like ``nnx.Param`` passes them over without a word, and flax tells a module neither who reads its state nor
    by which filter: the optimizer is looked up among the callers. One whose filter would not take unquantized experts
    either, as of adapters alone, means to leave them; if it finds no adapters at all, that is said as well.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not _INIT:
        frame = frame.f_back
    if frame is None:
        return
    optimizer, wrt = frame.f_locals["self"], frame.f_locals["wrt"]
    if optimizer in _told:
        return
    is_taken = filterlib.to_predicate(wrt)
    text = (
        f"the experts of {label} are quantized ({scheme}): they have no gradient, and this optimizer leaves them and "
        "their biases as they are; what is around them trains. To train experts, add adapters by moe_jax.lora, or load "
        "the model unquantized"
    )
    if not is_taken(("weights",), nnx.Param(None)):
        _told.add(optimizer)  # before the model is searched, which leads here again
        model = frame.f_locals["model"]
        if not is_taken(("a",), nnx.LoRAParam(None)) or jax.tree.leaves(nnx.state(model, wrt)):
            return
        text = "this optimizer is for adapters, and the model has none, so nothing trains; moe_jax.lora adds some"
    _told.add(optimizer)
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == "flax":
        frame = frame.f_back
    warnings.warn_explicit(
        text,
        FrozenExpertsWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
    )
