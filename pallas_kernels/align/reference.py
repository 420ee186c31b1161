"""align in plain jnp, with a rank for each pair that is the same on every call.

The rank of a pair counts the pairs of its expert before it: those in earlier blocks of pairs, by sums before each row
of a table (blocks, E), and those in its own block, each compared with each. Nothing is sorted, scattered or scanned, so
that XLA makes a few short kernels of it on a GPU.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.align.config import LAST_BIT, AlignDesc

_PAIRS = 128  # of a block
_ROWS = 32  # of a table that are summed together


def align_ref(desc: AlignDesc, ids: jax.Array, offset: jax.Array | None = None) -> dict[str, jax.Array]:
    """What ``align`` computes, rows of an expert in the order of the pairs. Operands as of ``align_sm90``."""
    if desc.are_wide:
        low, high = ids[0::2], ids[1::2]
        ids = jnp.where(high == 0, low, -1)
    ids = ids if offset is None else ids - offset
    is_routed = (ids >= 0) & (ids < desc.num_experts)
    expert = jnp.where(is_routed, ids, desc.num_experts)
    names = jnp.arange(desc.num_experts, dtype=jnp.int32)
    missing = -desc.num_pairs % _PAIRS if desc.num_pairs else _PAIRS
    blocks = jnp.pad(expert, (0, missing), constant_values=desc.num_experts).reshape(-1, _PAIRS)
    counts = (blocks[:, :, None] == names).sum(axis=1, dtype=jnp.int32)
    before = _sums_before(counts)
    sizes = before[-1] + counts[-1]
    tiles = jnp.minimum(sizes, 1) if desc.top_k else -(-sizes // desc.block_m)
    first = _sums_before(tiles[:, None])[:, 0]
    ends = first + tiles
    owner = jnp.minimum(expert, desc.num_experts - 1)
    pair = jnp.arange(desc.num_pairs, dtype=jnp.int32)
    if desc.top_k:
        rank = pair // desc.top_k
    else:
        is_same = blocks[:, :, None] == blocks[:, None, :]
        within = (is_same & _is_before(_PAIRS)).sum(axis=2, dtype=jnp.int32).reshape(-1)[: desc.num_pairs]
        rank = before[pair // _PAIRS, owner] + within
    index = jnp.arange(desc.num_tiles, dtype=jnp.int32)
    in_use = index < ends[-1]
    tile_expert = (ends <= index[:, None]).sum(axis=1, dtype=jnp.int32)
    tile_owner = jnp.minimum(tile_expert, desc.num_experts - 1)
    used = jnp.clip(sizes[tile_owner] - (index - first[tile_owner]) * desc.block_m, 0, desc.block_m)
    bits = {}
    if desc.top_k:
        used = desc.num_tokens
        token = jnp.minimum(jnp.arange(desc.num_tokens, dtype=jnp.int32), LAST_BIT)
        is_own = (expert.reshape(-1, desc.top_k, 1) == names).any(axis=1)
        each = jnp.where(is_own, lax.shift_left(jnp.ones_like(token), token)[:, None], 0)
        of_expert = lax.reduce(each, jnp.int32(0), lax.bitwise_or, (0,))
        bits = dict(tile_bits=jnp.where(in_use, of_expert[tile_owner], 0))
    return dict(
        row_of=jnp.where(is_routed, first[owner] * desc.block_m + rank, -1),
        group_sizes=sizes,
        tile_expert=jnp.where(in_use, tile_expert, -1),
        tile_rows=jnp.where(in_use, used, 0),
        num_tiles=ends[-1:],
        **bits,
    )


def _is_before(count: int) -> jax.Array:
    """(count, count) bool, whether the second index lies before the first."""
    return jnp.tri(count, k=-1, dtype=bool)


def _sums_before(table: jax.Array) -> jax.Array:
    """(N, E) int32 -> (N, E): the sum of the rows before each."""
    rows, columns = table.shape
    parts = jnp.pad(table, ((0, -rows % _ROWS), (0, 0))).reshape(-1, _ROWS, columns)
    sums = jnp.where(_is_before(_ROWS)[:, :, None], parts[:, None], 0).sum(axis=2, dtype=jnp.int32)
    if parts.shape[0] > 1:
        sums = sums + _sums_before(parts.sum(axis=1, dtype=jnp.int32))[:, None]
    return sums.reshape(-1, columns)[:rows]
