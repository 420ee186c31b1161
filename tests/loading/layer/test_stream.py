"""Layers out of files that the real tools wrote, bit for bit what the file holds, within one layer's memory."""

import json

import jax
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from moe_jax import MoEConfig, Scheme
from moe_jax.loading import (
    Checkpoint,
    CheckpointError,
    ExpertReader,
    load_layer,
    save_safetensors,
    stream_layers,
)
from moe_jax.quantization import method_for
from tests.support.checkpoints.expert_tensors import BF16, E, H, assert_same, config, write_checkpoint
from tests.support.refusals import refuses

SPELLING = {"qwen3_moe": ("gate_proj", "up_proj", "down_proj"), "mixtral": ("w1", "w3", "w2")}


def layer_config(directory, scheme="bf16", **changes):
    raw = json.loads((directory / "config.json").read_text())
    return MoEConfig(
        num_experts=raw.get("num_local_experts") or raw["num_experts"],
        top_k=raw["num_experts_per_tok"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw.get("moe_intermediate_size") or raw["intermediate_size"],
        scheme=Scheme.parse(scheme),
        **changes,
    )


def stored(directory, family, layer):
    """(expert, "w1" | "w3" | "w2", suffix) -> torch tensor, read by the safetensors package."""
    words = dict(zip(SPELLING[family], ("w1", "w3", "w2"), strict=True))
    result = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        head, _, tail = name.partition(".experts.")
        if tail and f".{layer}." in head:
            expert, projection, suffix = tail.split(".")
            result[int(expert), words[projection], suffix.removesuffix("_inv")] = tensor
    return result


def bits(x):
    """Bytes of a torch tensor or an array, and its number of elements."""
    if isinstance(x, torch.Tensor):
        x = x.contiguous().view(torch.uint8) if x.ndim else x.reshape(1).view(torch.uint8)
    return np.asarray(x).tobytes()


def assert_holds(weights, tensors, num_experts):
    """Each expert's weights are bit for bit the file's; scales are the file's in float32."""
    halves = {"w1": 0, "w3": 1}
    for expert in range(num_experts):
        for shard in ("w1", "w3", "w2"):
            product = weights.w2 if shard == "w2" else weights.w13
            index = (expert,) if shard == "w2" else (expert, halves[shard])
            weight = tensors[expert, shard, "weight"]
            assert tuple(weight.shape) == product.data[index].shape
            assert bits(product.data[index]) == bits(weight), (expert, shard)
            if (expert, shard, "weight_scale") in tensors:
                scale = tensors[expert, shard, "weight_scale"].float()
                assert bits(product.scale[index]) == bits(scale), (expert, shard)
    for product, shards in ((weights.w13, ("w1", "w3")), (weights.w2, ("w2",))):
        scales = [t.item() for (_, shard, suffix), t in tensors.items() if suffix == "input_scale" and shard in shards]
        assert (product.input_scale is not None) == bool(scales)
        if scales:
            assert float(product.input_scale) == max(scales)


FILES = ["bf16", "fp8_tensor_static", "fp8_channel", "fp8_block", "native", "int8_w8a8"]


@pytest.mark.parametrize("family", SPELLING)
@pytest.mark.parametrize("kind", FILES)
@pytest.mark.sample(3)
def test_bit_identical_to_the_file(written, family, kind):
    """Both families, in each format that transformers and compressed-tensors write; the blocks are ragged."""
    directory = written(family, kind)
    layer = layer_config(directory, "fp8_block" if kind == "native" else kind)
    with Checkpoint(directory) as checkpoint:
        layers = dict(stream_layers(checkpoint, layer))
        assert sorted(layers) == [0, 1]
        assert_same(layers[1], load_layer(checkpoint, 1, layer))
        assert_same(layers[1], load_layer(checkpoint, "model.layers.1.mlp", layer))
    for index, weights in layers.items():
        assert weights.scheme == layer.scheme
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(weights))
        assert_holds(weights, stored(directory, family, index), layer.num_experts)


@pytest.mark.parametrize("family", SPELLING)
def test_fused_file_is_the_same_layer(written, family):
    layer = layer_config(written(family, "bf16"))
    with Checkpoint(written(family, "fused")) as fused_file:
        for index, weights in stream_layers(fused_file, layer):
            assert_holds(weights, stored(written(family, "bf16"), family, index), layer.num_experts)


@pytest.mark.parametrize(
    "family, kind, scheme",
    [
        ("qwen3_moe", "bf16", "fp8_block"),
        ("mixtral", "fused", "fp8_block"),
        ("mixtral", "bf16", "int8_w8a16"),
        ("qwen3_moe", "fused", "int8_w8a16"),
    ],
)
@pytest.mark.sample(2)
def test_online_quantization(written, family, kind, scheme):
    """Quantizing while loading gives, expert by expert, what the method makes of the whole layer."""
    directory = written(family, kind)
    layer, plain = layer_config(directory, scheme), layer_config(directory)
    with Checkpoint(directory) as checkpoint:
        reader = ExpertReader(checkpoint)
        full = reader.load(0, plain)
        one_layer = full.nbytes()
        assert reader.peak_staged_bytes == one_layer
        reader = ExpertReader(checkpoint)
        weights = reader.load(0, layer)
        assert_same(weights, reader.load(0, plain, scheme))
    method = method_for(scheme)
    whole = method.process_weights_after_loading(
        method.quantize_leaves(full.w13.data, full.w2.data, None, layer), layer
    )
    assert_same(weights, jax.tree.map(jax.numpy.asarray, whole))
    # One expert at a time where the file has one expert at a time; never more than the layer.
    bound = one_layer // layer.num_experts if kind == "bf16" else one_layer
    assert reader.peak_staged_bytes <= bound


def test_scheme_must_fit_the_file(written):
    with Checkpoint(written("mixtral", "fp8_channel")) as checkpoint:
        reader = ExpertReader(checkpoint)
        assert reader.stored_scheme(0) == Scheme.parse("fp8_channel")
        layer = layer_config(checkpoint.directory)
        for scheme in ("bf16", "int8_w8a8", "fp8_block"):
            with pytest.raises(ValueError, match=f"layer 0 is stored as fp8_channel and cannot be loaded as {scheme}"):
                reader.load(0, layer, scheme)
        weight_only = reader.load(0, layer, "fp8_channel_a16")  # the same tensors, activations left alone
        assert_same(weight_only.w13, reader.load(0, layer, "fp8_channel").w13)
    with Checkpoint(written("mixtral", "bf16")) as checkpoint:
        assert ExpertReader(checkpoint).stored_scheme(1) is None
        with pytest.raises(ValueError, match="needs input scales, which a full-precision checkpoint does not have"):
            load_layer(checkpoint, 0, layer, "fp8_tensor_static")


def rewritten(source, target, change):
    """A copy of a checkpoint with ``change(tensors)`` applied."""
    with Checkpoint(source) as checkpoint:
        tensors = {name: np.array(checkpoint.read(name)) for name in checkpoint.names}
    change(tensors)
    write_checkpoint(target, checkpoint.config, tensors)
    return target


def test_errors_name_file_and_tensor(written, tmp_path):
    source = written("qwen3_moe", "fp8_channel")
    layer = layer_config(source, "fp8_channel")
    weight, scale = (f"model.layers.1.mlp.experts.2.up_proj.{suffix}" for suffix in ("weight", "weight_scale"))

    def refused(name, change):
        directory = rewritten(source, tmp_path / name, change)
        with Checkpoint(directory) as checkpoint, pytest.raises(CheckpointError) as caught:
            load_layer(checkpoint, 1, layer)
        message = str(caught.value)
        assert "\n" not in message and str(directory) in message
        return message

    def nan(tensors):
        tensors[scale][3] = np.nan

    assert "up_proj.weight of expert 2" in refused("missing", lambda t: t.pop(weight))
    assert "w13_weight_scale: expert 2 (w3) has scale nan" in refused("nan", nan)
    extra = weight.replace("weight", "weight_zero_point")
    assert extra in refused("left_over", lambda t: t.update({extra: np.zeros(3, np.int8)}))
    beyond = weight.replace("experts.2", "experts.6")
    assert f"unexpected: {beyond}" in refused("beyond", lambda t: t.update({beyond: t[weight]}))
    unknown = weight.replace("up_proj", "u_proj")
    assert unknown in refused("unknown", lambda t: t.update({unknown: t[weight]}))
    twice = weight.replace("up_proj", "w3")
    message = refused("twice", lambda t: t.update({twice: t[weight], f"{twice}_scale": t[scale]}))
    assert "duplicate: " in message and twice in message
    assert refused("shape", lambda t: t.update({weight: t[weight].T.copy()}))


def test_expert_without_layer(tmp_path, written):
    target = rewritten(
        written("mixtral", "bf16"), tmp_path / "a", lambda t: t.update({"experts.0.w1.weight": np.zeros((2, 2), BF16)})
    )
    with (
        Checkpoint(target) as checkpoint,
        pytest.raises(CheckpointError, match="an expert tensor whose name carries no layer"),
    ):
        ExpertReader(checkpoint)
    with pytest.raises(ValueError, match="layer='model.mlp': expected an index or a name that carries one"):
        load_layer(checkpoint, "model.mlp", config())


def test_one_scheme_for_a_layer(written, tmp_path):
    """Experts that config.json leaves out make a layer of two schemes."""
    source = written("mixtral", "fp8_channel")
    module = "model.layers.0.block_sparse_moe.experts.1.w1"

    def plain_expert(tensors):
        del tensors[f"{module}.weight_scale"]
        tensors[f"{module}.weight"] = tensors[f"{module}.weight"].astype(BF16)

    target = rewritten(source, tmp_path / "a", plain_expert)
    raw = json.loads((target / "config.json").read_text())
    raw["quantization_config"]["ignore"].append(module)
    (target / "config.json").write_text(json.dumps(raw))
    with Checkpoint(target) as checkpoint, pytest.raises(CheckpointError, match="expected one scheme for all experts"):
        load_layer(checkpoint, 0, layer_config(source, "fp8_channel"))


@pytest.mark.parametrize("transposed", [False, True])
def test_ambiguous_layout_is_settled_by_the_neighbour(tmp_path, transposed):
    """In a file the other projection tells, since 2I = H and I = H cannot both hold."""
    layer = config(intermediate_size=H // 2)
    rng = np.random.default_rng(0)
    gate_up, down = (rng.standard_normal(shape).astype(BF16) for shape in ((E, H, H), (E, H, H // 2)))
    stored_as = (lambda x: np.ascontiguousarray(x.swapaxes(1, 2))) if transposed else (lambda x: x)
    names = [f"model.layers.0.mlp.experts.{projection}" for projection in ("gate_up_proj", "down_proj")]
    save_safetensors(tmp_path / "model.safetensors", dict(zip(names, map(stored_as, (gate_up, down)), strict=True)))
    (tmp_path / "config.json").write_text("{}")
    with Checkpoint(tmp_path) as checkpoint:
        weights = load_layer(checkpoint, 0, layer)
    np.testing.assert_array_equal(weights.w13.data.reshape(E, H, H), gate_up)
    np.testing.assert_array_equal(weights.w2.data, down)


def test_values_are_checked_by_the_threads_that_copy(tmp_path):
    """Tensors large enough to be handed over: the file and the tensor at fault are named, wherever it is found."""
    layer = config("fp8_channel", hidden_size=512, intermediate_size=256)
    rng = np.random.default_rng(0)
    shapes = {"gate_proj": (256, 512), "up_proj": (256, 512), "down_proj": (512, 256)}
    tensors = {}
    for expert, (name, shape) in ((e, p) for e in range(E) for p in shapes.items()):
        module = f"model.layers.0.mlp.experts.{expert}.{name}"
        tensors[f"{module}.weight"] = rng.integers(0, 0x7E, shape, np.uint8).view("float8_e4m3fn")
        tensors[f"{module}.weight_scale"] = rng.random((shape[0], 1), np.float32)
    stated = dict(weights=dict(num_bits=8, type="float", strategy="channel"), targets=["Linear"])
    stated["input_activations"] = dict(num_bits=8, type="float", strategy="token", dynamic=True)
    raw = dict(quantization_config=dict(quant_method="compressed-tensors", config_groups=dict(group_0=stated)))

    def load(name):
        (tmp_path / name).mkdir()
        save_safetensors(tmp_path / name / "model.safetensors", tensors)
        (tmp_path / name / "config.json").write_text(json.dumps(raw))
        with Checkpoint(tmp_path / name) as checkpoint:
            return load_layer(checkpoint, 0, layer)

    weights = load("whole")
    for expert, half in np.ndindex(E, 2):
        stored = tensors[f"model.layers.0.mlp.experts.{expert}.{('gate_proj', 'up_proj')[half]}.weight"]
        assert bits(weights.w13.data[expert, half]) == bits(stored)
    damaged = "model.layers.0.mlp.experts.1.up_proj.weight"
    tensors[damaged].view(np.uint8)[200, 300] = 0xFF
    refuses(CheckpointError, rf"damaged/model\.safetensors: tensor {damaged}: 1 values are NaN", load, "damaged")
