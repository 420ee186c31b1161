"""Layouts computed by torch against the same functions run by JAX: every scheme, gated and not, bit for bit."""

import jax
import numpy as np
import pytest
import torch

from moe_jax import MoEConfig, Scheme
from moe_jax.quantization import method_for
from torch_bridge._tensors import to_numpy, to_torch
from torch_bridge.launch._evaluate import Evaluator, struct_of
from torch_bridge.launch._gpu import Gpu
from torch_bridge.launch._kernel_experts import as_kernels_read
from torch_bridge.launch._weights import load_weights

H200 = Gpu("NVIDIA H200", 132)
E, H, INTERMEDIATE = 3, 256, 128
SCHEMES = (
    "bf16 fp8_tensor_token fp8_tensor_static fp8_channel fp8_block int8_w8a8 int8_w8a16 w4a16_g128 w4a16_channel "
    "w8a16_g128 w8a16_channel w4a16_g32_asym w4a16_channel_asym w4a16_g64_actorder nvfp4_a16 nvfp4_a16_modelopt "
    "mxfp4_a16 mxfp8_a16 w4a8_fp8 w4a8_int8"
).split()


def checkpoint_leaves(config: MoEConfig) -> dict[str, jax.Array]:
    """Leaves of a layer, drawn; different for each expert."""
    rng = np.random.default_rng(0)
    lead = (E, config.num_projections)
    w13 = rng.standard_normal((*lead, INTERMEDIATE, H)).astype(np.float32) * 0.05
    w2 = rng.standard_normal((E, H, INTERMEDIATE)).astype(np.float32) * 0.05
    source = config.scheme.name.removesuffix("_actorder").replace("fp8_tensor_static", "fp8_tensor")
    leaves = dict(method_for(source).quantize_leaves(w13, w2, None, config))
    for name, spec in method_for(config.scheme).create_weights(config).items():
        if spec.kind == "g_idx":
            groups = np.arange(spec.shape[1]) // 64
            leaves[name] = np.stack([rng.permutation(groups).astype(np.int32) for _ in range(E)])
        elif spec.kind == "input_scale":
            leaves[name] = np.full(spec.shape, 0.25, np.float32)
    return {name: jax.numpy.asarray(leaf) for name, leaf in leaves.items()}


def config_of(name: str, *, is_gated: bool = True) -> MoEConfig:
    activation = "silu" if is_gated else "silu_no_mul"
    return MoEConfig(E, 2, H, INTERMEDIATE, Scheme.parse(name), activation=activation, is_act_and_mul=is_gated)


def assert_same(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        a, b = to_numpy(a.contiguous()), np.asarray(b)
        assert (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes())


@pytest.mark.sample(7)
@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("name", SCHEMES)
def test_layouts(name, is_gated):
    config = config_of(name, is_gated=is_gated)
    leaves = checkpoint_leaves(config)
    tensors = {key: to_torch(leaf) for key, leaf in leaves.items()}
    with H200.tracing():
        wanted = as_kernels_read(config, leaves)
        structs = {key: struct_of(tensor) for key, tensor in tensors.items()}
        evaluator = Evaluator(lambda leaves: as_kernels_read(config, leaves), structs)
    assert_same(evaluator(tensors), wanted)


IN_PLACE = {
    "fp8_channel": ("data", "weight"),
    "w4a16_g128": ("data", "weight_packed"),
    "w4a8_int8_channel": ("scale", "weight_scale"),  # the kernels' order of the same numbers
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_few_experts_at_a_time_in_place(name, monkeypatch):
    """Each expert's result is where its source was, and no expert reads what another one wrote."""
    from torch_bridge.launch import _weights

    monkeypatch.setattr(_weights, "_ELEMENTS_AT_ONCE", 1)
    config = config_of(name)
    leaves = checkpoint_leaves(config)
    tensors = {key: to_torch(leaf).clone() for key, leaf in leaves.items()}
    with H200.tracing():
        wanted = as_kernels_read(config, leaves)
    field, leaf = IN_PLACE[name]
    memory = {f"{prefix}_{field}": tensors[f"{prefix}_{leaf}"] for prefix in ("w13", "w2")}
    found = load_weights(config, lambda leaf, first, last: tensors[leaf][first:last], H200, memory=memory)
    assert_same(found, wanted)
    places = [getattr(tensor, field).data_ptr() for tensor in (found.w13, found.w2)]
    assert places == [tensor.data_ptr() for tensor in memory.values()]


DAMAGE = [("fp8_channel", "scale", value) for value in (float("nan"), float("inf"), -1.0, 1e38)]
DAMAGE += [("w4a8_int8_channel", "weight", value) for value in (8, -9, 100)]


@pytest.mark.parametrize(("scheme", "kind", "value"), DAMAGE)
def test_values_are_refused_as_by_jax(scheme, kind, value):
    config = config_of(scheme)
    leaves = checkpoint_leaves(config)
    name = dict(scale="w2_weight_scale", weight="w2_weight")[kind]
    damaged = np.array(leaves[name])
    damaged[1, 5] = value
    leaves[name] = damaged
    with pytest.raises(ValueError) as wanted:
        method_for(config.scheme).process_weights_after_loading(leaves, config)
    tensors = {key: to_torch(jax.numpy.asarray(leaf)) for key, leaf in leaves.items()}
    before = tensors["w13_weight"].clone()
    with pytest.raises(ValueError) as found:
        load_weights(config, lambda leaf, first, last: tensors[leaf][first:last], H200, memory={})
    assert str(found.value) == str(wanted.value)
    assert torch.equal(tensors["w13_weight"].view(torch.uint8), before.view(torch.uint8))


def test_unknown_operations_are_named():
    x = torch.ones(3)
    with pytest.raises(NotImplementedError, match="erf"):
        Evaluator(jax.lax.erf, struct_of(x))(x)
