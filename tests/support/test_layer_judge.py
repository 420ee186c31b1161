"""The judge of layers itself: right layers pass, and in every row of every scheme each wrong one fails.

Right layers are the xla implementation, whose activations are float32, and the oracle with sums that are off as those
of kernels; those of the kernels' references are judged in tests/experts/hopper.
"""

import dataclasses

import jax
import numpy as np
import pytest

from moe_jax import fused_experts
from moe_jax.quantization import SCHEMES
from tests.support.cases import experts as cases
from tests.support.oracles import layer_judge
from tests.support.oracles.layer_judge import WRONG, LayerJudge
from tests.support.refusals import refuses

QUANTIZED = [name for name, scheme in SCHEMES.items() if scheme.activations is not None]
FP8_CORE = [name for name in QUANTIZED if "fp8" in name and not name.startswith("mx")]
# Normal deviates of these sums: what an order of float32 sums may do, and 16% of hidden values with another bfloat16.
FLOAT32_SUMS, FP8_SUMS = 2.0**-22, 2.0**-13.4


@pytest.fixture(autouse=True)
def prints_nothing(monkeypatch):
    monkeypatch.delenv(layer_judge.REPORT, raising=False)


def judge_of(scheme, dtype="bfloat16", tokens=12, **options):
    config = cases.make_config(scheme, hidden_size=256, has_bias=len(scheme) % 2 == 0)
    weights, config = cases.make_stored_weights(config), dataclasses.replace(config, dtype=dtype)
    x = cases.make_tokens(tokens, config, dtype=dtype)
    return LayerJudge(x, *cases.make_routing(tokens), weights, config, **options)


def assert_wrong_layers_fail(judge, right):
    """Each row by itself. right: what is quantized -> (T, H), as a layer computes it that is right but for that."""
    rows = np.abs(judge.right.y).any(1)
    for quantizes in WRONG:
        wrong = right(quantizes)
        differs = rows & (wrong != right(("input", "hidden"))).any(1)
        assert differs.sum() >= rows.sum() - 1, "of a row of zeros the input's quantization does not matter"
        assert not judge.find(wrong.astype(np.float32)).is_right[differs].any(), quantizes
    y = right(("input", "hidden"))
    for factor in (1.01, 0.99):
        assert not judge.find((factor * y).astype(np.float32)).is_right[rows].any(), factor
    one_row = y.copy()
    one_row[7] *= 1.01
    refuses(AssertionError, "1 of 12 row.* worst is row 7", judge.check, one_row.astype(np.float32))


@pytest.mark.parametrize("scheme", QUANTIZED)
@pytest.mark.sample(2)  # each kind of grid; every scheme is judged in bfloat16 below
def test_layers_in_float32(scheme):
    judge = judge_of(scheme, "float32", kernels=False)
    call = jax.jit(lambda x, p, ids, w: fused_experts(x, p, ids, w, judge.config))
    judge.check(call(judge.x, judge.topk_weights, judge.topk_ids, judge.weights))
    assert_wrong_layers_fail(judge, lambda quantizes: dataclasses.replace(judge.right, quantizes=quantizes).y)


@pytest.mark.parametrize("scheme", QUANTIZED)
def test_layers_of_kernels(scheme):
    judge = judge_of(scheme)
    of_sums = dataclasses.replace(judge.right, sum_error=FLOAT32_SUMS)
    for dtype in (np.float32, judge.config.dtype):
        judge.check(of_sums.y.astype(dtype))
    assert_wrong_layers_fail(judge, lambda quantizes: dataclasses.replace(of_sums, quantizes=quantizes).y)


@pytest.mark.parametrize("ulps", [-1, 1])
@pytest.mark.parametrize("scheme", ["int8_w8a8", "w4a8_int8", "w4a8_fp8", "fp8_channel", "fp8_tensor_token"])
def test_inputs_on_a_border_fall_to_one_side_on_a_gpu(scheme, ulps):
    """Rows whose largest makes ties of many others: 127 and 448 times a power of two."""
    judge = judge_of(scheme, on_gpu=True)
    x = np.asarray(judge.x).astype(np.float32)
    largest = np.abs(x).max(1, keepdims=True)
    x *= np.resize([127 / 64, 448 / 64], largest.shape) / np.where(largest == 0, 1, largest)
    judge = dataclasses.replace(judge, x=x.astype(np.asarray(judge.x).dtype))
    aside = dataclasses.replace(judge.right, input_ulps=ulps)
    assert (aside.y != judge.right.y).any()
    assert judge.find(aside.y.astype(np.float32)).is_right.all()
    wrong = [dataclasses.replace(aside, quantizes=quantizes).y for quantizes in WRONG]
    for y in (*wrong, 1.01 * aside.y, 0.99 * aside.y):
        assert judge.find(y.astype(np.float32)).is_right.mean() <= 2 / 12  # the row of zeros, and one more


@pytest.mark.parametrize("scheme", FP8_CORE)
def test_layers_on_an_fp8_core(scheme):
    judge = judge_of(scheme, on_gpu=True)
    of_sums = dataclasses.replace(judge.right, sum_error=FP8_SUMS)
    found = judge.find(of_sums.y.astype(np.float32))
    assert found.is_right.all() and np.nanmax(found.error) > 0.002, "the sums are off indeed"
    assert_wrong_layers_fail(judge, lambda quantizes: dataclasses.replace(of_sums, quantizes=quantizes).y)


@pytest.mark.parametrize(("scheme", "far"), [("fp8_channel", 0.08), ("int8_w8a8", 0.018)])
def test_a_few_rows_of_a_call_may_be_off_on_a_gpu(scheme, far):
    judge = judge_of(scheme, tokens=50, on_gpu=True)
    right = judge.right.y
    rows = np.flatnonzero(np.abs(right).any(1))
    noise = np.random.default_rng(3).standard_normal(right.shape) * np.sqrt((right**2).mean(1, keepdims=True))

    def off(count, far):
        y = right.copy()
        y[rows[:count]] += far * noise[rows[:count]]
        return y

    judge.check(off(2, far))
    for y, where in ((off(3, far), judge), (off(1, 2 * far), judge), (off(1, far), judge_of(scheme, tokens=50))):
        refuses(AssertionError, "worst is row", where.check, y)


def test_a_row_of_no_values_a_row_too_many_and_what_is_printed(tmp_path, monkeypatch):
    judge = judge_of("fp8_channel")
    y = judge.right.y.astype(np.float32)
    for value in (np.nan, np.inf):
        spoiled = y.copy()
        spoiled[3, 5] = value
        refuses(AssertionError, "1 of 12 row.* worst is row 3", judge.check, spoiled)
    nowhere = np.flatnonzero(~y.any(1))
    assert nowhere.size
    y[nowhere[0], 0] = 1e-9
    monkeypatch.setenv(layer_judge.REPORT, str(tmp_path / "errors"))
    refuses(AssertionError, f"worst is row {nowhere[0]}", judge.check, y)
    assert "fp8_channel" in "\n".join(layer_judge.report(tmp_path / "errors"))
