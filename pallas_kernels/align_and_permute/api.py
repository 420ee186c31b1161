"""``align_and_permute``: few tokens to rows in expert order, and where these lie, by one launch."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.align import TileMap, align
from pallas_kernels.align.api import describe as describe_tiles
from pallas_kernels.align_and_permute.config import config_error
from pallas_kernels.common.device import hopper_sms
from pallas_kernels.common.implementations import first_that_runs
from pallas_kernels.quantize_and_permute import quantize_and_permute
from pallas_kernels.quantize_and_permute.api import describe as describe_rows


def align_and_permute(
    topk_ids: jax.Array,
    num_experts: int,
    block_m: int,
    x: jax.Array,
    *,
    quantization: str,
    scale: jax.Array | None = None,
    implementation: str | Sequence[str] | None = None,
) -> tuple[TileMap, jax.Array, jax.Array | None]:
    """``align(..., stable=True)``, and ``quantize_and_permute`` of the tokens to the rows that it gives.

    Args:
        topk_ids: (T, top_k) int32, as ``align`` takes it.
        num_experts, block_m: as there.
        x: (T, H), the tokens.
        quantization, scale: as ``quantize_and_permute`` takes them.
        implementation: "hopper", "reference", or both in the order to try; None for this order.

    Returns:
        (tiles, rows (Mp, H), scales): those of both.

    Raises:
        ValueError, TypeError: a wrong call. NotImplementedError: no implementation can run it (``config_error``).
    """
    if topk_ids.ndim != 2 or topk_ids.dtype != jnp.int32 or topk_ids.shape[0] != x.shape[0]:
        raise ValueError(
            f"topk_ids is {topk_ids.dtype}{topk_ids.shape}, expected int32 (T, top_k) of the T={x.shape[0]} rows of x"
        )
    how: Any = dict(quantization=quantization, scale=scale)
    num_tokens, top_k = topk_ids.shape
    tiles = describe_tiles(num_tokens, top_k, num_experts, block_m, has_offset=False, unpermuted=False)
    rows, operands = describe_rows(x, topk_ids, tiles.num_rows, **how)

    def hopper() -> tuple[TileMap, jax.Array, jax.Array | None]:
        hopper_sms()  # refuses other devices
        if reason := config_error(tiles, rows):
            raise NotImplementedError(reason)

        from pallas_kernels.align_and_permute.kernel_sm90 import align_and_permute_sm90  # importing it loads Pallas

        found = list(align_and_permute_sm90(tiles, rows)(topk_ids.reshape(-1), x, *operands[2:]))
        table = {name: found.pop(0) for name in tiles.outputs}
        table["row_of"] = table["row_of"].reshape(topk_ids.shape)
        return TileMap(**table), *found

    def reference() -> tuple[TileMap, jax.Array, jax.Array | None]:
        table = align(topk_ids, num_experts, block_m, stable=True, implementation="reference")
        return table, *quantize_and_permute(x, table.row_of, tiles.num_rows, **how, implementation="reference")

    return first_that_runs("align_and_permute", dict(hopper=hopper, reference=reference), implementation)
