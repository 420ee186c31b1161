"""``grouped_gemm_packed``: rows in expert order times packed weights of their experts."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from pallas_kernels.common.activations import Activation
from pallas_kernels.common.device import hopper_sms
from pallas_kernels.common.implementations import first_that_runs
from pallas_kernels.common.rows import check_unpermuted_rows, in_every_tile, scales_in_every_tile
from pallas_kernels.grouped_gemm.packed.config import PackedConfig, PackedDesc, config_error
from pallas_kernels.grouped_gemm.packed.format import BLOCK_N, pad_to
from pallas_kernels.grouped_gemm.packed.heuristics import choose_config
from pallas_kernels.grouped_gemm.packed.layout import PackedWeights
from pallas_kernels.grouped_gemm.packed.reference import grouped_gemm_packed_ref


def grouped_gemm_packed(
    x: Any,
    w: PackedWeights,
    tile_expert: Any,
    num_tiles: Any,
    *,
    x_scale: Any = None,
    bias: Any = None,
    activation: Activation | None = None,
    out_dtype: Any = jnp.bfloat16,
    block_m: int | None = None,
    config: PackedConfig | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Any:
    """Grouped GEMM over rows in expert order, each expert's rows starting at a tile of their own, weights packed.

    x: (Mp, K) of ``w.fmt.operand``. tile_expert: (Mp / block_m,) int32, the expert of each tile of rows, and so the
    tile size. num_tiles: () or (1,) int32, tiles in use. x_scale: None, () per tensor or (Mp,) per row, float32; it
    multiplies the product. bias: (E[, G], N), added before the activation. activation: applied to the product; gated
    ones need G = 2 stacked projections. block_m: with it x is (T, K), T <= block_m: the first rows of every tile, as
    ``align`` places them by_token. Scales of rows are then those of one tile, (block_m,), of any value past T.

    Returns (Mp, N) out_dtype; rows of tiles from num_tiles on are unspecified. Raises ValueError or TypeError for a
    wrong call and NotImplementedError, with one reason for each implementation tried, when none can run it. config: of
    the mosaic implementation; chosen when None.
    """
    if x.ndim != 2 or x.shape[1] != w.k:
        raise ValueError(f"x has shape {x.shape}, expected (Mp, {w.k})")
    if jnp.dtype(x.dtype).name != w.fmt.operand:
        raise TypeError(f"x is {x.dtype}, these weights are packed for {w.fmt.operand}")
    expected_halves = 1 if activation is None or not activation.is_gated else 2
    if w.projections != expected_halves:
        name = "no activation" if activation is None else activation.name
        raise ValueError(f"w has {w.projections} projections; {name} needs {expected_halves}")
    tiles = tile_expert.shape[0] if tile_expert.ndim == 1 else 0
    rows, unpermuted_rows = x.shape[0], 0
    if block_m is not None:
        check_unpermuted_rows(rows, block_m)
        unpermuted_rows, rows = rows, tiles * block_m
    if not tiles or rows % tiles:
        raise ValueError(f"tile_expert has shape {tile_expert.shape}, expected (Mp / block_m,) for Mp={rows} rows")
    for name, value in (("tile_expert", tile_expert), ("num_tiles", num_tiles)):
        if value.dtype != jnp.int32:
            raise TypeError(f"{name} is {value.dtype}, expected int32")
    if bias is not None:
        if math.prod(bias.shape) != w.num_experts * w.projections * w.n or bias.shape[-1] != w.n:
            raise ValueError(f"bias has shape {bias.shape}, expected {(w.num_experts, w.projections, w.n)}")
        bias = bias.reshape(w.num_experts, w.projections, w.n)
    lhs_scale = "none"
    if x_scale is not None:
        scaled = rows if block_m is None else block_m
        if x_scale.shape not in ((), (scaled,)) or x_scale.dtype != jnp.float32:
            raise ValueError(f"x_scale is {x_scale.dtype} {x_scale.shape}, expected float32 () or {(scaled,)}")
        lhs_scale = "row" if x_scale.ndim else "tensor"
    desc = dataclasses.replace(
        describe_call(rows, w, out_dtype, lhs_scale, bias, activation), unpermuted_rows=unpermuted_rows
    )
    operands = dict(x=x, w=w, tile_expert=tile_expert, num_tiles=num_tiles, x_scale=x_scale, bias=bias)
    runs = {name: functools.partial(run, desc, config, operands) for name, run in _RUN.items()}
    return first_that_runs("grouped_gemm_packed", runs, implementation)


def describe_call(
    rows: int, w: PackedWeights, out_dtype: Any, lhs_scale: Any, bias: Any, activation: Activation | None
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


def _run_mosaic(desc: PackedDesc, config: PackedConfig | None, operands: dict[str, Any]) -> Any:
    block_m = desc.rows // operands["tile_expert"].shape[0]
    if config is None:
        config = choose_config(desc, block_m, hopper_sms())
    elif config.block_m != block_m:
        raise ValueError(f"config.block_m={config.block_m}, but tile_expert has tiles of {block_m} rows")
    if reason := config_error(desc, config):
        raise NotImplementedError(reason)
    w = operands["w"]
    flat = dict(
        operands,
        x=pad_to(operands["x"], 1, desc.fmt.block_k),
        num_tiles=operands["num_tiles"].reshape(1),
        w=_flat(w.words),
        scale=_flat(w.scale),
        zero=_flat(w.zero),
        channel_scale=_flat(w.channel_scale),
    )
    if desc.bias_dtype is not None:
        flat["bias"] = pad_to(operands["bias"], -1, BLOCK_N).reshape(-1, BLOCK_N)
    if desc.lhs_scale == "tensor":
        flat["x_scale"] = operands["x_scale"].reshape(1)

    # here: importing it loads Pallas
    from pallas_kernels.grouped_gemm.packed.kernel_sm90 import grouped_gemm_packed_sm90

    return grouped_gemm_packed_sm90(desc, config)(flat)


def _flat(array: Any) -> Any:
    """(E, NB, G, ...) -> (E * NB * G, ...)."""
    return None if array is None else array.reshape(-1, *array.shape[3:])


def _run_reference(desc: PackedDesc, config: PackedConfig | None, operands: dict[str, Any]) -> Any:
    del config
    if desc.unpermuted_rows:
        tiles = operands["tile_expert"].shape[0]
        x_scale = scales_in_every_tile(operands["x_scale"], tiles)
        operands = dict(operands, x=in_every_tile(operands["x"], tiles, desc.rows // tiles), x_scale=x_scale)
    return grouped_gemm_packed_ref(desc, **operands)


_RUN = {"mosaic": _run_mosaic, "reference": _run_reference}
