"""Packed integers: the specification's worked examples, compressed-tensors' packer, and exact inverses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

from pallas_kernels.common import packing
from tests.support.refusals import refuses

KINDS = [np.asarray, jnp.asarray]


@pytest.mark.parametrize("as_array", KINDS)
@pytest.mark.parametrize(
    "bits, values, words",
    [
        (4, [-8, -1, 0, 7, 3, -4, 1, 2, 5], [0xA94BF870, 0x0000000D]),
        (8, [-128, -1, 0, 127], [0xFF807F00]),
        (2, [-2, -1, 0, 1], [0x000000E4]),
        (3, [-4, -1, 0, 3, 1, 2, -2, -3, 3, 0, 1], [0x672B5F18, 0x00000001]),
    ],
)
def test_worked_examples(bits, values, words, as_array):
    codes = as_array((np.array(values) + 2 ** (bits - 1)).astype(np.uint8))
    packed = packing.pack_words(codes, bits)
    assert packed.dtype == np.int32
    np.testing.assert_array_equal(np.asarray(packed).view(np.uint32), np.array(words, np.uint32))
    np.testing.assert_array_equal(packing.unpack_words(packed, bits, len(values)), codes)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("count", [1, 10, 11, 32, 33, 64, 97])
def test_dense_words_equal_compressed_tensors(bits, count):
    rng = np.random.default_rng(bits * 100 + count)
    signed = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (5, count)).astype(np.int8)
    judge = pack_to_int32(torch.from_numpy(signed), bits)
    codes = (signed.astype(np.int16) + 2 ** (bits - 1)).astype(np.uint8)
    np.testing.assert_array_equal(packing.pack_words(codes, bits), judge.numpy())
    unpacked = unpack_from_int32(judge, bits, torch.Size(signed.shape)).numpy()
    np.testing.assert_array_equal(
        packing.unpack_words(judge.numpy(), bits, count).astype(np.int16) - 2 ** (bits - 1), unpacked
    )


@pytest.mark.parametrize("as_array", KINDS)
@pytest.mark.parametrize("is_dense", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_pack_and_unpack_are_inverse(bits, is_dense, as_array):
    codes = as_array(np.random.default_rng(bits).integers(0, 2**bits, (3, 4, 75)).astype(np.uint8))
    words = packing.pack_words(codes, bits, is_dense=is_dense)
    assert words.shape == (3, 4, packing.words_per_row(75, bits, is_dense=is_dense))
    np.testing.assert_array_equal(packing.unpack_words(words, bits, 75, is_dense=is_dense), codes)


def test_padded_three_bit_words_hold_ten_elements():
    words = packing.pack_words(np.full(20, 7, np.uint8), 3, is_dense=False)
    np.testing.assert_array_equal(words, [2**30 - 1, 2**30 - 1])
    assert packing.words_per_row(20, 3, is_dense=False) == packing.words_per_row(20, 3, is_dense=True) == 2
    assert packing.words_per_row(64, 3, is_dense=False) == 7 != packing.words_per_row(64, 3) == 6


def test_unpack_runs_under_jit():
    words = jnp.asarray(np.random.default_rng(0).integers(-(2**31), 2**31, (2, 6), np.int32))
    unpack = jax.jit(lambda w: packing.unpack_words(w, 3, 64))
    np.testing.assert_array_equal(unpack(words), packing.unpack_words(np.asarray(words), 3, 64))


def test_wrong_width_is_named():
    refuses(ValueError, "7 words, expected 8", packing.unpack_words, np.zeros((2, 7), np.int32), 4, 64)


@pytest.mark.parametrize("as_array", KINDS)
def test_nibbles(as_array):
    data = as_array(np.array([[0x21, 0xA7, 0x4F, 0x08]], np.uint8))
    np.testing.assert_array_equal(packing.unpack_nibbles(data), [[1, 2, 7, 10, 15, 4, 8, 0]])
    np.testing.assert_array_equal(packing.pack_nibbles(packing.unpack_nibbles(data)), data)
    refuses(ValueError, "3 codes", packing.pack_nibbles, as_array(np.zeros(3, np.uint8)))


def test_awq_order():
    """Column c of a word sits at bit 4 * (0, 4, 1, 5, 2, 6, 3, 7)[c]."""
    codes = np.random.default_rng(0).integers(0, 16, (4, 3, 8)).astype(np.uint32)
    words = (codes << np.array([0, 16, 4, 20, 8, 24, 12, 28], np.uint32)).sum(-1, dtype=np.uint32).view(np.int32)
    for count in (24, 21):
        np.testing.assert_array_equal(packing.unpack_awq(words, count), codes.reshape(4, 24)[:, :count])
