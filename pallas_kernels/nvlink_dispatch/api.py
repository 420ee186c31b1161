"""``dispatch_rows``: tokens to the devices of their experts. ``place_rows``: those to rows in expert order.
``combine_rows``: rows of experts back to their tokens, and their weighted sum. Inside ``jax.shard_map``.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.common.device import hopper_sms, portable_sms
from pallas_kernels.common.implementations import first_that_runs
from pallas_kernels.common.types import Dtype, Leaf
from pallas_kernels.nvlink_dispatch.config import (
    QUANTIZATIONS,
    ExchangeConfig,
    ExchangeDesc,
    PlaceDesc,
    choose_combine_config,
    choose_dispatch_config,
    choose_place_config,
    config_error,
    place_error,
)
from pallas_kernels.nvlink_dispatch.reference import combine_ref, dispatch_ref, place_ref


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DispatchedRows:
    """Tokens of all devices as one device has them: token t of device s in row s * T + t.

    Args:
        codes: (size * T, H), unspecified where no slot of the row is of this device.
        scales: (size * T,) or, a scale for every 128 columns, (size * T, H / 128) float32, which multiply the codes.
            None for codes that are the values.
        slots: (size * T, top_k) int32 of the whole mesh, -1 for none.
        weights: (size, padded T * top_k) float32 of their tokens, where each device returns one partial sum; else None.
        mailbox, table: where rows come back to this device, and where to each other one, for ``combine_rows``. None
            where XLA's collectives bring them.
    """

    codes: Leaf
    scales: Leaf | None
    slots: Leaf
    weights: Leaf | None = None
    mailbox: Leaf | None = None
    table: Leaf | None = None


def dispatch_rows(
    x: jax.Array,
    slots: jax.Array,
    weights: jax.Array | None = None,
    *,
    axis: str,
    slots_per_device: int,
    quantization: str = "none",
    row_dtype: Dtype | None = None,
    sum_dtype: Dtype | None = None,
    config: ExchangeConfig | None = None,
    implementation: str | Sequence[str] | None = None,
) -> DispatchedRows:
    """Send each token, quantized once, to every device that has one of its slots. Never drops one.

    To be called inside ``jax.shard_map`` over a mesh with ``axis``. Every device of the mesh takes part, and calls
    ``combine_rows`` with what arrived.

    Args:
        x: (T, H) bfloat16, float16 or float32, T the same on all devices.
        slots: (T, top_k) int32; slot i is an expert of device i // slots_per_device along ``axis``, -1 is none.
        weights: (T, top_k) float32, given exactly with sum_dtype; they travel with the slots.
        axis: of the mesh, along which the experts are split.
        slots_per_device: experts of a device.
        quantization: one of ``QUANTIZATIONS``, by the rules of ``quantize_and_permute``.
        row_dtype: of the rows that ``combine_rows`` will send back; that of x by default.
        sum_dtype: dtype in which each device returns one partial sum for a token in place of its experts' rows; None
            for rows.
        config: of the Hopper kernel; None for its own choice.
        implementation: "hopper" or "reference", or several in the order to try; None tries them in this order.

    Raises:
        ValueError, TypeError: a wrong call. NotImplementedError: no implementation can run it.
    """
    desc = _describe(x.shape, x.dtype, slots, axis, slots_per_device, row_dtype or x.dtype, sum_dtype, quantization)
    if (weights is None) != (sum_dtype is None):
        raise ValueError("weights are given where each device returns one sum (sum_dtype), and only there")
    if weights is not None:
        _check_weights(weights, slots)
    padded = [_pad(desc, slots, -1), *([] if weights is None else [_pad(desc, weights, 0)])]

    def hopper():
        num_sms = hopper_sms()
        chosen = config or choose_dispatch_config(desc, num_sms)
        if reason := config_error(desc, chosen, num_sms):
            raise NotImplementedError(reason)

        from pallas_kernels.nvlink_dispatch.dispatch_sm90 import dispatch_sm90  # here: importing it loads Pallas

        return dispatch_sm90(desc, chosen)(x, *padded)

    runs = dict(hopper=hopper, reference=lambda: dispatch_ref(desc, x, *padded))
    codes, scales, came, came_weights, mailbox, table = first_that_runs("dispatch_rows", runs, implementation)
    came = came[:, : desc.num_pairs].reshape(desc.num_rows, desc.top_k)
    return DispatchedRows(codes, scales, came, came_weights, mailbox, table)


def place_rows(
    codes: jax.Array,
    scales: jax.Array,
    row_of: jax.Array,
    num_places: int,
    *,
    implementation: str | Sequence[str] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Copy rows of 8-bit codes and their scales to the places that ``row_of`` names.

    The result is what ``quantize_and_permute`` gives for the tokens themselves. Places that no row fills are
    unspecified.

    Args:
        codes: (N, H) float8_e4m3fn or int8.
        scales: (N,) or (N, H / 128) float32.
        row_of: (N, top_k) int32, the place of each (row, slot), -1 for none; distinct otherwise.
        num_places: Mp, static.
        implementation: "hopper", "portable", "reference", or several in the order to try; None for this order.

    Returns:
        (codes (Mp, H), scales (Mp,) or (H / 128, Mp)).

    Raises:
        ValueError: a wrong call. NotImplementedError: no implementation can run it.
    """
    if codes.ndim != 2 or jnp.dtype(codes.dtype).itemsize != 1 or row_of.shape[:1] != codes.shape[:1]:
        raise ValueError(f"codes {codes.dtype}{codes.shape}, row_of {row_of.shape}; expected 8 bits, (N, H) and (N, k)")
    if scales.shape[:1] != codes.shape[:1] or scales.ndim > 2 or scales.dtype != jnp.float32:
        raise ValueError(f"scales is {scales.dtype}{scales.shape}, expected float32 (N,) or (N, H / 128)")
    groups = scales.shape[1] if scales.ndim == 2 else 0
    desc = PlaceDesc(codes.shape[0], num_places, codes.shape[1], row_of.shape[1], groups)

    def kernel(num_sms: int) -> tuple[jax.Array, jax.Array]:
        if reason := place_error(desc):
            raise NotImplementedError(reason)

        from pallas_kernels.nvlink_dispatch.place_sm90 import place_sm90  # here: importing it loads Pallas

        bits = jax.lax.bitcast_convert_type(codes, jnp.int8)
        placed, placed_scales = place_sm90(desc, choose_place_config(desc, num_sms))(bits, scales, row_of)
        return jax.lax.bitcast_convert_type(placed, codes.dtype), placed_scales

    runs = dict(
        hopper=lambda: kernel(hopper_sms()),
        portable=lambda: kernel(portable_sms()),
        reference=lambda: place_ref(desc, codes, scales, row_of),
    )
    return first_that_runs("place_rows", runs, implementation)


def combine_rows(
    rows: jax.Array,
    row_of: jax.Array,
    slots: jax.Array,
    weights: jax.Array,
    arrived: DispatchedRows,
    *,
    axis: str,
    slots_per_device: int,
    sum_dtype: Dtype | None = None,
    config: ExchangeConfig | None = None,
    implementation: str | Sequence[str] | None = None,
) -> jax.Array:
    """Send the rows of this device's experts back to their tokens and add them up there. Once per ``dispatch_rows``.

    To be called inside ``jax.shard_map``, as ``dispatch_rows`` is, with the same axis, slots and sum_dtype.

    Args:
        rows: (Mp, H) bfloat16, float16 or float32, the row_dtype of the dispatch.
        row_of: (size * T, top_k) int32, the row of each slot of each token that arrived, -1 for slots of other devices.
        slots: (T, top_k) int32.
        weights: (T, top_k) float32.
        arrived: of ``dispatch_rows``.
        axis, slots_per_device, sum_dtype, config, implementation: as there.

    Returns:
        (T, H) float32: the sum over top_k, in this order, of weight times row, as ``combine`` gives it. With sum_dtype:
        the sum over the devices, in their order, of each one's sum over its own slots, rounded to that dtype.

    Raises:
        ValueError, TypeError: a wrong call. NotImplementedError: no implementation can run it.
    """
    shape = (slots.shape[0], rows.shape[1])
    desc = _describe(shape, rows.dtype, slots, axis, slots_per_device, rows.dtype, sum_dtype)
    if row_of.shape != (desc.num_rows, desc.top_k) or row_of.dtype != jnp.int32:
        raise ValueError(f"row_of is {row_of.dtype}{row_of.shape}, expected int32{(desc.num_rows, desc.top_k)}")
    _check_weights(weights, slots)
    if (arrived.weights is None) != (sum_dtype is None):
        raise ValueError(f"sum_dtype={sum_dtype}: dispatch_rows was called with another")
    operands = (rows, row_of.reshape(-1), slots.reshape(-1))
    factors = weights.reshape(-1) if arrived.weights is None else arrived.weights

    def hopper():
        if arrived.mailbox is None:
            raise NotImplementedError("the rows were not sent by the Hopper kernels: there is no mailbox")
        mailbox = (desc.mailbox_rows, desc.width), jnp.dtype(desc.mailbox_dtype)
        if (arrived.mailbox.shape, arrived.mailbox.dtype) != mailbox:
            raise ValueError(
                f"the mailbox is {arrived.mailbox}, expected {mailbox}: dispatch_rows had another row_dtype"
            )
        num_sms = hopper_sms()
        chosen = config or choose_combine_config(desc, num_sms)
        if reason := config_error(desc, chosen, num_sms):
            raise NotImplementedError(reason)

        from pallas_kernels.nvlink_dispatch.combine_sm90 import combine_sm90  # here: importing it loads Pallas

        return combine_sm90(desc, chosen)(*operands, factors, arrived.mailbox, arrived.table)

    runs = dict(hopper=hopper, reference=lambda: combine_ref(desc, *operands, factors))
    return first_that_runs("combine_rows", runs, implementation)


def _pad(desc: ExchangeDesc, part: jax.Array, fill: int) -> jax.Array:
    return jnp.pad(part.reshape(-1), (0, desc.padded_pairs - desc.num_pairs), constant_values=fill)


def _check_weights(weights: jax.Array, slots: jax.Array) -> None:
    if weights.shape != slots.shape or weights.dtype != jnp.float32:
        raise ValueError(f"weights is {weights.dtype}{weights.shape}, expected float32{slots.shape}")


def _describe(
    shape: tuple[int, ...],
    dtype: Dtype,
    slots: jax.Array,
    axis: str,
    slots_per_device: int,
    row_dtype: Dtype,
    sum_dtype: Dtype | None,
    quantization: str = "none",
) -> ExchangeDesc:
    if len(shape) != 2 or slots.ndim != 2 or slots.shape[0] != shape[0]:
        raise ValueError(f"x {shape}, slots {slots.shape}; expected (T, H), (T, top_k)")
    if slots.dtype != jnp.int32:
        raise TypeError(f"slots is {slots.dtype}, expected int32")
    if quantization not in QUANTIZATIONS:
        raise ValueError(f"quantization={quantization!r} is not one of {QUANTIZATIONS}")
    mesh = tuple(jax.sharding.get_abstract_mesh().shape.items())
    if axis not in dict(mesh):
        raise ValueError(f"axis={axis!r} is no axis of the mesh {mesh}; call this inside jax.shard_map over it")
    return ExchangeDesc(
        mesh=mesh,
        axis=axis,
        num_tokens=shape[0],
        width=shape[1],
        top_k=slots.shape[1],
        slots_per_device=slots_per_device,
        dtype=jnp.dtype(dtype).name,
        quantization=quantization,
        row_dtype=jnp.dtype(row_dtype).name,
        sum_dtype=None if sum_dtype is None else jnp.dtype(sum_dtype).name,
    )
