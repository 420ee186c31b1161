"""``grouped_dgrad``: rows in expert order times the transposed quantized weights of their experts; and, of plain
weights, ``grouped_gemm_widened``, the product of the forward pass.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common.activations import Activation
from pallas_kernels.common.device import hopper_sms
from pallas_kernels.common.implementations import first_that_runs
from pallas_kernels.grouped_gemm.api import check_before, check_tile_rows, check_tiles
from pallas_kernels.grouped_gemm.dgrad.config import DgradConfig, DgradDesc, choose_config, config_error
from pallas_kernels.grouped_gemm.dgrad.pairs import tile_pairs
from pallas_kernels.grouped_gemm.dgrad.plain import PlainWeights
from pallas_kernels.grouped_gemm.dgrad.reference import grouped_dgrad_ref
from pallas_kernels.grouped_gemm.packed.layout import PackedWeights

QuantizedWeights = PackedWeights | PlainWeights


def grouped_dgrad(
    dy: jax.Array,
    w: QuantizedWeights,
    tile_expert: jax.Array,
    num_tiles: jax.Array,
    *,
    tile_rows: jax.Array | None = None,
    activation: Activation | None = None,
    before: jax.Array | None = None,
    config: DgradConfig | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Any:
    """The gradient of the rows of a grouped GEMM with quantized weights: dy W[e], W[e] dequantized to dy's dtype.

    No matrix is written to global memory. With an activation, what it was given has the gradient: the product is the
    cotangent of the hidden rows. All of it is linear in dy, so a row's router weight can multiply what comes of it.

    Args:
        dy: (Mp, N) of ``w.fmt.operand``, gradients of the product's rows.
        w: matrices (E, 1, N, K) in kernel layout, of a gated product by ``stacked_projections``; or plain ones (E, N,
            K), of a gated product one projection below the other (``plain_weights``).
        tile_expert: (Mp / block_m,) int32, the expert of each tile of rows, and so the tile size.
        num_tiles: () or (1,) int32, tiles in use.
        tile_rows: (Mp / block_m,) int32, rows in use of each tile: the others may then be neither read nor written.
        activation: of the product before, whose N is K here.
        before: (Mp, G * K) of dy's dtype, what the activation was given, blocks of 64 columns of each projection in
            turn, beside plain weights one projection after the other; exactly with ``activation``.
        config: of the Hopper kernel; None for its own choice.
        implementation: "hopper" or "reference", or several in the order to try; None tries them in this order.

    Returns (Mp, K) of dy's dtype. With an activation the cotangent of ``before``, in its layout, and (Mp,) float32, the
    sum over K of hidden value times product, which is the gradient of the row's router weight. Rows of tiles from
    num_tiles on, and rows past tile_rows, are unspecified.

    Raises:
        ValueError, TypeError: a wrong call. NotImplementedError: no implementation can run it.
    """
    rows = _check_rows("dy", dy, w, w.n, tile_expert, num_tiles, tile_rows)
    if isinstance(w, PackedWeights) and w.projections != 1:
        raise ValueError(f"w has {w.projections} projections, expected 1: see stacked_projections")
    if (activation is None) != (before is None):
        raise ValueError("before is given exactly with an activation")
    desc = describe_dgrad(rows, w, activation, has_tile_rows=tile_rows is not None)
    if before is not None:
        check_before(before, (rows, desc.projections * w.k), dy.dtype)

    given = dict(dy=dy, tile_expert=tile_expert, num_tiles=num_tiles, tile_rows=tile_rows, before=before)

    def hopper() -> Any:
        found = _run_hopper(desc, config, w, given)
        return found if activation is None else (found[0], found[1].sum(axis=0))

    def reference() -> Any:
        return grouped_dgrad_ref(desc, dy, w, tile_expert, num_tiles, before=before)

    return first_that_runs("grouped_dgrad", dict(hopper=hopper, reference=reference), implementation)


def grouped_gemm_widened(
    x: jax.Array,
    w: PlainWeights,
    tile_expert: jax.Array,
    num_tiles: jax.Array,
    *,
    tile_rows: jax.Array | None = None,
    config: DgradConfig | None = None,
    implementation: str | Sequence[str] | None = None,
) -> jax.Array:
    """A grouped GEMM of 16-bit rows with plain weights of 8 bits: x W[e]^T, W[e] dequantized to x's dtype.

    What the forward pass computes of quantized rows, a gradient computes of the rows as they were before. No matrix is
    written to global memory. Arguments as ``grouped_dgrad`` has them; x: (Mp, K) of ``w.fmt.operand``.

    Returns (Mp, N) of x's dtype. Rows of tiles from num_tiles on, and rows past tile_rows, are unspecified.

    Raises:
        ValueError, TypeError: a wrong call. NotImplementedError: no implementation can run it.
    """
    rows = _check_rows("x", x, w, w.k, tile_expert, num_tiles, tile_rows)
    desc = describe_dgrad(rows, w, None, has_tile_rows=tile_rows is not None, contracts_k=True)
    given = dict(dy=x, tile_expert=tile_expert, num_tiles=num_tiles, tile_rows=tile_rows)
    runs = dict(
        hopper=lambda: _run_hopper(desc, config, w, given),
        reference=lambda: grouped_dgrad_ref(desc, x, w, tile_expert, num_tiles),
    )
    return first_that_runs("grouped_gemm_widened", runs, implementation)


def describe_dgrad(
    rows: int,
    w: QuantizedWeights,
    activation: Activation | None,
    *,
    has_tile_rows: bool = False,
    contracts_k: bool = False,
) -> DgradDesc:
    """The description of a call; leaves of w may be ShapeDtypeStructs."""
    beside = w.zero if isinstance(w, PackedWeights) and w.scale is None else w.scale
    return DgradDesc(
        rows=rows,
        n=w.n,
        k=w.k,
        num_experts=w.num_experts,
        groups=1 if beside is None else beside.shape[-2],
        fmt=w.fmt,
        scale_dtype="float32" if w.scale is None else jnp.dtype(w.scale.dtype).name,
        has_channel_scale=w.channel_scale is not None,
        is_plain=isinstance(w, PlainWeights),
        contracts_k=contracts_k,
        activation=activation,
        has_tile_rows=has_tile_rows,
    )


def flattened(w: QuantizedWeights) -> dict[str, jax.Array]:
    """The operands of the kernel that are the weights', by name."""
    if isinstance(w, PlainWeights):
        lead, leaves = 2, dict(w=w.codes, scale=w.scale, channel_scale=w.channel_scale)
    else:
        lead, leaves = 3, dict(w=w.words, scale=w.scale, zero=w.zero, channel_scale=w.channel_scale)
    return {name: leaf.reshape(-1, *leaf.shape[lead:]) for name, leaf in leaves.items() if leaf is not None}


def _check_rows(
    name: str,
    x: jax.Array,
    w: QuantizedWeights,
    width: int,
    tile_expert: jax.Array,
    num_tiles: jax.Array,
    tile_rows: jax.Array | None,
) -> int:
    """Mp, or raise what a wrong call raises."""
    if x.ndim != 2 or x.shape[1] != width:
        raise ValueError(f"{name} has shape {x.shape}, expected (Mp, {width})")
    if jnp.dtype(x.dtype).name != w.fmt.operand:
        raise TypeError(f"{name} is {x.dtype}, these weights are packed for {w.fmt.operand}")
    rows, _, _ = check_tiles(x, tile_expert, num_tiles, None)
    check_tile_rows(tile_rows, None, tile_expert)
    return rows


def _run_hopper(desc: DgradDesc, config: DgradConfig | None, w: QuantizedWeights, given: Mapping[str, Any]) -> Any:
    chosen = config or choose_config(desc, desc.rows // given["tile_expert"].shape[0], hopper_sms())
    if reason := config_error(desc, chosen):
        raise NotImplementedError(reason)

    from pallas_kernels.grouped_gemm.dgrad.kernel_sm90 import grouped_dgrad_sm90  # here: importing it loads Pallas

    return grouped_dgrad_sm90(desc, chosen)({**given, **flattened(w), **tile_table(desc, chosen, given)})


def tile_table(desc: DgradDesc, config: DgradConfig, given: Mapping[str, Any]) -> dict[str, jax.Array]:
    """The operands of the kernel that say which rows a CTA takes, by name; given: those of the call."""
    if config.neighbours > 1:
        experts, count, rows = (given[name] for name in ("tile_expert", "num_tiles", "tile_rows"))
        with jax.named_scope("tile_pairs"):
            return tile_pairs(experts, count, rows, config.block_m)
    return dict(num_tiles=given["num_tiles"].reshape(1))
