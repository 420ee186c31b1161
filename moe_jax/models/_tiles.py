"""Calls whose bits depend on nothing but a token and those before it in its row: ``pinned_tokens`` of a model.

All tokens of a call, of whatever rows, pass the layers ``pinned_tokens`` at a time, each as a row of its own that goes
on behind the tokens before it, as in a decode step. So every product, norm and sum has the same shape in every call,
and a token finds the same program beside any number of others, in a prompt, in a chunk of one, or alone. Keys and
values lie in pages, which the rows of a tile look up; tiles run in the order of tokens, so that those before a token
are there.

XLA must not learn of what differs between calls, or it rounds otherwise. Tiles run in a loop of whose turns it does not
know the number: a single one it would merge with what stands around it. What a tile takes out of arrays of the call
stands behind barriers: of a call of one row XLA knows that all rows of a tile are alike, and would compute one. On a
CPU barriers are gone before constants are folded, so numbers that might be constants have a zero added to them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.custom_derivatives import SymbolicZero

from moe_jax._typing import Array, Int
from moe_jax.experts import MoEStats
from moe_jax.models._cache import KVCache
from moe_jax.models._compiled import merge_model, split_model
from moe_jax.models.attention._attention import AttentionInputs
from moe_jax.models.attention._rope import rotary_angles
from moe_jax.nn._lora import with_token_choices


def in_tiles(size: int, rows: Array, take: Callable[[Array], Any], function: Callable[..., Any]) -> Any:
    """What ``function`` makes of rows, ``size`` at a time: a pytree of arrays (count, ...).

    rows: (count, ...) floats, some of what is taken. take: the arguments of ``function`` for the rows of these indices,
    (size,) int32; those behind the last repeat it.
    """
    count = len(rows)
    num_tiles = -(-count // size)

    def tile(carry: None, begin: Array) -> tuple[None, Any]:
        index = jnp.minimum(begin + jnp.arange(size, dtype=jnp.int32), count - 1)
        return carry, function(*jax.lax.optimization_barrier(take(index)))

    _, found = _loop(size, num_tiles, num_tiles + _unknown_zero(rows), tile, None)
    return jax.tree.map(lambda rows: rows[:count], found)


def _unknown_zero(array: Array) -> Int[Array, ""]:
    """0, which depends on the array for all that XLA knows. array: of signed integers from 0 on, or of floats."""
    first = array.reshape(-1)[0]
    if not jnp.issubdtype(first.dtype, jnp.integer):
        first = jax.lax.bitcast_convert_type(first.astype(jnp.float32), jnp.int32) & jnp.int32(0x7FFFFFFF)
    return jnp.minimum(first, 0)


def _loop(
    size: int, most: int, num_tiles: Int[Array, ""], tile: Callable[[Any, Array], tuple[Any, Any]], carry: Any
) -> tuple[Any, Any]:
    """(the last carry, what all tiles made as arrays (most * size, ...), zeros where no tile was)."""
    shapes = jax.eval_shape(tile, carry, jax.ShapeDtypeStruct((), jnp.int32))[1]

    def zeros(leaf: Any) -> Array:
        return jax.lax.full((most * size, *leaf.shape[1:]), 0, leaf.dtype, sharding=leaf.sharding)

    rows = jax.tree.map(zeros, shapes)

    def turn(index: Array, held: tuple[Any, Any]) -> tuple[Any, Any]:
        carry, rows = held
        begin = index * size
        carry, new = tile(carry, begin)
        new = jax.lax.optimization_barrier(new)
        put = jax.lax.dynamic_update_slice_in_dim
        return carry, jax.tree.map(lambda old, fresh: put(old, fresh, begin, axis=0), rows, new)

    return jax.lax.fori_loop(0, num_tiles, turn, (carry, rows))


def through_layers(
    model: Any,
    ids: Int[Array, "B S"],
    mask: Array,
    cache: KVCache,
    starts: Int[Array, " B"],
    first_slots: Int[Array, " B"],
    positions: Int[Array, "B S"],
    key_positions: Int[Array, "B L"] | None,
    longest: Int[Array, " B"],
) -> tuple[Array, tuple[Any, ...], MoEStats | None]:
    """As ``model.through_layers`` of the whole call; rows of padding mean nothing.

    mask: (B, S) bool, tokens before padding in every row. starts, first_slots, key_positions: as of
    ``AttentionInputs``; a token that the cache has no slot for is left out. longest: what ``rotary_angles`` takes.
    """
    model = without_gradients(model)
    (batch, columns), size = ids.shape, model.config.pinned_tokens
    count, table = batch * columns, cache.page_table
    assert table is not None
    most = -(-count // size)
    is_token = mask.reshape(-1)
    order = jnp.argsort(~is_token, stable=True).astype(jnp.int32)
    picked = jnp.pad(order, (0, most * size - count))
    unknown = _unknown_zero(ids)
    num_tokens = jnp.sum(is_token, dtype=jnp.int32) + unknown
    first_slots, positions, longest = (numbers + unknown for numbers in (first_slots, positions, longest))

    def tile(carry: tuple[Any, Any], begin: Array) -> tuple[Any, Any]:
        layers, load = carry
        at = jax.lax.dynamic_slice_in_dim(picked, begin, size)
        is_here = begin + jnp.arange(size, dtype=jnp.int32) < num_tokens
        row = at // columns
        slots = first_slots[row] + at % columns
        is_here &= slots < cache.num_slots
        begins, slots = (jnp.where(is_here, numbers, 0) for numbers in (starts[row], slots))
        keys = None if key_positions is None else key_positions[row]
        own = ids.reshape(-1)[at][:, None], positions.reshape(-1)[at][:, None], longest[row], table[row], keys
        places = begins, slots, is_here
        (begins, slots, is_here), own = jax.lax.optimization_barrier((places, own))
        token, where, length, pages, keys = own
        cos, sin = rotary_angles(model.config.rope, where, length)
        places = begins, jnp.where(is_here, slots + 1, 0), slots
        inputs = AttentionInputs(cos, sin, *places, where, keys, page_table=pages, is_pinned=True)
        chosen = with_token_choices(model, ids.shape, lambda choice: choice.reshape(-1)[at][:, None])
        chosen = with_token_choices(chosen, (batch,), lambda choice: choice[row])
        x, layers, stats = chosen.through_layers(token, inputs, layers, is_here[:, None])
        if stats is None:
            return (layers, load), (x[:, 0], None, None)
        rows = (jnp.moveaxis(stats.topk_ids, 1, 0), jnp.moveaxis(stats.router_logits, 1, 0))
        return (layers, load + stats.load), (x[:, 0], *rows)

    experts = [block.experts for block in model.moe_blocks()]
    load = jnp.zeros((len(experts), experts[0].num_slots), jnp.int32) if experts else jnp.int32(0)
    (layers, load), found = _loop(size, most, -(-num_tokens // size), tile, (cache.layers, load))
    back = jnp.argsort(order)
    x, ids_of_experts, logits = jax.tree.map(lambda rows: rows[back], found)
    x = x.reshape(batch, columns, -1)
    if not experts:
        return x, layers, None
    ids_of_experts = jnp.where(is_token[:, None, None], ids_of_experts, -1)
    return x, layers, MoEStats(load, jnp.moveaxis(ids_of_experts, 0, 1), jnp.moveaxis(logits, 0, 1))


def without_gradients(tree: Any) -> Any:
    """The same arrays, or module; whoever differentiates one gets a NotImplementedError."""
    if isinstance(tree, nnx.Module):
        structure, leaves = split_model(tree)
        return merge_model(structure, without_gradients(leaves))
    is_float = lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating)  # noqa: E731
    return jax.tree.map(lambda leaf: _without_gradient(leaf) if is_float(leaf) else leaf, tree)


@jax.custom_jvp
def _without_gradient(x: Array) -> Array:
    return x


def _refuse_tangent(primals: Any, tangents: Any) -> Any:
    if not isinstance(tangents[0], SymbolicZero):
        raise NotImplementedError(
            "a model with pinned_tokens has no gradients, since its calls loop over tiles; load it without"
        )
    return primals[0], tangents[0]


_without_gradient.defjvp(_refuse_tangent, symbolic_zeros=True)


def check_schemes(model: Any) -> None:
    """Raise NotImplementedError where experts scale activations by all tokens of a call, whatever tiles it has. Other
    matrices have scales of tokens then (``scheme_per_token``)."""
    for config in (block.experts.config for block in model.moe_blocks()):
        if config.has_call_scale:
            raise NotImplementedError(
                f"pinned_tokens={model.config.pinned_tokens}: {config.name} has scheme {config.scheme.name!r}, which "
                "scales activations by the largest of a whole call; expected scales of tokens, groups or the "
                "checkpoint, or leave pinned_tokens out"
            )
