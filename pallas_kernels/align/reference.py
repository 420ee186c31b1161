"""align in plain jnp."""

import jax
import jax.numpy as jnp

from pallas_kernels.align.config import AlignDesc


def align_ref(desc: AlignDesc, ids: jax.Array, offset: jax.Array | None = None) -> dict[str, jax.Array]:
    """What ``align`` computes, rows of an expert in the order of the pairs. Operands as of ``align_sm90``."""
    if desc.are_wide:
        low, high = ids[0::2], ids[1::2]
        ids = jnp.where(high == 0, low, -1)
    ids = ids if offset is None else ids - offset
    is_routed = (ids >= 0) & (ids < desc.num_experts)
    expert = jnp.where(is_routed, ids, desc.num_experts)
    sizes = jnp.zeros(desc.num_experts, jnp.int32).at[expert].add(1, mode="drop")
    tiles = jnp.minimum(sizes, 1) if desc.top_k else -(-sizes // desc.block_m)
    ends = jnp.cumsum(tiles)
    order = jnp.argsort(expert, stable=True)
    starts = jnp.cumsum(sizes) - sizes
    sorted_expert = jnp.minimum(expert[order], desc.num_experts - 1)
    rank = jnp.arange(desc.num_pairs, dtype=jnp.int32) - starts[sorted_expert]
    if desc.top_k:
        rank = order // desc.top_k
    row = (ends - tiles)[sorted_expert] * desc.block_m + rank
    row_of = jnp.zeros(desc.num_pairs, jnp.int32).at[order].set(row)
    index = jnp.arange(desc.num_tiles, dtype=jnp.int32)
    tile_expert = jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
    owner = jnp.minimum(tile_expert, desc.num_experts - 1)
    used = jnp.clip(sizes[owner] - (index - (ends - tiles)[owner]) * desc.block_m, 0, desc.block_m)
    if desc.top_k:
        used = desc.num_tokens
    in_use = index < ends[-1]
    return dict(
        row_of=jnp.where(is_routed, row_of, -1),
        group_sizes=sizes,
        tile_expert=jnp.where(in_use, tile_expert, -1),
        tile_rows=jnp.where(in_use, used, 0),
        num_tiles=ends[-1:],
    )
