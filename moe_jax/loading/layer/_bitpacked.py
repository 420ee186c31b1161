"""Bitpacked integers as different versions of compressed-tensors wrote them, brought to the one layout of a leaf.

A leaf holds dense words. Up to compressed-tensors 0.17, words of 3, 5, 6 or 7-bit codes held floor(32 / bits) elements
and unused top bits; up to 0.6, zero points were plain int8. All three are told apart by dtype and shape, and where the
two kinds of words have the same shape by the version in config.json.
"""

import numpy as np

from moe_jax._config import MoEConfig
from moe_jax.loading._errors import shorten
from moe_jax.loading.layer._names import ExpertTensor
from moe_jax.quantization import Packing, QuantFormat
from pallas_kernels.common import packing


def conform_bitpacked(
    tensor: ExpertTensor, array: np.ndarray, config: MoEConfig, words_are_dense: bool | None
) -> np.ndarray:
    """The array in the layout of its leaf, or as it is where it needs no change or has a shape that fits no layout.

    words_are_dense: which of two layouts of the same shape is meant, None if unknown. Raises ValueError in that case.
    """
    fmt = config.scheme.weights
    if fmt is not None and fmt.packing is Packing.NIBBLES and tensor.suffix == "weight_packed" and array.ndim == 4:
        return array.reshape(*array.shape[:2], -1)  # gpt-oss: 16 bytes for each block of 32
    if fmt is None:
        return array
    return conform_words(tensor.name, tensor.suffix, array, fmt, matrix_shape(tensor, config), words_are_dense)


def conform_words(
    name: str,
    suffix: str,
    array: np.ndarray,
    fmt: QuantFormat,
    shape: tuple[int, int],
    words_are_dense: bool | None,
) -> np.ndarray:
    """``conform_bitpacked`` for a tensor of any (out, in) matrix of this shape; suffix: the leaf without its prefix."""
    if fmt.packing is not Packing.WORDS:
        return array
    rows, columns = shape
    if suffix == "weight_packed":
        return _as_dense(name, array, fmt, columns, words_are_dense)
    if suffix == "weight_zero_point" and array.ndim >= 2:
        if array.dtype == np.int8:
            codes = (array.astype(np.int16) + (1 << (fmt.element_type.bits - 1))).astype(np.uint8)
            return packing.pack_words(codes.swapaxes(-1, -2), fmt.element_type.bits).swapaxes(-1, -2)
        return _as_dense(name, array.swapaxes(-1, -2), fmt, rows, words_are_dense).swapaxes(-1, -2)
    return array


def stored_shapes(suffix: str, fmt: QuantFormat, shape: tuple[int, int]) -> dict[np.dtype, set[tuple[int, ...]]]:
    """dtype -> shapes in which some version stores packed codes ("weight_packed") or zero points of an (out, in) matrix
    of this shape; {} for leaves that have one form only."""
    if fmt.packing is not Packing.WORDS or suffix not in ("weight_packed", "weight_zero_point"):
        return {}
    (rows, columns), bits, words = shape, fmt.element_type.bits, np.dtype(np.int32)
    if suffix == "weight_packed":
        return {words: {(rows, packing.words_per_row(columns, bits, is_dense=d)) for d in (True, False)}}
    groups = fmt.zero_point_shape(rows, columns)[1]
    packed = {(packing.words_per_row(rows, bits, is_dense=d), groups) for d in (True, False)}
    return {words: packed, np.dtype(np.int8): {(rows, groups)}}


def check_weight_shape(tensor: ExpertTensor, array: np.ndarray, config: MoEConfig) -> None:
    """``weight_shape`` is (out, in) of the matrix before packing; it has to be what config.json says."""
    expected = matrix_shape(tensor, config)
    lead = () if tensor.expert is not None else (config.num_experts,)
    if array.shape != (*lead, 2) or (array != np.array(expected)).any():
        raise ValueError(f"{shorten(tensor.name)}: found {array.tolist()}, expected {list(expected)} from config.json")


def matrix_shape(tensor: ExpertTensor, config: MoEConfig) -> tuple[int, int]:
    """(out, in) of the matrix that a tensor belongs to; a stacked gate_up_proj has the rows of both."""
    if tensor.leaf.startswith("w13"):
        return config.intermediate_size * len(tensor.shards), config.hidden_size
    return config.hidden_size, config.intermediate_size


def _as_dense(name: str, words: np.ndarray, fmt: QuantFormat, count: int, words_are_dense: bool | None) -> np.ndarray:
    bits = fmt.element_type.bits
    dense, padded = (packing.words_per_row(count, bits, is_dense=is_dense) for is_dense in (True, False))
    if 32 % bits == 0 or padded == 1 or words.dtype != np.int32 or words.shape[-1:] not in ((dense,), (padded,)):
        return words
    if dense == padded and words_are_dense is None:
        raise ValueError(
            f"{shorten(name)}: {count} codes of {bits} bits take {dense} words in compressed-tensors 0.17 and "
            "0.18 alike, and no version in quantization_config tells which one it was"
        )
    is_padded = not words_are_dense if dense == padded else words.shape[-1] == padded
    return packing.pack_words(packing.unpack_words(words, bits, count, is_dense=False), bits) if is_padded else words
