"""``grouped_gemm_pull``: rows times transposed weights, through the derivative of the activation before them."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.common.activations import Activation
from pallas_kernels.common.device import hopper_sms
from pallas_kernels.common.implementations import first_that_runs
from pallas_kernels.grouped_gemm.api import Operands, check_before, check_block_m, describe_gemm
from pallas_kernels.grouped_gemm.config import GemmConfig, config_error
from pallas_kernels.grouped_gemm.heuristics import choose_config
from pallas_kernels.grouped_gemm.problem import GemmDesc
from pallas_kernels.grouped_gemm.reference import grouped_gemm_ref, pulled_ref

Pulled = tuple[jax.Array, jax.Array, jax.Array | None]


def grouped_gemm_pull(
    dy: jax.Array,
    w: jax.Array,
    tile_expert: jax.Array,
    num_tiles: jax.Array,
    *,
    activation: Activation,
    before: jax.Array,
    row_weights: jax.Array,
    has_weighted: bool = False,
    tile_rows: jax.Array | None = None,
    config: GemmConfig | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Pulled:
    """The gradient of what an activation was given, from that of the rows of the product behind it: dy W[e] is the
    cotangent of the activation's values before they are multiplied with ``row_weights``.

    Args:
        dy: (Mp, K) bfloat16 or float16, gradients of the product's rows.
        w: (E, K, N) of dy's dtype, the product's weights as they lie.
        tile_expert: (Mp / block_m,) int32, the expert of each tile of rows, and so the tile size.
        num_tiles: () or (1,) int32, tiles in use.
        activation: the one whose values the product was of; it must have no ``slopes_refusal``.
        before: (Mp, G * N) of dy's dtype, what the activation was given: gate, then up where it is gated.
        row_weights: (Mp,) float32, the router weight of each row.
        has_weighted: the activation's values times ``row_weights`` are returned as well.
        tile_rows: (Mp / block_m,) int32, rows in use of each tile: the others may then be neither read nor written.
        config: of the Hopper kernel; None for its own choice.
        implementation: "hopper" or "reference", or several in the order to try; None tries them in this order.

    Returns the cotangent of ``before``; (Mp,) float32, the sum over N of activation's value times product, which is the
    gradient of the row's weight; and (Mp, N), values times ``row_weights``, or None. Rows of tiles from num_tiles on,
    and rows past tile_rows, are unspecified.

    Raises:
        ValueError, TypeError: a wrong call. NotImplementedError: no implementation can run it.
    """
    operands: Operands = dict.fromkeys(("x_scale", "w_scale", "bias", "out_scale"))
    operands |= dict(x=dy, w=w, tile_expert=tile_expert, num_tiles=num_tiles, tile_rows=tile_rows)
    desc = describe_gemm(operands, None, dy.dtype, "none", None, True)
    desc = dataclasses.replace(desc, pulls=activation, has_weighted=has_weighted)
    check_before(before, (desc.rows, desc.pulled_projections * desc.n), dy.dtype)
    if row_weights.shape != dy.shape[:1] or row_weights.dtype != jnp.float32:
        raise ValueError(f"row_weights is {row_weights.dtype}{row_weights.shape}, expected float32 {dy.shape[:1]}")
    operands |= dict(before=before, row_weights=row_weights, num_tiles=num_tiles.reshape(1))

    def hopper() -> Pulled:
        chosen = config or choose_config(desc, check_block_m(config, operands, desc.rows), hopper_sms())
        if reason := config_error(desc, chosen):
            raise NotImplementedError(reason)

        from pallas_kernels.grouped_gemm.kernel_sm90 import grouped_gemm_sm90  # here: importing it loads Pallas

        bar, sums, *weighted = grouped_gemm_sm90(desc, chosen)(operands)
        return bar, sums.sum(axis=0), weighted[0] if weighted else None

    def reference() -> Pulled:
        return _reference(desc, operands)

    return first_that_runs("grouped_gemm_pull", dict(hopper=hopper, reference=reference), implementation)


def _reference(desc: GemmDesc, operands: Operands) -> Pulled:
    dy, w, before = (operands[name] for name in ("x", "w", "before"))
    product = dataclasses.replace(desc, pulls=None, has_weighted=False, out_dtype="float32")
    rows = grouped_gemm_ref(product, dy, w.mT[:, None], operands["tile_expert"], operands["num_tiles"])
    given = jnp.split(before.astype(jnp.float32), desc.pulled_projections, axis=1)
    assert desc.pulls is not None and not isinstance(rows, tuple)
    weights = operands["row_weights"][:, None]
    bars, values = pulled_ref(desc.pulls, given, rows * weights)
    weighted = (values * weights).astype(dy.dtype) if desc.has_weighted else None
    return jnp.concatenate(bars, axis=1).astype(dy.dtype), (values * rows).sum(axis=1), weighted
