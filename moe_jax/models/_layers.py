"""Dense building blocks: RMSNorm, Linear, Embedding, gated feed-forward. Weights are (out, in), as on disk.

With ``rngs=None`` a module is abstract: its parameters are ``jax.ShapeDtypeStruct`` until a checkpoint fills them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moe_jax._typing import Array, DTypeLike, Float, Int
from moe_jax.models._partition import WHOLE, Partitioned, partitioned


def parameter(
    shape: tuple[int, ...], dtype: DTypeLike, rngs: nnx.Rngs | None, init: Callable[..., Any]
) -> nnx.Param[Any]:
    """A parameter drawn from ``init``, or an abstract one when ``rngs`` is None."""
    if rngs is None:
        return nnx.Param(jax.ShapeDtypeStruct(shape, dtype))
    return nnx.Param(init(rngs.params(), shape, jnp.float32).astype(dtype))


def precision_of(dtype: DTypeLike) -> jax.lax.Precision | None:
    """float32 means float32: without this a GPU multiplies float32 operands in TF32 (10 bits of mantissa)."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis: float32 inside, one rounding to x's dtype at the end."""

    def __init__(self, size: int, *, eps: float, dtype: DTypeLike = jnp.bfloat16, rngs: nnx.Rngs | None = None):
        self.eps = eps
        self.weight: nnx.Param[Array] = parameter((size,), dtype, rngs, nnx.initializers.ones)

    def __call__(self, x: Float[Array, "... H"]) -> Float[Array, "... H"]:
        return (scaled_to_unit(x, self.eps) * self.weight[...].astype(jnp.float32)).astype(x.dtype)


def scaled_to_unit(x: Float[Array, "... H"], eps: float) -> Float[Array, "... H"]:
    """x / sqrt(mean(x^2) + eps) over the last axis, in float32."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)


class LayerNorm(nnx.Module):
    """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias over the last axis, rounded like ``RMSNorm``."""

    def __init__(self, size: int, *, eps: float, dtype: DTypeLike = jnp.bfloat16, rngs: nnx.Rngs | None = None):
        self.eps = eps
        self.weight: nnx.Param[Array] = parameter((size,), dtype, rngs, nnx.initializers.ones)
        self.bias: nnx.Param[Array] = parameter((size,), dtype, rngs, nnx.initializers.zeros)

    def __call__(self, x: Float[Array, "... H"]) -> Float[Array, "... H"]:
        wide = x.astype(jnp.float32)
        normal = scaled_to_unit(wide - jnp.mean(wide, axis=-1, keepdims=True), self.eps)
        return (normal * self.weight[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)).astype(x.dtype)


NORMS: dict[str, type[RMSNorm] | type[LayerNorm]] = {"rms": RMSNorm, "layer": LayerNorm}


class Linear(nnx.Module):
    """y = x W^T + b: x (..., in) -> (..., out) in ``out_dtype`` (None: x's dtype), summed in float32.

    weight: (out, in) in ``dtype``; bias: (out,) in ``dtype`` or None. x must have the weight's dtype.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = False,
        dtype: DTypeLike = jnp.bfloat16,
        out_dtype: DTypeLike | None = None,
        rngs: nnx.Rngs | None = None,
    ):
        self.out_dtype = out_dtype
        init = nnx.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=1, out_axis=0)
        self.weight = parameter((out_features, in_features), dtype, rngs, init)
        self.bias = parameter((out_features,), dtype, rngs, nnx.initializers.zeros) if use_bias else None

    def __call__(self, x: Float[Array, "... K"]) -> Float[Array, "... N"]:
        y = project(x, self.weight[...])
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype if self.out_dtype is None else self.out_dtype)


def project(x: Float[Array, "... K"], weight: Float[Array, "N K"]) -> Float[Array, "... N"]:
    """x W^T in float32; both operands have one dtype."""
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, weight, contract, precision=precision_of(x.dtype), preferred_element_type=jnp.float32)


class Vocabulary(Partitioned):
    """A (vocab, H) weight; over a mesh split by the vocabulary where that divides, which adds nothing up, else by H."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        init: Callable[..., Any],
        dtype: DTypeLike,
        rngs: nnx.Rngs | None,
        *,
        use_bias: bool = False,
    ):
        self.weight: nnx.Param[Array] = parameter((vocab_size, hidden_size), dtype, rngs, init)
        zeros = nnx.initializers.zeros
        self.bias: nnx.Param[Array] | None = parameter((vocab_size,), dtype, rngs, zeros) if use_bias else None

    def splits(self, parts: int) -> dict[str, int]:
        own = next(({"weight": axis} for axis in (0, 1) if self.weight.shape[axis] % parts == 0), {})
        return own | ({"bias": 0} if self.bias is not None and own.get("weight") == 0 else {})

    def logits(self, x: Float[Array, "... H"]) -> Float[Array, "... V"]:
        """x W^T + b in float32; over a mesh split as the vocabulary is."""
        splits = {} if self.partition is None else self.splits(self.partition.parts)
        return partitioned(Vocabulary._logits, self, x.ndim - 1 if splits.get("weight") == 0 else WHOLE, x)

    def _logits(self, x: Float[Array, "... H"]) -> Float[Array, "... V"]:
        y = project(x, self.weight[...])
        return y if self.bias is None else y + self.bias[...].astype(jnp.float32)


class Head(Vocabulary):
    """x (..., H) -> ``logits`` of the vocabulary."""

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        use_bias: bool = False,
        dtype: DTypeLike = jnp.bfloat16,
        rngs: nnx.Rngs | None = None,
    ):
        init = nnx.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=1, out_axis=0)
        super().__init__(vocab_size, hidden_size, init, dtype, rngs, use_bias=use_bias)


class Embedding(Vocabulary):
    """Rows of a (vocab, H) table. An id outside the table, a negative one too, gives NaN, not another token's row."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: DTypeLike = jnp.bfloat16, rngs: nnx.Rngs | None = None
    ):
        super().__init__(vocab_size, hidden_size, nnx.initializers.normal(0.02), dtype, rngs)

    def __call__(self, ids: Int[Array, "..."]) -> Float[Array, "... H"]:
        return partitioned(Embedding._rows, self, WHOLE, ids)

    def _rows(self, ids: Int[Array, "..."]) -> Float[Array, "... H"]:
        ids = jnp.where(ids < 0, self.weight.shape[0], ids.astype(jnp.int32))  # ``take`` counts these from the end
        return jnp.take(self.weight[...], ids, axis=0, mode="fill")


class GatedMLP(Partitioned):
    """Dense feed-forward layer: down(silu(gate(x)) * up(x)), the product in float32."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, dtype: DTypeLike = jnp.bfloat16, rngs: nnx.Rngs | None = None
    ):
        self.gate_proj = Linear(hidden_size, intermediate_size, dtype=dtype, out_dtype=jnp.float32, rngs=rngs)
        self.up_proj = Linear(hidden_size, intermediate_size, dtype=dtype, out_dtype=jnp.float32, rngs=rngs)
        self.down_proj = Linear(intermediate_size, hidden_size, dtype=dtype, rngs=rngs)

    def splits(self, parts: int) -> dict[str, int]:
        if self.gate_proj.weight.shape[0] % parts:
            return {}
        return {"gate_proj": 0, "up_proj": 0, "down_proj": 1}

    def __call__(self, x: Float[Array, "... H"]) -> Float[Array, "... H"]:
        return partitioned(GatedMLP._forward, self, WHOLE, x)

    def _forward(self, x: Float[Array, "... H"]) -> Float[Array, "... H"]:
        return self.down_proj((jax.nn.silu(self.gate_proj(x)) * self.up_proj(x)).astype(x.dtype))


class SharedExperts(GatedMLP):
    """The experts that every token passes, as one wider dense block: x (..., H) -> (..., H) in float32.

    gate: None, or a projection to one number whose sigmoid scales a token's output.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        has_gate: bool = False,
        dtype: DTypeLike = jnp.bfloat16,
        rngs: nnx.Rngs | None = None,
    ):
        super().__init__(hidden_size, intermediate_size, dtype=dtype, rngs=rngs)
        self.gate = Linear(hidden_size, 1, dtype=dtype, out_dtype=jnp.float32, rngs=rngs) if has_gate else None

    def __call__(self, x: Float[Array, "... H"]) -> Float[Array, "... H"]:
        y = super().__call__(x).astype(jnp.float32)
        return y if self.gate is None else y * jax.nn.sigmoid(self.gate(x))
