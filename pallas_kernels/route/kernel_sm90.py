"""Top-k of router scores, one warp a token, and alignment of what was chosen in the same launch.

route_tokens, for each token of a warp:
    load its logits, E / 32 a thread -> scores -> keys (int32, in the order of the scores)
    with groups: the score of each group, the groups kept; other groups' keys become that of -inf
    top_k times:  maximum of the keys -> lowest column that holds it -> take it out      (two redux.sync)
    renormalize, scale; thread j of the warp stores slot j

route_and_align, one CTA: route_tokens -> barrier -> align_pairs, which reads the ids just stored

Of a token by itself the warp that routes it writes the rows, too: the tile of an expert is the number of chosen experts
before it, which the warp counts in ballots of its columns.

The same launch may quantize tokens that stay in place. CTA 0 routes; each further CTA quantizes one token by the
arithmetic of quantize_and_permute.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.align.config import AlignConfig, AlignDesc
from pallas_kernels.align.kernel_sm90 import align_outputs, align_pairs, align_scratch
from pallas_kernels.common import mosaic, simt
from pallas_kernels.common.row_kernel_sm90 import row_kernel
from pallas_kernels.common.sm90 import WARPS
from pallas_kernels.common.types import Kernel, Ref, Scalar, Value
from pallas_kernels.quantize_and_permute.config import TAKES_SCALE, PermuteDesc
from pallas_kernels.quantize_and_permute.kernel_sm90 import RowQuantizer, quantized_outputs, split_columns
from pallas_kernels.route.config import RouteConfig, RouteDesc

_TAKEN = np.int32(-(2**31))  # below the key of -inf
_NOWHERE = np.int32(2**30)


def route_sm90(desc: RouteDesc, config: RouteConfig) -> Kernel:
    """The kernel: (logits (P * T * E,), [bias (E,)], [mask (T,) i32]) -> (weights f32, ids i32), both (T * top_k,)."""
    body = functools.partial(_route_kernel, desc, config)
    return row_kernel(body, _outputs(desc), config.num_ctas, "route", num_warpgroups=config.num_warpgroups)


def route_and_align_sm90(
    desc: RouteDesc, config: RouteConfig, align: AlignDesc, tokens: PermuteDesc | None = None
) -> Kernel:
    """The kernel: operands of ``route_sm90``, [offset (1,) int32] -> (weights, ids, *align.outputs), by one CTA.

    tokens: quantized beside that, each by a CTA. Then (x (T, H), [scale (1,)]) follow the offset, and (codes (T, H),
    [scales]) are the last results.
    """
    call = row_kernel(
        functools.partial(_fused_kernel, desc, config, align, tokens),
        [*_outputs(desc), *align_outputs(align), *(quantized_outputs(tokens) if tokens else ())],
        1 if tokens is None else 1 + tokens.num_tokens,
        "route_and_align",
        num_warpgroups=config.num_warpgroups,
        scratch_types=align_scratch(align),
    )
    if tokens is None:
        return call
    first = _num_operands(desc, align)

    def run(*operands):
        x, *scale = operands[first:]
        found = call(*operands[:first], x.reshape(tokens.num_tokens, *split_columns(tokens)), *scale)
        codes = 2 + len(align_outputs(align))
        return *found[:codes], found[codes].reshape(tokens.num_tokens, tokens.width), *found[codes + 1 :]

    return run


def _num_operands(desc: RouteDesc, align: AlignDesc) -> int:
    """Of routing and alignment."""
    return 1 + desc.has_bias + desc.has_mask + align.has_offset


def _outputs(desc: RouteDesc) -> list[jax.ShapeDtypeStruct]:
    slots = (desc.num_tokens * desc.top_k,)
    return [jax.ShapeDtypeStruct(slots, jnp.float32), jax.ShapeDtypeStruct(slots, jnp.int32)]


def _route_kernel(desc: RouteDesc, config: RouteConfig, *refs: Ref) -> None:
    mosaic.begin()
    route_tokens(desc, config, refs, lax.axis_index("cta"))


def _fused_kernel(
    desc: RouteDesc, config: RouteConfig, align: AlignDesc, tokens: PermuteDesc | None, *refs: Ref, **scratch: Ref
) -> None:
    mosaic.begin()
    pending = list(refs)
    operands = [pending.pop(0) for _ in range(_num_operands(desc, align))]
    offset = operands.pop() if align.has_offset else None
    source = [pending.pop(0) for _ in range(1 + (tokens.quantization in TAKES_SCALE) if tokens else 0)]
    weights, ids, *pending = pending
    count = len(align_outputs(align))
    outputs, quantized = pending[:count], pending[count:]

    def route_and_align():
        if desc.num_tokens == 1:
            _route_and_align_token(desc, align, (*operands, weights, ids), offset, outputs)
            return
        route_tokens(desc, config, (*operands, weights, ids), jnp.int32(0))
        simt.barrier()
        align_pairs(align, AlignConfig(config.num_warpgroups), ids, offset, *outputs, **scratch)

    if tokens is None:
        route_and_align()
        return
    cta = lax.axis_index("cta")
    x, given = source[0], source[1] if len(source) > 1 else None
    rows = RowQuantizer(tokens, x, given, *quantized)
    pl.when(cta == 0)(route_and_align)

    # One warpgroup quantizes a row; the others of its CTA are idle.
    @pl.when((cta > 0) & (lax.axis_index("warpgroup") == 0))
    def _():
        token = cta - 1
        rows.quantize(token, [token], always=True)


def route_tokens(desc: RouteDesc, config: RouteConfig, refs: Sequence[Ref], cta: Scalar) -> None:
    """Route this CTA's tokens. refs: the operands and outputs of ``route_sm90``."""
    per_round = config.num_warpgroups * WARPS
    row, warp = _of_warp(desc)
    first, step = cta * per_round + warp, config.num_ctas * per_round

    def one_token(i, _):
        _route_token(desc, refs, row, first + i * step)
        return 0

    lax.fori_loop(0, -(-desc.num_tokens // step), one_token, 0)


def _of_warp(desc: RouteDesc) -> tuple["_Row", Value]:
    """(the columns of each thread, its warp)."""
    thread = simt.thread_index()
    return _Row(thread & 31, desc.num_experts), simt.warp_of(thread)


def _route_token(desc: RouteDesc, refs: Sequence[Ref], row: "_Row", token: Value) -> "_Choice":
    """Choose the experts of each warp's token, and store them and their weights."""
    pending = list(refs)
    logits = pending.pop(0)
    bias = pending.pop(0) if desc.has_bias else None
    mask = pending.pop(0) if desc.has_mask else None
    weights_out, ids_out = pending
    is_token = token < desc.num_tokens
    z = row.load(logits, token * desc.num_experts, is_token)
    for part in range(1, desc.num_parts):  # added in their order
        own = row.load(logits, (token + part * desc.num_tokens) * desc.num_experts, is_token)
        z = [a + b for a, b in zip(z, own, strict=True)]
    shift = None if bias is None else row.load(bias, token * 0, is_token)
    chosen = _choose(desc, row, z, shift)
    if mask is not None:
        chosen = chosen.where(simt.load(mask, token, is_token, 0) != 0)
    slot = token * desc.top_k + row.lane
    is_slot = is_token & (row.lane < desc.top_k)
    simt.store(weights_out, slot, lax.bitcast_convert_type(chosen.weights, jnp.int32), is_slot)
    simt.store(ids_out, slot, chosen.ids, is_slot)
    return chosen


def _route_and_align_token(
    desc: RouteDesc, align: AlignDesc, refs: Sequence[Ref], offset: Ref | None, outputs: Sequence[Ref]
) -> None:
    """A token by itself, by the first warp. outputs: of the alignment; every expert chosen has a tile of one row."""
    row, token = _of_warp(desc)
    chosen, is_first_warp = _route_token(desc, refs, row, token), token == 0
    first = 0 if offset is None else offset[0]
    row_of, group_sizes, tile_expert, tile_rows, num_tiles, *tile_bits = outputs

    def is_local(expert: Value) -> Value:
        return (expert >= first) & (expert < first + align.num_experts)

    # Bit l of word j is column l + 32 j.
    words = []
    for column, flag in zip(row.columns, chosen.flags, strict=True):
        is_own = flag & is_local(column)
        words.append(simt.ballot(is_own))
        sizes = jnp.where(is_own, jnp.ones_like(column), 0)
        simt.store(group_sizes, column - first, sizes, is_first_warp & is_local(column) & (column < desc.num_experts))

    ids, lane = chosen.ids, row.lane
    below = lax.shift_left(jnp.ones_like(ids), ids & 31) - 1
    count = before = simt.constant(0)
    for j, word in enumerate(words):
        part = ids - 32 * j  # of the columns of a word those below the expert count
        count = count + simt.count_bits(word)
        before = before + simt.count_bits(jnp.where(part >= 32, word, jnp.where(part >= 0, word & below, 0)))
    is_slot = is_first_warp & (lane < desc.top_k)
    is_own = is_slot & (ids >= 0) & is_local(ids)
    simt.store(row_of, lane, jnp.where(is_own, before * align.block_m, -1), is_slot)
    is_tile = is_first_warp & (lane < align.num_tiles)
    simt.store(tile_expert, before, ids - first, is_own)
    simt.store(tile_expert, lane, simt.constant(-1), is_tile & (lane >= count))
    for of_tiles in (tile_rows, *tile_bits):  # row 0 alone
        simt.store(of_tiles, lane, jnp.where(lane < count, jnp.ones_like(lane), 0), is_tile)
    simt.store(num_tiles, lane, count, is_first_warp & (lane == 0))


class _Choice(NamedTuple):
    """What a warp has chosen for its token.

    Args:
        weights, ids: slot j in thread j, weight 0 in the threads past top_k.
        flags: which of a thread's columns are among them.
    """

    weights: Value
    ids: Value
    flags: list[Value]

    def where(self, is_kept: Value) -> "_Choice":
        """The same where it is kept, no expert elsewhere."""
        flags = [flag & is_kept for flag in self.flags]
        return _Choice(jnp.where(is_kept, self.weights, 0.0), jnp.where(is_kept, self.ids, -1), flags)


class _Row:
    """A token's E values as a warp holds them: a list of vectors, thread l having columns l, l + 32, ..."""

    def __init__(self, lane: Value, num_experts: int):
        self.lane = lane
        self.columns = [lane + 32 * j for j in range(-(-num_experts // 32))]
        self.is_inside = [column < num_experts for column in self.columns]

    def load(self, ref: Ref, start: Value, is_token: Value) -> list[Value]:
        return [
            simt.load_float(ref, start + column, is_token & is_inside, -np.inf)
            for column, is_inside in zip(self.columns, self.is_inside, strict=True)
        ]

    def keys(self, values: Sequence[Value]) -> list[Value]:
        """Keys of values; a column past the last expert gets a key below that of any value."""
        return [jnp.where(is_inside, key_of(v), _TAKEN) for v, is_inside in zip(values, self.is_inside, strict=True)]

    def best(self, keys: Sequence[Value]) -> tuple[Value, Value]:
        """(the largest key, the lowest column that holds it)."""
        best = simt.warp_max(functools.reduce(jnp.maximum, keys))
        held = [jnp.where(key == best, column, _NOWHERE) for key, column in zip(keys, self.columns, strict=True)]
        return best, simt.warp_min(functools.reduce(jnp.minimum, held))

    def without(self, keys: Sequence[Value], index: Value) -> list[Value]:
        return [jnp.where(column == index, _TAKEN, key) for key, column in zip(keys, self.columns, strict=True)]

    def at(self, values: Sequence[Value], index: Value) -> Value:
        """The value in column ``index``; values are not negative."""
        bits = [
            jnp.where(column == index, lax.bitcast_convert_type(value, jnp.int32), -1)
            for value, column in zip(values, self.columns, strict=True)
        ]
        return lax.bitcast_convert_type(simt.warp_max(functools.reduce(jnp.maximum, bits)), jnp.float32)

    def sum(self, values: Sequence[Value]) -> Value:
        return simt.warp_sum(functools.reduce(lambda a, b: a + b, values))


def key_of(value: Value) -> Value:
    """int32 in the order of float32 values, both zeros alike. Its own inverse, but for the sign of zero."""
    return _flip(lax.bitcast_convert_type(jnp.where(value == 0.0, 0.0, value), jnp.int32))


def value_of(key: Value) -> Value:
    """The float32 of a key."""
    return lax.bitcast_convert_type(_flip(key), jnp.float32)


def _flip(bits: Value) -> Value:
    return bits ^ (lax.shift_right_arithmetic(bits, jnp.full_like(bits, 31)) & 0x7FFFFFFF)


def _choose(desc: RouteDesc, row: _Row, z: list[Value], bias: list[Value] | None) -> _Choice:
    is_valid: Value | bool = True
    largest: Value | float = 0.0
    score: list[Value] = []
    if desc.scoring == "softmax":
        # A NaN counts as infinite here. With an infinite logit there is no softmax, and all scores are 0.
        largest = value_of(row.best(row.keys([jnp.where(v == v, v, np.inf) for v in z]))[0])
        is_valid = (largest < np.inf) & (largest > -np.inf)
        largest = jnp.where(is_valid, largest, 0.0)
        z = [jnp.where(is_valid, v, 0.0) for v in z]
    if desc.chooses_by_logit:
        choice = z
    elif desc.scoring == "softmax":
        powers = [
            jnp.where(is_inside, jnp.exp(v - largest), 0.0) for v, is_inside in zip(z, row.is_inside, strict=True)
        ]
        factor = jnp.where(is_valid, 1.0 / row.sum(powers), 0.0)
        choice = score = [power * factor for power in powers]
    else:
        choice = score = [jnp.where(v == v, lax.logistic(v), 0.0) for v in z]
    if bias is not None:
        choice = [c + b for c, b in zip(choice, bias, strict=True)]
    keys = row.keys(choice)
    if desc.num_groups:
        keys = _in_best_groups(desc, row, keys)

    def one_slot(slot, carry):
        keys, weights, ids = carry
        best, index = row.best(keys)
        weight = value_of(best) if bias is None and not desc.num_groups else row.at(score, index)
        is_slot = row.lane == slot
        return row.without(keys, index), jnp.where(is_slot, weight, weights), jnp.where(is_slot, index, ids)

    nothing = simt.constant(0)
    empty = (keys, lax.bitcast_convert_type(nothing, jnp.float32), nothing)
    left, weights, ids = lax.fori_loop(0, desc.top_k, one_slot, empty)
    if desc.chooses_by_logit:
        weights = jnp.where(is_valid & (row.lane < desc.top_k), jnp.exp(weights - largest), 0.0)
    if desc.renormalize:
        weights = weights * (desc.scale / jnp.maximum(simt.warp_sum(weights), desc.floor))
    elif desc.scale != 1.0:
        weights = weights * desc.scale
    flags = [(after == _TAKEN) & (before != _TAKEN) for after, before in zip(left, keys, strict=True)]
    return _Choice(weights, ids, flags)


def _in_best_groups(desc: RouteDesc, row: _Row, keys: list[Value]) -> list[Value]:
    """Keys, with that of -inf in all groups but the ``groups_kept`` best; ties go to the lower group."""
    size = desc.num_experts // desc.num_groups
    group_of = [lax.div(column, jnp.full_like(column, size)) for column in row.columns]

    def one_group(g, worth):
        own = [jnp.where(group == g, key, _TAKEN) for key, group in zip(keys, group_of, strict=True)]
        best, index = row.best(own)
        if desc.has_bias:
            second, _ = row.best(row.without(own, index))
            best = key_of(value_of(best) + value_of(second))
        return jnp.where(row.lane == g, best, worth)

    def one_kept(_, carry):
        worth, kept = carry
        best = simt.warp_max(worth)
        chosen = simt.warp_min(jnp.where(worth == best, row.lane, _NOWHERE))
        return jnp.where(row.lane == chosen, _TAKEN, worth), kept | lax.shift_left(jnp.ones_like(chosen), chosen)

    worth = lax.fori_loop(0, desc.num_groups, one_group, simt.constant(int(_TAKEN)))
    _, kept = lax.fori_loop(0, desc.groups_kept, one_kept, (worth, simt.constant(0)))
    excluded = int(np.float32(-np.inf).view(np.int32)) ^ 0x7FFFFFFF
    return [
        jnp.where((lax.shift_right_logical(kept, group) & 1 != 0) | (key == _TAKEN), key, np.int32(excluded))
        for key, group in zip(keys, group_of, strict=True)
    ]
