"""grouped_dgrad and grouped_gemm_widened in plain jnp."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_gemm.dgrad import plain
from pallas_kernels.grouped_gemm.dgrad.config import UNIT, DgradDesc
from pallas_kernels.grouped_gemm.packed import reference as packed
from pallas_kernels.grouped_gemm.packed.layout import PackedWeights
from pallas_kernels.grouped_gemm.reference import pulled_ref


def grouped_dgrad_ref(
    desc: DgradDesc,
    dy: jax.Array,
    w: PackedWeights | plain.PlainWeights,
    tile_expert: jax.Array,
    num_tiles: jax.Array,
    *,
    before: jax.Array | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """What ``desc`` describes, tile by tile in float32; rows of tiles from num_tiles on are zero."""
    wide = packed.dequantized(w) if isinstance(w, PackedWeights) else plain.dequantized(w)
    matrices = wide.reshape(desc.num_experts, desc.n, desc.k).astype(desc.dtype).astype(jnp.float32)
    matrices = matrices.swapaxes(1, 2) if desc.contracts_k else matrices
    tiles = tile_expert.shape[0]
    block_m = desc.rows // tiles

    def one_tile(index):
        rows = lax.dynamic_slice_in_dim(dy, index * block_m, block_m).astype(jnp.float32)
        expert = jnp.maximum(tile_expert[index], 0)
        product = jnp.einsum("mn,nk->mk", rows, matrices[expert], precision=lax.Precision.HIGHEST)
        return jnp.where(index < num_tiles.reshape(()), product, 0.0)

    sums = lax.map(one_tile, jnp.arange(tiles, dtype=jnp.int32)).reshape(desc.rows, desc.width)
    if desc.activation is None:
        return sums.astype(desc.dtype)
    assert before is not None
    size = desc.k if desc.is_plain else UNIT  # columns of a projection that lie together
    blocks = before.astype(jnp.float32).reshape(desc.rows, -1, desc.projections, size)
    given = [blocks[:, :, projection].reshape(sums.shape) for projection in range(desc.projections)]
    bars, hidden = pulled_ref(desc.activation, given, sums)
    together = jnp.stack([bar.reshape(desc.rows, -1, size) for bar in bars], axis=2)
    return together.reshape(before.shape).astype(desc.dtype), (hidden * sums).sum(axis=1)
