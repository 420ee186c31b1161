"""compressed-tensors as judge of a checkpoint directory: what it would quantize, and what it decompresses."""

import functools
import json
from unittest import mock

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4 import base as nvfp4
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from loguru import logger
from safetensors.torch import load_file

from tests.support.checkpoints.writers import _linear_tree

logger.disable("compressed_tensors")


def tensors_of(directory):
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        found |= load_file(path)
    return found


def decompressed(directory):
    """{module: float32 weight} of every module that is stored quantized.

    Asserts on the way that compressed-tensors, from config.json alone, quantizes exactly these modules among all
    Linears of the file, and that each has exactly the tensors that its format names.
    """
    stated = json.loads((directory / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(stated)
    ((_, scheme),) = config.config_groups.items()
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    tensors, modules = tensors_of(directory), {}
    for name, value in tensors.items():
        module, _, suffix = name.rpartition(".")
        modules.setdefault(module, {})[suffix] = value
    quantized = {m: t for m, t in modules.items() if "weight_scale" in t}
    plain = {
        f"{m}.weight": torch.zeros(1, 1)
        for m, t in modules.items()
        if m in quantized or t.get("weight", torch.zeros(1)).ndim == 2
    }
    tree, _ = _linear_tree(plain)
    apply_quantization_config(tree, config)
    assert {n for n, m in tree.named_modules() if getattr(m, "quantization_scheme", None)} == set(quantized)
    expected = set(compressor.compression_param_names(scheme))
    in_float32 = functools.partial(nvfp4.unpack_fp4_from_uint8, dtype=torch.float32)
    result = {}
    with mock.patch.object(nvfp4, "unpack_fp4_from_uint8", in_float32):
        for module, own in quantized.items():
            own.pop("bias", None)
            of_inputs = {"input_scale", "input_global_scale"}
            assert set(own) - of_inputs == expected - of_inputs, module
            result[module] = compressor.decompress(_in_float32(own), scheme)["weight"].float().numpy()
    return result


def _in_float32(tensors):
    """Scales of 16 bits widened, so that the product is not rounded to their dtype."""
    return {k: v.float() if v.dtype in (torch.bfloat16, torch.float16) else v for k, v in tensors.items()}
