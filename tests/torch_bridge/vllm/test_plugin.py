"""The plugin around vLLM's layers: ranks, biases, reloads, what is left to vLLM, and what the entry point does."""

import dataclasses
import functools
import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("vllm")

import torch

from tests.support.checkpoints.vllm_formats import FORMATS
from tests.support.vllm_layers import (
    computed_by_reference,
    experts_float32,
    heard,
    load_experts,
    make_layer,
    model_config,
    vllm_without_gpu,
    weights_of,
)
from tests.torch_bridge.vllm.test_formats import INTERMEDIATE, TOP_K, E, H
from torch_bridge.vllm._method import NotTakenError

pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = dict(num_experts=E, top_k=TOP_K, hidden_size=H, intermediate_size=INTERMEDIATE)
load = functools.partial(load_experts, num_experts=E, hidden=H, intermediate=INTERMEDIATE)


def test_the_entry_point_only_adds_names():
    """In a process that does not choose moe_jax, JAX is never imported."""
    code = (
        "import sys, vllm.plugins as p; p.load_general_plugins();"
        "from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS as m;"
        "assert 'moe_jax' in m and 'moe_jax_fp8_per_channel' in m, m;"
        "assert not {'jax', 'moe_jax', 'flax'} & set(sys.modules)"
    )
    environment = os.environ | dict(VLLM_PLUGINS="moe_jax", VLLM_LOGGING_LEVEL="ERROR")
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


# What vLLM refuses of half a matrix here, or what is left to it.
WHOLE_MATRICES = {"ct_w4a16_g256", "ct_w4a8_fp8", "ct_w4a16_actorder", "gptq_actorder"}
RANKS = [(name, split) for name in FORMATS for split in ("tp", "ep") if split == "ep" or name not in WHOLE_MATRICES]


@pytest.mark.parametrize(("name", "split"), RANKS)
def test_ranks_add_up(name, split, caplog, monkeypatch):
    """Two ranks of a pretended group, each with its own part of the checkpoint, give the whole layer together.

    Of biases, the second belongs to rank 0 alone where matrices are split, and to its expert's rank where experts are.
    """
    computed_by_reference(monkeypatch)
    form, outputs = FORMATS[name], []
    for rank in range(2):
        with vllm_without_gpu(tp=(2, rank), ep=split == "ep"), heard(caplog):
            layer = make_layer(form.config, tp_size=2, **SIZES, **form.settings)
            values = load(layer, form, torch.Generator().manual_seed(3))
            method = layer.quant_method
            if not method.moe_jax.form.online:  # whose weights are processed as they arrive
                method.process_weights_after_loading(layer)
            x, weights, ids, logits = _call(torch.Generator().manual_seed(4))
            outputs.append(method.apply(layer, x, weights, ids, None, None).float())
            assert method.is_monolithic == (split == "tp")
            if split == "ep":
                assert (layer.expert_map >= 0).nonzero().flatten().tolist() == [2 * rank, 2 * rank + 1]
    assert "loaded into" not in caplog.text
    _assert_close(sum(outputs), experts_float32(x, weights, ids, *values), form)


LACKING = {
    "a whole expert": ("ct_fp8_channel", r"^2\.", "w13_weight (w1) of expert 2 and 5 more"),
    "one matrix": ("ct_w4a16_g128", r"^3\.up_proj\.weight_packed", "w13_weight_packed (w3) of expert 3"),
    "scales of all": ("fp8_block", r"down_proj\.weight_scale_inv", "w2_weight_scale_inv (w2) of expert 0 and 3 more"),
    "everything": ("bf16", "", None),  # as when weights are drawn
    "nothing": ("bf16", "^none", None),
}


@pytest.mark.parametrize(("name", "without", "said"), LACKING.values(), ids=LACKING)
def test_what_a_checkpoint_lacks_is_said(name, without, said, caplog):
    """vLLM says nothing; the layer runs with what its memory held. A reload begins anew."""
    from vllm.model_executor.model_loader import reload

    form = FORMATS[name]
    with vllm_without_gpu(), heard(caplog):
        layer = make_layer(form.config, **SIZES)
        reload.record_metadata_for_reloading(layer)
        for parameter in layer.parameters():
            parameter.data.zero_()
        load(layer, form, torch.Generator().manual_seed(1), without=without)
        layer.quant_method.process_weights_after_loading(layer)
        expected = (
            []
            if said is None
            else [f"moe_jax: nothing was loaded into {layer.layer_name}: {said}. The rest stays as vLLM made it"]
        )
        assert [record.message for record in caplog.records] == expected
        reload.initialize_layerwise_reload(layer)
        load(layer, form, torch.Generator().manual_seed(2))
        reload.finalize_layerwise_reload(layer, None)
        assert len(caplog.records) == len(expected)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["bf16", "ct_fp8_channel", "ct_nvfp4"])
def test_a_shorter_tensor_is_said(name, size, caplog):
    """vLLM copies it to the beginning of its place. Also where each rank takes a share of it that is long enough."""
    form = FORMATS[name]
    with vllm_without_gpu(tp=(size, 0)), heard(caplog):
        layer = make_layer(form.config, tp_size=size, **SIZES)
        load(layer, form, torch.Generator().manual_seed(1))
        place = "w2_weight_packed" if hasattr(layer, "w2_weight_packed") else "w2_weight"
        parameter = getattr(layer, place)
        own = parameter.data[1]
        shorter = torch.zeros(own.shape[0] * 3 // 4, own.shape[1] * size).to(own.dtype)
        parameter.weight_loader(parameter, shorter, f"experts.1.{place}", shard_id="w2", expert_id=1)
        layer.quant_method.process_weights_after_loading(layer)
        [record] = caplog.records
        said = f"{place} (w2) of expert 1, {shorter.numel()} numbers of {own.numel() * size}"
        assert f"too little was loaded into {layer.layer_name}: {said}. The rest stays" in record.message


def test_which_shorter_tensors_count(caplog):
    """Gate and up are halves of a parameter. Experts of other ranks, and what comes whole at last, lack nothing."""
    with vllm_without_gpu(tp=(2, 1), ep=True), heard(caplog):
        layer = make_layer(None, tp_size=2, **SIZES)
        load(layer, FORMATS["bf16"], torch.Generator().manual_seed(1))

        def bring(rows, shard, expert):
            tensor = torch.zeros(rows, H, dtype=torch.bfloat16)
            layer.w13_weight.weight_loader(layer.w13_weight, tensor, "experts.w13_weight", shard, expert)

        bring(INTERMEDIATE // 2, "w1", 0)  # of the other rank
        bring(INTERMEDIATE // 2, "w1", 2)
        bring(INTERMEDIATE, "w1", 2)
        bring(INTERMEDIATE // 2, "w3", 3)
        layer.quant_method.process_weights_after_loading(layer)
        [record] = caplog.records
        numbers = INTERMEDIATE // 2 * H
        assert f": w13_weight (w3) of expert 1, {numbers} numbers of {2 * numbers}. The" in record.message


@pytest.mark.parametrize("rank", [0, 1])
def test_bias_of_one_rank(rank, monkeypatch):
    """A loader that leaves the second bias to every rank, as ours does not: it still counts once, on rank 0."""
    computed_by_reference(monkeypatch)
    form = FORMATS["gpt_oss_bf16"]
    with vllm_without_gpu(tp=(2, rank)):
        layer = make_layer(None, tp_size=2, **SIZES, **form.settings)
        values = load(layer, form, torch.Generator().manual_seed(5))
        layer.w2_bias.data.copy_(values.w2_bias)
        half = slice(rank * INTERMEDIATE // 2, (rank + 1) * INTERMEDIATE // 2)
        method = layer.quant_method
        method.process_weights_after_loading(layer)
        x, weights, ids, _ = _call(torch.Generator().manual_seed(4))
        expected = experts_float32(
            x,
            weights,
            ids,
            values.w13[:, :, half],
            values.w2[..., half],
            values.w13_bias[..., half],
            values.w2_bias if rank == 0 else None,
        )
        _assert_close(method.apply(layer, x, weights, ids, None, None).float(), expected, form)


def test_int4_with_int8_activations_needs_no_cpu(caplog, monkeypatch):
    """vLLM makes the method on CPUs alone. Where our kernels do not take the layer either, its own error stands."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w4a8_int8 as module,
    )

    def on_a_gpu(*_, **__):
        raise NotImplementedError("W4A8 Int8 MoE is only supported on CPU platforms")

    form = FORMATS["ct_w4a8_int8_channel"]
    with vllm_without_gpu(), heard(caplog):
        monkeypatch.setattr(module, "select_w4a8_int8_moe_backend", on_a_gpu)
        with pytest.raises(NotImplementedError, match="only supported on CPU"):
            make_layer(form.config, plugin=False, **SIZES)
        layer = make_layer(form.config, **SIZES)
        assert type(layer.quant_method).__name__ == form.method and not caplog.records
        load(layer, form, torch.Generator().manual_seed(1))
        layer.w2_weight_scale.data[3, 5] = float("nan")
        with pytest.raises(ValueError, match="expert 3 .w2. has scale nan"):  # nobody else can run it
            layer.quant_method.process_weights_after_loading(layer)
        with pytest.raises(NotImplementedError, match="only supported on CPU"):
            make_layer(form.config, **SIZES | dict(intermediate_size=INTERMEDIATE + 8))
    [line] = [record.message for record in caplog.records if "moe_jax leaves" in record.message]
    assert "CompressedTensorsW4A8Int8MoEMethod" in line


def test_biases_without_parameters_are_left(caplog, monkeypatch):
    """Of a method of vLLM that makes no biases, whatever the model says, our kernels would not know them."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w4a4_mxfp4 as module,
    )

    form, called = FORMATS["ct_mxfp4"], []
    own = module.CompressedTensorsW4A4Mxfp4MoEMethod
    monkeypatch.setattr(own, "process_weights_after_loading", lambda self, layer: called.append(layer))
    with vllm_without_gpu(), heard(caplog):
        layer = make_layer(form.config, **SIZES, has_bias=True)
        load(layer, form, torch.Generator().manual_seed(1))
        layer.quant_method.process_weights_after_loading(layer)
        assert called == [layer] and layer.quant_method.moe_jax.experts is None
    [line] = [record.message for record in caplog.records if "moe_jax leaves" in record.message]
    assert "no parameters for them" in line


GROUPED = dict(use_grouped_topk=True, num_expert_group=2, topk_group=1, routed_scaling_factor=2.5)


@pytest.mark.parametrize(
    "settings",
    [
        dict(renormalize=False),
        dict(scoring_func="sigmoid"),
        GROUPED | dict(scoring_func="sigmoid", has_bias=True),
        GROUPED | dict(apply_routed_scale_to_output=True),
    ],
)
def test_routing_is_vllms(settings, monkeypatch):
    """apply_monolithic against vLLM's own router followed by apply: correction bias, groups, the factor once."""
    from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import grouped_topk

    computed_by_reference(monkeypatch)
    settings = dict(settings)
    generator = torch.Generator().manual_seed(6)
    bias = torch.randn(E, generator=generator, dtype=torch.float32) if settings.pop("has_bias", False) else None
    with vllm_without_gpu():
        layer = make_layer(None, **SIZES, e_score_correction_bias=bias, **settings)
        load(layer, FORMATS["bf16"], generator)
        method = layer.quant_method
        method.process_weights_after_loading(layer)
        assert method.is_monolithic
        x, _, _, logits = _call(generator)
        scores = torch.sigmoid(logits) if settings.get("scoring_func") == "sigmoid" else torch.softmax(logits, -1)
        if settings.get("use_grouped_topk"):
            weights, ids = grouped_topk(
                x,
                logits,
                TOP_K,
                True,
                2,
                1,
                settings.get("scoring_func", "softmax"),
                layer.routed_scaling_factor,
                bias,
            )
        else:
            weights, ids = scores.topk(TOP_K)
            if settings.get("renormalize", True):
                weights = weights / weights.sum(-1, keepdim=True)
        expected = method.apply(layer, x, weights.float(), ids.to(torch.int32), None, None)
        torch.testing.assert_close(method.apply_monolithic(layer, x, logits), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", ["ct_fp8_channel", "fp8_block", "ct_int8", "bf16", "ct_w4a16_g128", "gptq_4", "awq"])
def test_weights_stay_in_vllms_memory(name):
    form = FORMATS[name]
    with vllm_without_gpu():
        layer = make_layer(form.config, **SIZES)
        load(layer, form, torch.Generator().manual_seed(1))
        before = {parameter.data_ptr() for parameter in layer.parameters()}
        layer.quant_method.process_weights_after_loading(layer)
        weights = layer.quant_method.moe_jax.experts.weights
        assert {weights.w13.data.data_ptr(), weights.w2.data.data_ptr()} <= before
        assert {weights.w13.data.data_ptr(), weights.w2.data.data_ptr()} <= {p.data_ptr() for p in layer.parameters()}


@pytest.mark.parametrize("name", ["ct_fp8_channel", "ct_w4a16_g128", "awq", "online_fp8_channel", "bf16"])
def test_reload_writes_where_graphs_read(name):
    """vLLM's own reload of a processed layer: the kernels' memory stays, its values are those of the new checkpoint."""
    from vllm.model_executor.model_loader import reload

    form = FORMATS[name]
    with vllm_without_gpu():
        layer = make_layer(form.config, **SIZES)
        reload.record_metadata_for_reloading(layer)
        load(layer, form, torch.Generator().manual_seed(1))
        method = layer.quant_method
        if not method.moe_jax.form.online:
            method.process_weights_after_loading(layer)
        experts = method.moe_jax.experts
        places = [leaf.data_ptr() for leaf in _leaves(experts)]
        reload.initialize_layerwise_reload(layer)
        w13, w2, *_ = load(layer, form, torch.Generator().manual_seed(2))
        reload.finalize_layerwise_reload(layer, None)
        assert method.moe_jax.experts is experts and [leaf.data_ptr() for leaf in _leaves(experts)] == places
        assert {experts.weights.w13.data.data_ptr()} <= {p.data_ptr() for p in layer.parameters()}
        found13, found2 = map(torch.from_numpy, weights_of(experts))
        tolerance = 0.05 if method.moe_jax.form.online else 1e-6
        assert (found13 - w13).norm() <= tolerance * w13.norm() and (found2 - w2).norm() <= tolerance * w2.norm()


@pytest.mark.parametrize("name", ["ct_fp8_channel", "ct_w4a16_g128"])  # refused at the last tensor; at the end
def test_a_refused_reload_leaves_the_layer_and_the_next_one_counts(name):
    """vLLM alone takes the next reload for the rest of the refused one, and the kernels keep the first weights."""
    from vllm.model_executor.model_loader import reload

    form = FORMATS[name]
    with vllm_without_gpu():
        layer = make_layer(form.config, **SIZES)
        reload.record_metadata_for_reloading(layer)
        w13, w2, *_ = load(layer, form, torch.Generator().manual_seed(1))
        method = layer.quant_method
        method.process_weights_after_loading(layer)
        held = dict(layer.named_parameters())
        reload.initialize_layerwise_reload(layer)
        damaged = dataclasses.replace(form, write=lambda *drawn: _with_scale(form.write(*drawn), float("nan")))
        with pytest.raises(ValueError, match="has scale nan"):
            load(layer, damaged, torch.Generator().manual_seed(2))
            reload.finalize_layerwise_reload(layer, None)
        assert {id(parameter) for parameter in held.values()} == {id(parameter) for parameter in layer.parameters()}
        _assert_holds(method, w13, w2)
        reload.initialize_layerwise_reload(layer)
        w13, w2, *_ = load(layer, form, torch.Generator().manual_seed(3))
        reload.finalize_layerwise_reload(layer, None)
        _assert_holds(method, w13, w2)


@pytest.mark.parametrize("name", ["ct_w4a16_actorder", "gptq_actorder"])
@pytest.mark.parametrize("bad", [4, -1])
def test_groups_that_do_not_exist_are_left_to_vllm(name, bad):
    """The kernels would read scales of another matrix, or beyond the layer's."""
    form = FORMATS[name]
    with vllm_without_gpu():
        layer = make_layer(form.config, **SIZES)
        load(layer, form, torch.Generator().manual_seed(1))
        method = layer.quant_method
        getattr(layer, f"w2_{method.moe_jax.form.leaves['weight_g_idx'].parameter}").data[2, 5] = bad
        with pytest.raises(NotTakenError, match=f"w2_weight_g_idx: expert 2 has group {bad} at column 5"):
            method.moe_jax.load(layer)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_damaged_scales_are_left_to_vllm(bad, caplog, monkeypatch):
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w8a8_fp8 as module,
    )

    form, called = FORMATS["ct_fp8_channel"], []
    own = module.CompressedTensorsW8A8Fp8MoEMethod
    monkeypatch.setattr(own, "process_weights_after_loading", lambda self, layer: called.append(layer))
    monkeypatch.setattr(own, "apply", lambda *_: torch.full((), 7.0))
    with vllm_without_gpu(), heard(caplog):
        layer = make_layer(form.config, **SIZES)
        load(layer, form, torch.Generator().manual_seed(1))
        before = layer.w13_weight.data.view(torch.uint8).clone()
        layer.w13_weight_scale.data[1, 7] = bad
        layer.quant_method.process_weights_after_loading(layer)
        assert called == [layer] and torch.equal(layer.w13_weight.data.view(torch.uint8), before)
        x, weights, ids, _ = _call(torch.Generator().manual_seed(1))
        assert torch.equal(layer.quant_method.apply(layer, x, weights, ids), torch.full((), 7.0))
    [line] = [record.message for record in caplog.records if "moe_jax leaves" in record.message]
    assert "expert 1 (w1) has scale" in line and "\n" not in line


def test_a_negative_input_scale_is_not_hidden_by_others():
    """The kernels have one for a layer, the largest of its experts'."""
    form = FORMATS["fp8_static"]
    with vllm_without_gpu():
        layer = make_layer(form.config, **SIZES)
        load(layer, form, torch.Generator().manual_seed(1))
        layer.w2_input_scale.data[1] = -1.0
        with pytest.raises(NotTakenError, match="w2_input_scale: .*has scale -1.0"):
            layer.quant_method.moe_jax.load(layer)


def test_what_is_left_to_vllm(caplog, monkeypatch):
    """A version that is not known, no Hopper GPU, a group size that no kernel takes, bits that must not depend on the
    batch: one line each, vLLM's method."""
    import vllm
    from vllm import envs
    from vllm.model_executor.layers import fused_moe
    from vllm.model_executor.layers.quantization import get_quantization_config

    from torch_bridge.vllm import _method

    def no_gpu():
        raise NotImplementedError("the kernels need compute capability 9.0, NVIDIA A100 has 8.0")

    form = FORMATS["ct_fp8_channel"]
    with vllm_without_gpu(), heard(caplog):
        with monkeypatch.context() as patch:
            patch.setattr(vllm, "__version__", "0.19.0")
            patch.setattr(_method, "taken", None)  # nothing of a version that is not known is read
            assert not hasattr(make_layer(form.config, **SIZES).quant_method, "moe_jax")
            patch.delattr(fused_moe, "RoutedExperts")
            linear = get_quantization_config("moe_jax")().get_quant_method(torch.nn.Linear(2, 2), "x")
            assert linear is None
        with monkeypatch.context() as patch:
            patch.setattr(_method, "gpu_of_process", no_gpu)
            assert not hasattr(make_layer(form.config, **SIZES).quant_method, "moe_jax")
        odd = SIZES | dict(intermediate_size=INTERMEDIATE + 8)
        assert not hasattr(make_layer(form.config, **odd).quant_method, "moe_jax")
        with monkeypatch.context() as patch:
            patch.setattr(envs, "VLLM_BATCH_INVARIANT", True)
            assert not hasattr(make_layer(form.config, **SIZES).quant_method, "moe_jax")
    lines = [record.message for record in caplog.records if "moe_jax leaves" in record.message]
    assert "moe_jax leaves all layers to vLLM 0.19.0, which is not known; 0.24.x is" == lines[0] == lines[1]
    assert ["A100 has 8.0" in lines[2], "VLLM_BATCH_INVARIANT" in lines[4], len(lines)] == [True, True, 5]


GROUPS = dict(use_grouped_topk=True, num_expert_group=2, topk_group=1)


@pytest.mark.parametrize("options", [{}, GROUPS, GROUPS | dict(apply_routed_scale_to_output=True)], ids=["", "k", "y"])
def test_runners_scale_once_and_add_shared_experts(options, monkeypatch):
    """vLLM's runner around our method: shared experts once, and the routed factor once, of weights or of the output."""
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.fused_moe import FusedMoE
    from vllm.model_executor.layers.quantization import get_quantization_config

    computed_by_reference(monkeypatch)
    generator, factor = torch.Generator().manual_seed(5), 2.5 if options else 1.0
    shared = torch.nn.Linear(H, H, bias=False, dtype=torch.bfloat16)
    shared.weight.data.normal_(0, 0.05, generator=generator)
    with vllm_without_gpu() as config:
        made = dict(quant_config=get_quantization_config("moe_jax")(), params_dtype=torch.bfloat16, tp_size=1)
        runner = FusedMoE(
            E,
            TOP_K,
            H,
            INTERMEDIATE,
            prefix=f"model.layers.{len(options)}.mlp.experts",
            shared_experts=shared,
            **dict(made, routed_scaling_factor=factor, **options),
        )
        layer = runner.routed_experts
        w13, w2, *_ = load(layer, FORMATS["bf16"], generator)
        layer.quant_method.process_weights_after_loading(layer)
        x = torch.randn(6, H, generator=generator).bfloat16()
        logits = torch.randn(6, E, generator=generator).bfloat16()
        with torch.no_grad(), set_forward_context(None, config):
            y = runner(x.clone(), logits)
    scores = logits.float().softmax(-1)
    if options:
        best = scores.view(6, 2, -1).amax(-1).argmax(-1, keepdim=True)
        scores = torch.where(torch.arange(E).view(1, -1) // (E // 2) == best, scores, 0.0)
    weights, ids = scores.topk(TOP_K)
    expected = factor * experts_float32(x, weights / weights.sum(-1, keepdim=True), ids, w13, w2)
    with torch.no_grad():
        expected += shared(x).float()
    assert (y.float() - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("ranks", ["one", "tp", "ep"])
def test_runners_have_zero_experts(ranks, monkeypatch):
    """LongCat's layers in vLLM's runner: its router takes ids from E on out of what our kernels get. Shared experts and
    the factor beside them, and ranks whose routed parts add up. Triton's sum of the zero experts has a stand-in here.
    """
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.fused_moe import FusedMoE
    from vllm.model_executor.layers.fused_moe.router import zero_expert_router as module
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.model_executor.layers.quantization import get_quantization_config

    def best(logits, bias, topk):
        scores = torch.softmax(logits.float(), -1)
        ids = (scores + bias.float()).topk(topk).indices
        return scores.gather(1, ids), ids

    def fused_topk_bias(*, gating_output, e_score_correction_bias, topk, indices_type, **_):
        weights, ids = best(gating_output, e_score_correction_bias, topk)
        return weights, ids.to(indices_type)

    def zero_experts(*, expert_indices, expert_scales, num_experts, hidden_states, **_):
        return hidden_states * torch.where(expert_indices >= num_experts, expert_scales, 0).sum(-1, keepdim=True)

    computed_by_reference(monkeypatch)
    monkeypatch.setattr(module, "fused_topk_bias", fused_topk_bias)
    monkeypatch.setattr(module, "zero_experts_compute_triton", zero_experts)
    monkeypatch.setattr(MoERunner, "_maybe_reduce_final_output", lambda runner, y, size: y)
    count, factor, zeros, top_k = 1 if ranks == "one" else 2, 2.5, 3, 3
    shared = torch.nn.Linear(H, H, bias=False, dtype=torch.bfloat16)
    shared.weight.data.normal_(0, 0.05, generator=torch.Generator().manual_seed(1))
    total = torch.zeros(6, H, dtype=torch.float32)
    for rank in range(count):
        generator = torch.Generator().manual_seed(5)
        bias = 0.1 * torch.randn(E + zeros, generator=generator, dtype=torch.float32)
        with vllm_without_gpu(tp=(count, rank), ep=ranks == "ep") as config, torch.no_grad():
            runner = FusedMoE(
                *(E, top_k, H, INTERMEDIATE),
                prefix=f"model.layers.{ranks}.mlp.experts",
                quant_config=get_quantization_config("moe_jax")(),
                params_dtype=torch.bfloat16,
                tp_size=count,
                shared_experts=shared,
                renormalize=False,
                zero_expert_type="identity",
                e_score_correction_bias=bias,
                routed_scaling_factor=factor,
                router_logits_dtype=torch.float32,
            )
            layer = runner.routed_experts
            w13, w2, *_ = load(layer, FORMATS["bf16"], generator)
            layer.quant_method.process_weights_after_loading(layer)
            x = torch.randn(6, H, generator=generator).bfloat16()
            logits = torch.randn(6, E + zeros, generator=generator, dtype=torch.float32)
            with set_forward_context(None, config):
                total += runner(x.clone(), logits).float()
    weights, ids = best(logits, bias, top_k)
    weights, is_zero = factor * weights, ids >= E
    assert 0.2 < is_zero.float().mean() < 0.8
    of_each_rank = x.float() * torch.where(is_zero, weights, 0).sum(-1, keepdim=True) + shared(x).detach().float()
    routed = experts_float32(x, torch.where(is_zero, 0, weights), torch.where(is_zero, 0, ids), w13, w2)
    assert (total - count * of_each_rank - routed).norm() < 0.02 * routed.norm()


@pytest.mark.parametrize("name", ["ct_fp8_channel", "fp8_block", "gptq_4", "awq", "modelopt_nvfp4"])
def test_model_config(name, tmp_path):
    """vLLM's own way from a checkpoint's folder to a quantization config: ours only where it is named."""
    from vllm.config import DeviceConfig, VllmConfig
    from vllm.model_executor.layers.quantization import get_quantization_config

    sizes = dict(hidden_size=H, intermediate_size=H, num_hidden_layers=1, num_attention_heads=4, head_dim=64)
    sizes |= dict(num_key_value_heads=2, num_experts=E, num_experts_per_tok=TOP_K, moe_intermediate_size=INTERMEDIATE)
    model = dict(model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], vocab_size=128, torch_dtype="bfloat16")
    (tmp_path / "config.json").write_text(json.dumps(model | sizes | dict(quantization_config=FORMATS[name].config)))
    with vllm_without_gpu():
        found = {}
        for asked in ("moe_jax", None):
            config = model_config(tmp_path, quantization=asked, max_model_len=64)
            found[asked] = config.quantization
            if asked:
                ours = VllmConfig(model_config=config, device_config=DeviceConfig("cpu")).quant_config
    assert found["moe_jax"] == "moe_jax" == type(ours).__name__ and found[None] not in ("moe_jax", None)
    assert type(ours.inner) is get_quantization_config(found[None])


def test_captured_sizes_are_exact():
    from torch_bridge.vllm._settings import token_counts

    with vllm_without_gpu() as config:
        config.compilation_config.cudagraph_mode = None
        config.compilation_config.cudagraph_capture_sizes = [1, 2, 4, 24, 40, 512]
        config.scheduler_config.max_num_batched_tokens = 3000
        exact, buckets = token_counts(config)
    assert exact == [1, 2, 4, 24, 40, 512] and buckets == [16, 32, 64, 128, 256, 512, 1024, 2048, 3072]


def _call(generator):
    x = torch.randn(6, H, generator=generator, dtype=torch.float32).to(torch.bfloat16)
    logits = torch.randn(6, E, generator=generator, dtype=torch.float32).to(torch.bfloat16).float()
    weights, ids = torch.softmax(logits, -1).topk(TOP_K)
    return x, weights / weights.sum(-1, keepdim=True), ids.to(torch.int32), logits


def _assert_close(y, expected, form):
    """expected: from the checkpoint's weights, which online formats round to 8 bits."""
    error = (y - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < (0.015 if form.activations == 16 and not isinstance(form.config, str) else 0.12), error


def _assert_holds(method, w13, w2):
    for found, expected in zip(weights_of(method.moe_jax.experts), (w13, w2), strict=True):
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-6, atol=0)


def _with_scale(written, scale):
    tensors, values = written
    tensors["weight_scale"].view(-1)[0] = scale
    return tensors, values


def _leaves(experts):
    import jax

    return jax.tree.leaves(experts.weights)
