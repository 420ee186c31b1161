"""vLLM's verbs on modules that are not ``FusedMoE``: create, load by ``weight_loader``, process, both applies.

Judged per expert and row by NumPy in float64 on weights that NumPy cut from the checkpoint.
"""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import torch_bridge
from moe_jax.quantization import method_for
from tests.support.cases.torch_bridge import (
    E,
    H,
    I,
    K,
    as_torch,
    bits,
    config,
    of_rank,
    plain_arrays,
    stored_arrays,
)
from tests.support.oracles.layer_judge import assert_layer_close
from tests.support.oracles.routing import route_row
from tests.support.refusals import refuses

FP8, INT4 = {"num_bits": 8, "type": "float"}, {"num_bits": 4, "type": "int"}
TOKEN = {"strategy": "token", "dynamic": True, "symmetric": True}
STATIC, CHANNEL = {"strategy": "tensor", "dynamic": False}, {"strategy": "channel"}
BLOCKS, GROUPS = {"strategy": "block", "block_structure": [128, 128]}, {"strategy": "group", "group_size": 128}
G32 = {"strategy": "group", "group_size": 32}
W8A8, W4A8 = torch_bridge.CompressedTensorsW8A8Fp8MoEMethod, torch_bridge.CompressedTensorsW4A8Int8MoEMethod
WNA16, NVFP4 = torch_bridge.CompressedTensorsWNA16MarlinMoEMethod, torch_bridge.CompressedTensorsW4A4Nvfp4MoEMethod
METHODS = {
    "bf16": torch_bridge.UnquantizedFusedMoEMethod,
    "fp8_tensor_static": lambda moe: W8A8(FP8 | STATIC, FP8 | STATIC, moe),
    "fp8_channel": lambda moe: W8A8(FP8 | CHANNEL, FP8 | TOKEN, moe),
    "fp8_block": lambda moe: W8A8(FP8 | BLOCKS, FP8 | GROUPS | {"dynamic": True}, moe),
    "w4a8_int8": lambda moe: W4A8(INT4 | GROUPS, {"num_bits": 8, "type": "int"} | TOKEN, moe),
    "w4a8_int8_channel": lambda moe: W4A8(INT4 | CHANNEL, {"num_bits": 8, "type": "int"} | TOKEN, moe),
    "w4a16_g32": lambda moe: WNA16(INT4 | G32, None, moe),
    "w4a16_g32_asym": lambda moe: WNA16(INT4 | G32 | {"symmetric": False}, None, moe),
    "w4a16_channel": lambda moe: WNA16(INT4 | CHANNEL, None, moe),
    "w8a16_channel": lambda moe: WNA16({"num_bits": 8, "type": "int"} | CHANNEL, None, moe),
    "nvfp4": NVFP4,
    "nvfp4_a16": lambda moe: NVFP4(moe, use_a16=True),
    "mxfp4_a16": lambda moe: torch_bridge.SchemeMoEMethod("mxfp4_a16", moe),
    "int8_w8a16": lambda moe: torch_bridge.Int8OnlineMoEMethod(layer=Told(moe)),
}
RANKS = {"whole": {}, "tp": dict(tp_size=2, tp_rank=1), "ep": dict(ep_size=2, ep_rank=1)}


class Told:
    def __init__(self, moe):
        self.moe_config = moe


class Module(torch.nn.Module):
    """What vLLM's ``RoutedExperts`` has and methods read, and nothing of ours."""

    def __init__(self, moe, rank, **attributes):
        super().__init__()
        self.moe_config, self.top_k, self.activation = moe, moe.experts_per_token, moe.activation
        self.global_num_experts, self.renormalize = moe.num_experts, True
        expert_map = rank.expert_map
        self.register_buffer("expert_map", None if expert_map is None else torch.from_numpy(expert_map))
        for name, value in attributes.items():
            setattr(self, name, value)


def described(rank, *, is_gated=True, has_bias=False):
    parallel = rank.moe_parallel_config
    return torch_bridge.FusedMoEConfig(
        num_experts=E,
        experts_per_token=K,
        hidden_dim=H,
        intermediate_size=I,
        num_local_experts=rank.num_local_experts,
        num_logical_experts=E,
        activation=torch_bridge.MoEActivation.of("silu", is_gated),
        device="cpu",
        routing_method=torch_bridge.RoutingMethodType.Renormalize,
        moe_parallel_config=parallel,
        in_dtype=torch.bfloat16,
        has_bias=has_bias,
    )


def checkpoint(scheme, is_gated, has_bias):
    """{(expert, shard, suffix): array}: scales that bfloat16 holds, since vLLM's parameters round them to it."""
    is_online = scheme == "int8_w8a16"
    arrays = dict(plain_arrays() if is_online or scheme == "bf16" else stored_arrays(scheme))
    for (expert, shard, suffix), array in list(arrays.items()):
        if suffix == "weight_scale" and array.dtype == np.float32 and scheme.startswith("w"):
            arrays[expert, shard, suffix] = (array / 128).astype(ml_dtypes.bfloat16).astype(np.float32)
        if suffix == "input_scale" and shard == "w3":  # as vLLM's methods want them
            arrays[expert, shard, suffix] = arrays[expert, "w1", suffix]
    if has_bias:
        arrays |= {key: value for key, value in plain_arrays(bias=True).items() if key[2] == "bias"}
    return {key: value for key, value in arrays.items() if is_gated or key[1] != "w3"}


def whole_weights(scheme, arrays, is_gated, has_bias, columns=slice(None)):
    """The layer's weights from NumPy leaves: codes of int8 by the formula, the rest as stored.

    columns: those of w2 that a rank quantizes.
    """
    shape = config(scheme, is_act_and_mul=is_gated, has_bias=has_bias)
    leaves = {}
    if scheme == "int8_w8a16":
        arrays = dict(arrays)
        for (expert, shard, suffix), array in list(arrays.items()):
            if suffix == "weight":
                w = array.astype(np.float32)
                own = w[:, columns] if shard == "w2" else w
                scale = np.abs(own).max(-1, keepdims=True) / np.float32(127)
                arrays[expert, shard, "weight"] = np.rint(w / scale).clip(-127, 127).astype(np.int8)
                arrays[expert, shard, "weight_scale"] = scale
    for name, spec in method_for(scheme).create_weights(shape).items():
        prefix, _, suffix = name.partition("_")
        shards = ("w2",) if prefix == "w2" else ("w1", "w3") if is_gated else ("w1",)
        parts = [np.concatenate([np.atleast_1d(arrays[e, s, suffix]) for s in shards]) for e in range(E)]
        leaves[name] = np.stack(parts).reshape(spec.shape).astype(spec.dtype)
    weights = method_for(scheme).process_weights_after_loading(leaves, shape)
    return jax.tree.map(np.asarray, weights), shape


def loaded(scheme, rank, arrays, is_gated=True, has_bias=False, dtype=torch.bfloat16, **attributes):
    moe = described(rank, is_gated=is_gated, has_bias=has_bias)
    module, method = Module(moe, rank, **attributes), METHODS[scheme](moe)
    sizes = rank.num_local_experts, H, moe.intermediate_size_per_partition
    method.create_weights(module, *sizes, dtype, global_num_experts=E, intermediate_size_full=I)
    created = dict(module.named_parameters())
    for (expert, shard, suffix), array in arrays.items():
        param, name = created[f"{'w2' if shard == 'w2' else 'w13'}_{suffix}"], f"experts.{expert}.{shard}.{suffix}"
        param.weight_loader(param, as_torch(array), name, shard, expert)
    method.process_weights_after_loading(module)
    return method, module


def inputs(tokens=9, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, H)).astype(ml_dtypes.bfloat16)
    weights = rng.uniform(0.2, 1, (tokens, K)).astype(np.float32)
    ids = np.stack([rng.permutation(E)[:K] for _ in range(tokens)]).astype(np.int32)
    ids[1, 0], ids[2, 1] = -1, E + 3
    return x, weights, ids, rng.standard_normal((tokens, E)).astype(np.float32)


def local_ids(ids, rank):
    inside = (ids >= 0) & (ids < E)
    table = np.arange(E) if rank.expert_map is None else rank.expert_map
    return np.where(inside, table[np.where(inside, ids, 0)], -1)


def pairwise():
    """Every method with every rank; the other options take turns, so that each pair of values occurs.

    Where a rank's columns are no whole groups or blocks of 128, layers are not split over them.
    """
    options = [(True, False), (True, True), (False, False), (False, True)]
    in_groups_of_128 = ("fp8_block", "w4a8_int8") if I // 2 % 128 else ()
    return [
        (scheme, rank, *options[(2 * row + column) % 4])
        for row, scheme in enumerate(METHODS)
        for column, rank in enumerate(RANKS)
        if not ("tp" in rank and scheme in in_groups_of_128)
    ]


@pytest.mark.parametrize(("scheme", "ranks", "is_gated", "has_bias"), pairwise())
@pytest.mark.sample(14)
def test_create_load_process_apply(scheme, ranks, is_gated, has_bias):
    """M30, M31, M95: both applies of every method, on a rank's experts, beside NumPy."""
    rank = torch_bridge.Rank(**RANKS[ranks], num_experts=E)
    arrays = checkpoint(scheme, is_gated, has_bias)
    method, module = loaded(scheme, rank, arrays, is_gated, has_bias, torch.float32)  # nothing rounds to 16 bits
    size, at = I // rank.tp_size, rank.tp_rank
    whole, shape = whole_weights(scheme, arrays, is_gated, has_bias, slice(at * size, (at + 1) * size))
    weights = jax.tree.map(jnp.asarray, of_rank(whole, rank)) if not rank.is_whole else whole
    if scheme in ("fp8_tensor_static", "nvfp4"):  # vLLM's loader brings the input scales of the rank's own experts
        weights = with_input_scales(weights, arrays, range(E) if rank.is_whole or "tp" in ranks else range(2, 4))
    sizes = dict(num_experts=rank.num_local_experts, intermediate_size=size)
    local = dataclasses.replace(shape, **sizes, dtype="float32")
    x, p, ids, z = inputs()
    x = x.astype(np.float32)
    y = method.apply(module, as_torch(x), torch.from_numpy(p), torch.from_numpy(ids), None, None)
    assert y.dtype == torch.float32
    assert_layer_close(y.numpy(), x, p, local_ids(ids, rank), weights, local, kernels=False)
    routed = [route_row(row, top_k=K) for row in z]
    p, ids = np.array([w for w, _ in routed], np.float32), np.array([i for _, i in routed])
    y = method.apply_monolithic(module, as_torch(x), torch.from_numpy(z))
    assert_layer_close(y.numpy(), x, p, local_ids(ids, rank), weights, local, kernels=False)


def with_input_scales(weights, arrays, own):
    """With the widest range of some of the experts: the largest scale, or the smallest of those that divide."""
    common = {}
    for name, shards in (("w13", ("w1", "w3")), ("w2", ("w2",))):
        (kind,) = {key[2] for key in arrays if "input" in key[2]}
        values = [arrays[e, s, kind] for e in own for s in shards if (e, s, kind) in arrays]
        value = np.float32(min(values) if "global" in kind else max(values))
        common[name] = dataclasses.replace(getattr(weights, name), input_scale=jnp.asarray(value))
    return dataclasses.replace(weights, **common)


def to_numpy(tensor):
    return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)


# method -> the parameters of vLLM's method before loading: name -> (shape, dtype, kind of scale); E experts, I, H
BF16, F32, I32, U8, F8 = torch.bfloat16, torch.float32, torch.int32, torch.uint8, torch.float8_e4m3fn
INVENTORY = {
    "bf16": {"w13_weight": ((E, 2 * I, H), BF16, None), "w2_weight": ((E, H, I), BF16, None)},
    "fp8_tensor_static": {
        "w13_weight": ((E, 2 * I, H), F8, None),
        "w2_weight": ((E, H, I), F8, None),
        "w13_weight_scale": ((E, 2), F32, "tensor"),
        "w2_weight_scale": ((E,), F32, "tensor"),
        "w13_input_scale": ((E,), F32, None),
        "w2_input_scale": ((E,), F32, None),
    },
    "fp8_channel": {
        "w13_weight": ((E, 2 * I, H), F8, None),
        "w2_weight": ((E, H, I), F8, None),
        "w13_weight_scale": ((E, 2 * I, 1), F32, "channel"),
        "w2_weight_scale": ((E, H, 1), F32, "channel"),
    },
    "fp8_block": {
        "w13_weight": ((E, 2 * I, H), F8, None),
        "w2_weight": ((E, H, I), F8, None),
        "w13_weight_scale": ((E, 2 * I // 128, H // 128), F32, "block"),
        "w2_weight_scale": ((E, H // 128, I // 128), F32, "block"),
    },
    "w4a8_int8": {
        "w13_weight": ((E, 2 * I, H), torch.int8, None),
        "w2_weight": ((E, H, I), torch.int8, None),
        "w13_weight_scale": ((E, 2 * I, H // 128), BF16, "group"),
        "w2_weight_scale": ((E, H, I // 128), BF16, "group"),
    },
    "w4a16_g32_asym": {
        "w13_weight_packed": ((E, H // 8, 2 * I), I32, "group"),
        "w2_weight_packed": ((E, I // 8, H), I32, "group"),
        "w13_weight_scale": ((E, H // 32, 2 * I), BF16, "group"),
        "w2_weight_scale": ((E, I // 32, H), BF16, "group"),
        "w13_weight_zero_point": ((E, H // 32, 2 * I // 8), I32, "group"),
        "w2_weight_zero_point": ((E, I // 32, H // 8), I32, "group"),
        "w13_weight_g_idx": ((E, H), I32, None),
        "w2_weight_g_idx": ((E, I), I32, None),
        "w13_g_idx_sort_indices": ((E, H), I32, None),
        "w2_g_idx_sort_indices": ((E, I), I32, None),
        "w13_weight_shape": ((E, 2), I32, None),
        "w2_weight_shape": ((E, 2), I32, None),
    },
    "w4a16_channel": {
        "w13_weight_packed": ((E, H // 8, 2 * I), I32, "channel"),
        "w13_weight_scale": ((E, 1, 2 * I), BF16, "channel"),
        "w2_weight_scale": ((E, 1, H), BF16, "channel"),
    },
    "nvfp4": {
        "w13_weight_packed": ((E, 2 * I, H // 2), U8, None),
        "w2_weight_packed": ((E, H, I // 2), U8, None),
        "w13_weight_scale": ((E, 2 * I, H // 16), F8, "group"),
        "w2_weight_scale": ((E, H, I // 16), F8, "group"),
        "w13_weight_global_scale": ((E, 2), F32, "tensor"),
        "w2_weight_global_scale": ((E,), F32, "tensor"),
        "w13_input_global_scale": ((E, 2), F32, "tensor"),
        "w2_input_global_scale": ((E,), F32, "tensor"),
    },
    "int8_w8a16": {"w13_weight": ((E, 2 * I, H), BF16, None), "w2_weight": ((E, H, I), BF16, None)},
}
BECOMES = {  # of an online method, once it is processed
    "int8_w8a16": {
        "w13_weight": ((E, 2 * I, H), torch.int8),
        "w2_weight": ((E, H, I), torch.int8),
        "w13_scale": ((E, 2 * I), F32),
        "w2_scale": ((E, H), F32),
    }
}


@pytest.mark.parametrize("scheme", INVENTORY)
def test_parameters_are_those_of_vllm(scheme):
    """M35, M144 to M147, M160, M161, M179 to M183, M197 to M205: shapes, dtypes, memory and what loaders read."""
    rank = torch_bridge.Rank(num_experts=E)
    module = Module(described(rank), rank)
    method, loader = METHODS[scheme](module.moe_config), print
    method.create_weights(module, E, H, I, torch.bfloat16, weight_loader=loader)
    parameters = dict(module.named_parameters())
    is_whole = scheme != "w4a16_channel"
    assert not is_whole or set(parameters) == set(INVENTORY[scheme])
    for name, (shape, dtype, kind) in INVENTORY[scheme].items():
        parameter = parameters[name]
        assert (tuple(parameter.shape), parameter.dtype) == (shape, dtype), name
        assert (parameter.weight_loader is loader) != method.uses_meta_device and not parameter.requires_grad
        assert getattr(parameter, "quant_method", None) == kind, name
        assert parameter.is_meta == method.uses_meta_device, name
        is_transposed = scheme.startswith("w4a16") and name.endswith(("_packed", "_scale", "_zero_point"))
        assert parameter.is_transposed == is_transposed
    assert (module.num_experts, module.orig_dtype) == (E, torch.bfloat16)
    assert module.weight_block_size == ([128, 128] if scheme == "fp8_block" else None)
    if "w13_input_scale" not in parameters:
        assert module.w13_input_scale is None and module.w2_input_scale is None


@pytest.mark.parametrize("scheme", ["fp8_tensor_static", "w4a16_g32_asym", "int8_w8a16", "nvfp4"])
def test_processed_parameters_are_what_was_loaded(scheme):
    """M18, M187, M206: the same values in the same axes after processing, again and again; nothing else stays."""
    rank = torch_bridge.Rank(num_experts=E)
    arrays = checkpoint(scheme, True, False)
    method, module = loaded(scheme, rank, arrays)
    expected = BECOMES.get(scheme)
    if expected is None:
        unread = ("g_idx", "g_idx_sort_indices", "weight_shape")
        expected = {n: (shape, None) for n, (shape, *_) in INVENTORY[scheme].items() if not n.endswith(unread)}
    parameters = dict(module.named_parameters())
    assert set(parameters) == set(expected)
    for name, (shape, dtype) in expected.items():
        assert tuple(parameters[name].shape) == shape and dtype in (None, parameters[name].dtype), name
    if scheme == "w4a16_g32_asym":
        for suffix in ("weight_packed", "weight_scale", "weight_zero_point"):
            for expert in range(E):
                found = parameters[f"w2_{suffix}"][expert]
                assert bits(found.T) == bits(arrays[expert, "w2", suffix]), suffix
    x, p, ids, _ = inputs()
    call = [as_torch(x), torch.from_numpy(p), torch.from_numpy(ids)]
    first, before = method.apply(module, *call), {name: bits(p) for name, p in parameters.items()}
    method.process_weights_after_loading(module)
    assert {name: bits(p) for name, p in module.named_parameters()} == before
    assert torch.equal(method.apply(module, *call), first)


def test_online_modules_are_processed_by_their_last_tensor():
    """M13, M14, M16, M18, M22: memory with the first tensor, codes with the last; the same again changes nothing."""
    rank = torch_bridge.Rank(num_experts=E)
    moe, arrays = described(rank), plain_arrays()
    module, method = Module(moe, rank), torch_bridge.Int8OnlineMoEMethod(layer=Told(moe))
    method.create_weights(module, E, H, I, torch.bfloat16)
    created, keys = dict(module.named_parameters()), list(arrays)
    for count, key in enumerate([*keys[:4], *keys[2:], keys[0]]):
        expert, shard, suffix = key
        param = created["w2_weight" if shard == "w2" else "w13_weight"]
        is_last = count == len(keys) + 1
        assert not hasattr(module, "w13_scale")
        assert param.weight_loader(param, as_torch(arrays[key]), "weight", shard, expert, return_success=True)
        assert not module.w13_weight.is_meta and hasattr(module, "w13_scale") == is_last
        if is_last:
            break
    old = {name: bits(p) for name, p in module.named_parameters()}
    param.weight_loader(param, as_torch(arrays[key]), "weight", shard, expert)
    method.process_weights_after_loading(module)
    assert {name: bits(p) for name, p in module.named_parameters()} == old
    with pytest.raises(ValueError, match="came twice with different values"):
        param.weight_loader(param, as_torch(arrays[key]) * 2, "weight", shard, expert)


def test_online_modules_without_a_checkpoint_and_with_half_of_one():
    """M19: dummy values as torch's generator gives them from seed 1234; what is missing is named."""
    rank = torch_bridge.Rank(num_experts=E)
    moe = described(rank)
    module, method = Module(moe, rank), torch_bridge.Int8OnlineMoEMethod(layer=Told(moe))
    method.create_weights(module, E, H, I, torch.bfloat16)
    with pytest.warns(UserWarning, match="nothing was loaded; weights are dummy values"):
        method.process_weights_after_loading(module)
    drawn = torch.empty((E, H, I), dtype=torch.bfloat16).uniform_(
        -1e-3, 1e-3, generator=torch.Generator().manual_seed(1234)
    )
    assert bits(module.w2_scale) == bits(drawn.float().abs().amax(-1) / 127)
    half, method = Module(moe, rank), torch_bridge.Int8OnlineMoEMethod(layer=Told(moe))
    method.create_weights(half, E, H, I, torch.bfloat16)
    half.w2_weight.weight_loader(half.w2_weight, drawn[0], "weight", "w2", 0)
    with pytest.raises(ValueError, match=f"missing {2 * E} of w13_weight, {E - 1} of w2_weight"):
        method.process_weights_after_loading(half)


def test_routing_by_attributes_of_the_module():
    """M31: ``apply_monolithic`` routes by what vLLM keeps on the module, and by its correction bias of the moment."""
    rank, bias = torch_bridge.Rank(num_experts=E), torch.tensor([0.3, -0.2, 0.5, 0.0])
    said = dict(scoring_func="sigmoid", routed_scaling_factor=2.5, renormalize=False, e_score_correction_bias=bias)
    arrays = checkpoint("bf16", True, False)
    method, module = loaded("bf16", rank, arrays, **said)
    x, _, _, z = inputs(5)
    for _ in range(2):
        routed = [
            route_row(row, top_k=K, scoring="sigmoid", renormalize=False, factor=2.5, bias=bias.numpy()) for row in z
        ]
        p, ids = np.array([w for w, _ in routed], np.float32), np.array([i for _, i in routed])
        weights, shape = whole_weights("bf16", arrays, True, False)
        y = method.apply_monolithic(module, as_torch(x), torch.from_numpy(z))
        assert_layer_close(to_numpy(y), x, p, ids, weights, shape)
        bias.copy_(torch.tensor([-1.0, 2.0, -0.3, 0.7]))
    module.custom_routing_function = print
    with pytest.raises(NotImplementedError, match="custom_routing_function"):
        method.apply_monolithic(module, as_torch(x), torch.from_numpy(z))


def test_calls_that_cannot_be():
    """One line each: before anything is created or processed, and tensors that do not fit."""
    method = torch_bridge.SchemeMoEMethod("fp8_channel")
    module, x = torch.nn.Module(), torch.zeros(3, H)
    call = torch.ones(3, K), torch.zeros(3, K, dtype=torch.int32)
    refuses(RuntimeError, r"call create_weights\(module, ...\) first", method.apply, module, x, *call)
    method.create_weights(module, E, H, I, torch.bfloat16)
    assert method.moe.num_experts == E and not method.moe.use_ep
    refuses(RuntimeError, r"call process_weights_after_loading\(module\)", method.apply, module, x, *call)
    for name, parameter in module.named_parameters():
        parameter.data.fill_(1)
        assert name.startswith("w")
    method.process_weights_after_loading(module)
    refuses(ValueError, r"x has shape \(3, 64\), expected \(T, 128\)", method.apply, module, x[:, :64], *call)
    refuses(ValueError, "x has 3 tokens, found 2", method.apply, module, x, call[0][:2], call[1])
    assert method.apply(module, x[:0], call[0][:0], call[1][:0]).shape == (0, H)


def test_tokens_of_other_ranks_are_the_owners_to_bring():
    """M54, M64: a method that claims its own dispatch gets none from vLLM's runner; copies are chosen before apply."""
    moe = described(torch_bridge.Rank(num_experts=E))
    module, method = Module(moe, torch_bridge.Rank(num_experts=E)), METHODS["bf16"](moe)
    method.create_weights(module, E, H, I, torch.bfloat16)
    for parameter in module.parameters():
        parameter.data.zero_()
    method.process_weights_after_loading(module)
    assert method.supports_internal_mk and method.is_monolithic
    moe.moe_parallel_config.dp_size = 2
    assert not method.supports_internal_mk and method.is_monolithic
    moe.moe_parallel_config.enable_eplb = True
    assert not method.is_monolithic
    with pytest.raises(NotImplementedError, match="Module has enable_eplb, and copies of experts are chosen outside"):
        x, _, _, z = inputs()
        method.apply_monolithic(module, as_torch(x), torch.from_numpy(z))
