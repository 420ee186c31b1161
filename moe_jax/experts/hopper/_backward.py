"""The gradient of the experts of a call, as a sequence of Pallas kernels for Hopper GPUs.

    align -> rows of x and of the output's cotangent g -> gate and up again -> g W2 -> derivative of the activation
    -> gradients of W2 and W13 -> rows of x's cotangent by W13 -> their sum over the experts of a token

Nothing but the call's own arguments is kept from the forward pass; where ``MoEConfig.keep_hidden`` asks for it, gate
and up are kept as well, and the backward pass begins at g W2. Rows are multiplied with their router weights after
g W2, so that the product with the hidden rows gives the gradient of these weights, and the experts' outputs are not
computed again: at once, or beside frozen quantized weights in the sum over the experts of a token. Products have
operands of the layer's dtype and float32 sums. Rows in the gaps between experts are zeros where sums over an expert's
rows are asked for, which run over whole tiles.

Weights in kernel layout, and plain ones of 8 bits, are dequantized inside of the kernels that multiply, and the
activation's derivative follows g W2 in its kernel. Other quantized weights are dequantized to the layer's dtype once
per backward pass, for 2 bytes per weight of one layer, freed after it. Activations count as unquantized, in the
derivative as in the hidden values that are computed again: rounding passes gradients straight through.
"""

import dataclasses
import functools
import os
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from moe_jax._config import MoEConfig
from moe_jax._typing import Array
from moe_jax.activations import apply_activation
from moe_jax.experts.hopper._aligned_call import AlignedCall, Kept, kept_bytes
from moe_jax.experts.hopper._experts import forward
from moe_jax.experts.hopper._gradient_products import (
    DenseProducts,
    PackedProducts,
    PlainProducts,
    PulledBefore,
    pulls_activation,
    quantized_operands,
)
from moe_jax.experts.hopper._kernel_layout import in_kernel_layout
from moe_jax.quantization import ExpertWeights, LowRank, Strategy
from pallas_kernels.grouped_gemm.wgrad import grouped_wgrad

_Products: TypeAlias = DenseProducts | PackedProducts | PlainProducts
_LAYER_UNIT = 64  # what H and I are multiples of, so that operands can be read transposed
# Whether quantized weights are read as they are. MOE_JAX_PACKED_GRADIENT=0 in the environment has them dequantized
# first, for measurements; it is read once, at import.
READS_PACKED = os.environ.get("MOE_JAX_PACKED_GRADIENT") != "0"


@dataclasses.dataclass(frozen=True)
class Static:
    """What is static about a differentiable call.

    kernels: the implementation of every kernel, by name. reads_packed: quantized weights are read as they are.
    """

    config: MoEConfig
    out_dtype: Any
    kernels: str = "hopper"
    reads_packed: bool = READS_PACKED


def gradient_refusal(config: MoEConfig, weights: ExpertWeights) -> str | None:
    """Why the gradient of a call that ``forward`` runs has no kernels, or None."""
    activations = weights.scheme.activations
    if activations is not None and not activations.dynamic:
        return f"has no gradient for activations with a static scale, which clips (scheme {weights.scheme.name!r})"
    for name, size in (("hidden_size", weights.hidden_size), ("intermediate_size", weights.intermediate_size)):
        if size % _LAYER_UNIT:
            return f"has no gradient for {name}={size}, which is not a multiple of {_LAYER_UNIT}"
    return None


def _shapes_of_operands(config: MoEConfig, weights: ExpertWeights) -> Any:
    """``quantized_operands`` as a gradient has them, without computing them."""
    return jax.eval_shape(functools.partial(quantized_operands, config), weights) if READS_PACKED else None


def describe_kept(config: MoEConfig, weights: ExpertWeights, num_tokens: int) -> str | None:
    """What ``MoEConfig.keep_hidden`` keeps beside the arguments of a call, in words; None where that is nothing."""
    operands = _shapes_of_operands(config, weights)
    if weights.scheme.is_quantized and operands is None:
        return None
    size = kept_bytes(config, weights, operands, num_tokens * config.top_k) / 2**20
    return f"gate and up of each row ({size:.1f} MiB)"


def describe_gradient(config: MoEConfig, weights: ExpertWeights) -> str:
    """How the gradient of a call runs, in words."""
    if (reason := gradient_refusal(config, weights)) is not None:
        return f"gradient: by the next implementation, since the kernel {reason}"
    if not weights.scheme.is_quantized:
        return "gradient: by kernels"
    activations = "" if weights.scheme.activations is None else ", activations as if they were not quantized"
    operands = _shapes_of_operands(config, weights)
    if operands is not None and in_kernel_layout(weights):
        return f"gradient: by kernels, packed weights dequantized in shared memory{activations}"
    if operands is not None:
        price = "plain weights dequantized in shared memory"
        assert weights.scheme.weights is not None
        if weights.scheme.weights.strategy is not Strategy.CHANNEL:
            size = 4 * sum(leaf.size for w in operands for leaf in (w.scale, w.channel_scale) if leaf is not None)
            price += f" ({size / 2**20:.1f} MiB for copies of scales)"
        return f"gradient: by kernels, {price}{activations}"
    numbers = weights.num_experts * weights.hidden_size * weights.intermediate_size * (config.num_projections + 1)
    size = numbers * config.dtype.itemsize / 2**30
    price = f"weights dequantized to {config.dtype.name} in each backward pass ({size:.2f} GiB)"
    return f"gradient: by kernels, {price}{activations}"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def differentiable(static: Static, x: Array, topk_weights: Array, topk_ids: Array, weights: ExpertWeights) -> Array:
    """``forward``, with a gradient by kernels; for calls without a ``gradient_refusal``."""
    return _forward(static, x, topk_weights, topk_ids, weights)


@functools.partial(jax.jit, static_argnums=0)
def _forward(static: Static, x: Array, topk_weights: Array, topk_ids: Array, weights: ExpertWeights) -> Array:
    return forward(
        static.config, x, topk_weights, topk_ids, weights, kernels=static.kernels, out_dtype=static.out_dtype
    )


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Wanted:
    """Which leaves of (x, topk_weights, weights) need a gradient, by position."""

    leaves: frozenset[int]

    def of(self, arguments: Any) -> Any:
        """In the structure of ``arguments``, which is that of (x, topk_weights, weights)."""
        leaves, structure = jax.tree.flatten(arguments)
        return structure.unflatten([index in self.leaves for index in range(len(leaves))])


def _save_for_backward(static: Static, x: Any, topk_weights: Any, topk_ids: Any, weights: Any) -> Any:
    differentiated = jax.tree.leaves((x, topk_weights, weights))
    wanted = _Wanted(frozenset(i for i, leaf in enumerate(differentiated) if leaf.perturbed))
    arguments = jax.tree.map(lambda leaf: leaf.value, (x, topk_weights, topk_ids, weights))
    if static.config.keep_hidden:
        y, kept = _forward_kept(static, wanted, *arguments)
    else:
        y, kept = _forward(static, *arguments), None
    return y, (arguments, wanted, kept)


def _backward(static: Static, residuals: Any, g: Any) -> Any:
    (x, topk_weights, topk_ids, weights), wanted, kept = residuals
    if isinstance(g, SymbolicZero):
        return None, None, None, None
    x_bar, topk_bar, weights_bar = _gradient(static, wanted, g, x, topk_weights, topk_ids, weights, kept)
    return x_bar, topk_bar, None, weights_bar


differentiable.defvjp(_save_for_backward, _backward, symbolic_zeros=True)


def _aligned(
    static: Static, x: Array, topk_ids: Array, weights: ExpertWeights, wants_weights: Any, kept: Kept | None
) -> AlignedCall:
    has_sums = any(jax.tree.leaves(wants_weights))
    return AlignedCall(static.config, static.kernels, static.reads_packed, x, topk_ids, weights, has_sums, kept)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward_kept(
    static: Static, wanted: _Wanted, x: Array, topk_weights: Array, topk_ids: Array, weights: ExpertWeights
) -> tuple[Array, Kept | None]:
    """``_forward``, with what the gradient by ``wanted`` takes instead of computing it again; None: it does that."""
    *_, wants_weights = wanted.of((x, topk_weights, weights))
    call = _aligned(static, x, topk_ids, weights, wants_weights, None)
    if call.is_dequantized:
        return _forward(static, x, topk_weights, topk_ids, weights), None
    return call.forward(topk_weights, static.out_dtype)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _gradient(
    static: Static,
    wanted: _Wanted,
    g: Array,
    x: Array,
    topk_weights: Array,
    topk_ids: Array,
    weights: ExpertWeights,
    kept: Kept | None,
) -> tuple[Array | None, Array | None, Any]:
    """Cotangents of x, of topk_weights and of the leaves of the weights; None for those that nobody asked for."""
    wants = wants_x, wants_topk, wants_weights = wanted.of((x, topk_weights, weights))
    call = _aligned(static, x, topk_ids, weights, wants_weights, kept)
    found = _Gradient(call, topk_weights)(g, wants_x, wants_topk, wants_weights)
    asked, structure = jax.tree.flatten(wants)
    bars = [bar if wants_it else None for bar, wants_it in zip(structure.flatten_up_to(found), asked, strict=True)]
    return structure.unflatten(bars)


@dataclasses.dataclass(frozen=True)
class _Gradient:
    """The gradient of one call."""

    call: AlignedCall
    topk_weights: Array

    def __call__(self, g: Array, wants_x: bool, wants_topk: bool, wants_weights: Any) -> tuple[Any, Any, Any]:
        """g: (T, H). wants_weights: of the structure of the weights, which leaves need a gradient.

        Returns cotangents in the structure of (x, topk_weights, weights).
        """
        call, weights, config, kernels = self.call, self.call.weights, self.call.config, self.call.kernels
        rows, products, tiles = call.rows, call.products, call.rows.tiles
        w13_addend, w2_addend = call.w13_addend, call.w2_addend
        g_rows, of_rows, of_pairs = call.moved(g), None, self.topk_weights
        if call.weighs_rows:
            of_rows, of_pairs = rows.of_pairs(of_pairs), jnp.ones_like(of_pairs)
        quantized_w2 = None if call.operands is None else call.operands[1]
        if pulls_activation(config, weights, quantized_w2) and (quantized_w2 is None or not call.has_sums):
            before, has_weighted = call.before, bool(wants_weights.w2.data)
            with jax.named_scope("hidden_cotangent_and_activation"):
                pulled_before = products.pulled_before(g_rows, before, of_rows, has_weighted=has_weighted)
        else:
            wide = call.wide
            with jax.named_scope("hidden_cotangent"):
                hidden_bar = products.pulled_hidden(g_rows).astype(jnp.float32)
            if w2_addend is not None:
                with jax.named_scope("w2_adapter"):
                    hidden_bar = hidden_bar + w2_addend.pulled(g_rows).rows().astype(jnp.float32)
            with jax.named_scope("activation"):
                pulled_before = _pulled_by_xla(config, wide, hidden_bar, of_rows, products)
        row_bar = pulled_before.row_bar

        contract = functools.partial(
            grouped_wgrad, first_row=rows.first, num_rows=tiles.group_sizes, implementation=kernels
        )
        w13_bar = w2_bar = x_bar = topk_bar = None
        loras: dict[str, LowRank] = {}
        if w13_addend is not None:
            with jax.named_scope("w13_adapter_gradient"):
                pulled = w13_addend.pulled(pulled_before.gate_up_bar)
                loras["w13_lora"] = pulled.leaves(call.x_rows, rows.first, wants_weights.w13_lora)
        if w2_addend is not None:
            with jax.named_scope("w2_adapter_gradient"):
                pulled = w2_addend.pulled(g_rows)
                loras["w2_lora"] = pulled.leaves(pulled_before.weighted, rows.first, wants_weights.w2_lora)
        if wants_weights.w2.data:
            with jax.named_scope("w2_gradient"):
                w2_bar = contract(g_rows, pulled_before.weighted, out_dtype=weights.w2.data.dtype)
        if wants_weights.w13.data:
            with jax.named_scope("w13_gradient"):
                own = weights.w13.data
                w13_bar = contract(pulled_before.gate_up_bar, call.x_rows, out_dtype=own.dtype).reshape(own.shape)
        if wants_x:
            with jax.named_scope("x_cotangent"):
                parts = [products.pulled_rows(pulled_before.before_bar)]
                if w13_addend is not None:
                    parts.append(w13_addend.pulled(pulled_before.gate_up_bar).rows())
                x_bar = rows.sum_of_tokens(parts, of_pairs, call.x.dtype)
        biases = dict.fromkeys(("w13_bias", "w2_bias"))
        if wants_weights.w13_bias:
            own = weights.w13_bias
            assert own is not None
            total = rows.sum_of_experts(pulled_before.gate_up_bar.astype(jnp.float32))
            biases["w13_bias"] = products.pull_bias(total.reshape(own.shape).astype(own.dtype))
        if weights.w2_bias is not None:
            wide_g = g_rows.astype(jnp.float32)
            row_bar = row_bar + jnp.sum(wide_g * rows.of_experts(weights.w2_bias.astype(jnp.float32)), axis=1)
            if wants_weights.w2_bias:
                assert of_rows is not None
                total = rows.sum_of_experts(wide_g * of_rows[:, None])
                biases["w2_bias"] = total.astype(weights.w2_bias.dtype)
        if wants_topk:
            topk_bar = jnp.where(tiles.row_of < 0, 0.0, row_bar[jnp.maximum(tiles.row_of, 0)])
        w13_leaf, w2_leaf = (
            dataclasses.replace(tensor, data=bar) for tensor, bar in ((weights.w13, w13_bar), (weights.w2, w2_bar))
        )
        return x_bar, topk_bar, dataclasses.replace(weights, w13=w13_leaf, w2=w2_leaf, **biases, **loras)


def _pulled_by_xla(
    config: MoEConfig, wide: Array, hidden_bar: Array, of_rows: Array | None, products: _Products
) -> PulledBefore:
    """wide: (Mp, G, I) float32, gate and up. hidden_bar: (Mp, I) float32, before it is multiplied with ``of_rows``;
    None for ones.
    """
    hidden, pull = jax.vjp(lambda h: apply_activation(h, config), wide)

    def weighted(values: Array) -> Array:
        return values if of_rows is None else values * of_rows[:, None]

    (wide_bar,) = pull(weighted(hidden_bar))
    wide_bar = wide_bar.astype(config.dtype)
    return PulledBefore(
        products.in_columns(wide_bar),
        jnp.sum(hidden * hidden_bar, axis=1),
        wide_bar.reshape(wide_bar.shape[0], -1),
        weighted(hidden).astype(config.dtype),
    )
