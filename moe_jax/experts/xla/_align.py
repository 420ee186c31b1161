"""From expert ids to grouped rows: a stable sort of (token, slot) by expert and the tile table of a grouped GEMM."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax._typing import Array, Int, Leaf
from moe_jax.experts._sort import sort_by_expert
from pallas_kernels.align import row_capacity


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Alignment:
    """Rows of one call grouped by expert, each group padded to a whole number of tiles. All leaves are int32 on device.

    row_token: (Mp,) token whose activations fill a row; the sentinel T in the gaps after a group and past the end.
    row_of: (T, top_k) row that holds the pair (token, slot); -1 when the pair is not routed.
    group_sizes: (E,) rows per expert without padding. Group e starts at row
        ``tile * sum_{i<e} ceil(group_sizes[i] / tile)``.
    tile_expert: (Mp / tile,) expert of each tile, -1 past the end.
    num_tiles: () tiles in use; the rows in use are the first ``num_tiles * tile``.
    """

    row_token: Leaf
    row_of: Leaf
    group_sizes: Leaf
    tile_expert: Leaf
    num_tiles: Leaf


def align(topk_ids: Int[Array, "T top_k"], num_experts: int, tile: int) -> Alignment:
    """Group the rows (token, slot) by expert; order inside a group is ascending (token, slot).

    topk_ids: (T, top_k) signed integer; an id outside [0, num_experts) is not routed: it gets no row and no expert.
    tile: rows of one GEMM tile, static; 1 packs the groups without gaps. The shapes depend on static values only, see
    ``row_capacity``. Everything stays on device. An expert may appear more than once in a token.
    """
    if tile < 1 or num_experts < 1:
        raise ValueError(f"align: num_experts={num_experts} and tile={tile} must both be at least 1")
    num_tokens, top_k = topk_ids.shape
    capacity = row_capacity(num_tokens * top_k, num_experts, tile)

    flat = topk_ids.reshape(-1).astype(jnp.int32)
    expert = jnp.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    group_sizes = jnp.zeros(num_experts, jnp.int32).at[expert].add(1, mode="drop")
    tiles = (group_sizes + (tile - 1)) // tile

    sorted_expert, source = sort_by_expert(expert, num_experts)
    # Rows of group e move by the padding of the groups before it; what is not routed moves past the end and is dropped.
    padding = jnp.cumsum(tiles * tile - group_sizes) - (tiles * tile - group_sizes)
    shift = jnp.concatenate([padding, jnp.full(1, capacity, jnp.int32)])
    row = lax.iota(jnp.int32, flat.size) + shift[sorted_expert]
    row_of = jnp.full(flat.size, -1, jnp.int32).at[source].set(jnp.where(row < capacity, row, -1), unique_indices=True)
    row_token = jnp.full(capacity, num_tokens, jnp.int32)
    return Alignment(
        row_token=row_token.at[row].set(source // max(top_k, 1), mode="drop", unique_indices=True),
        row_of=row_of.reshape(num_tokens, top_k),
        group_sizes=group_sizes,
        tile_expert=jnp.full(capacity // tile, -1, jnp.int32).at[row // tile].set(sorted_expert, mode="drop"),
        num_tiles=tiles.sum(dtype=jnp.int32),
    )
