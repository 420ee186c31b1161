"""``grouped_gemm_packed``: rows in expert order times packed weights of their experts."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.common.activations import Activation
from pallas_kernels.common.device import hopper_sms
from pallas_kernels.common.implementations import check_config, first_that_runs
from pallas_kernels.grouped_gemm.api import (
    OF_SUM,
    Operands,
    check_block_m,
    check_tile_rows,
    check_tiles,
    describe_sum,
    expected_projections,
    in_turn,
    numbered,
    of_each_weight,
    permuted,
    side_by_side,
    sum_of_reference,
)
from pallas_kernels.grouped_gemm.packed.config import PackedConfig, config_error
from pallas_kernels.grouped_gemm.packed.format import BLOCK_N, pad_to
from pallas_kernels.grouped_gemm.packed.heuristics import choose_config
from pallas_kernels.grouped_gemm.packed.layout import PackedWeights
from pallas_kernels.grouped_gemm.packed.problem import PackedDesc
from pallas_kernels.grouped_gemm.packed.reference import grouped_gemm_packed_ref
from pallas_kernels.grouped_gemm.packed.vector import PackedVectorConfig


def grouped_gemm_packed(
    x: jax.Array,
    w: PackedWeights | tuple[PackedWeights, ...],
    tile_expert: jax.Array,
    num_tiles: jax.Array,
    *,
    x_scale: jax.Array | None = None,
    bias: jax.Array | tuple[jax.Array, ...] | None = None,
    activation: Activation | None = None,
    out_dtype: DTypeLike = jnp.bfloat16,
    block_m: int | None = None,
    tile_rows: jax.Array | None = None,
    row_of: jax.Array | None = None,
    slot_weights: jax.Array | None = None,
    shared: jax.Array | None = None,
    config: Any = None,
    implementation: str | Sequence[str] | None = None,
) -> jax.Array:
    """Grouped GEMM over rows in expert order, each expert's rows starting at a tile of their own, weights packed.

    Args:
        x: (Mp, K) of ``w.fmt.operand``.
        w: matrices (E, G, N, K) in the kernel layout; G = 2 stacks gate and up for a gated activation. A tuple of
            weights with E = 1 gives their products side by side, N being the sum; bias is then a tuple too.
        tile_expert: (Mp / block_m,) int32, the expert of each tile of rows, and so the tile size.
        num_tiles: () or (1,) int32, tiles in use.
        x_scale: None, or float32 () per tensor or (Mp,) per row; it multiplies the product.
        bias: (E[, G], N), added before the activation.
        activation: applied to the product; gated ones need G = 2.
        out_dtype: of the result.
        block_m: with it x is (T, K), T <= block_m: the unpermuted tokens, which are the first rows of every tile.
            Scales of rows are then those of one tile, (block_m,), of any value past T.
        tile_rows: (Mp / block_m,) int32, rows in use of each tile: the others may then be neither read nor written.
        row_of, slot_weights, shared: as ``grouped_gemm`` has them, for the sum of each token's rows, (T, N).
        config: PackedConfig of the hopper implementation, or PackedVectorConfig for tiles of 1 and 4 rows, MmaConfig of
            the portable one; chosen when None.
        implementation: "hopper", "portable" or "reference", or several in the order to try; all when None.

    Returns (Mp, N) out_dtype; rows of tiles from num_tiles on, and rows past tile_rows, are unspecified. Raises
    ValueError or TypeError for a wrong call and NotImplementedError, with one reason for each implementation tried,
    when none can run it.
    """
    each, (expected, name) = of_each_weight(w=w, bias=bias), expected_projections(activation)
    for own in each:
        one, own_bias = own["w"], own["bias"]
        if x.ndim != 2 or x.shape[1] != one.k:
            raise ValueError(f"x has shape {x.shape}, expected (Mp, {one.k})")
        if jnp.dtype(x.dtype).name != one.fmt.operand:
            raise TypeError(f"x is {x.dtype}, these weights are packed for {one.fmt.operand}")
        if one.projections != expected:
            raise ValueError(f"w has {one.projections} projections; {name} needs {expected}")
        if own_bias is not None:
            wanted = (one.num_experts, one.projections, one.n)
            if math.prod(own_bias.shape) != math.prod(wanted) or own_bias.shape[-1] != one.n:
                raise ValueError(f"bias has shape {own_bias.shape}, expected {wanted}")
            own["bias"] = own_bias.reshape(wanted)
    rows, unpermuted_rows, scaled = check_tiles(x, tile_expert, num_tiles, block_m)
    check_tile_rows(tile_rows, None, tile_expert)
    lhs_scale: Literal["none", "tensor", "row"] = "none"
    if x_scale is not None:
        if x_scale.shape not in ((), (scaled,)) or x_scale.dtype != jnp.float32:
            raise ValueError(f"x_scale is {x_scale.dtype} {x_scale.shape}, expected float32 () or {(scaled,)}")
        lhs_scale = "row" if x_scale.ndim else "tensor"
    descs = [describe_call(rows, own["w"], out_dtype, lhs_scale, own["bias"], activation) for own in each]
    desc = side_by_side(descs, is_one=not isinstance(w, tuple))
    desc = dataclasses.replace(desc, unpermuted_rows=unpermuted_rows, has_tile_rows=tile_rows is not None)
    of_tokens = dict(row_of=row_of, slot_weights=slot_weights, shared=shared)
    desc = dataclasses.replace(desc, **describe_sum(desc, **of_tokens))
    tiles = dict(tile_expert=tile_expert, num_tiles=num_tiles, tile_rows=tile_rows)
    operands = dict(x=x, x_scale=x_scale, **tiles, **of_tokens, **numbered(each))
    runs = {name: functools.partial(run, desc, config, operands) for name, run in _RUN.items()}
    return first_that_runs("grouped_gemm_packed", runs, implementation)


def describe_call(
    rows: int,
    w: PackedWeights,
    out_dtype: DTypeLike,
    lhs_scale: Literal["none", "tensor", "row"],
    bias: jax.Array | jax.ShapeDtypeStruct | None,
    activation: Activation | None,
) -> PackedDesc:
    """The description of a call; w and bias may be ShapeDtypeStructs."""
    return PackedDesc(
        rows=rows,
        n=w.n,
        k=w.words.shape[3] * w.fmt.block_k,
        num_experts=w.num_experts,
        fmt=w.fmt,
        out_dtype=jnp.dtype(out_dtype).name,
        projections=w.projections,
        scale_dtype="float32" if w.scale is None else jnp.dtype(w.scale.dtype).name,
        has_channel_scale=w.channel_scale is not None,
        lhs_scale=lhs_scale,
        bias_dtype=None if bias is None else jnp.dtype(bias.dtype).name,
        activation=activation,
    )


def _run_hopper(desc: PackedDesc, config: Any, operands: Operands) -> jax.Array:
    check_config(config, PackedConfig, PackedVectorConfig)
    block_m = check_block_m(config, operands, desc.rows)
    config = config or choose_config(desc, block_m, hopper_sms())
    if reason := config_error(desc, config):
        raise NotImplementedError(reason)
    # here: importing it loads Pallas
    from pallas_kernels.grouped_gemm.kernel_sm90 import grouped_gemm_sm90

    return grouped_gemm_sm90(desc, config)(_flattened(desc, operands))


def _flattened(desc: PackedDesc, operands: Operands) -> Operands:
    """Operands as the kernels take them: (E, NB, G, ...) as (E * NB * G, ...)."""
    each = []
    for weight, bias in zip(desc.of_each_weight("w"), desc.of_each_weight("bias"), strict=True):
        w: PackedWeights = operands[weight]
        leaves = dict(w=w.words, scale=w.scale, zero=w.zero, channel_scale=w.channel_scale)
        own = {name: leaf.reshape(-1, *leaf.shape[3:]) for name, leaf in leaves.items() if leaf is not None}
        if desc.bias_dtype is not None:
            own["bias"] = pad_to(operands[bias], -1, BLOCK_N).reshape(-1, BLOCK_N)
        each.append(own)
    flat = dict(numbered(each), x=pad_to(operands["x"], 1, desc.fmt.block_k), tile_expert=operands["tile_expert"])
    flat["num_tiles"] = operands["num_tiles"].reshape(1)
    flat |= {name: operands.get(name) for name in ("tile_rows", *OF_SUM)}
    if desc.lhs_scale != "none":
        flat["x_scale"] = operands["x_scale"].reshape(-1)
    return flat


def _run_portable(desc: PackedDesc, config: Any, operands: Operands) -> jax.Array:
    if desc.widths:
        raise NotImplementedError(f"{len(desc.widths)} weights side by side: the Hopper kernels read them")
    if desc.top_k:
        raise NotImplementedError("the sum of a token's rows: the Hopper kernel of single rows has it")
    from pallas_kernels.grouped_gemm.portable import run  # here: it loads Pallas

    block_m = check_block_m(config, operands, desc.rows)
    desc = dataclasses.replace(desc, has_tile_rows=False)  # tiles in use are written whole
    return run(desc, config, block_m, _flattened(desc, operands))


def _run_reference(desc: PackedDesc, config: Any, operands: Operands) -> jax.Array:
    del config
    if desc.top_k:
        return sum_of_reference(desc, operands, _run_reference)
    given = permuted(operands, desc.rows) if desc.unpermuted_rows else operands
    given = {name: leaf for name, leaf in given.items() if name not in ("tile_rows", *OF_SUM)}
    return in_turn(desc, given, ("w", "bias"), grouped_gemm_packed_ref)


_RUN = {"hopper": _run_hopper, "portable": _run_portable, "reference": _run_reference}
