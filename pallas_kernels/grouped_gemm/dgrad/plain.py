"""``PlainWeights``: expert matrices of 8 bits as they are stored, with their scales as the kernel reads them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.common.numerics import widen
from pallas_kernels.common.types import Leaf
from pallas_kernels.grouped_gemm.dgrad.config import COPIES_OF_SCALE
from pallas_kernels.grouped_gemm.packed import PackedFormat
from pallas_kernels.grouped_gemm.packed.format import BLOCK_N
from pallas_kernels.grouped_gemm.problem import SCALE_GROUP


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PlainWeights:
    """Matrices (E, N, K) of 8 bits, N in whole blocks of 64 channels; NB = N / 64.

    Args:
        codes: (E, N, K) float8_e4m3fn or int8, as they are stored.
        scale: (E, NB, groups, COPIES_OF_SCALE) float32, of 64 channels by 128 columns of K each; None without.
        channel_scale: (E, NB, 64) float32; None without.
        fmt: element of the codes, dtype of both operands of the product, and what the scales belong to.
    """

    codes: Leaf
    scale: Leaf | None
    channel_scale: Leaf | None
    fmt: PackedFormat = dataclasses.field(metadata=dict(static=True))

    @property
    def num_experts(self) -> int:
        return self.codes.shape[0]

    @property
    def n(self) -> int:
        return self.codes.shape[1]

    @property
    def k(self) -> int:
        return self.codes.shape[2]


def plain_weights(codes: jax.Array, scale: jax.Array, operand: DTypeLike) -> PlainWeights:
    """Stored matrices for ``grouped_dgrad`` and ``grouped_gemm_widened``; codes are not copied.

    Projections come one below the other. A scale of a matrix is repeated for each channel, one of a block 64
    times: 128 bytes for 8,192 weights.

    Args:
        codes: (E, N, K) or (E, G, N, K) float8_e4m3fn or int8; N a multiple of 64.
        scale: float32 (E[, G]) per matrix, (E[, G], N) per channel, or (E[, G], ceil(N/128), ceil(K/128)) per block;
            what codes are multiplied by.
        operand: bfloat16 or float16, of both operands of the product.

    Raises:
        ValueError: N is not in whole blocks, or the scale has another shape. TypeError: another dtype of the codes.
    """
    elements: dict[str, Any] = {"float8_e4m3fn": "e4m3", "int8": "int8"}
    if (name := jnp.dtype(codes.dtype).name) not in elements:
        raise TypeError(f"codes are {name}, expected float8_e4m3fn or int8")
    lead, (n, k) = codes.shape[:-2], codes.shape[-2:]
    if n % BLOCK_N:
        raise ValueError(f"codes have shape {codes.shape}, expected N={n} to be a multiple of {BLOCK_N}")
    groups = -(-k // SCALE_GROUP)
    shapes = (lead, (*lead, n), (*lead, -(-n // SCALE_GROUP), groups))
    if scale.shape not in shapes:
        raise ValueError(f"scale has shape {scale.shape}, expected one of {shapes} for codes {codes.shape}")
    codes, scale = codes.reshape(lead[0], -1, k), scale.astype(jnp.float32)
    fmt = PackedFormat(elements[name], _name(operand))
    if scale.shape == shapes[2]:
        blocks = jnp.repeat(scale, SCALE_GROUP // BLOCK_N, axis=-2)[..., : n // BLOCK_N, :]
        copies = jnp.repeat(blocks.reshape(lead[0], -1, groups, 1), COPIES_OF_SCALE, axis=-1)
        return PlainWeights(codes, copies, None, dataclasses.replace(fmt, scale="group", group_size=SCALE_GROUP))
    of_channels = scale if scale.shape == shapes[1] else jnp.broadcast_to(scale[..., None], shapes[1])
    of_channels = of_channels.reshape(lead[0], -1, BLOCK_N)
    return PlainWeights(codes, None, of_channels, fmt)


def _name(dtype: DTypeLike) -> Any:
    return jnp.dtype(dtype).name


def dequantized(w: PlainWeights) -> jax.Array:
    """(E, N, K) float32, every scale applied."""
    values = widen(w.codes, jnp.float32)
    if w.channel_scale is not None:
        return values * w.channel_scale.reshape(w.num_experts, w.n, 1)
    assert w.scale is not None
    of_channels = jnp.repeat(w.scale[..., 0], BLOCK_N, axis=1)
    return values * jnp.repeat(of_channels, SCALE_GROUP, axis=-1)[..., : w.k]
