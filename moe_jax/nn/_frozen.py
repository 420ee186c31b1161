"""Says that an optimizer leaves quantized experts as they are, which nothing in flax would."""

import inspect
import sys
import warnings
import weakref
from typing import Any

from flax import nnx
from flax.nnx import filterlib

_INIT = inspect.unwrap(nnx.Optimizer.__init__).__code__
_told: "weakref.WeakSet[nnx.Optimizer[Any]]" = weakref.WeakSet()  # one line each, however many layers its model has


class FrozenExpertsWarning(UserWarning):
    """An optimizer was made for parameters of a layer whose experts are quantized and hence have no gradient."""


def warn_of_frozen_experts(label: str, scheme: str) -> None:
    """Warn if this is called while an ``nnx.Optimizer`` collects the parameters of a layer with quantized experts.

    A filter like ``nnx.Param`` passes them over without a word, and flax tells a module neither who reads its state nor
    by which filter: the optimizer is looked up among the callers. One whose filter would not take unquantized experts
    either, as of adapters alone, means to leave them.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not _INIT:
        frame = frame.f_back
    if frame is None:
        return
    optimizer, wrt = frame.f_locals["self"], frame.f_locals["wrt"]
    if optimizer in _told or not filterlib.to_predicate(wrt)(("weights",), nnx.Param(None)):
        return
    _told.add(optimizer)
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == "flax":
        frame = frame.f_back
    warnings.warn_explicit(
        f"the experts of {label} are quantized ({scheme}): they have no gradient, and this optimizer leaves them and "
        "their biases as they are; what is around them trains. To train experts, add adapters by moe_jax.lora, or load "
        "the model unquantized",
        FrozenExpertsWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
    )
