# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""vLLM's method for int4 weights with int8 activations, whose constructor wants a CPU to run it."""

from typing import Any


def int4_method(config: Any, layer: Any, prefix: str) -> Any:
    """The method of an expert layer, made without vLLM's choice of a kernel; None for a checkpoint of another kind.

    On GPUs vLLM refuses to make it for channels. For groups it makes the method of FP8 activations in its place, which
    has no parameter for weights in bytes.
    """
    if config is None or config.get_name() != "compressed-tensors":
        return None
    from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w4a8_int8 as module,
    )

    config._add_fused_moe_to_target_scheme_map()
    schemes = [config.get_scheme_dict(layer, f"{prefix}.0.{projection}_proj") for projection in ("gate", "up", "down")]
    scheme = schemes[0]
    if scheme is None or scheme != schemes[1] or scheme != schemes[2]:
        return None
    weights, inputs = scheme.get("weights"), scheme.get("input_activations")
    kinds = [None if one is None else (one.num_bits, getattr(one.type, "value", one.type)) for one in (weights, inputs)]
    stored_as = str(getattr(scheme.get("format"), "value", scheme.get("format")))
    if stored_as != "int-quantized" or kinds != [(4, "int"), (8, "int")]:
        return None
    if not config._is_dynamic_token_w4a8_int(weights, inputs):
        return None
    method: Any = object.__new__(module.CompressedTensorsW4A8Int8MoEMethod)
    FusedMoEMethodBase.__init__(method, layer.moe_config)
    method.weight_quant, method.input_quant = weights, inputs
    method.group_size = -1 if weights.group_size is None else weights.group_size
    method.has_bias, method.static_input_scales = layer.moe_config.has_bias, False
    method.backend = method.experts_cls = None
    return method
