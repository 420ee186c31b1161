"""Nothing has to divide: layers of any hidden and intermediate size, however weights share scales and words."""

import dataclasses

import pytest

from moe_jax import fused_experts
from tests.support.cases import experts as cases
from tests.support.oracles.experts import experts_numpy
from tests.support.oracles.tolerances import assert_rows_close, tolerance

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize(
    "scheme, hidden, inner",
    [
        ("bf16", 1, 1),
        ("fp8_block", 131, 259),  # blocks of 128 with 3 columns left
        ("int8_w8a8", 5, 129),
        ("w4a16_g32_asym", 37, 33),  # words and groups with 5 columns and 1 column left
        ("w3a16_g128_asym", 129, 7),
        ("mxfp4", 34, 2),
    ],
)
@pytest.mark.sample(6)
def test_any_size(scheme, hidden, inner):
    """M90, M91, M223, M255: also where Marlin, DeepGEMM and CUTLASS need multiples of 32 to 256."""
    is_16_bit = "a16" in scheme
    config = cases.make_config(
        scheme,
        hidden_size=hidden,
        intermediate_size=inner,
        has_bias=True,
        top_k=1,
        apply_router_weight_on_input=is_16_bit,
    )
    weights = cases.make_weights(config)
    assert weights.hidden_size == hidden and weights.intermediate_size == inner
    x = cases.make_tokens(9, config)
    p, ids = cases.make_routing(9, 1)
    expected = experts_numpy(x, p, ids, weights, config)
    y = cases.jitted(fused_experts, config)(x, p, ids, weights)
    assert y.shape == (9, hidden)
    assert_rows_close(y, expected, tolerance_of(config), experts=ids)


def tolerance_of(config):
    activations = config.scheme.activations
    if activations is None or activations.element in ("e4m3", "int8"):
        return tolerance(config.scheme, "float32")
    return dataclasses.replace(tolerance("bf16", "float32"), fraction=0.25)  # a step of e2m1
