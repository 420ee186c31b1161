"""Two views of the leaves of a processed layer: as checkpoints name and store them, and as vLLM does after processing.

They differ for NVFP4 of compressed-tensors (``weight``, ``weight_scale_2`` and ``input_scale``, which multiply, for
``weight_packed`` and global scales, which divide) and for int4 with int8 activations (``weight_packed``, offset by 8
with the even column in the low nibble, for ``weight``). Every other scheme has one view.
"""

from collections.abc import Mapping

import torch

from moe_jax import Scheme
from moe_jax.quantization import Packing

_DIVIDING = {"weight_global_scale": "weight_scale_2", "input_global_scale": "input_scale"}


def processed_view(leaves: Mapping[str, torch.Tensor], scheme: Scheme) -> dict[str, torch.Tensor]:
    """Leaves in the checkpoint's view -> the same as vLLM has them after processing."""
    if not has_two_views(scheme):
        return dict(leaves)
    view = {}
    for name, leaf in leaves.items():
        prefix, _, suffix = name.partition("_")
        if suffix in _DIVIDING:
            view[f"{prefix}_{_DIVIDING[suffix]}"] = leaf.reciprocal()
        elif suffix == "weight_packed":
            view[f"{prefix}_weight"] = leaf
        elif suffix == "weight":
            codes = (leaf + 8).to(torch.uint8)
            view[f"{prefix}_weight_packed"] = codes[..., 0::2] | (codes[..., 1::2] << 4)
        else:
            view[name] = leaf
    return view


def checkpoint_view(leaves: Mapping[str, torch.Tensor], scheme: Scheme) -> dict[str, torch.Tensor]:
    """The inverse of ``processed_view``; leaves in the checkpoint's view already stay as they are.

    A reciprocal is rounded, so that global scales of NVFP4 come back within one unit of their last place.
    """
    if not has_two_views(scheme):
        return dict(leaves)
    is_fp4 = scheme.weight_format.global_scale is not None
    plain = leaves.get("w2_weight")  # what the processed view calls packed FP4, and never int4
    if (plain is not None and plain.dtype == torch.uint8) != is_fp4 or (plain is not None and not is_fp4):
        return dict(leaves)
    multiplying, view = {new: old for old, new in _DIVIDING.items()}, {}
    for name, leaf in leaves.items():
        prefix, _, suffix = name.partition("_")
        if is_fp4 and suffix in multiplying:
            view[f"{prefix}_{multiplying[suffix]}"] = leaf.reciprocal()
        elif is_fp4 and suffix == "weight":
            view[f"{prefix}_weight_packed"] = leaf
        elif suffix == "weight_packed" and leaf.dtype == torch.uint8:
            codes = torch.stack([leaf & 15, leaf >> 4], -1).flatten(-2)
            view[f"{prefix}_weight"] = codes.to(torch.int8) - 8
        else:
            view[name] = leaf
    return view


def has_two_views(scheme: Scheme) -> bool:
    """Whether vLLM renames or repacks leaves of this scheme when it processes them, in a way that is the format's own.

    Kernel layouts of single GPUs, such as Marlin's, are no view of ours.
    """
    weights = scheme.weights
    if weights is None:
        return False
    is_plain_int4 = weights.element == "int4" and weights.packing is not Packing.WORDS
    return weights.global_scale == "divides" or is_plain_int4
