"""``align``: rows in expert order for routed (token, slot) pairs, and the tile table of a grouped GEMM."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.align.config import AlignConfig, AlignDesc, choose_config, config_error, row_capacity
from pallas_kernels.align.reference import align_ref
from pallas_kernels.common.device import hopper_sms, portable_sms
from pallas_kernels.common.implementations import first_that_runs
from pallas_kernels.common.types import Leaf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TileMap:
    """Where the rows of a routing lie. Each expert's rows start at a tile of their own, experts ascending.

    Args:
        row_of: (T, top_k) int32, the row of each (token, slot), -1 where it is not routed. Rows of an expert are in the
            order in which threads reached a counter, or, where ``align`` was asked for it, in that of their pairs.
        group_sizes: (E,) int32, pairs per expert.
        tile_expert: (Mp / block_m,) int32, the expert of each tile, -1 past the last tile in use.
        tile_rows: (Mp / block_m,) int32, rows in use of each tile.
        num_tiles: (1,) int32, tiles in use.
        tile_bits: (Mp / block_m,) int32 where tokens stay unpermuted, else None: bit r of a tile says whether the token
            of its row r is routed to its expert, the last bit whether that of any row from 31 on is.
    """

    row_of: Leaf
    group_sizes: Leaf
    tile_expert: Leaf
    tile_rows: Leaf
    num_tiles: Leaf
    tile_bits: Leaf | None = None


def align(
    topk_ids: jax.Array,
    num_experts: int,
    block_m: int,
    *,
    group_offset: jax.Array | int | None = None,
    unpermuted: bool = False,
    stable: bool = False,
    config: AlignConfig | None = None,
    implementation: str | Sequence[str] | None = None,
) -> TileMap:
    """Give every routed (token, slot) a row: rows grouped by expert, each group padded to whole tiles of block_m rows.

    The number of rows Mp is ``row_capacity``, whatever the ids are. Inside a group the order of rows is unspecified and
    may differ between implementations and calls; with ``stable`` it is that of the pairs (t, slot).

    Args:
        topk_ids: (T, top_k) int32, or (T, top_k, 2) int32 with the words of 64-bit ids, low first, as int64 lies in
            memory; an id outside [0, num_experts) is not routed.
        num_experts: experts that get rows.
        block_m: rows of a tile.
        group_offset: () int32, which may live on the device: the id of the first of the num_experts experts, where they
            are a shard of more. Ids of other shards are not routed and cost nothing.
        unpermuted: row t of an expert's tile is token t, so that every tile holds the same T <= block_m tokens. A token
            that names an expert twice then has one row of it.
        stable: rows of a group in the order of their pairs (t, slot), so that sums over them repeat to the bit. XLA
            computes it, whatever the implementation. It changes nothing where tokens stay unpermuted.
        config: of the Hopper kernel; None for its own choice.
        implementation: "hopper", "portable", "reference", or several in the order to try; None for this order.

    Raises:
        ValueError, TypeError: a wrong call. NotImplementedError: no implementation can run it.
    """
    if topk_ids.ndim not in (2, 3) or topk_ids.shape[2:] not in ((), (2,)) or topk_ids.dtype != jnp.int32:
        raise ValueError(f"topk_ids is {topk_ids.dtype}{topk_ids.shape}, expected int32 (T, top_k) or (T, top_k, 2)")
    if num_experts < 1 or block_m < 1:
        raise ValueError(f"num_experts={num_experts} and block_m={block_m} must both be at least 1")
    by_xla = stable and not unpermuted
    if by_xla and config is not None:
        raise ValueError(f"stable=True takes no config of the Hopper kernel, found {config}; leave one of them out")
    desc = describe(
        topk_ids.shape[0],
        topk_ids.shape[1],
        num_experts,
        block_m,
        has_offset=group_offset is not None,
        unpermuted=unpermuted,
        are_wide=topk_ids.ndim == 3,
    )
    operands = [topk_ids.reshape(-1), *as_operands(group_offset)]

    def kernel(num_sms: int) -> dict[str, jax.Array]:
        del num_sms  # asked for whether the device runs it
        if by_xla:
            return align_ref(desc, *operands)
        chosen = config or choose_config(desc)
        if reason := config_error(desc, chosen):
            raise NotImplementedError(reason)

        from pallas_kernels.align.kernel_sm90 import align_sm90  # here: importing it loads Pallas

        return dict(zip(desc.outputs, align_sm90(desc, chosen)(*operands), strict=True))

    runs = dict(
        hopper=lambda: kernel(hopper_sms()),
        portable=lambda: kernel(portable_sms()),
        reference=lambda: align_ref(desc, *operands),
    )
    found = first_that_runs("align", runs, implementation)
    return TileMap(**dict(found, row_of=found["row_of"].reshape(topk_ids.shape[:2])))


def describe(
    num_tokens: int,
    top_k: int,
    num_experts: int,
    block_m: int,
    *,
    has_offset: bool,
    unpermuted: bool,
    are_wide: bool = False,
) -> AlignDesc:
    """The description of a call. Raises ValueError for more unpermuted tokens than a tile has rows."""
    if unpermuted and num_tokens > block_m:
        raise ValueError(
            f"unpermuted with {num_tokens} tokens in tiles of block_m={block_m} rows, expected T <= block_m"
        )
    pairs = num_tokens * top_k
    rows = row_capacity(pairs, num_experts, block_m)
    return AlignDesc(pairs, num_experts, block_m, rows, has_offset, top_k if unpermuted else 0, are_wide)


def as_operands(group_offset: jax.Array | int | None) -> list[jax.Array]:
    """The offset as the kernels take it, (1,) int32, or nothing. Raises ValueError for another kind."""
    if group_offset is None:
        return []
    offset = jnp.asarray(group_offset, jnp.int32) if isinstance(group_offset, int) else group_offset
    if offset.shape != () or offset.dtype != jnp.int32:
        raise ValueError(f"group_offset is {offset.dtype}{offset.shape}, expected int32 ()")
    return [offset.reshape(1)]
