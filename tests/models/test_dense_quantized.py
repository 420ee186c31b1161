"""Dense layers that stay quantized: bytes as in the file, over meshes, through reloads and Orbax, and what says so."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import moe_jax
from moe_jax import checkpointing
from moe_jax.inspection import inspect_checkpoint
from moe_jax.loading import Checkpoint, CheckpointError
from moe_jax.models import load_pretrained
from moe_jax.models._layers import Linear
from moe_jax.nn import QuantizedParam
from moe_jax.quantization import QuantizedMatrix
from tests.models.test_partition import mesh_of
from tests.support.cases.models import (
    VOCAB,
    assert_logits_close,
    real_weight,
    without_quantized_inputs,
    write_checkpoint,
)
from tests.support.refusals import refuses

IDS = np.random.default_rng(0).integers(0, VOCAB, (2, 20)).astype(np.int32)
WIDE = dict(intermediate_size=64)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """written(case, scheme): a checkpoint whose matrices outside routers, head and embeddings all have the scheme."""
    root = tmp_path_factory.mktemp("dense")

    def get(name, scheme, **options):
        source, target = root / name, root / f"{name}-{scheme}"
        if not source.exists():
            write_checkpoint(name, source, **options)
        if not target.exists():
            moe_jax.quantize_checkpoint(source, target, scheme=scheme, modules="all")
        return target

    return get


def bytes_on_disk(directory):
    with Checkpoint(directory) as opened:
        return {name: opened.info(name).nbytes for name in opened.names}


def matrices(model):
    return {name: m for name, m in model.dense_modules().items() if isinstance(m.weight.get_value(), QuantizedMatrix)}


# Scales are float32 in these files and once loaded; 16-bit ones are held as float32 in layout "plain".
@pytest.mark.parametrize(
    "scheme", ["fp8_block", "w4a16_g32", "nvfp4_a16", "mxfp4_a16", "int8_w8a8", "w4a16_g32_asym", "mxfp8", "fp8_tensor"]
)
@pytest.mark.sample(4)
def test_memory_is_that_of_the_file(written, scheme):
    """Each quantized module has the bytes of its tensors; nothing else of the model is larger than on disk."""
    directory = written("qwen2", scheme, **WIDE)
    sizes, model = bytes_on_disk(directory), load_pretrained(directory, dtype=jnp.float32)
    found = matrices(model)
    assert {name.split(".")[-1] for name in found} == {f"{p}_proj" for p in ("q", "k", "v", "o", "gate", "up", "down")}
    for name, module in found.items():
        own = {k: v for k, v in sizes.items() if k.startswith(f"{name}.") and not k.endswith(("_shape", ".bias"))}
        held = jax.tree.leaves(module.weight.get_value())
        assert len(own) >= 2 and sum(leaf.nbytes for leaf in held) == sum(own.values()), name
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(checkpointing._state_of(model)))
    shapes = sum(size for name, size in sizes.items() if name.endswith("_shape"))
    assert whole - 4 * len(model.moe_blocks()) == sum(sizes.values()) - shapes  # each layer counts its version


@pytest.mark.parametrize("scheme", ["fp8_channel", "w4a16_g32_asym"])
@pytest.mark.sample(2)
def test_latent_attention_keeps_all_but_kv_b_proj(written, scheme):
    """Absorbing takes kv_b_proj apart: it is dequantized once, and report and model say so."""
    directory = written("deepseek_v2_lite", scheme, intermediate_size=64, kv_lora_rank=32)
    model, report = load_pretrained(directory, dtype=jnp.float32), inspect_checkpoint(directory)
    stored = {name.rpartition(".")[0] for name in bytes_on_disk(directory) if name.endswith(".weight_scale")}
    dense = {name for name in stored if ".experts." not in name}
    plain = {name for name in dense if name.endswith("kv_b_proj")}
    assert plain and matrices(model).keys() == dense - plain
    assert {(run.scheme, run.held, sum(run.counts.values())) for run in report.dense_runs} == {
        (scheme, scheme, len(dense - plain)),
        (scheme, None, len(plain)),
    }
    text = report.render()
    assert f"dense matrices in {scheme}, stay quantized, multiplied as {scheme}: " in text
    assert f"dense matrices in {scheme}, dequantized when loaded: {len(plain)} of attention" in text


MESHES = (("expert=2,tensor=2", "Explicit"), ("expert=2,tensor=4", "Auto"), ("data=2,expert=2,tensor=2", "Explicit"))


@pytest.mark.parametrize("layout", MESHES, ids=str)
@pytest.mark.parametrize("name, scheme", [("qwen3_dense_bias", "w4a16_g32"), ("qwen3_dense_bias", "fp8_channel"),
                                          ("deepseek_v2_lite", "w4a16_g32_asym")])  # fmt: skip
@pytest.mark.sample(5)
def test_over_a_mesh(written, name, scheme, layout):
    """The answers of one device, shares of every matrix, and the same again after a reload."""
    options = dict(intermediate_size=64) | (dict(kv_lora_rank=32) if "deepseek" in name else {})
    directory = written(name, scheme, **options)
    weights_only = "fp8_channel_a16" if scheme == "fp8_channel" else None
    load = dict(dtype=jnp.float32, quantize=weights_only)
    alone, spread = load_pretrained(directory, **load), load_pretrained(directory, mesh=mesh_of(*layout), **load)
    expected = np.asarray(alone.score(IDS))
    assert_logits_close(spread.score(IDS), expected)
    whole, parts = matrices(alone), matrices(spread)
    assert whole.keys() == parts.keys()
    for module in whole:
        np.testing.assert_array_equal(real_weight(parts[module]), real_weight(whole[module]))
    data = spread.layers[0].self_attn.o_proj.weight.get_value().tensor.data
    assert data.sharding.spec == jax.sharding.PartitionSpec(None, None, "tensor")
    made = [moe_jax.generate(m, IDS, max_new_tokens=3).tolist() for m in (spread, alone)]
    assert made[0] == made[1]
    spread.reload_weights(directory)
    assert_logits_close(spread.score(IDS), expected)


def test_a_reload_is_in_place_and_compiles_nothing(written):
    directory = written("qwen2", "w4a16_g32", **WIDE)
    model = load_pretrained(directory, dtype=jnp.float32)
    run = jax.jit(lambda model, ids: model(ids))
    before = np.asarray(run(model, IDS))
    q_proj = model.layers[0].self_attn.q_proj
    held = q_proj.weight.get_value()
    q_proj.weight.set_value(jax.tree.map(lambda leaf: leaf * 0, held))
    assert not np.array_equal(run(model, IDS), before)
    model.reload_weights(directory)
    np.testing.assert_array_equal(run(model, IDS), before)
    assert run._cache_size() == 1 and q_proj is model.layers[0].self_attn.q_proj


def test_another_form_of_the_file_is_refused(written):
    model = load_pretrained(written("qwen2", "fp8_channel", **WIDE), dtype=jnp.float32)
    other = load_file(written("qwen2", "int8_w8a8", **WIDE) / "model.safetensors")
    before = np.asarray(model.score(IDS))
    refuses(CheckpointError, "fp8_channel|e4m3|float8", model.reload_weights, other.items())
    np.testing.assert_array_equal(model.score(IDS), before)


def test_quantize_changes_activations_of_layers_stored_alike(written):
    """As of experts; another format of weights is refused as before."""
    directory = written("qwen2", "fp8_channel", **WIDE)
    as_said = load_pretrained(directory, dtype=jnp.float32)
    wide = load_pretrained(directory, dtype=jnp.float32, quantize="fp8_channel_a16")
    schemes = [{m.weight.get_value().scheme.name for m in matrices(model).values()} for model in (as_said, wide)]
    assert schemes == [{"fp8_channel"}, {"fp8_channel_a16"}]
    error = np.abs(as_said.score(IDS) - wide.score(IDS)).max()
    assert 1e-4 < error / np.ptp(wide.score(IDS)) < 0.1
    blocks = without_quantized_inputs(as_said), wide
    q_proj = [model.layers[0].self_attn.q_proj(jnp.ones((1, 3, 64))) for model in blocks]
    np.testing.assert_array_equal(*q_proj)


# -- Orbax ------------------------------------------------------------------------------------------------------------


def test_orbax_keeps_quantized_matrices(written, tmp_path):
    directory = written("qwen2", "w4a16_g32_asym", **WIDE)
    model, other = (load_pretrained(directory, dtype=jnp.float32) for _ in range(2))
    expected = np.asarray(model.score(IDS))
    checkpointing.save(model, tmp_path / "saved")
    for module in matrices(other).values():
        module.weight.set_value(jax.tree.map(lambda leaf: leaf * 0, module.weight.get_value()))
    checkpointing.restore(other, tmp_path / "saved")
    np.testing.assert_array_equal(other.score(IDS), expected)
    for module in matrices(other).values():
        held = module.weight.get_value()
        scheme = dataclasses.replace(held.scheme, weights=dataclasses.replace(held.scheme.weights, symmetric=True))
        module.weight.set_value(QuantizedMatrix(held.tensor, scheme))
    refuses(ValueError, "saved from another module.*symmetric", checkpointing.restore, other, tmp_path / "saved")


def test_orbax_refuses_dequantized_matrices_for_quantized_ones(written, tmp_path):
    directory = written("qwen2", "fp8_channel", **WIDE)
    model, other = (load_pretrained(directory, dtype=jnp.float32) for _ in range(2))
    for module in matrices(other).values():
        module.weight.set_value(jnp.asarray(real_weight(module)))
    checkpointing.save(other, tmp_path / "saved")
    refuses(ValueError, "saved from another module.*proj.*expected", checkpointing.restore, model, tmp_path / "saved")


# -- what is quantized ------------------------------------------------------------------------------------------------


def test_every_linear_that_the_file_quantizes(written):
    """No matrix is dequantized by the way; embeddings, head, norms and routers of this file are in full precision."""
    model = load_pretrained(written("qwen2", "int8_w8a8", **WIDE))
    stored = bytes_on_disk(written("qwen2", "int8_w8a8"))
    for name, module in model.dense_modules().items():
        is_quantized = isinstance(getattr(module, "weight", None), QuantizedParam)
        assert is_quantized == (f"{name}.weight_scale" in stored), name
        assert isinstance(module, Linear) or not is_quantized
