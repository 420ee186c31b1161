"""Models of transformers on our experts: ``convert`` a block, ``patch`` a whole model, states to and from nnx layers.

transformers keeps the experts of a block in one module, ``experts(hidden_states, top_k_index, top_k_weights)``, beside
the router and whatever else the block has. That module is what is replaced; the router stays the model's own.
"""

import dataclasses
import inspect
import os
from collections.abc import Mapping
from typing import Any

import torch

import moe_jax
from moe_jax import MoEConfig
from moe_jax.experts._choice import plain_layout
from moe_jax.quantization import Scheme, SchemeLike
from torch_bridge._experts_modules import check_experts, is_experts_module, layer_of
from torch_bridge._layer import FusedMoE
from torch_bridge._patched import PatchedExperts, refuse_saving
from torch_bridge._tensors import to_jax, to_torch, torch_dtype
from torch_bridge._vllm import convert_vllm, is_vllm_style

# Class of the experts -> class of routing; what differs between the families beyond the shapes.
_FAMILIES = {
    "MixtralExperts": "mixtral",
    "Qwen3MoeExperts": "qwen3_moe",
    "DeepseekV3Experts": "deepseek_v3",
    "GptOssExperts": "gpt_oss",
}
_TOP_K = ("num_experts_per_tok", "moe_topk", "top_k_experts")  # of configs whose router does not say top_k
_TENSOR_FILES = (".bin", ".pt", ".pth")


def convert(
    block: torch.nn.Module,
    *,
    quantize: SchemeLike = None,
    quant_config: Any = None,
    prefix: str = "",
    implementation: Any = None,
    torch_kernels: bool | None = None,
    process_group: Any = None,
) -> FusedMoE:
    """A processed ``FusedMoE`` with experts and routing of a MoE block of transformers, or of a layer of vLLM's kind.

    Args:
        block: of Mixtral, Qwen3-MoE, DeepSeek-V3 or gpt-oss, with its weights; or a layer that keeps them in parameters
            of vLLM's names (``w13_weight``, ``w2_weight_scale``, ...), of one rank too: vLLM's runner with all that it
            does around its experts, or ``RoutedExperts`` alone. It is left as it is.
        quantize: what to quantize the experts of transformers to; None keeps them.
        quant_config: what the parameters of a layer of vLLM's kind are; None asks its ``quant_method``.
        implementation, torch_kernels: as in ``FusedMoE``.
        process_group: the ranks that share a layer of vLLM's kind; None takes vLLM's tensor-parallel group.

    Returns:
        ``layer(x, router_logits)``. Of a block of transformers it is the routed part: router, shared experts and their
        weights stay the block's. Of a runner it is all that the runner returns, with its own modules.

    Raises NotImplementedError for another block, by its class, and for parameters of bitsandbytes or GGUF; ValueError
    for an activation that is not known, or parameters that are not of the scheme.
    """
    if is_vllm_style(block):
        if quantize is not None:
            raise ValueError(f"quantize={quantize!r}: {type(block).__name__} keeps its parameters; pass quant_config=")
        options = dict(prefix=prefix, implementation=implementation, torch_kernels=torch_kernels)
        return convert_vllm(block, quant_config, process_group=process_group, **options)
    if process_group is not None:
        raise ValueError(f"process_group is for a layer of vLLM's kind, {type(block).__name__} is whole on every rank")
    experts: Any = getattr(block, "experts", None)
    family = _FAMILIES.get(type(experts).__name__)
    if family is None or experts is None:
        raise NotImplementedError(
            f"{type(block).__name__} with experts {type(experts).__name__} is not supported; supported experts: "
            f"{', '.join(_FAMILIES)}"
        )
    router: Any = block.router if family == "gpt_oss" else block.gate
    options: dict[str, Any] = dict(quantize=quantize, implementation=implementation, torch_kernels=torch_kernels)
    return layer_of(experts, router.top_k, prefix=prefix, **options, **_routing(family, router))


def patch(
    model: torch.nn.Module,
    *,
    quantize: SchemeLike = None,
    implementation: Any = None,
    torch_kernels: bool | None = None,
) -> list[str]:
    """Replace the experts of every MoE block of a transformers model, in place; ``generate()`` goes on working.

    A block's own experts are let go as soon as they are replaced, so that one layer exists twice at a time. Every class
    that transformers runs by its table of experts implementations is taken, whatever its family.

    State dicts of unquantized experts keep transformers' names, so that ``save_pretrained`` writes a checkpoint that
    reads back; with ``quantize`` it refuses. implementation, torch_kernels: as in ``FusedMoE``.

    Returns:
        The names of the modules that were replaced.

    Raises ValueError when the model has no such block, NotImplementedError for experts of another kind or with an
    activation that is not known; the model is unchanged then.
    """
    blocks: dict[str, Any] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "experts", None), torch.nn.Module) and not isinstance(module, PatchedExperts)
    }
    blocks = {name: block for name, block in blocks.items() if not isinstance(block.experts, PatchedExperts)}
    unknown = sorted({type(b.experts).__name__ for b in blocks.values() if not is_experts_module(b.experts)})
    if unknown:
        raise NotImplementedError(
            f"experts {', '.join(unknown)} are not supported; supported are those that transformers runs by its table "
            "of experts implementations"
        )
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no block with experts to replace")
    Scheme.parse(quantize)
    counts = {name: _top_k(name, block, block.experts) for name, block in blocks.items()}
    for block in blocks.values():
        check_experts(block.experts)
    options: dict[str, Any] = dict(quantize=quantize, implementation=implementation, torch_kernels=torch_kernels)
    for name, block in blocks.items():
        layer = layer_of(block.experts, counts[name], **options)
        block.experts = PatchedExperts(layer, block.experts)
    if Scheme.parse(quantize).is_quantized:
        refuse_saving(model, Scheme.parse(quantize).name)
    return [f"{name}.experts" for name in blocks]


def to_nnx(layer: FusedMoE) -> moe_jax.FusedMoE:
    """The whole layer as a ``moe_jax.FusedMoE`` over the same weights.

    Raises ValueError for a rank's part of a layer.
    """
    if not layer.rank.is_whole:
        raise ValueError(
            f"{layer.layer_name} is one part of {layer.tp_size * layer.ep_size}; only a whole layer converts"
        )
    if layer.eplb_state is not None:
        raise NotImplementedError(f"{layer.layer_name} has copies of experts (enable_eplb), which do not convert")
    if layer.torch_routing is not None:
        raise NotImplementedError(f"{layer.layer_name} has a custom_routing_function of torch, which JAX cannot run")
    bias = layer.correction_bias
    table = layer.routing_params.hash_indices_table
    config = layer.config
    fields = _arguments(moe_jax.FusedMoE, config)
    sizes = [fields.pop(name) for name in ("num_experts", "hidden_size", "intermediate_size")]
    built = moe_jax.FusedMoE(
        *sizes, e_score_correction_bias=None if bias is None else to_jax(bias), hash_indices_table=table, **fields
    )
    built.set_weights(layer.expert_weights)
    return built


def from_nnx(layer: moe_jax.FusedMoE, *, prefix: str = "", **options: Any) -> FusedMoE:
    """A bridge layer over the weights of a processed ``moe_jax.FusedMoE``. options: more arguments of ``FusedMoE``.

    Both layers have one memory: what is written into a parameter or the correction bias of the new one
    (``layer.w2_weight.data``) changes the other. A reload of one leaves the other alone, unless a CUDA graph holds it.

    Raises NotImplementedError for a layer with JAX modules inside (router, shared experts, transforms), which torch
    cannot run; give their torch counterparts to ``FusedMoE`` yourself.
    """
    inside = ("router", "shared_experts", "shared_expert_gate", "routed_input_transform", "routed_output_transform")
    owned = [name for name in inside if getattr(layer, name) is not None]
    if owned or layer.hash_table is not None or layer.per_expert_scale is not None:
        raise NotImplementedError(f"{layer!r} has {', '.join(owned) or 'arrays of its router'}, which stay in JAX")
    fields, dtype = _arguments(FusedMoE, layer.config), layer.config.dtype
    if layer.config.param_dtype != dtype:
        raise NotImplementedError(f"{layer!r} keeps parameters in another dtype than it computes in")
    if fields["router_logits_dtype"] is not None:
        fields["router_logits_dtype"] = torch_dtype(fields["router_logits_dtype"])
    bias = layer.correction_bias
    built = FusedMoE(
        params_dtype=torch_dtype(dtype),
        quant_config=layer.config.scheme,
        prefix=prefix,
        routing_framework="jax",
        e_score_correction_bias=None if bias is None else to_torch(bias.get_value()),
        **(fields | options),
    )
    weights = layer.weights.get_value()
    built.install(plain_layout(weights))
    return built


def load_tensors(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """The tensors of a torch file (.bin, .pt, .pth) or a safetensors file by name, ready for ``load_weights``.

    torch files are read with ``weights_only=True``: tensors and plain containers, nothing that runs code.
    Raises ValueError for another kind of file, or one that holds more than named tensors; NotImplementedError for GGUF.
    """
    name = os.fspath(path)
    if name.endswith(".safetensors"):
        from safetensors.torch import load_file

        return load_file(name)
    if name.endswith(".gguf"):
        raise NotImplementedError(
            f"{name}: GGUF files are not supported; read the safetensors repository that it was made from, or convert "
            "it once: transformers.AutoModelForCausalLM.from_pretrained(DIR, gguf_file=NAME).save_pretrained(NEW_DIR)"
        )
    if not name.endswith(_TENSOR_FILES):
        raise ValueError(f"{name}: expected a file ending in .safetensors, {', '.join(_TENSOR_FILES)}")
    try:
        loaded = torch.load(name, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # what is no pickle of tensors fails in many ways
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{name}: not a file of tensors that weights_only loading accepts: {first}") from None
    if not isinstance(loaded, Mapping) or not all(isinstance(tensor, torch.Tensor) for tensor in loaded.values()):
        raise ValueError(f"{name}: expected named tensors, found {type(loaded).__name__} with other contents")
    return dict(loaded)


def _arguments(built: type, config: MoEConfig) -> dict[str, Any]:
    """The constructor's arguments that a layer's configuration states, by name."""
    stated = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: stated[name] for name in inspect.signature(built.__init__).parameters if name in stated}


def _routing(family: str, router: Any) -> dict[str, Any]:
    """The arguments of ``FusedMoE`` that say how a family routes."""
    if family == "qwen3_moe":
        return dict(renormalize=bool(router.norm_topk_prob))
    if family != "deepseek_v3":
        return {}
    has_groups = router.num_group > 1
    return dict(
        renormalize=bool(router.norm_topk_prob),
        scoring_func="sigmoid",
        use_grouped_topk=has_groups,
        num_expert_group=router.num_group if has_groups else None,
        topk_group=router.topk_group if has_groups else None,
        routed_scaling_factor=float(router.routed_scaling_factor),
        e_score_correction_bias=router.e_score_correction_bias,
    )


def _top_k(name: str, block: torch.nn.Module, experts: Any) -> int:
    found = [getattr(module, "top_k", None) for module in block.modules()]
    found += [getattr(experts.config, key, None) for key in _TOP_K]
    counts = [count for count in found if isinstance(count, int)]
    if not counts:
        raise NotImplementedError(f"{name}: neither its router nor its config says how many experts a token has")
    return counts[0]
