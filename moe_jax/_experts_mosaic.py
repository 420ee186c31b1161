"""The mosaic implementation: Pallas kernels for Hopper GPUs around an alignment computed by XLA.

    align -> quantize_and_permute -> grouped GEMM 1 (scales, bias, activation, requantization where the scale is local)
    -> row requantization where it is not -> grouped GEMM 2 (scales, bias) -> combine in float32

Group sizes stay on the device. Hidden activations are rounded to the layer's dtype before they are requantized per row
or per tensor, as the rounding points of vLLM's kernels have it.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax._align import align, row_capacity
from moe_jax._config import MoEConfig
from moe_jax._typing import Array
from moe_jax.activations import resolve_activation
from moe_jax.quantization import ExpertWeights, QuantFormat, Scheme, Strategy
from pallas_kernels.combine import combine
from pallas_kernels.common.device import hopper_sms
from pallas_kernels.common.numerics import E4M3_MAX, divide, magnitude
from pallas_kernels.grouped_gemm import choose_block_m, grouped_gemm
from pallas_kernels.grouped_gemm.config import GemmDesc
from pallas_kernels.grouped_gemm.heuristics import choose_config
from pallas_kernels.grouped_gemm.heuristics import describe as describe_config
from pallas_kernels.quantize_and_permute import quantize_and_permute

_16_BIT = ("bfloat16", "float16")


def why_not(config: MoEConfig, weights: ExpertWeights, num_tokens: int) -> str | None:
    """Why the kernels cannot run this layer on this device, or None."""
    if config.dtype.name not in _16_BIT:
        return f"computes in bfloat16 or float16, the layer in {config.dtype.name}"
    if _quantization(weights.scheme) is None:
        return f"there is no kernel for scheme {weights.scheme.name!r} yet"
    if not weights.scheme.is_quantized and weights.w13.data.dtype != config.dtype:
        return f"unquantized weights are {weights.w13.data.dtype}, expected the layer's dtype {config.dtype.name}"
    try:
        num_sms = hopper_sms()
    except NotImplementedError as error:
        return str(error)
    leaves, structure = jax.tree.flatten(weights)
    shapes = tuple((leaf.shape, jnp.dtype(leaf.dtype)) for leaf in leaves)
    return _refusal(dataclasses.replace(config, name=""), structure, shapes, num_tokens, num_sms)


@functools.lru_cache(maxsize=256)
def _refusal(config: MoEConfig, structure: Any, shapes: tuple[Any, ...], num_tokens: int, num_sms: int) -> str | None:
    """The first kernel that refuses, found by tracing; the layers of a model share one answer."""
    del num_sms  # part of the key: the answer depends on the device
    weights = structure.unflatten([jax.ShapeDtypeStruct(*shape) for shape in shapes])
    x = jax.ShapeDtypeStruct((num_tokens, weights.hidden_size), config.dtype)
    slots = (num_tokens, config.top_k)
    args = (x, jax.ShapeDtypeStruct(slots, jnp.float32), jax.ShapeDtypeStruct(slots, jnp.int32), weights)
    try:
        jax.eval_shape(functools.partial(forward, config), *args)
    except NotImplementedError as error:
        return str(error)
    return None


def describe(config: MoEConfig, weights: ExpertWeights, num_tokens: int) -> list[str]:
    """The configuration of both products, for ``explain``."""
    block_m = _block_m(num_tokens, config, weights)
    return [
        f"GEMM {number}: {describe_config(desc, choose_config(desc, block_m, hopper_sms()))}"
        for number, desc in enumerate(_descriptions(config, weights, num_tokens), 1)
    ]


def run(x: Array, topk_weights: Array, topk_ids: Array, weights: ExpertWeights, config: MoEConfig) -> Array:
    """Routed output in float32, before any rounding. Arguments as ``Implementation.run`` states them."""
    return _refusing_gradients(config, x, topk_weights, topk_ids, weights)


def forward(
    config: MoEConfig,
    x: Array,
    topk_weights: Array,
    topk_ids: Array,
    weights: ExpertWeights,
    *,
    kernels: str = "mosaic",
) -> Array:
    """``run`` with the implementation of every kernel given by name; "reference" runs anywhere."""
    num_tokens = x.shape[0]
    tile = _block_m(num_tokens, config, weights)
    alignment = align(topk_ids, weights.num_experts, tile)
    is_used = alignment.row_token < num_tokens
    count = alignment.num_tiles * tile
    gemm = functools.partial(
        grouped_gemm,
        tile_expert=jnp.maximum(alignment.tile_expert, 0),
        num_tiles=alignment.num_tiles,
        tile_rows=jnp.sum(is_used.reshape(-1, tile), axis=1, dtype=jnp.int32),
        out_dtype=config.dtype,
        implementation=kernels,
    )
    permute = functools.partial(quantize_and_permute, implementation=kernels)

    kind = _quantization(weights.scheme)
    if kind is None:
        raise NotImplementedError(f"there is no kernel for scheme {weights.scheme.name!r} yet")
    operand = x if weights.scheme.is_quantized else x.astype(config.dtype)
    scale = _tensor_scale(weights.scheme.activations, weights.w13.input_scale, operand, None)
    rows, row_scale = permute(operand, alignment.row_of, is_used.size, quantization=kind, scale=scale)
    hidden, hidden_scale = _hidden(
        config, weights, gemm, permute, kind, rows, scale if kind == "e4m3_tensor" else row_scale, is_used, count
    )
    out = gemm(hidden, weights.w2.data, x_scale=hidden_scale, w_scale=weights.w2.scale, bias=weights.w2_bias)
    return combine(out, alignment.row_of, topk_weights, out_dtype=jnp.float32, implementation=kernels)


def _hidden(
    config: MoEConfig,
    weights: ExpertWeights,
    gemm: Any,
    permute: Any,
    kind: str,
    rows: Array,
    row_scale: Array | None,
    is_used: Array,
    count: Array,
) -> tuple[Array, Array | None]:
    """GEMM 1 with its activation, and the operand of GEMM 2: (codes or values (Mp, I), scale)."""
    first = functools.partial(
        gemm,
        rows,
        weights.w13.data,
        x_scale=row_scale,
        w_scale=weights.w13.scale,
        bias=weights.w13_bias,
        activation=resolve_activation(config),
    )
    fmt = weights.scheme.activations
    if kind == "e4m3_group":
        return first(requantize="group")
    if kind == "e4m3_tensor" and not fmt.dynamic:
        return first(requantize="tensor", out_scale=weights.w2.input_scale), weights.w2.input_scale
    hidden = first()
    if kind == "none":
        return hidden, None
    scale = _tensor_scale(fmt, None, hidden, is_used)
    codes, code_scale = permute(hidden, quantization=kind, scale=scale, count=count)
    return codes, code_scale if scale is None else scale


def _tensor_scale(fmt: QuantFormat | None, static: Array | None, values: Array, is_used: Array | None) -> Array | None:
    """The one scale () of per-tensor activations: the checkpoint's, or amax / 448 over the rows in use."""
    if fmt is None or fmt.strategy is not Strategy.TENSOR:
        return None
    if not fmt.dynamic:
        return static
    values = magnitude(values.astype(jnp.float32))
    if is_used is not None:
        values = jnp.where(is_used[:, None], values, 0.0)
    return jnp.maximum(divide(jnp.max(values), E4M3_MAX), np.finfo(np.float32).tiny)


def _quantization(scheme: Scheme) -> str | None:
    """The kind of ``quantize_and_permute`` for a scheme's activations; None where no kernel fits the scheme."""
    weights, activations = scheme.weights, scheme.activations
    if weights is None:
        return "none"
    if activations is None:
        return None
    kinds = {
        ("e4m3", Strategy.TENSOR, "e4m3", Strategy.TENSOR): "e4m3_tensor",
        ("e4m3", Strategy.TENSOR, "e4m3", Strategy.TOKEN): "e4m3_row",
        ("e4m3", Strategy.CHANNEL, "e4m3", Strategy.TOKEN): "e4m3_row",
        ("e4m3", Strategy.BLOCK, "e4m3", Strategy.GROUP): "e4m3_group",
        ("int8", Strategy.CHANNEL, "int8", Strategy.TOKEN): "int8_row",
    }
    kind = kinds.get((weights.element, weights.strategy, activations.element, activations.strategy))
    if kind == "e4m3_group" and (weights.block_shape, activations.group_size) != ((128, 128), 128):
        return None
    return kind


def _block_m(num_tokens: int, config: MoEConfig, weights: ExpertWeights) -> int:
    """Rows of a tile, from the expected rows of an expert that is hit at all when routing is uniform."""
    experts = weights.num_experts
    hit = experts * (1 - (1 - min(config.top_k / experts, 1.0)) ** max(num_tokens, 1))
    return choose_block_m(num_tokens * config.top_k / hit)


def _descriptions(config: MoEConfig, weights: ExpertWeights, num_tokens: int) -> tuple[GemmDesc, GemmDesc]:
    """Both products as the kernels will see them."""
    kind = _quantization(weights.scheme)
    if kind is None:
        raise NotImplementedError(f"there is no kernel for scheme {weights.scheme.name!r} yet")
    lhs = {"none": "none", "e4m3_tensor": "tensor", "e4m3_group": "group"}.get(kind, "row")
    fmt = weights.scheme.weights
    rhs = "none" if fmt is None else fmt.strategy.value
    activations = weights.scheme.activations
    requantize = "none"
    if kind == "e4m3_group":
        requantize = "group"
    elif kind == "e4m3_tensor" and not activations.dynamic:
        requantize = "tensor"
    tile = _block_m(num_tokens, config, weights)
    bias = None if weights.w13_bias is None else jnp.dtype(weights.w13_bias.dtype).name
    common: dict[str, Any] = dict(
        rows=row_capacity(max(num_tokens, 1), config.top_k, weights.num_experts, tile),
        num_experts=weights.num_experts,
        dtype=jnp.dtype(weights.w13.data.dtype).name,
        out_dtype=config.dtype.name,
        lhs_scale=lhs,
        rhs_scale=rhs,
        bias_dtype=bias,
        has_tile_rows=True,
    )
    hidden, inner = weights.hidden_size, weights.intermediate_size
    activation = resolve_activation(config)
    return (
        GemmDesc(n=inner, k=hidden, halves=config.num_halves, activation=activation, requantize=requantize, **common),
        GemmDesc(n=hidden, k=inner, **common),
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _refusing_gradients(config, x, topk_weights, topk_ids, weights):
    return forward(config, x, topk_weights, topk_ids, weights)


@_refusing_gradients.defjvp
def _refuse(config, primals, tangents):
    raise NotImplementedError(
        "the mosaic implementation has no gradient; differentiate a layer with implementation='xla' or 'reference'"
    )
