"""What a thread has added up of a tile's splits (``SplitSums``), and the outputs that it makes of that.

    numerators / denominator, rounded -> stored; or, of one query a row, quantized as ``quantize_and_permute`` quantizes
    rows:  largest magnitude, by shuffles and shared memory -> codes and scales

A thread has one column of a tile, and every (128 / columns)-th of its values (``Place``).
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import simt
from pallas_kernels.common.sm90 import WARPGROUP, WARPS
from pallas_kernels.common.types import Ref, Scalar, Value
from pallas_kernels.decode_attention.config import DecodeConfig, DecodeDesc, values_a_thread
from pallas_kernels.quantize_and_permute.by_thread_sm90 import coded, magnitude
from pallas_kernels.quantize_and_permute.config import PermuteDesc

FLOOR = -(2.0**100)  # below every score in use, and finite
LOG2_E = math.log2(math.e)

Part = tuple[Value, Value, tuple[Value, ...]]  # of a split: the largest score, the sum of its weights, sums of values


class SplitSums(NamedTuple):
    """What a thread has added up of the splits so far, as in an online softmax.

    Args:
        top: the largest score.
        numerators, denominator: sums of weighted values, and of weights, as if ``top`` were subtracted from all scores.
    """

    top: Value
    numerators: tuple[Value, ...]
    denominator: Value

    @classmethod
    def of_nothing(cls, count: int) -> "SplitSums":
        """count: values of a thread."""
        zero = lax.bitcast_convert_type(simt.constant(0), jnp.float32)
        return cls(zero + FLOOR, (zero,) * count, zero)

    def with_sink(self, sink: Value | None) -> "SplitSums":
        """sink: the logit of a head that attends to no value, times log2(e), or None."""
        if sink is None:
            return self
        zero = jnp.zeros_like(sink)
        return self.plus((sink, zero + 1.0, (zero,) * len(self.numerators)))

    def plus(self, part: Part) -> "SplitSums":
        score, weight, values = part
        joined = functools.partial(added, score > self.top, jnp.exp2(-lax.abs(score - self.top)))
        numerators = tuple(map(joined, self.numerators, values))
        return SplitSums(lax.max(self.top, score), numerators, joined(self.denominator, weight))

    def plus_all(self, load: Callable[[Any], list[Part]], splits: Any, unroll: int, is_one_load: bool) -> "SplitSums":
        """With the parts of all ``splits``, one after the other, whatever ``unroll`` is. load: from the first of
        ``unroll`` of them; it is asked for the next ones before these are added. is_one_load: there are no more than
        ``unroll``."""
        first = load(0)
        if is_one_load:
            return functools.reduce(SplitSums.plus, first, self)

        def one_load(i, carry):
            state, parts = carry
            following = load((i + 1) * unroll)
            return functools.reduce(SplitSums.plus, parts, state), following

        loads = lax.div(splits + (unroll - 1), jnp.int32(unroll))
        return lax.fori_loop(0, loads, one_load, (self, first))[0]

    def outputs(self, scale: Scalar | None) -> list[Value]:
        """Weighted means, times ``scale``; zeros where no slot was seen."""
        nothing = self.denominator == 0
        results = [jnp.where(nothing, 0.0, own / self.denominator) for own in self.numerators]
        return results if scale is None else [result * scale for result in results]


def added(is_higher: Value, shrink: Value, before: Value, own: Value) -> Value:
    """Sums of two parts, of which the one with the lower score shrinks. is_higher: the score of ``own`` is.

    One product, so that the bits are the same in all kernels.
    """
    return jnp.where(is_higher, before, own) * shrink + jnp.where(is_higher, own, before)


def outputs_of(desc: DecodeDesc, rows: PermuteDesc | None) -> list[jax.ShapeDtypeStruct]:
    """(B * S * N * V,), or as ``rows`` quantizes them codes and scales, flat."""
    size = desc.batch * desc.num_queries * desc.num_heads * desc.value_width
    if rows is None:
        return [jax.ShapeDtypeStruct((size,), jnp.dtype(desc.dtype))]
    assert rows.scale_shape is not None
    scales = jax.ShapeDtypeStruct((math.prod(rows.scale_shape),), jnp.float32)
    return [jax.ShapeDtypeStruct((size,), jnp.dtype(rows.out_dtype)), scales]


class Columns:
    """The column of a tile that each thread of a warpgroup has, and every (128 / columns)-th of its values.

    count: of columns, a power of two. column: a thread's. head, is_used: its query head, and whether there is one.
    numbers: of a thread's values, among those of the tile, which lie value after value.
    """

    def __init__(self, desc: DecodeDesc, config: DecodeConfig, row: Scalar, kv_head: Scalar, first: Scalar = 0):
        """first: column of the key head."""
        self._desc, self.count, self._row = desc, config.columns, row
        self.thread = simt.thread_index() & (WARPGROUP - 1)
        self.column = self.thread & (self.count - 1)
        index = self.column + first
        self._query = lax.div(index, jnp.full_like(index, desc.group))
        self.is_used = self._query < desc.num_queries
        self.head = lax.rem(index, jnp.full_like(index, desc.group)) + kv_head * desc.group
        self.numbers = [self.thread + i * WARPGROUP for i in range(values_a_thread(desc, config))]

    def load(self, ref: Ref, index: Value) -> Value:
        return simt.load_float(ref, index, self.is_used, 0.0)

    def outputs(self, sums: SplitSums, sinks: Ref | None, scale: Scalar | None) -> list[Value]:
        """A thread's, rounded to the dtype of the output. scale: of values in e4m3."""
        sink = None if sinks is None else self.load(sinks, self.head) * LOG2_E
        results = sums.with_sink(sink).outputs(scale)
        return [result.astype(self._desc.dtype).astype(jnp.float32) for result in results]

    def store(self, out: Ref, results: list[Value]) -> None:
        for index, result in zip(self._places(), results, strict=True):
            simt.store_bits(out, index, simt.float_bits(result, self._desc.dtype), self.is_used, 2)

    def store_codes(
        self,
        rows: PermuteDesc,
        codes: Ref,
        scales: Ref,
        results: list[Value],
        largest: Callable[[Value], Value],
        is_first: Value | None = None,
    ) -> None:
        """largest: of what threads have whose values share a scale, of the bits of magnitudes. is_first: the one thread
        that stores the scale of a row."""
        found, scale = coded(rows, results, lax.bitcast_convert_type(largest(magnitude(results)), jnp.float32))
        for index, code in zip(self._places(), found, strict=True):
            simt.store_bits(codes, index, code, self.is_used, 1)
        if is_first is None:
            place, is_first = self.head * (rows.scale_rows or rows.num_rows), self.is_used & (self.thread < self.count)
        else:
            place = simt.constant(0)
        simt.store(scales, place + self._row, lax.bitcast_convert_type(scale, jnp.int32), is_first)

    def largest(self, maxima: Ref, meet: Callable[[], None], value: Value) -> Value:
        """Of the threads with the same column. maxima: (4 * columns,) int32. meet: a barrier of the warpgroup."""
        lane, warp = self.thread & 31, simt.warp_of(self.thread)
        distance = self.count
        while distance < 32:
            value = jnp.maximum(value, simt.of_lane(value, distance))
            distance *= 2
        simt.store(maxima, warp * self.count + self.column, value, lane < self.count)
        meet()
        every = lane >= 0
        found = [simt.load(maxima, self.column + i * self.count, every, 0) for i in range(WARPS)]
        return functools.reduce(jnp.maximum, found)

    def _places(self) -> list[Value]:
        """Of a thread's values, among all outputs."""
        desc = self._desc
        first = (self.head + (self._query + self._row * desc.num_queries) * desc.num_heads) * desc.value_width
        shift = jnp.full_like(first, self.count.bit_length() - 1)
        return [first + lax.shift_right_logical(number, shift) for number in self.numbers]


def store_tile(
    rows: PermuteDesc | None,
    columns: Columns,
    so_far: dict[str, Ref],
    meet: Callable[[], None],
    sinks: Ref | None,
    scale: Scalar | None,
    outputs: Sequence[Ref],
) -> None:
    """The outputs of a tile all of whose splits are added up; quantized as ``rows`` says.

    so_far: ``sums`` (V, C) and ``stats`` (2, C), float32 of shared memory, and room for ``maxima`` (4 * C,) int32.
    outputs: of the kernel.
    """
    meet()
    top, denominator = (columns.load(so_far["stats"], columns.column + i * columns.count) for i in range(2))
    sums = SplitSums(top, tuple(columns.load(so_far["sums"], number) for number in columns.numbers), denominator)
    meet()  # the next tile's sums may come
    results = columns.outputs(sums, sinks, scale)
    if rows is None:
        columns.store(outputs[0], results)
        return
    codes, scales = outputs
    columns.store_codes(rows, codes, scales, results, functools.partial(columns.largest, so_far["maxima"], meet))
