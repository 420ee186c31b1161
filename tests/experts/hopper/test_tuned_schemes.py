"""Which schemes run as the shipped table of the H200 has it, by their own measurements or those of a like format."""

import pytest

import moe_jax
from moe_jax.benchmarking import MODELS
from moe_jax.experts.hopper import _plan as hopper_plan
from moe_jax.experts.hopper._kernel_layout import kernel_format
from moe_jax.experts.hopper._rows import row_kind
from moe_jax.quantization import SCHEMES, Scheme, method_for
from pallas_kernels.tuning import PACKED_FORMATS, PackedLayerKey, table_for
from tests.support.cases.hopper_layers import on_hopper


def fits(key, entry, tokens):
    c = entry.config
    pairs = zip(key.products(tokens, c.block_m), (c.gemm1, c.gemm2), strict=True)
    return not any(isinstance(hopper_plan._fitting(key, desc, measured), str) for desc, measured in pairs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_which_named_schemes_run_as_measured(dtype):
    """At the sizes of Mixtral, with scales in float32; float16 borrows from bfloat16."""
    found = {}
    for name in (*SCHEMES, "w4a16_g128_approximate_fp8", "mxfp4_a16_approximate_fp8"):
        scheme = Scheme.parse(name)
        config = moe_jax.MoEConfig(8, 2, 4096, 14336, scheme=scheme, dtype=dtype, param_dtype=dtype)
        if (fmt := kernel_format(scheme, dtype)) is not None:
            how = (fmt.element, fmt.operand, fmt.scale, fmt.group_size, fmt.has_zero_point)
            key = PackedLayerKey(8, 2, 4096, 14336, *how)
        elif row_kind(scheme) is not None:
            key = hopper_plan.layer_key(config, method_for(scheme).abstract_weights(config))
        else:
            continue  # microscaling in float16
        entry = table_for("NVIDIA H200").lookup(key, 64)
        assert entry is not None, name
        found[name] = (entry.source or "its own") if fits(key, entry, 64) else None
    assert len(found) == (39 if dtype == "bfloat16" else 35)
    assert [name for name, source in found.items() if source is None] == []
    lent = {
        "w4a8_fp8": "int4_fp8",
        "fp8_tensor_token": "fp8_channel",
        "w4a16_g128_asym": "int4_g128",
    }
    if dtype == "float16":
        lent |= {"bf16": "bf16", "int8_w8a16": "int8_a16", "w8a16_g128": "int8_g128_a16_f32"}
    assert {name: found[name] for name in lent} == {name: f"with times of {format}" for name, format in lent.items()}


# With float32 scales few tiles hold the sums of such groups; where many rows come the heuristic chooses one of them.
SMALL_GROUPS = {
    "int4_g32_f32": {("qwen3", 8192), ("gpt-oss", 8192), *((m, t) for m in ("dsv3", "mixtral") for t in (1024, 8192))},
    "int4_g64_asym_f32": {("qwen3", 8192)},
}
SMALL_GROUPS["int4_g32_asym_f32"] = SMALL_GROUPS["int4_g32_f32"]


@pytest.mark.parametrize("name", PACKED_FORMATS)
def test_layers_of_the_four_models_run_as_measured(name):
    for model, sizes in MODELS.items():
        key = PackedLayerKey(*sizes, **PACKED_FORMATS[name])
        for tokens in (1, 16, 64, 256, 1024, 8192):
            entry = table_for("NVIDIA H200").lookup(key, tokens)
            runs = entry.reaches(tokens) and fits(key, entry, tokens)
            cell = (next(short for short in ("qwen3", "dsv3", "mixtral", "gpt-oss") if model.startswith(short)), tokens)
            assert runs == (cell not in SMALL_GROUPS.get(name, ())), cell


def test_a_borrowed_configuration_is_said_to_be_one():
    scheme = Scheme.parse("fp8_tensor_token")
    config = moe_jax.MoEConfig(8, 2, 4096, 14336, scheme=scheme, dtype="bfloat16")
    with on_hopper():
        plan = hopper_plan.make_plan(config, method_for(scheme).abstract_weights(config), 64)
    assert plan.source == "measured for 64 tokens with times of fp8_channel"
