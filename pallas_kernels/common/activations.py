"""Expert activations, elementwise, for references and kernel bodies alike. Shapes and dtype of the inputs are kept.

``gate`` and ``up`` are the two projections of a gated expert; a caller that wants float32 passes float32.
Each clamp bounds the gate from above only and ``up`` on both sides.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.types import Value

NOT_GATED_SUFFIX = "_no_mul"

Function = Callable[[Value], Value]


def silu(x: Value, sigmoid: Function = lax.logistic) -> Value:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


def gelu(x: Value) -> Value:
    """x/2 * (1 + erf(x / sqrt 2)). lax.erf rather than erfc, which kernels cannot lower: absolute error of |x| ulp."""
    return 0.5 * x * (1.0 + lax.erf(x * math.sqrt(0.5)))


def gelu_tanh(x: Value, sigmoid: Function = lax.logistic) -> Value:
    """x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))), with (1 + tanh y) / 2 = sigmoid(2y), which does not cancel."""
    return x * sigmoid(2.0 * math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x))


def relu2(x: Value) -> Value:
    """max(x, 0)^2."""
    positive = jnp.maximum(x, 0.0)
    return positive * positive


def swiglu(
    gate: Value,
    up: Value,
    *,
    limit: float | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    sigmoid: Function = lax.logistic,
) -> Value:
    """g * sigmoid(alpha * g) * (u + beta) with g = min(gate, limit) and u = clip(up, -limit, limit)."""
    if limit is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * sigmoid(alpha * gate) * (up + beta)


def swiglu_step(gate: Value, up: Value, *, limit: float | None = None, sigmoid: Function = lax.logistic) -> Value:
    """min(silu(gate), limit) * clip(up, -limit, limit): the gate is clamped after its non-linearity."""
    gate = silu(gate, sigmoid)
    if limit is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * up


@dataclasses.dataclass(frozen=True)
class Activation:
    """One activation with all its parameters filled in; static, hashable, callable inside a kernel body.

    name: "silu", "gelu", "gelu_tanh", "swigluoai", "swigluoai_uninterleave", "swiglustep" (gated), or "silu_no_mul",
    "gelu_no_mul", "gelu_tanh_no_mul", "relu2_no_mul". limit, alpha, beta: as in ``swiglu`` and ``swiglu_step``.
    """

    name: str
    limit: float | None = None
    alpha: float = 1.0
    beta: float = 0.0

    @property
    def is_gated(self) -> bool:
        return not self.name.endswith(NOT_GATED_SUFFIX)

    def __call__(self, gate: Value, up: Any = None, sigmoid: Function = lax.logistic) -> Value:
        """gate: any shape; up: the same shape, exactly when gated. sigmoid: how a kernel computes it."""
        match self.name:
            case "silu" | "swigluoai" | "swigluoai_uninterleave":
                return swiglu(gate, up, limit=self.limit, alpha=self.alpha, beta=self.beta, sigmoid=sigmoid)
            case "swiglustep":
                return swiglu_step(gate, up, limit=self.limit, sigmoid=sigmoid)
        match self.name.removesuffix(NOT_GATED_SUFFIX):
            case "gelu":
                value = gelu(gate)
            case "gelu_tanh":
                value = gelu_tanh(gate, sigmoid)
            case "relu2" if not self.is_gated:
                value = relu2(gate)
            case "silu":
                value = silu(gate, sigmoid)
            case _:
                raise ValueError(f"activation {self.name!r} has no formula")
        return value * up if self.is_gated else value


def slopes_refusal(activation: Activation) -> str | None:
    """Why ``with_slopes`` has no formula, or None."""
    if activation.limit is not None:
        return f"activation {activation.name} with limit={activation.limit}: no formula for the derivative of a clamp"
    if activation.name.removesuffix(NOT_GATED_SUFFIX) == "gelu":
        return f"activation {activation.name}: erf has no layout rule in Mosaic GPU (jax 0.10.2 and 0.11.2)"
    return None


def with_slopes(
    activation: Activation, gate: Value, up: Any = None, sigmoid: Function = lax.logistic
) -> tuple[Value, tuple[Value, ...]]:
    """The activation's value and its derivative by each projection, without JAX's transformations: for kernel bodies.

    Arguments as those of ``Activation``, which must have no ``slopes_refusal``.
    """
    name = activation.name.removesuffix(NOT_GATED_SUFFIX)
    if name == "relu2":
        positive = jnp.maximum(gate, 0.0)
        curve, slope = positive * positive, 2.0 * positive
    else:
        inner, inner_slope = activation.alpha * gate, activation.alpha
        if name == "gelu_tanh":
            factor, cubic = 2.0 * math.sqrt(2.0 / math.pi), 0.044715
            inner = factor * (gate + cubic * gate * gate * gate)
            inner_slope = factor * (1.0 + 3.0 * cubic * gate * gate)
        s = sigmoid(inner)
        curve = gate * s
        slope = s + curve * (1.0 - s) * inner_slope
    if not activation.is_gated:
        return curve, (slope,)
    other = up + activation.beta if activation.beta else up
    return curve * other, (slope * other, curve)
