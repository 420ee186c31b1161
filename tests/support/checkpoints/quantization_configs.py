"""Configs for tests of ``quantization_config``: small whole config.json files, as dicts."""

import json

from moe_jax.loading import QuantizationConfig

EXPERT = "model.layers.1.mlp.experts.3.gate_proj"
FP8, TOKEN = {"num_bits": 8, "type": "float"}, {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
CHANNEL_GROUP = {"targets": ["Linear"], "weights": FP8 | {"strategy": "channel"}, "input_activations": TOKEN}


def config_of(groups=None, **top):
    """A whole config.json around one quantization_config."""
    stated = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]}
    stated["config_groups"] = {"group_0": CHANNEL_GROUP} if groups is None else groups
    return {"quantization_config": stated | top}


def parse(config):
    return QuantizationConfig.from_config(json.loads(json.dumps(config)))


def scheme_name(config, module=EXPERT):
    scheme = parse(config).scheme_for(module)
    return None if scheme is None else scheme.name


def native(**changes):
    """A config.json with DeepSeek's fp8 in blocks."""
    stated = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return {"quantization_config": stated | changes}


def one_group(weights, inputs=None, **extra):
    return {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs, **extra}}
