"""Rows of activations as 16-bit packed products take them: left alone, or rounded to their format's grid.

Microscaling formats are rounded by the kernel that moves rows, or in place; other ones, whose codes the product's dtype
holds, by XLA.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from moe_jax._typing import Array
from moe_jax.quantization import QuantFormat, quantize_activations
from pallas_kernels.common import microscaling, numerics
from pallas_kernels.quantize_and_permute import PermuteConfig, PermuteDesc, config_error


def rows_on_grid(
    x: Array,
    fmt: QuantFormat | None,
    input_scale: Any,
    operand: str,
    axes: tuple[str, ...],
    *,
    quantize: Callable[..., tuple[Array, Array | None]],
    place: Callable[[Array, Array | None], tuple[Array, Array | None]],
) -> tuple[Array, Array | None]:
    """The product's rows, and what multiplies them: () or one a row, None for 1.

    axes: mesh axes over which a row is split. quantize: ``quantize_and_permute`` to where the rows belong. place:
    brings rounded values, and a scale for each of x's rows, there.
    """
    rule = kernel_rule(fmt, axes)
    if rule is None:
        return place(*_on_grid(x, fmt, operand, axes))
    inverse = None if fmt is None or fmt.global_scale in (None, "token") else _inverse(fmt, input_scale)
    rows, row_scale = quantize(x, quantization=rule, scale=inverse)
    return rows, row_scale if inverse is None else numerics.divide(jnp.ones_like(inverse), inverse)


def kernel_rule(fmt: QuantFormat | None, axes: tuple[str, ...]) -> str | None:
    """The kind of ``quantize_and_permute`` for activations of a microscaling format; None where XLA rounds."""
    if fmt is None or fmt.scale not in ("e4m3", "e8m0"):
        return None
    if fmt.scale == "e8m0":
        return "mxfp4" if fmt.element == "e2m1" else "mxfp8"
    if fmt.global_scale != "token":
        return "nvfp4"
    return None if axes else "nvfp4_row"


def rounded_by_xla(fmt: QuantFormat, widths: Mapping[str, int], dtype: str) -> list[str]:
    """What ``explain`` says where rows of one of ``widths`` columns (by name) are not rounded by the row kernel."""
    rule = kernel_rule(fmt, ())
    if rule is None:
        return ["rows: rounded by XLA, since the row kernel has no such codes in 16 bits"]
    reasons = {
        name: config_error(PermuteDesc(1, width, 1, 1, dtype, rule), PermuteConfig(1)) for name, width in widths.items()
    }
    return [
        f"{name} rows: rounded and moved by XLA, since the kernel refuses {reason}"
        for name, reason in reasons.items()
        if reason is not None
    ]


def _inverse(fmt: QuantFormat, input_scale: Any) -> Array:
    """The global scale that block scales are multiplied by."""
    stored = jnp.asarray(input_scale, jnp.float32)
    return stored if fmt.global_scale == "divides" else numerics.reciprocal(stored)


def _on_grid(x: Array, fmt: QuantFormat | None, operand: str, axes: tuple[str, ...]) -> tuple[Array, Array | None]:
    if fmt is None:
        return x.astype(operand), None
    if fmt.scale == "float32":
        codes, scale = quantize_activations(x, fmt, axes=axes)
        return codes.astype(operand), scale
    # NVFP4 with a global scale for each row, which lies on several devices.
    k, size = x.shape[-1], fmt.group_size or x.shape[-1]
    groups = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, -k % size))).reshape(x.shape[0], -1, size)
    amax = jnp.max(numerics.magnitude(groups), axis=-1, keepdims=True, initial=0.0)
    inverse = microscaling.nvfp4_global_scale(jax.lax.pmax(jnp.max(amax, axis=1, keepdims=True), axes))
    values = microscaling.fake_quantize(groups, amax, "nvfp4", inverse)
    scale = numerics.divide(jnp.ones_like(inverse), inverse)[:, 0, 0]
    return values.reshape(x.shape[0], -1)[:, :k].astype(operand), scale


def of_rows(scale: Array | None, row_of: Array, num_rows: int) -> Array | None:
    """A factor per token -> one per row; rows that no token fills get 1."""
    if scale is None or scale.ndim == 0:
        return scale
    rows = jnp.where(row_of < 0, num_rows, row_of)
    spread = jnp.broadcast_to(scale[:, None], row_of.shape)
    return jnp.ones(num_rows, jnp.float32).at[rows].set(spread, mode="drop")
