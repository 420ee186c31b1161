"""``dequantize_packed``: packed weights as matrices of 16 bits, for products that no dequant main loop has."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.common.device import hopper_sms
from pallas_kernels.common.implementations import first_that_runs
from pallas_kernels.grouped_gemm.packed.dense_config import DenseDesc
from pallas_kernels.grouped_gemm.packed.layout import PackedWeights
from pallas_kernels.grouped_gemm.packed.reference import dequantized


def dequantize_packed(
    w: PackedWeights, out_dtype: DTypeLike = jnp.bfloat16, *, implementation: str | Sequence[str] | None = None
) -> jax.Array:
    """(E, G, N, K), every scale applied in float32 and rounded once to ``out_dtype``.

    implementation: "hopper" or "reference", or several in the order to try; None tries them in this order. Raises
    NotImplementedError, with a reason for each, when none can.
    """
    desc = describe_dense(w, out_dtype)

    def hopper():
        if reason := desc.unsupported():
            raise NotImplementedError(reason)

        from pallas_kernels.grouped_gemm.packed.dense_sm90 import dequantize_sm90  # here: importing it loads Pallas

        leaves = dict(w=w.words, scale=w.scale, zero=w.zero, channel_scale=w.channel_scale)
        flat = [leaf.reshape(-1, *leaf.shape[3:]) for leaf in leaves.values() if leaf is not None]
        rows = dequantize_sm90(desc, hopper_sms())(*flat)
        return rows.reshape(desc.num_experts, desc.projections, desc.n, desc.k)

    runs = dict(hopper=hopper, reference=lambda: dequantized(w).astype(out_dtype))
    return first_that_runs("dequantize_packed", runs, implementation)


def describe_dense(w: PackedWeights, out_dtype: DTypeLike) -> DenseDesc:
    """The description of a call; leaves may be ShapeDtypeStructs."""
    beside = w.scale if w.scale is not None else w.zero
    return DenseDesc(
        num_experts=w.num_experts,
        channel_blocks=w.words.shape[1],
        projections=w.projections,
        depth_blocks=w.words.shape[3],
        n=w.n,
        k=w.k,
        groups=1 if beside is None else beside.shape[3],
        fmt=w.fmt,
        out_dtype=jnp.dtype(out_dtype).name,
        scale_dtype="float32" if w.scale is None else jnp.dtype(w.scale.dtype).name,
        has_channel_scale=w.channel_scale is not None,
    )
