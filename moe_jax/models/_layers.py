"""Dense building blocks: RMSNorm, Linear, Embedding, gated feed-forward. Weights are (out, in), as on disk.

With ``rngs=None`` a module is abstract: its parameters are ``jax.ShapeDtypeStruct`` until a checkpoint fills them.
The weight of a Linear or Head may be a ``QuantizedMatrix``, see ``keep_quantized``.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from moe_jax._typing import Array, DTypeLike, Float, Int
from moe_jax.experts._low_rank import adapter_dtype, low_rank_product
from moe_jax.experts._matrix import in_best_matrix_layout, joins, multiply, padded_product, parts_of_product
from moe_jax.models._partition import WHOLE, Partitioned, partitioned
from moe_jax.nn import LoRAParam, QuantizedParam
from moe_jax.nn._lora import Adapter
from moe_jax.parallel._logical import EMBED, MLP, VOCAB
from moe_jax.quantization import LowRank, QuantizedMatrix, Scheme, method_for
from pallas_kernels.combine import RoutedRows

MANY_ROWS = 256  # from here on a product is bound by its arithmetic, and one weight's on a GPU is cuBLAS's
_TILES = 320  # of a product, 64 x 64, that give each SM of a GPU enough to read
_LEAST_DEPTH = 64  # of a part of a product
_ROUTER_DEPTH = 128  # the same for router logits, whose parts one warp adds up; deeper ones XLA would split again
_MANY_ROUTED = 1025  # from so many rows on router logits come from one product: parts are no faster (H100)


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


class ZeroCenteredRMSNorm(RMSNorm):
    """``RMSNorm`` whose weight is stored minus one."""

    def __init__(self, size: int, *, eps: float, dtype: DTypeLike = jnp.bfloat16, rngs: nnx.Rngs | None = None):
        self.eps = eps
        self.weight: nnx.Param[Array] = parameter((size,), dtype, rngs, nnx.initializers.zeros)

    def __call__(self, x: Float[Array, "... H"]) -> Float[Array, "... H"]:
        return (scaled_to_unit(x, self.eps) * (1 + self.weight[...].astype(jnp.float32))).astype(x.dtype)


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


NORMS: dict[str, type[RMSNorm] | type[LayerNorm]] = {
    "rms": RMSNorm,
    "zero_centered_rms": ZeroCenteredRMSNorm,
    "layer": LayerNorm,
}


class LinearLoRA(Adapter):
    """What adapters add to the weight (N, K) of a Linear: ``alpha / rank * b a``.

    a: (R, K). b: (N, R). Both ``LoRAParam``, R = rank.
    """

    def __init__(self, a: Array, b: Array, *, ranks: Sequence[int], alphas: Sequence[float], names: Sequence[str] = ()):
        self._hold(ranks, alphas, names)
        self.a, self.b = LoRAParam(a), LoRAParam(b)

    def __call__(self, x: Float[Array, "... K"]) -> Float[Array, "... N"]:
        """The addend of a product, float32; operands are rounded to x's dtype, float32 for float16."""
        y = low_rank_product(x.reshape(-1, x.shape[-1]), self.addend(x.shape[:-1]), adapter_dtype(x.dtype))
        return y.reshape(*x.shape[:-1], -1)

    def addend(self, lead: tuple[int, ...] | None = None) -> LowRank:
        """Without an expert axis. lead: axes of the tokens of a call; None: no call is made."""
        chosen = None if lead is None else self.chosen(lead)
        return LowRank(self.a.get_value(), self.b.get_value(), jnp.asarray(self.scales()), chosen)


class Linear(nnx.Module):
    """y = x W^T + b: x (..., in) -> (..., out) in ``out_dtype`` (None: x's dtype), summed in float32.

    weight: (out, in) in ``dtype``, then x must have this dtype, or quantized. bias: (out,) in ``dtype`` or None.
    dtype, implementation: of products with a quantized weight: x's dtype, and names of backends in the order to try,
    None for that of the platform.
    is_dequantized: others read the weight, so that a quantized one is dequantized when it is loaded.
    lora: an adapter that is added to the product, see ``moe_jax.lora``.
    """

    dtype: DTypeLike = jnp.bfloat16
    implementation: tuple[str, ...] | None = None
    lora: LinearLoRA | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = False,
        dtype: DTypeLike = jnp.bfloat16,
        out_dtype: DTypeLike | None = None,
        is_dequantized: bool = False,
        rngs: nnx.Rngs | None = None,
    ):
        self.out_dtype = out_dtype
        self.is_dequantized = is_dequantized
        init = nnx.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=1, out_axis=0)
        self.weight: nnx.Variable[Any] = parameter((out_features, in_features), dtype, rngs, init)
        self.bias = parameter((out_features,), dtype, rngs, nnx.initializers.zeros) if use_bias else None

    def __call__(self, x: Float[Array, "... K"]) -> Float[Array, "... N"]:
        return product(self, x, x.dtype if self.out_dtype is None else self.out_dtype)

    def partial_sums(self, x: Float[Array, "... K"]) -> Float[Array, "P T N"] | None:
        """Of a float32 product of few rows on a GPU, whose sum is no launch then; None where it is not split."""
        weight, num_tokens = self.weight.get_value(), x.size // x.shape[-1]
        is_plain = not isinstance(weight, QuantizedMatrix) and self.bias is None and self.lora is None
        if not is_plain or self.out_dtype != jnp.float32 or x.dtype.itemsize != 2 or jax.default_backend() != "gpu":
            return None
        if not 1 < num_tokens < _MANY_ROUTED:
            return None
        parts = split_product(x.reshape(num_tokens, -1), self.weight[...], _ROUTER_DEPTH, below=_MANY_ROUTED)
        return parts if parts.shape[0] > 1 else None


def product(module: "Linear | Vocabulary", x: Float[Array, "... K"], out_dtype: DTypeLike) -> Float[Array, "... N"]:
    """x W^T + b with a module's weight and bias: summed in float32, rounded once to ``out_dtype``."""
    weight, bias = module.weight.get_value(), None if module.bias is None else module.bias[...]
    if isinstance(weight, QuantizedMatrix):
        summed_in = out_dtype if module.lora is None else jnp.float32
        y = multiply(x, weight, bias, out_dtype=summed_in, implementation=module.implementation)
    else:
        is_final = bias is None and module.lora is None and jnp.dtype(out_dtype) == x.dtype
        y = rounded_product(x, weight) if is_final else project(x, weight)
        y = y if bias is None else y + bias.astype(jnp.float32)
    return (y if module.lora is None else y + module.lora(x)).astype(out_dtype)


def keep_quantized(
    module: "Linear | Head", scheme: Scheme, dtype: DTypeLike, implementation: tuple[str, ...] | None
) -> None:
    """Give an abstract module the weight that a checkpoint of this scheme fills; ``dtype`` is that of computation."""
    module.dtype, module.implementation = jnp.dtype(dtype), implementation
    matrix = QuantizedMatrix(method_for(scheme).abstract_matrix(*module.weight.shape), scheme)
    axes = module.weight.get_metadata(exclude_required=True)
    module.weight = QuantizedParam(in_computed_layout(module, matrix), eager_sharding=False, **axes)


def in_computed_layout(module: "Linear | Head", matrix: QuantizedMatrix) -> QuantizedMatrix:
    """A plain matrix as the module's products read it fastest."""
    return in_best_matrix_layout(matrix, module.dtype, module.implementation)


def project(
    x: Float[Array, "... K"], weight: Float[Array, "N K"], dtype: DTypeLike = jnp.float32
) -> Float[Array, "... N"]:
    """x W^T, summed in float32; both operands have one dtype."""
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, weight, contract, precision=precision_of(x.dtype), preferred_element_type=dtype)


@dataclasses.dataclass(frozen=True)
class PartialSums:
    """A product as it was written, for a kernel that reads it so.

    parts: (P, R, N) whose sum over P, in this order, is the product; float32, or with P = 1 the dtype of the product.
    Rows past the tokens mean nothing. lead: axes of the tokens. biases: vectors that side by side, (N,), are still to
    be added to the sum; then parts are float32.
    """

    parts: Array
    lead: tuple[int, ...]
    biases: tuple[Array, ...] = ()

    def whole(self, dtype: DTypeLike) -> Float[Array, "... N"]:
        """The product, rounded once."""
        size = math.prod(self.lead)
        rows = self.parts[:, :size]
        y = rows[0] if rows.shape[0] == 1 else jnp.sum(rows.astype(jnp.float32), axis=0)
        y = y + jnp.concatenate(self.biases).astype(jnp.float32) if self.biases else y
        return y.reshape(*self.lead, -1).astype(dtype)


# What a layer hands on to be added to x by who comes next, and None for zeros.
Addend: TypeAlias = Array | PartialSums | RoutedRows | None


def partial_sums(module: Linear, x: Float[Array, "... K"], *, splits_quantized: bool = False) -> PartialSums:
    """``module(x)`` in x's dtype, in parts where it has few rows. No axis of x is empty.

    splits_quantized: products with quantized weights may come in parts, too.
    """
    weight, lead = module.weight.get_value(), x.shape[:-1]
    biases, tokens = tuple(biases_of([module])), x.reshape(-1, x.shape[-1])
    if module.lora is not None:
        return PartialSums(module(x).reshape(1, tokens.shape[0], -1), lead)
    if not isinstance(weight, QuantizedMatrix):
        return PartialSums(split_product(tokens, weight, is_rounded=not biases), lead, biases)
    options: dict[str, Any] = dict(out_dtype=x.dtype, implementation=module.implementation)
    parts = parts_of_product(weight, len(tokens), x.dtype, module.implementation) if splits_quantized else 1
    if parts == 1:
        return PartialSums(padded_product(tokens, weight, *biases, **options)[None], lead)
    y = padded_product(tokens, weight, **options | dict(out_dtype=jnp.float32, parts=parts))
    return PartialSums(y.reshape(parts, -1, y.shape[-1]), lead, biases)


def side_by_side(modules: Sequence[Linear], x: Float[Array, "... K"], out_dtype: DTypeLike) -> PartialSums | None:
    """The products of x with the quantized weights of several modules in one array, from one launch.

    None where a weight is not quantized or has an adapter, an axis of x is empty, or no backend joins the products.
    """
    matrices = tuple(module.weight.get_value() for module in modules)
    biases, names = tuple(biases_of(modules)), {module.implementation for module in modules}
    is_joined = all(isinstance(one, QuantizedMatrix) for one in matrices) and len(names) == 1 and 0 not in x.shape
    if not is_joined or len(biases) not in (0, len(modules)) or any(module.lora is not None for module in modules):
        return None
    options: dict[str, Any] = dict(out_dtype=out_dtype, implementation=names.pop())
    tokens = x.reshape(-1, x.shape[-1])
    if not joins(matrices, tokens.shape[0], x.dtype, has_bias=bool(biases), **options):
        return None
    return PartialSums(padded_product(tokens, matrices, biases or None, **options)[None], x.shape[:-1])


def biases_of(modules: Sequence[Linear]) -> list[Array]:
    return [module.bias[...] for module in modules if module.bias is not None]


def split_product(
    x: Float[Array, "T K"],
    weight: Float[Array, "N K"],
    least_depth: int = _LEAST_DEPTH,
    *,
    below: int = MANY_ROWS,
    is_rounded: bool = True,
) -> Float[Array, "P T N"]:
    """Partial sums of x W^T in float32; with P = 1 the product, in x's dtype where it is_rounded.

    XLA splits products of few rows along K, so that all SMs read the weight, and adds the parts in a launch of its own.
    A product that is split already it leaves as it is.
    """
    (num_tokens, k), n = x.shape, weight.shape[0]
    tiles, parts = -(-num_tokens // 64) * -(-n // 64), 1
    if 1 < num_tokens < below:  # one row is a product of a vector, which XLA does not split
        while 2 * parts * tiles <= _TILES and k % (2 * parts) == 0 and k // (2 * parts) >= least_depth:
            parts *= 2
    if parts == 1:
        return (rounded_product(x, weight) if is_rounded else project(x, weight))[None]
    x, weight = x.reshape(num_tokens, parts, -1), weight.reshape(n, parts, -1)
    contract = (((2,), (2,)), ((1,), (1,)))
    options: Any = dict(precision=precision_of(x.dtype), preferred_element_type=jnp.float32)
    return jax.lax.dot_general(x, weight, contract, **options)


def rounded_product(x: Float[Array, "... K"], weight: Float[Array, "N K"]) -> Float[Array, "... N"]:
    """``project`` rounded to x's dtype."""
    return project(x, weight, x.dtype if _rounds_in_product(x) else jnp.float32).astype(x.dtype)


def _rounds_in_product(x: Float[Array, "... K"]) -> bool:
    """Whether a product writes 16 bits itself. On a GPU XLA may write float32 otherwise, and rounds in the next kernel.

    Products of few rows may be split along K, and partial sums then be rounded too. XLA's CPU client has no such
    products.
    """
    return x.dtype.itemsize == 2 and jax.default_backend() == "gpu" and x.size // x.shape[-1] >= MANY_ROWS


class Vocabulary(Partitioned):
    """A (vocab, H) weight; over a mesh split by the vocabulary where that divides, which adds nothing up, else by H."""

    dtype: DTypeLike = jnp.bfloat16  # this and the next three as of Linear
    implementation: tuple[str, ...] | None = None
    lora: LinearLoRA | None = None
    is_dequantized: bool = False

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
        self.weight: nnx.Variable[Any] = parameter((vocab_size, hidden_size), dtype, rngs, init)
        zeros = nnx.initializers.zeros
        self.bias: nnx.Param[Array] | None = parameter((vocab_size,), dtype, rngs, zeros) if use_bias else None
        self.name_parameters()

    def logical_axes(self) -> Mapping[str, tuple[str | None, ...]]:
        return {"weight": (VOCAB, EMBED)} | ({} if self.bias is None else {"bias": (VOCAB,)})

    def split_names(self, parts: int) -> Collection[str]:
        sizes = zip((VOCAB, EMBED), self.weight.shape, strict=True)
        return [name for name, size in sizes if size % parts == 0][:1]

    def logits(self, x: Float[Array, "... H"]) -> Float[Array, "... V"]:
        """x W^T + b in float32; over a mesh split as the vocabulary is."""
        splits = {} if self.partition is None else self.splits(self.partition.parts)
        return partitioned(Vocabulary._logits, self, x.ndim - 1 if splits.get("weight") == 0 else WHOLE, x)

    def _logits(self, x: Float[Array, "... H"]) -> Float[Array, "... V"]:
        return product(self, x, jnp.float32)


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

    is_dequantized = True

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
        self.name_parameters()

    def logical_axes(self) -> Mapping[str, tuple[str | None, ...]]:
        return {"gate_proj": (MLP, EMBED), "up_proj": (MLP, EMBED), "down_proj": (EMBED, MLP)}

    def split_names(self, parts: int) -> Collection[str]:
        return () if self.gate_proj.weight.shape[0] % parts else (MLP,)

    def __call__(self, x: Float[Array, "... H"]) -> Float[Array, "... H"]:
        return partitioned(GatedMLP._forward, self, WHOLE, x)

    def _forward(self, x: Float[Array, "... H"]) -> Float[Array, "... H"]:
        both = None if self.partition is not None else side_by_side((self.gate_proj, self.up_proj), x, jnp.float32)
        gate, up = (self.gate_proj(x), self.up_proj(x)) if both is None else jnp.split(both.whole(jnp.float32), 2, -1)
        return self.down_proj((jax.nn.silu(gate) * up).astype(x.dtype))


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
