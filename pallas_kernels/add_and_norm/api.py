"""``add_and_norm``: a residual sum and its RMSNorm."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from pallas_kernels.add_and_norm.config import QUANTIZATIONS, AddNormConfig, AddNormDesc, choose_config, config_error
from pallas_kernels.add_and_norm.reference import add_and_norm_ref
from pallas_kernels.combine import RoutedRows
from pallas_kernels.common.device import hopper_sms
from pallas_kernels.common.implementations import first_that_runs


def add_and_norm(
    x: jax.Array,
    weight: jax.Array,
    addend: jax.Array | RoutedRows | None = None,
    *,
    eps: float,
    bias: jax.Array | None = None,
    router: jax.Array | None = None,
    router_bias: jax.Array | None = None,
    quantization: str = "none",
    scale_rows: int | None = None,
    config: AddNormConfig | None = None,
    implementation: str | Sequence[str] | None = None,
) -> tuple[jax.Array, ...]:
    """(x + addend + bias, that / sqrt(mean(that^2) + eps) * weight over the last axis), and the router's logits of it.

    Sum and norm are computed in float32. Each is rounded once, so that the norm is that of the sum before its rounding,
    as it is where XLA fuses the two. Logits are of the rounded norm.

    Args:
        x: (T, H).
        weight: (H,), of the same dtype.
        addend: (T, H), of the same dtype; or the partial sums of a product, (P, R, H) of the same dtype or float32,
            which are added in their order. Of their R >= T rows those past T are not read. Or the rows of the tokens'
            experts, of the same dtype or float32, whose weighted sum is added as ``combine`` makes it, but not rounded
            in between; the Hopper kernel takes those of up to ``most_routed`` tokens. None for zeros: then x is
            returned as it is.
        bias: (H,) float, of the product that addend is; None for zeros.
        router: (E, H) of x's dtype, then the last result is norm router^T + router_bias, (T, E) float32, summed in
            float32; None for no such result. The Hopper kernel takes up to ``FEW_TOKENS`` tokens, not quantized.
        router_bias: (E,) float; None for zeros.
        quantization: "none", or what is done to the rounded norm, as by ``quantize_and_permute``: "e4m3_row",
            "int8_row", "e4m3_group" or "e4m3_group_ue8m0". Then the results are (x + addend, codes, scales).
        scale_rows: the scales have room for this many rows, at least T; those past T are unspecified.
        config: of the Hopper kernel; None for its own choice.
        implementation: "hopper" or "reference", or several in the order to try; None tries them in this order.

    Raises:
        ValueError, TypeError: a wrong call. NotImplementedError: no implementation can run it.
    """
    desc, operands = describe_norm(
        x,
        weight,
        addend,
        eps=eps,
        bias=bias,
        router=router,
        router_bias=router_bias,
        quantization=quantization,
        scale_rows=scale_rows,
    )

    def hopper():
        chosen = config or choose_config(desc, hopper_sms())
        if reason := config_error(desc, chosen):
            raise NotImplementedError(reason)

        from pallas_kernels.add_and_norm.kernel_sm90 import add_and_norm_sm90  # here: importing it loads Pallas

        found = add_and_norm_sm90(desc, chosen)(*kernel_operands(operands))
        return tuple(found) if desc.has_addend else (x, *found)

    runs = dict(hopper=hopper, reference=lambda: add_and_norm_ref(desc, *operands))
    return first_that_runs("add_and_norm", runs, implementation)


Operands: TypeAlias = tuple[Any, ...]  # x, weight, addend as parts or RoutedRows, bias, router, router_bias; or None


def describe_norm(
    x: jax.Array,
    weight: jax.Array,
    addend: jax.Array | RoutedRows | None,
    *,
    eps: float,
    bias: jax.Array | None,
    router: jax.Array | None = None,
    router_bias: jax.Array | None = None,
    quantization: str = "none",
    scale_rows: int | None = None,
) -> tuple[AddNormDesc, Operands]:
    """The description of a call of ``add_and_norm`` and its operands; both are checked here."""
    routed = addend if isinstance(addend, RoutedRows) else None
    if routed is not None:
        _check_routed(x, weight, routed)
    addend = None if isinstance(addend, RoutedRows) else addend
    parts = addend[None] if addend is not None and addend.ndim == 2 else addend
    is_fit = parts is None or (parts.ndim == 3 and parts.shape[0] > 0 and parts.shape[2] == x.shape[-1])
    if x.ndim == 2 and addend is not None and is_fit:
        is_fit = addend.shape[-2] == x.shape[0] if addend.ndim == 2 else addend.shape[1] >= x.shape[0]
    if x.ndim != 2 or weight.shape != x.shape[1:] or not is_fit:
        other = None if addend is None else addend.shape
        raise ValueError(
            f"x {x.shape}, weight {weight.shape}, addend {other}; expected (T, H), (H,), (T, H) or (P, R, H), R >= T"
        )
    dtypes = {jnp.dtype(a.dtype).name for a in (x, weight, addend) if a is not None}
    has_partial_sums = addend is not None and addend.ndim == 3 and addend.dtype == jnp.float32
    if len(dtypes) != 1 and (x.dtype != weight.dtype or not has_partial_sums):
        raise TypeError(f"operands are {', '.join(sorted(dtypes))}; expected one dtype, or partial sums in float32")
    is_float = bias is None or jnp.issubdtype(bias.dtype, jnp.floating)
    if bias is not None and (parts is None or bias.shape != weight.shape or not is_float):
        raise ValueError(f"bias is {bias.dtype}{bias.shape}, expected a float dtype and {weight.shape}, with an addend")
    rows = parts if routed is None else routed.rows
    shared = None if routed is None else routed.shared
    _check_router(x, router, router_bias)
    desc = AddNormDesc(
        *x.shape,
        dtype=jnp.dtype(x.dtype).name,
        num_parts=0 if parts is None else parts.shape[0],
        eps=float(eps),
        part_dtype=None if rows is None else jnp.dtype(rows.dtype).name,
        quantization=quantization,
        scale_rows=scale_rows or 0,
        has_bias=bias is not None,
        num_experts=0 if router is None else router.shape[0],
        has_router_bias=router_bias is not None,
        top_k=0 if routed is None else routed.row_of.shape[1],
        shared_dtype=None if shared is None else jnp.dtype(shared.dtype).name,
    )
    if quantization not in QUANTIZATIONS:
        raise ValueError(f"quantization={quantization!r} is not one of {QUANTIZATIONS}")
    if scale_rows is not None and (quantization == "none" or scale_rows < x.shape[0]):
        raise ValueError(f"scale_rows={scale_rows} goes with a quantization and is at least T={x.shape[0]}")
    return desc, (x, weight, parts if routed is None else routed, bias, router, router_bias)


def kernel_operands(operands: Operands) -> list[jax.Array]:
    """As the Hopper kernels take them."""
    x, weight, addend, *others = operands
    of_experts = isinstance(addend, RoutedRows)
    added = (addend.rows, addend.row_of, addend.weights, addend.shared) if of_experts else (addend,)
    return [a for a in (x, weight, *added, *others) if a is not None]


def _check_routed(x: jax.Array, weight: jax.Array, routed: RoutedRows) -> None:
    routed.check()
    if routed.shape != x.shape or not routed.row_of.shape[1]:
        raise ValueError(
            f"addend has rows of experts of (T, H) {routed.shape}, expected {x.shape} as x, with top_k > 0"
        )
    if routed.rows.dtype not in (x.dtype, jnp.float32):
        raise TypeError(f"addend has rows of experts in {routed.rows.dtype}, expected {x.dtype} as x, or float32")


def _check_router(x: jax.Array, router: jax.Array | None, router_bias: jax.Array | None) -> None:
    if router is None:
        if router_bias is not None:
            raise ValueError(f"router_bias {router_bias.shape} is given without a router; pass both or neither")
        return
    if router.ndim != 2 or router.shape[1] != x.shape[1] or not router.shape[0]:
        raise ValueError(f"router has shape {router.shape}, expected (E, {x.shape[1]}) to match x {x.shape}")
    if router.dtype != x.dtype:
        raise TypeError(f"router is {router.dtype}, expected {x.dtype} as x")
    is_float = router_bias is None or jnp.issubdtype(router_bias.dtype, jnp.floating)
    if router_bias is not None and (router_bias.shape != router.shape[:1] or not is_float):
        raise ValueError(
            f"router_bias is {router_bias.dtype}{router_bias.shape}, expected a float dtype and {router.shape[:1]}"
        )
