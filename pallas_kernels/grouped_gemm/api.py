"""``grouped_gemm``: rows in expert order times the weights of their experts, with what surrounds a product fused in."""

import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp

from pallas_kernels.common.activations import Activation
from pallas_kernels.common.device import hopper_sms
from pallas_kernels.common.implementations import first_that_runs
from pallas_kernels.common.rows import check_unpermuted_rows, in_every_tile, scales_in_every_tile
from pallas_kernels.grouped_gemm.config import SCALE_GROUP, GemmConfig, GemmDesc, config_error
from pallas_kernels.grouped_gemm.heuristics import choose_config
from pallas_kernels.grouped_gemm.reference import grouped_gemm_ref


def grouped_gemm(
    x: Any,
    w: Any,
    tile_expert: Any,
    num_tiles: Any,
    *,
    x_scale: Any = None,
    w_scale: Any = None,
    bias: Any = None,
    activation: Activation | None = None,
    out_dtype: Any = jnp.bfloat16,
    requantize: Literal["none", "group", "group_ue8m0", "tensor"] = "none",
    out_scale: Any = None,
    tile_rows: Any = None,
    block_m: int | None = None,
    config: GemmConfig | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Any:
    """Grouped GEMM over rows in expert order, each expert's rows starting at a tile of their own.

    x: (Mp, K) e4m3, int8, bfloat16 or float16. w: (E, N, K) or (E, G, N, K) of x's dtype, K contiguous; G = 2 stacks
    gate and up for a gated activation. tile_expert: (Mp / block_m,) int32, the expert of each tile of rows, and so the
    tile size. num_tiles: () or (1,) int32, tiles in use. Everything the call depends on may live on the device.

    Scales multiply the stored values. x_scale: None, () per tensor, (Mp,) per row, or (ceil(K/128), Mp) per 128 of K.
    w_scale: None, (E[, G]) per matrix, (E[, G], N) per channel, or (E[, G], ceil(N/128), ceil(K/128)) per 128 x 128
    block; groups of x go with blocks of w, and then every 128 of K are scaled and added in float32. bias: (E[, G], N),
    added before the activation.

    activation: applied to the product, (E, G, N, K) weights only. requantize: "group" returns e4m3 codes and their
    scales (ceil(N/128), Mp) f32, one per row and 128 columns, "group_ue8m0" with scales rounded up to powers of two;
    "tensor" returns codes for the given out_scale (). With out_dtype bfloat16 values are rounded to it first.
    tile_rows: (Mp / block_m,) int32, rows in use of each tile: the others may then be neither read nor written.
    block_m: with it x is (T, K), T <= block_m: the first rows of every tile, as ``align`` places them by_token. Scales
    of rows are then those of one tile, (block_m,) or (ceil(K/128), block_m), of any value past T.

    Returns (Mp, N) out_dtype, or codes, or (codes, scales). Rows of tiles from num_tiles on, and rows past tile_rows,
    are unspecified. Raises ValueError or TypeError for a wrong call and NotImplementedError, with one reason for each
    implementation tried, when none can run it. config: of the mosaic implementation; chosen when None.
    """
    desc, operands = _describe(
        x,
        w,
        tile_expert,
        num_tiles,
        x_scale,
        w_scale,
        bias,
        activation,
        out_dtype,
        requantize,
        out_scale,
        tile_rows,
        block_m,
    )
    runs = {name: functools.partial(run, desc, config, operands) for name, run in _RUN.items()}
    return first_that_runs("grouped_gemm", runs, implementation)


def _run_mosaic(desc: GemmDesc, config: GemmConfig | None, operands: dict[str, Any]) -> Any:
    block_m = desc.rows // operands["tile_expert"].shape[0]
    if config is None:
        config = choose_config(desc, block_m, hopper_sms())
    elif config.block_m != block_m:
        raise ValueError(f"config.block_m={config.block_m}, but tile_expert has tiles of {block_m} rows")
    if reason := config_error(desc, config):
        raise NotImplementedError(reason)
    w = operands["w"]
    lead = w.shape[0] * w.shape[1]
    flat = dict(operands, w=w.reshape(lead, *w.shape[2:]), num_tiles=operands["num_tiles"].reshape(1))
    for name, keep in (("w_scale", 2), ("bias", 2)):
        if operands[name] is not None:
            flat[name] = operands[name].reshape(lead, *operands[name].shape[keep:])
    for name in ("x_scale", "out_scale"):
        if operands[name] is not None and operands[name].ndim == 0:
            flat[name] = operands[name].reshape(1)
    # here: importing them loads Pallas
    if config.swap_ab:
        from pallas_kernels.grouped_gemm.kernel_swapped_sm90 import grouped_gemm_swapped_sm90 as kernel
    else:
        from pallas_kernels.grouped_gemm.kernel_sm90 import grouped_gemm_sm90 as kernel
    return kernel(desc, config)(flat)


def _run_reference(desc: GemmDesc, config: GemmConfig | None, operands: dict[str, Any]) -> Any:
    del config
    if desc.unpermuted_rows:
        tiles = operands["tile_expert"].shape[0]
        x_scale = scales_in_every_tile(operands["x_scale"], tiles)
        operands = dict(operands, x=in_every_tile(operands["x"], tiles, desc.rows // tiles), x_scale=x_scale)
    names = ("x", "w", "tile_expert", "num_tiles", "x_scale", "w_scale", "bias", "out_scale")
    x, w, tile_expert, num_tiles, x_scale, w_scale, bias, out_scale = (operands[name] for name in names)
    return grouped_gemm_ref(
        desc, x, w, tile_expert, num_tiles, x_scale=x_scale, w_scale=w_scale, bias=bias, out_scale=out_scale
    )


_RUN = {"mosaic": _run_mosaic, "reference": _run_reference}


def _describe(
    x,
    w,
    tile_expert,
    num_tiles,
    x_scale,
    w_scale,
    bias,
    activation,
    out_dtype,
    requantize,
    out_scale,
    tile_rows,
    block_m,
) -> tuple[GemmDesc, dict[str, Any]]:
    """Check shapes and dtypes once, and bring weights and their leaves to (E, G, ...)."""
    if x.ndim != 2 or w.ndim not in (3, 4):
        raise ValueError(
            f"x has shape {x.shape}, expected (Mp, K); w has {w.shape}, expected (E, N, K) or (E, G, N, K)"
        )
    lead = w.shape[:-2]

    def stacked(value):
        return value if value is None or len(lead) == 2 else value[:, None]

    rows, k = x.shape
    n = w.shape[-2]
    projections = lead[1] if len(lead) == 2 else 1
    expected_halves = 1 if activation is None or not activation.is_gated else 2
    if projections != expected_halves or (activation is not None and len(lead) == 1):
        name = "no activation" if activation is None else activation.name
        raise ValueError(f"w has shape {w.shape}; {name} needs (E, {expected_halves}, N, K)")
    if w.shape[-1] != k:
        raise ValueError(f"x has K={k} and w has K={w.shape[-1]}; w is stored (..., N, K)")
    if x.dtype != w.dtype:
        raise TypeError(f"x is {x.dtype} and w is {w.dtype}; both operands have one dtype")
    tiles = tile_expert.shape[0] if tile_expert.ndim == 1 else 0
    unpermuted_rows = 0
    if block_m is not None:
        check_unpermuted_rows(rows, block_m)
        unpermuted_rows, rows = rows, tiles * block_m
    if tile_expert.ndim != 1 or tiles == 0 or rows % tiles:
        raise ValueError(f"tile_expert has shape {tile_expert.shape}, expected (Mp / block_m,) for Mp={rows} rows")
    if num_tiles.size != 1:
        raise ValueError(f"num_tiles has shape {num_tiles.shape}, expected () or (1,)")
    for name, value in (("tile_expert", tile_expert), ("num_tiles", num_tiles), ("tile_rows", tile_rows)):
        if value is not None and value.dtype != jnp.int32:
            raise TypeError(f"{name} is {value.dtype}, expected int32")
    if tile_rows is not None and tile_rows.shape != (tiles,):
        raise ValueError(f"tile_rows has shape {tile_rows.shape}, expected {(tiles,)}")

    k_groups, n_groups = -(-k // SCALE_GROUP), -(-n // SCALE_GROUP)
    scaled = rows if block_m is None else block_m
    lhs_scale = _kind("x_scale", x_scale, {(): "tensor", (scaled,): "row", (k_groups, scaled): "group"})
    w_shapes = {lead: "tensor", (*lead, n): "channel", (*lead, n_groups, k_groups): "block"}
    rhs_scale = _kind("w_scale", w_scale, w_shapes)
    if bias is not None and bias.shape != (*lead, n):
        raise ValueError(f"bias has shape {bias.shape}, expected {(*lead, n)}")
    if requantize not in ("none", "group", "group_ue8m0", "tensor"):
        raise ValueError(f"requantize={requantize!r} is not one of 'none', 'group', 'group_ue8m0', 'tensor'")
    if (out_scale is not None) != (requantize == "tensor"):
        raise ValueError("out_scale is given exactly when requantize='tensor'")
    if out_scale is not None and out_scale.shape != ():
        raise ValueError(f"out_scale has shape {out_scale.shape}, expected ()")

    desc = GemmDesc(
        rows=rows,
        n=n,
        k=k,
        num_experts=lead[0],
        dtype=jnp.dtype(x.dtype).name,
        out_dtype=jnp.dtype(out_dtype).name,
        projections=projections,
        lhs_scale=lhs_scale,
        rhs_scale=rhs_scale,
        bias_dtype=None if bias is None else jnp.dtype(bias.dtype).name,
        activation=activation,
        requantize="group" if requantize == "group_ue8m0" else requantize,
        has_tile_rows=tile_rows is not None,
        has_power_of_two_scales=requantize == "group_ue8m0",
        unpermuted_rows=unpermuted_rows,
    )
    operands = dict(
        x=x,
        w=w if len(lead) == 2 else w[:, None],
        tile_expert=tile_expert,
        num_tiles=num_tiles,
        x_scale=x_scale,
        w_scale=stacked(w_scale),
        bias=stacked(bias),
        out_scale=out_scale,
        tile_rows=tile_rows,
    )
    return desc, operands


def _kind(name: str, value: Any, shapes: dict[tuple[int, ...], str]) -> Any:
    if value is None:
        return "none"
    if value.dtype != jnp.float32:
        raise TypeError(f"{name} is {value.dtype}, expected float32")
    if value.shape not in shapes:
        expected = ", ".join(f"{shape} ({kind})" for shape, kind in shapes.items())
        raise ValueError(f"{name} has shape {value.shape}, expected one of {expected}")
    return shapes[value.shape]
