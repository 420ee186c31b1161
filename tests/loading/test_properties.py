"""Any split of tensors into files, in any order, gives the same experts; files give back what they got."""

import functools
import json
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.loading import Checkpoint, LayerLoader, SafetensorsFile, load_layer, save_safetensors
from moe_jax.writing._shards import ShardedWriter, TensorSpec
from tests.support.checkpoints.expert_tensors import (
    BF16,
    PROJECTIONS,
    assert_same,
    config,
    filled,
    fused,
    plain_tensors,
    static_tensors,
)
from tests.support.checkpoints.expert_tensors import E as NUM_EXPERTS
from tests.support.refusals import refuses

quick = functools.partial(settings, derandomize=True, deadline=None, database=None)

STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
STATED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": STATIC, "input_activations": STATIC}},
}


def write(directory, tensors, files, stated):
    """files: index of a file for every tensor, in the order in which a file gets them."""
    parts = {}
    for (name, array), file in zip(tensors, files, strict=True):
        parts.setdefault(f"part-{file}.safetensors", {})[name] = array
    for name, part in parts.items():
        save_safetensors(directory / name, part)
    index = {"weight_map": {tensor: name for name, part in parts.items() for tensor in part}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps({"quantization_config": stated} if stated else {}))


@quick(max_examples=12)
@given(st.data(), st.booleans())
def test_shards_in_any_split_and_order(data, is_static):
    prefix = "model.layers.0.mlp."
    tensors = static_tensors(prefix) if is_static else plain_tensors(prefix)
    scheme = "fp8_tensor_static" if is_static else "bf16"
    expected = filled(config(scheme), tensors, layer=0)
    order = data.draw(st.permutations(sorted(tensors)))
    files = data.draw(st.lists(st.integers(0, 3), min_size=len(order), max_size=len(order)))
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write(directory, [(n, tensors[n]) for n in order], files, STATED if is_static else None)
        with Checkpoint(directory) as checkpoint:
            assert_same(load_layer(checkpoint, 0, config(scheme)), expected.finish())


@quick(max_examples=12)
@given(st.data(), st.sampled_from(["per expert", "fused", "transposed"]), st.sampled_from(["bf16", "int8_w8a8"]))
def test_pairs_in_any_order_and_spelling(data, layout, scheme):
    tensors = plain_tensors()
    expected = filled(config(scheme), tensors, layer=0)
    given_tensors = tensors if layout == "per expert" else fused(tensors, transposed=layout == "transposed")
    order = data.draw(st.permutations(sorted(given_tensors)))
    loader = LayerLoader(config(scheme), layer=0)
    for name in order:
        loader.accept(name, given_tensors[name])
    assert_same(loader.finish(), expected.finish())


@quick(max_examples=12)
@given(st.data())
def test_what_is_missing_is_named(data):
    """Any set of tensors left out: every projection of every expert that lacks one is in the error, no other."""
    tensors = plain_tensors()
    left_out = data.draw(st.sets(st.sampled_from(sorted(tensors)), min_size=1))
    loader = filled(config(), ((name, array) for name, array in tensors.items() if name not in left_out), layer=0)
    words = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    missing = {
        (expert, words[shard])
        for shards in loader.missing().values()
        for shard, experts in shards.items()
        for expert in experts
    }
    assert missing == {(int(name.split(".")[-3]), name.split(".")[-2]) for name in left_out}
    assert len(PROJECTIONS) * NUM_EXPERTS == len(tensors)
    refuses(ValueError, "missing: ", loader.finish)


DTYPES = [np.dtype(t) for t in (np.float32, np.float16, BF16, ml_dtypes.float8_e4m3fn, np.int8, np.uint8, np.int32)]
SPECS = st.dictionaries(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12).filter(
        lambda name: name != "__metadata__"
    ),
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3).map(tuple)),
    min_size=1,
    max_size=6,
)


@quick(max_examples=25)
@given(st.data(), SPECS, st.integers(1, 100))
def test_files_give_back_what_they_got(data, specs, max_shard_bytes):
    """ShardedWriter, whatever the names, dtypes, sizes and order of writing; read by our reader and by safetensors."""
    from safetensors import safe_open

    rng = np.random.default_rng(0)
    arrays = {}
    for name, (dtype, shape) in specs.items():
        count = int(np.prod(shape)) * dtype.itemsize
        arrays[name] = np.frombuffer(rng.integers(0, 100, count, np.uint8).tobytes(), dtype).reshape(shape)
    with tempfile.TemporaryDirectory() as directory:
        planned = [TensorSpec(name, array.shape, array.dtype) for name, array in arrays.items()]
        writer = ShardedWriter(Path(directory), planned, max_shard_bytes)
        for name in data.draw(st.permutations(sorted(arrays))):
            writer.write(name, arrays[name])
        writer.close()
        found = {}
        for file in writer.files:
            with SafetensorsFile(Path(directory) / file) as opened:
                found |= {name: np.array(opened.read(name)) for name in opened.names}
            with safe_open(Path(directory) / file, "numpy") as judge:
                assert set(judge.keys()) == set(opened.names)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()
