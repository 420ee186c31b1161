"""Nothing has to divide: layers of any hidden and intermediate size, however weights share scales and words."""

import pytest

from moe_jax import fused_experts
from tests.support.cases import experts as cases
from tests.support.oracles.layer_judge import assert_layer_close


@pytest.mark.parametrize(
    "scheme, hidden, intermediate",
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
def test_any_size(scheme, hidden, intermediate):
    """M90, M91, M223, M255: also where Marlin, DeepGEMM and CUTLASS need multiples of 32 to 256."""
    is_16_bit = "a16" in scheme
    config = cases.make_config(
        scheme,
        hidden_size=hidden,
        intermediate_size=intermediate,
        has_bias=True,
        top_k=1,
        apply_router_weight_on_input=is_16_bit,
    )
    x, p, ids, weights = cases.make_call(config, 9)
    assert weights.hidden_size == hidden and weights.intermediate_size == intermediate
    y = cases.jitted(fused_experts, config)(x, p, ids, weights)
    assert y.shape == (9, hidden)
    assert_layer_close(y, x, p, ids, weights, config, kernels=False)
