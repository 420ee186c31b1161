"""Our weight loading beside vLLM's: the same tensors, names, shards and ranks end in parameters of the same bits."""

import contextlib
import dataclasses
import zlib
from unittest import mock

import pytest

pytest.importorskip("vllm")

import torch

import torch_bridge
from tests.support.checkpoints.vllm_formats import FORMATS
from tests.support.vllm_layers import load_experts, make_layer, vllm_without_gpu
from torch_bridge._own_parameters import load_into
from torch_bridge._tensors import to_numpy

E, TOP_K, H, INTERMEDIATE = 4, 2, 256, 1024  # a quarter of it is the least that vLLM takes of every format
SIZES = dict(num_experts=E, top_k=TOP_K, hidden_size=H, intermediate_size=INTERMEDIATE)
RANKS = {"tp 0 of 2": dict(tp=(2, 0)), "tp 3 of 4": dict(tp=(4, 3)), "ep 1 of 2": dict(tp=(2, 1), ep=True)}
UNREAD = "g_idx_sort_indices"  # which vLLM makes while it processes
OF_A_CHECKPOINT = [name for name in FORMATS if not name.startswith("online_")]
pytestmark = pytest.mark.filterwarnings("ignore")


def ours(method, moe):
    """Our method of the same name, made of what vLLM's was made of; None where there is none."""
    name = type(method).__name__
    cls = getattr(torch_bridge, name, None)
    if cls is None:
        return None
    if name == "CompressedTensorsW4A4Nvfp4MoEMethod":
        return cls(moe, use_a16=getattr(method, "use_a16", False))
    if name == "Fp8MoEMethod":
        config = method.quant_config
        stated = dict(quant_method="fp8", activation_scheme=config.activation_scheme)
        if config.weight_block_size:
            stated["weight_block_size"] = config.weight_block_size
        return cls(stated, moe)
    if name.startswith("Compressed"):
        return cls(method.weight_quant, method.input_quant, moe)
    return cls(moe)


def emptied(layer):
    """What no tensor reaches is the same everywhere; scales begin at 1, as vLLM makes them."""
    for name, parameter in layer.named_parameters():
        parameter.data.fill_(1 if "scale" in name else 0)


def in_our_words(moe):
    """vLLM's description of a layer as ours, field by field."""

    def fields(kind, given):
        names = [field.name for field in dataclasses.fields(kind)]
        return {name: value for name in names if (value := getattr(given, name)) is not None}

    parallel = moe.moe_parallel_config
    parallel = torch_bridge.FusedMoEParallelConfig(**fields(torch_bridge.FusedMoEParallelConfig, parallel))
    stated = fields(torch_bridge.FusedMoEConfig, moe) | dict(moe_parallel_config=parallel)
    stated["activation"] = torch_bridge.MoEActivation.from_str(moe.activation.value)
    stated["routing_method"] = torch_bridge.RoutingMethodType(int(moe.routing_method))
    return torch_bridge.FusedMoEConfig(**stated)


def assert_same(found, expected):
    # Without what vLLM makes empty and fills while it processes.
    found, expected = ({name: leaf for name, leaf in one.items() if leaf.numel()} for one in (found, expected))
    assert set(found) == set(expected)
    for name, parameter in expected.items():
        other = found[name]
        assert other.shape == parameter.shape, name
        if name.endswith("weight_shape"):  # integers here; in vLLM of torch's default dtype, which nobody reads
            assert torch.equal(other.to(parameter.dtype), parameter.data), name
            continue
        assert other.dtype == parameter.dtype, name
        if not name.endswith(UNREAD):
            assert torch.equal(other.data.view(torch.uint8), parameter.data.view(torch.uint8)), name


def loaded(form, layer, name):
    load_experts(layer, form, torch.Generator().manual_seed(zlib.crc32(name.encode())), E, H, INTERMEDIATE)


def layer_of(form, rank):
    """With vLLM's own method, for int4 weights with int8 activations the one that it takes on CPUs."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    with contextlib.ExitStack() as stack:
        if form.method == "CompressedTensorsW4A8Int8MoEMethod":
            stack.enter_context(mock.patch.object(CompressedTensorsConfig, "_is_fp8_w4a8_sm90", lambda *_: False))
        layer = make_layer(form.config, plugin=False, tp_size=rank.get("tp", (1, 0))[0], **SIZES | form.settings)
    assert type(layer.quant_method).__name__ == form.method
    return layer


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("name", OF_A_CHECKPOINT)
def test_the_loader_on_parameters_of_vllm(name, rank):
    """Parameters that vLLM's method made, with the attributes that it set: filled by vLLM's loader, and by ours."""
    form, at = FORMATS[name], RANKS[rank]
    with vllm_without_gpu(**at):
        layers = [layer_of(form, at) for _ in range(2)]
        for layer in layers:
            emptied(layer)
        loaded(form, layers[0], name)
        other = layers[1]
        table = None if other.expert_map is None else to_numpy(other.expert_map)

        def load(param, tensor, weight_name, shard_id, expert_id):
            own, moe = dict(other.named_parameters()), in_our_words(other.moe_config)
            load_into(
                own, param, tensor, weight_name, shard_id, expert_id, moe=moe, expert_map=table,
                method=other.quant_method,
            )  # fmt: skip

        for parameter in other.parameters():
            parameter.weight_loader = load
        loaded(form, other, name)
        assert_same(dict(other.named_parameters()), dict(layers[0].named_parameters()))


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("name", OF_A_CHECKPOINT)
def test_our_methods_on_a_module(name, rank):
    """Our method of vLLM's name: parameters of the same names, shapes and dtypes, and the same bits once loaded."""
    form, at = FORMATS[name], RANKS[rank]
    with vllm_without_gpu(**at):
        layer = layer_of(form, at)
        moe = in_our_words(layer.moe_config)
        method = ours(layer.quant_method, moe)
        if method is None:
            pytest.skip(f"{type(layer.quant_method).__name__} has no counterpart by name")
        module = torch.nn.Module()
        module.moe_config, module.activation, module.top_k = moe, moe.activation, TOP_K
        module.register_buffer("expert_map", layer.expert_map)
        sizes = layer.local_num_experts, layer.hidden_size, layer.intermediate_size_per_partition
        whole = dict(global_num_experts=E, intermediate_size_full=INTERMEDIATE)
        method.create_weights(module, *sizes, torch.bfloat16, **whole)
        for one in (layer, module):
            emptied(one)
            loaded(form, one, name)
        assert_same(dict(module.named_parameters()), dict(layer.named_parameters()))
