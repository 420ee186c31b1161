"""Names and parameters of expert activations, and ``apply_activation``; formulas: pallas_kernels.common.activations."""

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from moe_jax._arguments import check_booleans, check_numbers
from moe_jax._typing import Array, Float
from pallas_kernels.common.activations import NOT_GATED_SUFFIX, Activation

__all__ = [
    "ACTIVATIONS",
    "NOT_GATED_SUFFIX",
    "Activation",
    "ActivationConfig",
    "apply_activation",
    "parse_activation",
    "resolve_activation",
    "split_halves",
    "split_interleaved",
]

# Every name; "relu2" is known by name only, since no model gates with it and no formula is agreed on.
ACTIVATIONS = (
    "silu",
    "gelu",
    "gelu_tanh",
    "relu2",
    "swigluoai",
    "swigluoai_uninterleave",
    "swiglustep",
    "silu_no_mul",
    "gelu_no_mul",
    "gelu_tanh_no_mul",
    "relu2_no_mul",
)
_ALIASES = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_pytorch_tanh_no_mul": "gelu_tanh_no_mul"}

# The parameters an activation takes, with their defaults; any other is refused by name.
_PARAMETERS: Mapping[str, Mapping[str, float | None]] = {
    "silu": {"limit": None},
    "swigluoai": {"limit": 7.0, "alpha": 1.702, "beta": 1.0},
    "swigluoai_uninterleave": {"limit": None, "alpha": 1.0, "beta": 0.0},
    "swiglustep": {"limit": 7.0},
}


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class ActivationConfig:
    """What is said of an activation. ``MoEConfig`` is one; ``resolve_activation`` makes the function of it.

    Args:
        activation: one of ``ACTIVATIONS`` or an alias.
        is_act_and_mul: gated: the activation of one projection multiplies another.
        swiglu_limit: clamp of clamped SwiGLU activations; None for the activation's default, as the other two.
        swiglu_alpha: factor inside the sigmoid.
        swiglu_beta: added to the up projection.
    """

    activation: str = "silu"
    is_act_and_mul: bool = True
    swiglu_limit: float | None = None
    swiglu_alpha: float | None = None
    swiglu_beta: float | None = None

    def __post_init__(self) -> None:
        check_booleans(self)
        given = ("swiglu_limit", "swiglu_alpha", "swiglu_beta")
        check_numbers(self, *(name for name in given if getattr(self, name) is not None))

    @property
    def num_projections(self) -> int:
        """G: matrices stacked in w13, 2 (gate and up) when gated, else 1."""
        return 2 if self.is_act_and_mul else 1


def parse_activation(name: str, *, is_gated: bool = True) -> str:
    """The canonical name: aliases resolved, and "_no_mul" appended when the activation is not gated.

    name: one of ``ACTIVATIONS`` or an alias. is_gated: False turns "silu" into "silu_no_mul"; a name that ends in
    "_no_mul" is not gated whatever is said here. Raises ValueError for an unknown name, listing all, and for one that
    does not exist in the form asked for.
    """
    canonical = _ALIASES.get(name, name)
    if canonical not in ACTIVATIONS:
        raise ValueError(f"activation={name!r}, expected one of {', '.join((*ACTIVATIONS, *_ALIASES))}")
    if not is_gated and not canonical.endswith(NOT_GATED_SUFFIX):
        canonical += NOT_GATED_SUFFIX
        if canonical not in ACTIVATIONS:
            raise ValueError(f"activation={name!r} exists gated only; pass is_act_and_mul=True")
    if canonical == "relu2":
        raise ValueError("activation='relu2' has no gated form; pass is_act_and_mul=False or 'relu2_no_mul'")
    return canonical


def resolve_activation(config: ActivationConfig) -> Activation:
    """The activation of a layer with its parameters: those of the config, else the defaults of the activation.

    =======================  ============  ============  ===========
    name                     swiglu_limit  swiglu_alpha  swiglu_beta
    =======================  ============  ============  ===========
    silu                     no clamp      refused       refused
    swigluoai                7             1.702         1
    swigluoai_uninterleave   required      1             0
    swiglustep               7             refused       refused
    others                   refused       refused       refused
    =======================  ============  ============  ===========

    Raises ValueError for an unknown name, a parameter that the activation does not take, lacks or cannot use, and for
    an ``is_act_and_mul`` that contradicts a "_no_mul" name.
    """
    name = parse_activation(config.activation, is_gated=config.is_act_and_mul)
    if config.is_act_and_mul and name.endswith(NOT_GATED_SUFFIX):
        raise ValueError(f"activation={config.activation!r} is not gated; pass is_act_and_mul=False")
    defaults = _PARAMETERS.get(name, {})
    given = {"limit": config.swiglu_limit, "alpha": config.swiglu_alpha, "beta": config.swiglu_beta}
    parameters = {parameter: value for parameter, value in defaults.items() if value is not None}
    for parameter, value in given.items():
        if value is None:
            continue
        if parameter not in defaults:
            takes = ", ".join(f"swiglu_{p}" for p in defaults) or "no parameters"
            raise ValueError(f"activation={name!r} does not take swiglu_{parameter}={value}; it takes {takes}")
        if not math.isfinite(value) or (parameter == "limit" and value <= 0):
            expected = "a positive number" if parameter == "limit" else "a finite number"
            raise ValueError(f"swiglu_{parameter}={value}, expected {expected}")
        parameters[parameter] = float(value)
    if name == "swigluoai_uninterleave" and "limit" not in parameters:
        raise ValueError(f"activation={name!r} needs swiglu_limit")
    return Activation(name, **parameters)


def apply_activation(h: Float[Array, "*lead G I"], config: ActivationConfig) -> Float[Array, "*lead I"]:
    """Activate the first product of the experts in float32.

    h: (..., G, I), G = 2 when gated with h[..., 0, :] the gate (w1) and h[..., 1, :] up (w3), else G = 1.
    Returns (..., I) float32. Raises ValueError as ``resolve_activation``, or when G does not fit.
    """
    activation = resolve_activation(config)
    projections = 2 if activation.is_gated else 1
    if h.shape[-2] != projections:
        raise ValueError(f"h has shape {h.shape}, expected (..., {projections}, I) for activation {activation.name!r}")
    h = h.astype(jnp.float32)
    return activation(h[..., 0, :], h[..., 1, :]) if activation.is_gated else activation(h[..., 0, :])


def split_halves(h: Float[Array, "*lead N"]) -> Float[Array, "*lead 2 I"]:
    """(..., 2I) with the gate in the first I columns and up in the last, as (..., 2, I)."""
    return h.reshape(*h.shape[:-1], 2, h.shape[-1] // 2)


def split_interleaved(h: Float[Array, "*lead N"]) -> Float[Array, "*lead 2 I"]:
    """(..., 2I) with the gate in the even columns and up in the odd ones (gpt-oss checkpoints), as (..., 2, I)."""
    return jnp.swapaxes(h.reshape(*h.shape[:-1], h.shape[-1] // 2, 2), -1, -2)
