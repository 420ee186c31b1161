"""Methods of one's own, computed in torch: inside ``FusedMoE`` and in other modules, with parameters and callbacks."""

from inspect import unwrap  # the tests' own checks of annotations would speak first

import numpy as np
import pytest
import torch

import torch_bridge
from tests.support.cases.torch_bridge import E, H, I, K, as_torch, bits, bridge_layer, inputs, plain_arrays, torch_pairs


class Int8PerTensor:
    """Callbacks of someone else: one int8 scale for an expert's matrix, computed in torch."""

    def create_scale_tensors(self, layer, num_experts, intermediate_size_per_partition, hidden_size):
        return tuple(torch.nn.Parameter(torch.zeros(num_experts), requires_grad=False) for _ in range(2))

    def get_quantized_dtype(self):
        return torch.int8

    def quantize_expert(self, weight):
        scale = weight.float().abs().max() / 127
        return (weight.float() / scale).round().to(torch.int8), scale

    def setup_kernel(self, layer, w13, w2, w13_scale, w2_scale):
        self.calls = getattr(self, "calls", 0) + 1
        for name, weight in (("w13_weight", w13), ("w2_weight", w2)):
            torch_bridge.replace_parameter(layer, name, weight)


class OwnMethod(torch_bridge.FusedMoEMethodBase):
    """A method that composes the helper and computes in torch."""

    def __init__(self):
        super().__init__()
        self.helper = torch_bridge.MoeOnlineWeightQuantizer(Int8PerTensor())

    def create_weights(self, layer, *args, **kwargs):
        self.helper.create_weights(layer, *args, **kwargs)

    def process_weights_after_loading(self, layer):
        self.helper.process_weights_after_loading(layer)

    def get_fused_moe_quant_config(self, layer):
        return None

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
        w13 = layer.w13_weight.float() * layer.w13_weight_scale[:, None, None]
        w2 = layer.w2_weight.float() * layer.w2_weight_scale[:, None, None]
        gate, up = torch.einsum("th,ekh->tek", x.float(), w13).chunk(2, -1)
        out = torch.einsum("tei,ehi->teh", torch.nn.functional.silu(gate) * up, w2)
        chosen = out.gather(1, topk_ids.long()[..., None].expand(-1, -1, out.shape[-1]))
        return (chosen * topk_weights[..., None]).sum(1).to(x.dtype)


def test_callbacks_quantize_when_the_last_tensor_comes():
    """M2 to M7, M14, M16, M18: placeholders without memory, one call of setup_kernel, scales filled in place."""
    layer = bridge_layer(OwnMethod())
    assert layer.w13_weight.is_meta and not layer.w13_weight_scale.is_meta
    assert (layer.num_experts, layer.hidden_size, layer.intermediate_size_per_partition) == (E, H, I)
    assert layer.orig_dtype == torch.bfloat16 and layer._load_device == torch.device("cpu")
    callbacks, arrays = layer.quant_method.helper.moe_quant_callbacks, plain_arrays()
    assert isinstance(callbacks, torch_bridge.MoeOnlineQuantizer)
    parameters = dict(layer.named_parameters())
    for (expert, shard, _), array in arrays.items():
        assert not hasattr(callbacks, "calls")
        param = parameters["w2_weight" if shard == "w2" else "w13_weight"]
        (_, tensor), *_ = torch_pairs({(expert, shard, "weight"): array})
        for _ in range(2):  # M22: the same again changes nothing
            assert param.weight_loader(param, tensor, "weight", shard, expert, return_success=True)
    with pytest.raises(ValueError, match="came twice with different values"):
        param.weight_loader(param, tensor * 2, "weight", shard, expert)
    layer.process_weights_after_loading()
    assert callbacks.calls == 1 and layer.w13_weight.dtype == torch.int8
    assert layer._already_called_process_weights_after_loading
    gate_up = torch.cat([torch_pairs({(1, s, "weight"): arrays[1, s, "weight"]})[0][1] for s in ("w1", "w3")])
    scale = gate_up.float().abs().max() / 127
    assert layer.w13_weight_scale[1] == scale
    assert torch.equal(layer.w13_weight[1], (gate_up.float() / scale).round().to(torch.int8))
    with pytest.raises(TypeError, match="moe_quant_callbacks is a object, expected create_scale_tensors"):
        helper = torch_bridge.MoeOnlineWeightQuantizer
        unwrap(helper.__init__)(object.__new__(helper), object())


def test_load_weights_says_who_fills_parameters_of_ones_own():
    """M110: rather than take tensors that it has no place for."""
    layer, pairs = bridge_layer(OwnMethod()), torch_pairs(plain_arrays())
    with pytest.raises(
        NotImplementedError, match="OwnMethod keeps its own .* call the weight_loader of each parameter"
    ):
        layer.load_weights(pairs)


def test_callbacks_take_biases_where_the_layer_has_them():
    """M6: biases come with the weights, and ``setup_kernel`` waits for them."""
    layer, arrays = bridge_layer(OwnMethod(), has_bias=True), plain_arrays(bias=True)
    parameters = dict(layer.named_parameters())
    for (expert, shard, suffix), array in sorted(arrays.items(), key=lambda item: item[0][2] == "bias"):
        assert not hasattr(layer.quant_method.helper.moe_quant_callbacks, "calls")
        param = parameters[f"{'w2' if shard == 'w2' else 'w13'}_{suffix}"]
        param.weight_loader(param, as_torch(array), suffix, shard, expert)
    assert layer.quant_method.helper.moe_quant_callbacks.calls == 1
    expected = np.stack([np.concatenate([arrays[e, s, "bias"] for s in ("w1", "w3")]) for e in range(E)])
    assert bits(layer.w13_bias) == bits(expected)


class OwnParameters(OwnMethod):
    """A method whose parameters have memory from the start, under names of its own; w2 and its scales are (in, out)."""

    GROUP = 32

    def create_weights(self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **attrs):
        i, groups = intermediate_size_per_partition, self.GROUP
        assert (attrs["global_num_experts"], attrs["intermediate_size_full"]) == (E, I)
        shapes = {
            "w13_codes": ((num_experts, 2 * i, hidden_size), {}),
            "w2_codes": ((num_experts, i, hidden_size), {"is_transposed": True}),
            "w13_channel_scale": ((num_experts, 2 * i, 1), {"quant_method": "channel"}),
            "w2_channel_scale": ((num_experts, hidden_size), {"quant_method": "channel"}),
            "w13_group_scale": ((num_experts, 2 * i, hidden_size // groups), {"quant_method": "group"}),
            "w2_group_scale": (
                (num_experts, i // groups, hidden_size),
                {"quant_method": "group", "is_transposed": True},
            ),
            "w2_whole_scale": (
                (num_experts, hidden_size, I // groups),
                {"quant_method": "group", "load_full_w2": True},
            ),
            "w13_block_scale": ((num_experts, 2 * i // groups, hidden_size // 64), {"quant_method": "block"}),
            "w2_block_scale": ((num_experts, hidden_size // groups, i // 64), {"quant_method": "block"}),
            "w13_tensor_scale": ((num_experts, 2), {"quant_method": "tensor"}),
            "w2_tensor_scale": ((num_experts,), {"quant_method": "tensor"}),
            "w13_input_scale": ((num_experts,), {}),
            "w13_bias": ((num_experts, 2 * i), {}),
            "w2_bias": ((num_experts, hidden_size), {}),
            "w2_weight_shape": ((num_experts, 2), {}),
            "w2_weight_scale": ((num_experts, hidden_size, 1), {"quant_method": "no_such_kind"}),
        }
        for name, (shape, own) in shapes.items():
            parameter = torch.nn.Parameter(torch.ones(shape), requires_grad=False)
            torch_bridge.set_weight_attrs(parameter, own | {"weight_loader": attrs["weight_loader"]})
            layer.register_parameter(name, parameter)

    def process_weights_after_loading(self, layer):
        """Nothing: they are read as they were loaded."""


def of_one_expert(matrices):
    """{(leaf, shard): the tensor of one expert as a checkpoint has it}, of (w1, w2, w3) (out, in)."""
    w1, w2, w3 = matrices
    tensors = {}
    for shard, w in (("w1", w1), ("w3", w3), ("w2", w2)):
        prefix = "w2" if shard == "w2" else "w13"
        kinds = {"codes": w, "channel_scale": w[:, :1], "group_scale": w[:, ::32], "block_scale": w[::32, ::64]}
        kinds |= {"tensor_scale": w[0, 0], "bias": w[:, 1]}
        tensors |= {(f"{prefix}_{kind}", shard): value for kind, value in kinds.items()}
    tensors["w2_channel_scale", "w2"] = w2[:, 0]
    tensors["w2_whole_scale", "w2"] = w2[:, ::32]
    for kind in ("codes", "group_scale"):
        tensors[f"w2_{kind}", "w2"] = tensors[f"w2_{kind}", "w2"].T
    return tensors


RANKS = [dict(), dict(tp_size=2, tp_rank=0), dict(tp_size=2, tp_rank=1), dict(ep_size=2, ep_rank=1)]


@pytest.mark.parametrize("rank", RANKS, ids=str)
def test_weight_loader_writes_into_parameters_of_a_method(rank):
    """M118, M122, M126, M130 to M134, M136: the rank's part of every tensor, cut along the axis that holds I."""
    layer, arrays = bridge_layer(OwnParameters(), **rank), plain_arrays()
    size, at = rank.get("tp_size", 1), rank.get("tp_rank", 0)
    own, load, parameters = (
        range(2, 4) if "ep_size" in rank else range(E),
        layer.weight_loader,
        dict(layer.named_parameters()),
    )
    whole = {
        e: [torch.from_numpy(arrays[e, s, "weight"].astype(np.float32)) for s in ("w1", "w2", "w3")] for e in range(E)
    }
    for expert, matrices in whole.items():
        for (name, shard), tensor in of_one_expert(matrices).items():
            assert load(parameters[name], tensor, name, shard, expert, return_success=True) == (expert in own)
        for shard in ("w1", "w3"):
            load(layer.w13_input_scale, torch.tensor(float(expert + 2)), "w13_input_scale", shard, expert)
        load(layer.w2_weight_shape, torch.tensor([float(H), float(I)]), "w2_weight_shape", "w2", expert)
    columns = slice(at * I // size, (at + 1) * I // size)
    for local, expert in enumerate(own):
        w1, w2, w3 = whole[expert]
        part = of_one_expert((w1[columns], w2[:, columns], w3[columns]))
        for prefix, kinds in (("w13", ("codes", "channel_scale", "group_scale", "block_scale", "bias")),):
            for kind in kinds:
                name = f"{prefix}_{kind}"
                expected = torch.cat([part[name, "w1"], part[name, "w3"]])
                assert torch.equal(parameters[name][local], expected), name
        for kind in ("codes", "group_scale", "block_scale", "channel_scale", "tensor_scale", "bias"):
            expected = of_one_expert(whole[expert])[f"w2_{kind}", "w2"]
            if kind in ("codes", "group_scale", "block_scale"):
                expected = part[f"w2_{kind}", "w2"]
            assert torch.equal(parameters[f"w2_{kind}"][local], expected), kind
        assert torch.equal(layer.w2_whole_scale[local], w2[:, ::32])
        assert layer.w13_tensor_scale[local].tolist() == [w1[0, 0], w3[0, 0]]
        assert layer.w13_input_scale[local] == expert + 2 and layer.w2_weight_shape[local].tolist() == [H, I]
    with pytest.raises(ValueError, match="input scales of w1 and w3 must be equal"):
        load(layer.w13_input_scale, torch.tensor(9.0), "w13_input_scale", "w3", own[0])
    with pytest.raises(ValueError, match="unknown kind 'no_such_kind', expected one of"):
        load(layer.w2_weight_scale, torch.zeros(H, 1), "weight_scale", "w2", own[0])
    with pytest.raises(ValueError, match=r"does not belong to the module, which has w13_codes"):
        load(torch.nn.Parameter(torch.zeros(3)), torch.zeros(3), "other", "w2", 0)


class Float32Experts(torch_bridge.FusedMoEMethodBase):
    """Weights as they are, a channel scale on each row of w13 and w2; routed by the layer, or by itself.

    Sizes are rounded up to multiples of 48, as a kernel might need them.
    """

    def __init__(self, *, routes=False):
        super().__init__()
        self.routes = routes

    @property
    def is_monolithic(self):
        return self.routes

    def maybe_roundup_sizes(self, hidden_size, intermediate_size_per_partition, act_dtype, moe_parallel_config):
        return tuple(-(-size // 48) * 48 for size in (hidden_size, intermediate_size_per_partition))

    def create_weights(self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **attrs):
        self.local_experts, h, i = num_experts, hidden_size, intermediate_size_per_partition
        shapes = {
            "w13_weight": (2 * i, h),
            "w2_weight": (h, i),
            "w13_weight_scale": (2 * i, 1),
            "w2_weight_scale": (h, 1),
        }
        for name, shape in shapes.items():
            parameter = torch.nn.Parameter(torch.zeros(num_experts, *shape), requires_grad=False)
            torch_bridge.set_weight_attrs(
                parameter, {"weight_loader": attrs["weight_loader"], "quant_method": "channel"}
            )
            layer.register_parameter(name, parameter)

    def get_fused_moe_quant_config(self, layer):
        return None

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
        assert shared_experts is None and shared_experts_input is None
        table = torch.arange(E) if layer.expert_map is None else layer.expert_map
        y = torch.zeros(x.shape)
        for token, slot in np.ndindex(*topk_ids.shape):
            expert = int(table[topk_ids[token, slot]])
            if expert >= 0:
                gate, up = (layer.w13_weight[expert] * layer.w13_weight_scale[expert] @ x[token].float()).chunk(2)
                out = (layer.w2_weight[expert] * layer.w2_weight_scale[expert]) @ (torch.nn.functional.silu(gate) * up)
                y[token] += topk_weights[token, slot] * out
        return y.to(x.dtype)

    def apply_monolithic(self, layer, x, router_logits, input_ids=None):
        weights, ids = router_logits.softmax(-1).topk(K)
        return self.apply(layer, x, weights / weights.sum(-1, keepdim=True), ids, None, None)


@pytest.mark.parametrize("routes", [False, True])
@pytest.mark.parametrize("ranks", [dict(), dict(tp_size=2), dict(ep_size=2)], ids=str)
def test_own_methods_compute_in_torch(ranks, routes):
    """M80, M93, M97: create, load by names, process and call; the parts of all ranks add up to NumPy's layer."""
    arrays, rng = plain_arrays(), np.random.default_rng(1)
    scales = {key[:2]: rng.uniform(0.5, 2, (len(array), 1)).astype(np.float32) for key, array in arrays.items()}
    x, z = inputs(5, dtype=torch.float32)
    kind = next(iter(ranks), "tp_size")
    y = 0
    for rank in range(ranks.get(kind, 1)):
        layer = bridge_layer(Float32Experts(routes=routes), **ranks, **{kind.replace("size", "rank"): rank})
        parameters = dict(layer.named_parameters())
        for (expert, shard, _), array in arrays.items():
            prefix = "w2" if shard == "w2" else "w13"
            for suffix, tensor in (
                ("weight", as_torch(array)),
                ("weight_scale", torch.from_numpy(scales[expert, shard])),
            ):
                parameters[f"{prefix}_{suffix}"].weight_loader(
                    parameters[f"{prefix}_{suffix}"], tensor, f"experts.{prefix}_{suffix}", shard, expert
                )
        layer.process_weights_after_loading()
        if not routes:
            weights, ids = layer.select_experts(x, z)
            assert weights.shape == ids.shape == (5, K) and weights.dtype == torch.float32
        y = y + layer(x, z).numpy()
    matrices = {key: arrays[*key, "weight"].astype(np.float64) * scale for key, scale in scales.items()}
    chosen = np.argsort(-z.numpy(), axis=1)[:, :K]
    expected = np.zeros((5, H))
    for token, experts in enumerate(chosen):
        p = np.exp(z.numpy()[token, experts].astype(np.float64))
        for weight, expert in zip(p / p.sum(), experts, strict=True):
            gate, up = (matrices[expert, shard] @ x.numpy()[token].astype(np.float64) for shard in ("w1", "w3"))
            expected[token] += weight * (matrices[expert, "w2"] @ (gate / (1 + np.exp(-gate)) * up))
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def test_callbacks_without_a_checkpoint_get_dummy_values():
    layer = bridge_layer(OwnMethod())
    with pytest.warns(UserWarning, match="dummy values"):
        layer.process_weights_after_loading()
    assert 0 < float(layer.w2_weight_scale.max()) < 1e-3 / 127 * 1.01
