"""Checkpoints that llm-compressor wrote: tests/data, or with ``--writers-dir`` the ones `make test-writers` just wrote.

``expected.npz`` beside each (tests/data/writers/write.py) says what compressed-tensors and transformers make of it.
"""

import functools
import hashlib
import json
import re
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import moe_jax
from moe_jax import MoEConfig
from moe_jax.loading import Checkpoint, ExpertReader
from tests.support.checkpoints.expert_tensors import matrices_of
from tests.support.oracles.compressed_tensors import decompressed
from tests.support.oracles.emulated_models import assert_logits_with_quantized_activations, fake_quantized

NAMES = [
    f"{family}-{scheme}"
    for family in ("qwen3_moe", "mixtral")
    for scheme in ("fp8", "fp8_dynamic", "fp8_block", "w8a8")
]
SCHEMES = {
    "fp8": "fp8_tensor_static",
    "fp8_dynamic": "fp8_channel",
    "fp8_block": "fp8_block",
    "w8a8": "int8_w8a8",
}
BLOCK = {"qwen3_moe": "mlp", "mixtral": "block_sparse_moe"}
MIXTRAL = {"gate": "w1", "down": "w2", "up": "w3"}


@pytest.fixture(scope="module")
def data(request):
    directory = Path(request.config.getoption("--writers-dir"))
    return lambda name: directory / name


@pytest.fixture(scope="module")
def expected(data):
    return lambda name: dict(np.load(data(name) / "expected.npz"))


def family_and_scheme(name):
    for family in BLOCK:
        if name.startswith(family):
            return family, SCHEMES[name.removeprefix(f"{family}-")]
    raise ValueError(name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sample(2)
def test_expert_weights_are_bit_identical(data, expected, name):
    """Every expert matrix of every layer, dequantized in float32, against the hash of compressed_tensors' own."""
    family, scheme = family_and_scheme(name)
    hashes = {k: v for k, v in expected(name).items() if ".experts." in k}
    seen = 0
    with Checkpoint(data(name)) as checkpoint:
        reader = ExpertReader(checkpoint)
        for layer in reader.layers:
            stored = reader.stored_scheme(layer)
            assert stored.name == scheme
            num_experts = checkpoint.config["num_local_experts"]
            weights = reader.load(layer, MoEConfig(num_experts, 2, 144, 136, scheme=stored))
            for (expert, projection), value in matrices_of(weights).items():
                key = f"sha256:model.layers.{layer}.{BLOCK[family]}.experts.{expert}.{projection}"
                assert hashlib.sha256(np.ascontiguousarray(value, "<f4")).hexdigest() == hashes[key], key
                seen += 1
    assert seen == len(hashes)


def logits_of(directory, ids):
    model = moe_jax.load_pretrained(directory, dtype=jnp.float32)
    return np.asarray(model(jnp.asarray(ids)[None]))[0]


def without_activation_quantization(source, target):
    """The same weights with a config that leaves activations alone."""
    target.mkdir()
    tensors = load_file(source / "model.safetensors")
    kept = {name: value for name, value in tensors.items() if not name.endswith("input_scale")}
    save_file(kept, target / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    for group in config["quantization_config"]["config_groups"].values():
        group["input_activations"] = None
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sample(8)
def test_logits_of_the_weights_alone(data, expected, tmp_path, name):
    judge = expected(name)
    plain = logits_of(without_activation_quantization(data(name), tmp_path / name), judge["input_ids"])
    assert np.abs(plain - judge["logits"]).max() <= 2e-3 * np.ptp(judge["logits"])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sample(8)
def test_logits_as_written(data, tmp_path, name):
    """Activations quantized too, of experts and of attention, beside compressed-tensors' fake_quantize of each."""
    family, scheme = family_and_scheme(name)
    checkpoint = shutil.copytree(data(name), tmp_path / name)
    write_decompressed(checkpoint)
    scales = ("input_scale", max) if scheme == "fp8_tensor_static" else None
    fake = functools.partial(fake_quantized, scheme)
    assert_logits_with_quantized_activations(tmp_path, checkpoint, fake, family, scales)


def write_decompressed(checkpoint):
    """Beside the checkpoint, what compressed-tensors makes of its weights, under the names that transformers reads."""
    target = checkpoint.with_name(f"{checkpoint.name}-decompressed")
    target.mkdir()
    config = json.loads((checkpoint / "config.json").read_text())
    del config["quantization_config"]
    weights = {f"{module}.weight": torch.tensor(value) for module, value in decompressed(checkpoint).items()}
    tensors = load_file(checkpoint / "model.safetensors")
    plain = {name: value.float() for name, value in tensors.items() if not name.endswith("_scale")} | weights
    if config["model_type"] == "mixtral":
        plain = {re.sub(r"(?<=\d\.)(gate|down|up)_proj", lambda m: MIXTRAL[m[1]], n): v for n, v in plain.items()}
    save_file(plain, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
