"""Real layers of vLLM 0.24 on a machine without a GPU: made by FusedMoE, loaded by its weight_loader, processed by us.

What vLLM asks of a GPU before a layer exists (which of its kernels would run) is answered with "none"; our kernels are
traced for an H200 that is not there, and the reference backend computes in their place.
"""

import contextlib
import dataclasses
import importlib
import logging
import os
import re
import tempfile
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import torch

from moe_jax import fused_experts, fused_moe
from moe_jax.experts._choice import plain_layout
from moe_jax.quantization import dequantize_tensor
from moe_jax.routing import RoutingParams
from tests.support.checkpoints.vllm_formats import Values, draw_experts
from torch_bridge._tensors import to_jax, to_numpy, to_torch
from torch_bridge.launch._gpu import Gpu

H200 = Gpu("NVIDIA H200", 132)
_LAYERS = "vllm.model_executor.layers."
_COMPRESSED = _LAYERS + "quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_"
_SELECTIONS = {
    _LAYERS + "quantization.fp8": ["select_fp8_moe_backend"],
    _LAYERS + "quantization.modelopt": [
        "select_fp8_moe_backend",
        "select_mxfp8_moe_backend",
        "select_nvfp4_moe_backend",
    ],
    _LAYERS + "quantization.mxfp4": ["select_mxfp4_moe_backend", "select_deepseek_v4_mxfp4_moe_backend"],
    _LAYERS + "quantization.online.fp8": ["select_fp8_moe_backend"],
    _LAYERS + "quantization.online.mxfp8": ["select_mxfp8_moe_backend"],
    _LAYERS + "quantization.online.int8": ["select_int8_moe_backend"],
    _LAYERS + "quantization.auto_awq": ["select_wna16_moe_backend"],
    _LAYERS + "quantization.auto_gptq": ["select_wna16_moe_backend"],
    _LAYERS + "fused_moe.unquantized_fused_moe_method": ["select_unquantized_moe_backend"],
    _COMPRESSED + "wna16_marlin": ["select_wna16_moe_backend"],
    _COMPRESSED + "w8a8_fp8": ["select_fp8_moe_backend"],
    _COMPRESSED + "w8a8_int8": ["select_int8_moe_backend"],
    _COMPRESSED + "w8a8_mxfp8": ["select_mxfp8_moe_backend"],
    _COMPRESSED + "w4a8_fp8": ["select_w4a8_moe_backend"],
    _COMPRESSED + "w4a8_int8": ["select_w4a8_int8_moe_backend"],
    _COMPRESSED + "w4a4_nvfp4": ["select_nvfp4_moe_backend"],
}


@contextlib.contextmanager
def vllm_without_gpu(*, gpu: Any = H200, tp: tuple[int, int] = (1, 0), ep: bool = False) -> Iterator[Any]:
    """vLLM's surroundings for building layers: a config, process groups of one, no kernels of its own.

    tp: (size, rank) of a pretended group. ep: the group splits experts instead of matrices. Gives the VllmConfig.
    """
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel, parallel_state
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
    from vllm.plugins import load_general_plugins

    from torch_bridge.vllm import _method

    os.environ["VLLM_PLUGINS"] = "moe_jax"
    load_general_plugins()
    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    config.parallel_config.enable_expert_parallel = ep
    with contextlib.ExitStack() as stack:
        stack.enter_context(set_current_vllm_config(config))
        if not parallel_state.model_parallel_is_initialized():
            meeting = f"file://{tempfile.mkdtemp()}/store"  # a port might be another process'
            init_distributed_environment(1, 0, meeting, 0, "gloo")
            initialize_model_parallel(1, 1)
        for module, names in _SELECTIONS.items():
            for name in names:
                target = importlib.import_module(module)
                stack.enter_context(mock.patch.object(target, name, lambda *_, **__: (None, None)))
        for name in ("auto_awq", "auto_gptq"):
            target = importlib.import_module(f"{_LAYERS}quantization.{name}")
            stack.enter_context(mock.patch.object(target, "marlin_make_workspace_new", lambda *_: None))
        stack.enter_context(
            mock.patch.object(CompressedTensorsConfig, "_check_scheme_supported", lambda *_, **__: True)
        )
        mxfp4 = importlib.import_module(_COMPRESSED + "w4a4_mxfp4")
        stack.enter_context(mock.patch.object(mxfp4.CutlassExpertsMxfp4, "_supports_current_device", lambda: False))
        stack.enter_context(mock.patch.object(_method, "gpu_of_process", lambda: gpu))
        stack.enter_context(mock.patch.object(_method, "_prepare", _prepared_for_nothing))
        flat = staticmethod(lambda *_, **__: tp)
        stack.enter_context(mock.patch.object(FusedMoEParallelConfig, "flatten_tp_across_dp_and_pcp", flat))
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        stack.callback(torch.set_default_dtype, before)
        yield config


def _prepared_for_nothing(experts: Any, layer: Any, routes: bool) -> None:
    """Tracing takes seconds; those tests that want it call ``prepare`` themselves."""


def model_config(folder: Any, **settings: Any) -> Any:
    """vLLM's ModelConfig of a folder with a config.json, as ``vllm serve FOLDER --quantization moe_jax`` makes it."""
    from vllm.config import ModelConfig

    stated = dict(quantization="moe_jax", skip_tokenizer_init=True, dtype="bfloat16") | settings
    return ModelConfig(model=str(folder), **stated)


def make_layer(
    quantization: dict[str, Any] | str | None, *, plugin: bool = True, tp_size: int = 1, **settings: Any
) -> Any:
    """The ``RoutedExperts`` of a new FusedMoE. quantization: a checkpoint's config, the name of an online method of
    the plugin, or None. plugin: False for the method that vLLM itself takes. settings: arguments of FusedMoE."""
    from vllm.model_executor.layers.fused_moe import FusedMoE
    from vllm.model_executor.layers.quantization import get_quantization_config

    if isinstance(quantization, dict):
        config = get_quantization_config("moe_jax").from_config(quantization)
    else:
        config = get_quantization_config(quantization or "moe_jax")()
    if not plugin:
        config = config.inner
    prefix = f"model.layers.{_next_index()}.mlp.experts"
    runner = FusedMoE(quant_config=config, prefix=prefix, tp_size=tp_size, params_dtype=torch.bfloat16, **settings)
    return runner.routed_experts


@contextlib.contextmanager
def heard(caplog: Any) -> Iterator[None]:
    """vLLM's loggers do not pass their records on."""
    logger = logging.getLogger("vllm.moe_jax")
    logger.addHandler(caplog.handler)
    logger.setLevel(logging.WARNING)
    yield
    logger.removeHandler(caplog.handler)
    logger.setLevel(logging.NOTSET)


def load_experts(
    layer: Any,
    form: Any,
    generator: Any,
    num_experts: int,
    hidden: int,
    intermediate: int,
    *,
    device: str = "cpu",
    without: str | None = None,
) -> Values:
    """Draw every expert's tensors of a ``VllmFormat`` and load them as vLLM's models do. Gives their values.

    without: a regular expression of names, "2.down_proj.weight", that are not loaded.
    """
    tensors, values = draw_experts(form, generator, num_experts, hidden, intermediate)
    is_lacking = re.compile(without or "$^").search
    tensors = {name: tensor.to(device) for name, tensor in tensors.items() if not is_lacking(name)}
    if form.is_gpt_oss:
        _load_gpt_oss(layer, tensors, num_experts, intermediate)
        return values
    parameters = dict(layer.named_parameters())
    for key, tensor in tensors.items():
        expert, projection, suffix = key.split(".")
        shard = dict(gate_proj="w1", up_proj="w3", down_proj="w2")[projection]
        name = f"{'w2' if shard == 'w2' else 'w13'}_{suffix}"
        if name in parameters:
            parameter = getattr(layer, name)
            parameter.weight_loader(
                parameter, tensor, f"experts.{expert}.{name}", shard_id=shard, expert_id=int(expert)
            )
    return values


def _load_gpt_oss(layer: Any, tensors: dict[str, torch.Tensor], num_experts: int, intermediate: int) -> None:
    """By vLLM's own model, which cuts tensors of all experts by ranks itself."""
    from vllm.model_executor.models.gpt_oss import GptOssForCausalLM, GptOssModel

    parallel = layer.moe_config.moe_parallel_config
    model: Any = torch.nn.Module()
    model.experts = layer
    model.config = types.SimpleNamespace(num_local_experts=num_experts, intermediate_size=intermediate)
    model.parallel_config = types.SimpleNamespace(enable_expert_parallel=parallel.use_ep)
    count = num_experts // parallel.ep_size
    first = parallel.ep_rank * count
    named = [(f"experts.{name}", tensor) for name, tensor in tensors.items()]
    is_mxfp4 = any(name.endswith("_blocks") for name in tensors)
    load = GptOssModel._load_weights_mxfp4 if is_mxfp4 else GptOssModel._load_weights_other
    with torch.no_grad():
        load(model, first + count, first, 0, 0, GptOssForCausalLM.hf_to_vllm_mapper.apply(named), [])


def int8_rows(x: torch.Tensor) -> torch.Tensor:
    """What int8 codes with a scale for each row of x say: the row's largest magnitude is 127."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, (x / scale).round() * scale, x)


def fp8_rows(x: torch.Tensor) -> torch.Tensor:
    """What e4m3 codes with one scale for x say: its largest magnitude is 448."""
    scale = x.abs().amax().clamp(min=1e-10) / 448 if x.numel() else 1.0
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def errors_of_both_applies(
    layer: Any,
    generator: torch.Generator,
    top_k: int,
    w13: torch.Tensor,
    w2: torch.Tensor,
    *biases: torch.Tensor | None,
) -> torch.Tensor:
    """(2, T) relative errors of the rows of ``apply`` and of ``apply_monolithic`` beside ``experts_float32``."""
    x = torch.randn(5, w2.shape[1], generator=generator, dtype=torch.float32).to(torch.bfloat16)
    logits = torch.randn(5, len(w13), generator=generator, dtype=torch.float32).to(torch.bfloat16).float()
    weights, ids = torch.softmax(logits, -1).topk(top_k)
    weights = weights / weights.sum(-1, keepdim=True)
    expected = experts_float32(x, weights, ids, w13, w2, *biases)
    method = layer.quant_method
    assert method.is_monolithic
    found = (
        method.apply(layer, x, weights, ids.to(torch.int32), None, None),
        method.apply_monolithic(layer, x, logits),
    )
    return torch.stack([(y.float() - expected).norm(dim=-1) / expected.norm(dim=-1) for y in found])


def experts_float32(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    rows: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
) -> torch.Tensor:
    """Experts of x (T, H) in float32: SwiGLU, or gpt-oss' clamped one where there are biases.

    w13 to w2_bias: ``Values``. rows: what becomes of the rows before each product.
    """
    y = torch.zeros(x.shape, device=x.device, dtype=torch.float32)
    for expert in range(len(w13)):
        token, place = (ids == expert).nonzero(as_tuple=True)
        gate, up = torch.einsum("gih,th->gti", w13[expert], rows(x[token].float()))
        if w13_bias is None:
            h = torch.nn.functional.silu(gate) * up
        else:
            gate, up = (gate + w13_bias[expert, 0]).clamp(max=7.0), (up + w13_bias[expert, 1]).clamp(-7.0, 7.0)
            h = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        out = rows(h) @ w2[expert].T + (0 if w2_bias is None else w2_bias[expert])
        y.index_add_(0, token, weights[token, place][:, None].float() * out)
    return y


_count = 0


def _next_index() -> int:
    global _count
    _count += 1
    return _count


def computed_by_reference(monkeypatch: Any) -> None:
    """Calls on ``KernelExperts`` go to the reference backend, on the same weights in the kernels' layout."""
    from torch_bridge.launch._kernel_experts import KernelExperts

    monkeypatch.setattr(KernelExperts, "_run", _by_reference)


def _by_reference(experts: Any, entry: str, arguments: tuple[Any, ...]) -> torch.Tensor:
    config = dataclasses.replace(experts.config, implementation=("reference",))
    weights = plain_layout(jax.tree.map(to_jax, experts.weights))
    x, *rest = [None if argument is None else to_jax(argument.contiguous()) for argument in arguments]
    if entry == "experts":
        y = fused_experts(x, *rest, weights, config)
    else:
        logits, bias, mask = rest
        y = fused_moe(x, logits, weights, config, routing=RoutingParams(correction_bias=bias), token_mask=mask)
    return to_torch(y.astype(x.dtype))


def weights_of(experts: Any) -> tuple[Any, Any]:
    """(w13 (E, G, I, H), w2 (E, H, I)) in float32, from what the kernels read."""
    weights = plain_layout(jax.tree.map(to_jax, experts.weights))
    return tuple(to_numpy(to_torch(dequantize_tensor(tensor))) for tensor in (weights.w13, weights.w2))
