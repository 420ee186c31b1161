"""Properties that must hold for any input: packing, scales, routing. Examples are drawn the same way in every run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moe_jax import MoEConfig
from moe_jax.quantization import (
    SCHEMES,
    Packing,
    QuantFormat,
    QuantizedTensor,
    Strategy,
    dequantize_tensor,
    quantize_weight,
    repack_integers,
)
from moe_jax.routing import route
from pallas_kernels.common import packing

quick = functools.partial(settings, derandomize=True, deadline=None, database=None)
BITS = st.integers(2, 8)


@quick(max_examples=60)
@given(st.data(), BITS, st.booleans())
def test_words_unpack_to_what_was_packed(data, bits, is_dense):
    shape = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 40)))
    codes = data.draw(hnp.arrays(np.uint8, shape, elements=st.integers(0, 2**bits - 1)))
    words = packing.pack_words(codes, bits, is_dense=is_dense)
    assert words.shape == (shape[0], packing.words_per_row(shape[1], bits, is_dense=is_dense))
    np.testing.assert_array_equal(packing.unpack_words(words, bits, shape[1], is_dense=is_dense), codes)
    if is_dense:  # the stream of bits, lowest first
        stream = [sum(int(code) << (bits * i) for i, code in enumerate(row)) for row in codes]
        assert [int.from_bytes(row.tobytes(), "little") for row in words] == stream


@quick(max_examples=30)
@given(hnp.arrays(np.uint8, st.tuples(st.integers(1, 3), st.sampled_from([8, 16, 40])), elements=st.integers(0, 15)))
def test_nibbles_unpack_to_what_was_packed(codes):
    np.testing.assert_array_equal(packing.unpack_nibbles(packing.pack_nibbles(codes)), codes)


@quick(max_examples=8)
@given(st.data(), st.sampled_from([3, 4]))
def test_repacking_keeps_codes_and_zero_points(data, bits):
    n, k, groups = 5, 12, 3
    fmt = QuantFormat(f"int{bits}", Strategy.GROUP, 4, packing=None, symmetric=False)
    code = st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    tensor = QuantizedTensor(
        data=data.draw(hnp.arrays(np.int8, (n, k), elements=code)),
        scale=np.ones((n, groups), np.float32),
        zero_point=data.draw(hnp.arrays(np.int8, (n, groups), elements=code)),
        fmt=fmt,
    )
    words = repack_integers(tensor, Packing.WORDS)
    assert words.data.dtype == np.int32 and words.shape == (n, k)
    back = repack_integers(words, None)
    np.testing.assert_array_equal(back.data, tensor.data)
    np.testing.assert_array_equal(back.zero_point, tensor.zero_point)
    assert back.fmt == fmt and back.num_columns is None


N, K = 6, 64
# half a step of the grid at the largest value of an extent, relative to that value; NVFP4's and MX scales are rounded
HALF_STEP = {
    "fp8_channel": 1 / 28,
    "int8_w8a8": 0.5 / 127,
    "w4a16_g32": 0.5 / 7.5,
    "w4a16_g32_asym": 1 / 15,
    "nvfp4_a16": 1 / 6 + 1 / 16,
    "mxfp4_a16": 1 / 3,
    "mxfp8": 1 / 14,
}
FLOATS = st.floats(-1e4, 1e4, width=32, allow_subnormal=False) | st.sampled_from([0.0, 1.0, -1e-3])


@functools.partial(jax.jit, static_argnames="fmt")
def round_trip(w, fmt):
    data, scale, *rest = quantize_weight(w, fmt)
    third = rest[0] if rest else None
    tensor = QuantizedTensor(
        data=data,
        scale=scale,
        global_scale=third if fmt.global_scale else None,
        zero_point=None if fmt.global_scale else third,
        fmt=fmt,
        num_columns=None if fmt.packing is None else K,
    )
    return dequantize_tensor(tensor)


@quick(max_examples=20)
@given(hnp.arrays(np.float32, (N, K), elements=FLOATS), st.sampled_from(sorted(HALF_STEP)), st.integers(-3, 3))
def test_rounding_error_and_powers_of_two(w, name, power):
    """No value moves by more than half a step of its extent, and a power of two in front changes nothing else."""
    fmt = SCHEMES[name].weights
    found = np.asarray(round_trip(w, fmt), np.float64)
    size = fmt.group_size or K
    largest = np.abs(w.astype(np.float64)).reshape(N, -1, size).max(-1).repeat(size, axis=1)
    # where a row's scale has a floor (FP8), or NVFP4's block scale falls below its own smallest number
    floor = {"fp8_channel": 1e-5, "nvfp4_a16": np.abs(w).max() * 2.0**-9}.get(name, 1e-30)
    assert (np.abs(found - w) <= HALF_STEP[name] * np.maximum(largest, floor) * 1.001).all()
    assert ((found == 0) | (np.sign(found) == np.sign(w)) | (name == "w4a16_g32_asym")).all()
    if np.abs(w[w != 0]).min(initial=1) > 1e-2:  # above the floors
        np.testing.assert_array_equal(np.asarray(round_trip(w * np.float32(2.0**power), fmt)), found * 2.0**power)


T, E, TOP_K = 4, 8, 3


@functools.partial(jax.jit, static_argnames="config")
def routed(logits, config):
    routing = route(logits, config)
    return routing.topk_weights, routing.topk_ids


@quick(max_examples=25)
@given(
    st.data(),
    st.sampled_from(["softmax", "sigmoid"]),
    st.booleans(),
    hnp.arrays(np.float32, (T, E), elements=st.floats(-30, 30, width=32), unique=True),
)
def test_routing(data, scoring_func, renormalize, logits):
    """The largest logits win, their order and that of experts and tokens do not matter, weights add up."""
    config = MoEConfig(E, TOP_K, 8, 8, scoring_func=scoring_func, renormalize=renormalize)
    weights, ids = (np.asarray(x) for x in routed(jnp.asarray(logits), config))
    order = data.draw(st.permutations(range(E)))
    for t in range(T):
        scores = 1 / (1 + np.exp(-logits[t])) if scoring_func == "sigmoid" else np.exp(logits[t] - logits[t].max())
        chosen = ids[t]
        assert len(set(chosen)) == TOP_K
        left_out = np.delete(scores, chosen)
        assert scores[chosen].min() >= left_out.max() * (1 - 1e-6), "float32 scores may tie"
    assert (weights >= 0).all() and (np.diff(weights, axis=1) <= 1e-6).all()
    if renormalize:
        np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-5)
    moved = jnp.asarray(logits[::-1][:, order])
    moved_weights, moved_ids = (np.asarray(x)[::-1] for x in routed(moved, config))
    np.testing.assert_allclose(moved_weights, weights, rtol=1e-5, atol=1e-7)
    same = np.asarray(order)[moved_ids] == ids
    ties = np.isclose(weights, moved_weights, rtol=1e-6)
    assert (same | ties).all()
