"""``grouped_dgrad``: rows in expert order times the transposed packed weights of their experts."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common.activations import Activation
from pallas_kernels.common.device import hopper_sms
from pallas_kernels.common.implementations import first_that_runs
from pallas_kernels.grouped_gemm.api import check_before, check_tiles
from pallas_kernels.grouped_gemm.dgrad.config import DgradConfig, DgradDesc, choose_config, config_error
from pallas_kernels.grouped_gemm.dgrad.reference import grouped_dgrad_ref
from pallas_kernels.grouped_gemm.packed.layout import PackedWeights


def grouped_dgrad(
    dy: jax.Array,
    w: PackedWeights,
    tile_expert: jax.Array,
    num_tiles: jax.Array,
    *,
    tile_rows: jax.Array | None = None,
    activation: Activation | None = None,
    before: jax.Array | None = None,
    row_weights: jax.Array | None = None,
    config: DgradConfig | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Any:
    """The gradient of the rows of a grouped GEMM with packed weights: dy W[e], W[e] as ``dequantize_packed`` gives it.

    No matrix is written to global memory. With an activation, what it was given has the gradient: the product is the
    cotangent of the hidden rows before they are multiplied with ``row_weights``.

    Args:
        dy: (Mp, N) of ``w.fmt.operand``, gradients of the product's rows.
        w: matrices (E, 1, N, K), of a gated product by ``stacked_projections``.
        tile_expert: (Mp / block_m,) int32, the expert of each tile of rows, and so the tile size.
        num_tiles: () or (1,) int32, tiles in use.
        tile_rows: (Mp / block_m,) int32, rows in use of each tile: the others may then be neither read nor written.
        activation: of the product before, whose N is K here.
        before: (Mp, G * K) of dy's dtype, what the activation was given, blocks of 64 columns of each projection in
            turn; exactly with ``activation``.
        row_weights: (Mp,) float32, the router weight of each row; exactly with ``activation``.
        config: of the Hopper kernel; None for its own choice.
        implementation: "hopper" or "reference", or several in the order to try; None tries them in this order.

    Returns (Mp, K) of dy's dtype. With an activation the cotangent of ``before``, in its layout, and (Mp,) float32, the
    sum over K of hidden value times product, which is the gradient of the row's weight. Rows of tiles from num_tiles
    on, and rows past tile_rows, are unspecified.

    Raises:
        ValueError, TypeError: a wrong call. NotImplementedError: no implementation can run it.
    """
    if dy.ndim != 2 or dy.shape[1] != w.n:
        raise ValueError(f"dy has shape {dy.shape}, expected (Mp, {w.n})")
    if jnp.dtype(dy.dtype).name != w.fmt.operand:
        raise TypeError(f"dy is {dy.dtype}, these weights are packed for {w.fmt.operand}")
    if w.projections != 1:
        raise ValueError(f"w has {w.projections} projections, expected 1: see stacked_projections")
    rows, _, _ = check_tiles(dy, tile_expert, num_tiles, None)
    if tile_rows is not None and (tile_rows.shape != tile_expert.shape or tile_rows.dtype != jnp.int32):
        raise ValueError(f"tile_rows is {tile_rows.dtype}{tile_rows.shape}, expected int32 {tile_expert.shape}")
    if (activation is None) != (before is None) or (activation is None) != (row_weights is None):
        raise ValueError("before and row_weights are given exactly with an activation")
    desc = describe_dgrad(rows, w, activation, has_tile_rows=tile_rows is not None)
    if before is not None and row_weights is not None:
        check_before(before, row_weights, (rows, desc.projections * w.k), dy.dtype)

    def hopper() -> Any:
        chosen = config or choose_config(desc, rows // tile_expert.shape[0], hopper_sms())
        if reason := config_error(desc, chosen):
            raise NotImplementedError(reason)

        from pallas_kernels.grouped_gemm.dgrad.kernel_sm90 import grouped_dgrad_sm90  # here: importing it loads Pallas

        leaves = dict(w=w.words, scale=w.scale, zero=w.zero, channel_scale=w.channel_scale)
        operands: dict[str, Any] = {
            name: leaf.reshape(-1, *leaf.shape[3:]) for name, leaf in leaves.items() if leaf is not None
        }
        operands |= dict(dy=dy, tile_expert=tile_expert, num_tiles=num_tiles.reshape(1), tile_rows=tile_rows)
        operands |= dict(before=before, row_weights=row_weights)
        found = grouped_dgrad_sm90(desc, chosen)(operands)
        return found if activation is None else (found[0], found[1].sum(axis=0))

    def reference() -> Any:
        return grouped_dgrad_ref(desc, dy, w, tile_expert, num_tiles, before=before, row_weights=row_weights)

    return first_that_runs("grouped_dgrad", dict(hopper=hopper, reference=reference), implementation)


def describe_dgrad(
    rows: int, w: PackedWeights, activation: Activation | None, *, has_tile_rows: bool = False
) -> DgradDesc:
    """The description of a call; leaves of w may be ShapeDtypeStructs."""
    beside = w.scale if w.scale is not None else w.zero
    return DgradDesc(
        rows=rows,
        n=w.n,
        k=w.k,
        num_experts=w.num_experts,
        groups=1 if beside is None else beside.shape[3],
        fmt=w.fmt,
        scale_dtype="float32" if w.scale is None else jnp.dtype(w.scale.dtype).name,
        has_channel_scale=w.channel_scale is not None,
        activation=activation,
        has_tile_rows=has_tile_rows,
    )
