"""Checkpoint directories: config.json, single files, indexes and shards; transformers and safetensors write them."""

import json
import os
import time

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moe_jax.loading import Checkpoint, CheckpointError, save_safetensors
from tests.support.refusals import refuses


def write_config(directory, config=None):
    directory.mkdir(parents=True, exist_ok=True)
    text = config if isinstance(config, str) else json.dumps(config or {"model_type": "qwen3_moe"})
    (directory / "config.json").write_text(text)
    return directory


def write_sharded(directory, shards, weight_map=None):
    """shards: file name -> {tensor: array}."""
    write_config(directory)
    for name, tensors in shards.items():
        save_safetensors(directory / name, tensors)
    if weight_map is None:
        weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


ONE = {"a": np.ones(3, np.float32)}
TWO = {"b": np.full((4, 2), 2, np.int8), "c": np.zeros((), ml_dtypes.bfloat16)}
A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def sharded(tmp_path):
    return write_sharded(tmp_path / "model", {A: ONE, B: TWO})


@pytest.fixture(scope="module")
def saved_by_transformers(tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen")
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_experts=4, num_experts_per_tok=2, num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(directory, max_shard_size="20KB")
    return directory


def test_transformers_shards(saved_by_transformers):
    files = sorted(path.name for path in saved_by_transformers.glob("*.safetensors"))
    assert len(files) > 1
    expected = {name: tensor for file in files for name, tensor in load_file(saved_by_transformers / file).items()}
    with Checkpoint(saved_by_transformers) as checkpoint:
        assert checkpoint.files == tuple(files)
        assert checkpoint.config["model_type"] == "qwen3_moe" and "quantization_config" not in checkpoint.config
        assert set(checkpoint.names) == set(expected) and len(checkpoint.names) == len(expected)
        assert checkpoint.nbytes == sum(tensor.nbytes for tensor in expected.values())
        for name, tensor in expected.items():
            info = checkpoint.info(name)
            assert (info.shape, info.dtype, info.numpy_dtype) == (tuple(tensor.shape), "BF16", ml_dtypes.bfloat16)
            np.testing.assert_array_equal(checkpoint.read(name).view(np.int16), tensor.view(torch.int16).numpy())
        assert checkpoint.bytes_read == checkpoint.nbytes


def test_rows_of_a_shard(sharded):
    with Checkpoint(sharded) as checkpoint:
        assert checkpoint.names == ("a", "c", "b") or checkpoint.names == ("a", "b", "c")
        assert checkpoint.read("b", slice(1, 3)).shape == (2, 2) and checkpoint.bytes_read == 4
        assert "c" in checkpoint and "d" not in checkpoint
        refuses(CheckpointError, "no tensor d in", checkpoint.read, "d")


def test_symlinked_shards_as_hub_caches_make_them(sharded, tmp_path):
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(sharded.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(blobs / str(number))
    with Checkpoint(sharded) as checkpoint:
        assert set(checkpoint.names) == {"a", "b", "c"}


def test_an_index_may_name_the_single_file(tmp_path):
    write_sharded(tmp_path, {"model.safetensors": ONE})
    assert Checkpoint(tmp_path).names == ("a",)


def test_other_files_are_ignored(sharded):
    save_file({"lora": torch.ones(1)}, sharded / "adapter_model.safetensors")
    for name in (
        "recipe.yaml",
        "tokenizer.json",
        "generation_config.json",
        "quantization_config.json",
        "pytorch_model.bin",
    ):
        (sharded / name).write_text("{")
    assert set(Checkpoint(sharded).names) == {"a", "b", "c"}


def refused(directory, *fragments):
    with pytest.raises(CheckpointError) as error:
        Checkpoint(directory)
    text = str(error.value)
    assert text.isprintable() and len(text) < 1500
    for fragment in fragments:
        assert fragment in text, text


def test_directory_and_config(tmp_path):
    refused(tmp_path / "gone", "no such directory", "organization/name")
    refused(tmp_path, "config.json: no such file")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    refused(tmp_path / "model.gguf", "is a file", "GGUF files are not supported")
    refused(tmp_path, str(tmp_path), "model.gguf", "GGUF files are not supported")
    (tmp_path / "x.safetensors").write_bytes(b"")
    refused(tmp_path / "x.safetensors", "is a file; pass the directory")


BROKEN_CONFIGS = {
    "empty": ("", "not valid JSON"),
    "list": ("[1]", "expected a JSON object"),
    "duplicate key": ('{"a": 1, "a": 2}', "'a' occurs twice"),
    "NaN": ('{"rms_norm_eps": NaN}', "NaN is not a JSON number"),
    "overflow": ('{"rope_theta": 1e999}', "too large"),
    "deep": ('{"a":' * 3000 + "1" + "}" * 3000, "too deeply"),
    "long": ('{"a": "' + "x" * (17 << 20) + '"}', "larger than"),
}


@pytest.mark.parametrize("case", BROKEN_CONFIGS)
def test_broken_configs(tmp_path, case):
    text, message = BROKEN_CONFIGS[case]
    write_config(tmp_path, text)
    save_safetensors(tmp_path / "model.safetensors", ONE)
    refused(tmp_path, "config.json", message)


def test_configs_of_other_quantizers_are_seen(tmp_path):
    write_config(tmp_path)
    save_safetensors(tmp_path / "model.safetensors", ONE)
    (tmp_path / "hf_quant_config.json").write_text("{}")
    assert Checkpoint(tmp_path).config["quantization_config"]["quant_method"] == "modelopt"


@pytest.mark.parametrize(
    "file, fragments",
    [
        ("pytorch_model.bin", ["pickle", "save_pretrained"]),
        ("consolidated.00.pth", ["pickle"]),
        ("model.pt", ["pickle"]),
        ("model-q4.gguf", ["GGUF", "gguf_file=NAME"]),
        (A, [A, "download the index"]),
        ("recipe.yaml", ["neither model.safetensors nor"]),
    ],
)  # fmt: skip
def test_no_readable_weights(tmp_path, file, fragments):
    """A pickle is refused unread: this one would be a syntax error for any reader."""
    write_config(tmp_path)
    (tmp_path / file).write_bytes(b"\x80\x04 not a pickle")
    refused(tmp_path, str(tmp_path), *fragments)


def test_index_refers_to_a_pickle(tmp_path):
    write_sharded(tmp_path, {}, {"a": "pytorch_model-00001-of-00002.bin"})
    refused(tmp_path, "pytorch_model-00001-of-00002.bin", "pickle")


NOT_PLAIN = ["../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..", "", "a\\b.safetensors"]
NOT_PLAIN += ["c:x.safetensors", "a\0.safetensors", "a\n.safetensors", "x" * 300 + ".safetensors", 3, None]


@pytest.mark.parametrize("name", NOT_PLAIN, ids=range(len(NOT_PLAIN)))
def test_shard_names_must_be_plain(tmp_path, name):
    save_safetensors(tmp_path / "x.safetensors", ONE)
    write_sharded(tmp_path / "model", {}, {"a": name})
    refused(tmp_path / "model", "tensor a", "expected the plain name")


@pytest.mark.parametrize("weight_map", [None, {}, [], "x"])
def test_weight_map_must_be_a_map(tmp_path, weight_map):
    write_config(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    refused(tmp_path, "weight_map is")


def test_index_json_is_read_strictly(sharded):
    (sharded / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"a": "{A}", "a": "{B}"}}}}')
    refused(sharded, "index.json", "'a' occurs twice")


def test_index_and_files_must_agree(tmp_path):
    full = {"a": A, "b": B, "c": B}
    cases = [
        (full | {"d": A}, ["index.json", "tensor d: listed in", A, "does not have it"]),
        ({"a": A, "b": B}, [B, "tensor c", "does not list it"]),
        (full | {"c": A}, [A, "tensor c: listed in", "does not have it"]),
        (full | {"a": B}, [B, "tensor a: listed in", "does not have it"]),
    ]
    for number, (weight_map, fragments) in enumerate(cases):
        refused(write_sharded(tmp_path / str(number), {A: ONE, B: TWO}, weight_map), *fragments)
    both = write_sharded(tmp_path / "both", {A: ONE, B: {**TWO, **ONE}}, full)
    refused(both, B, "tensor a", f"places it in {A}")


def test_missing_and_truncated_shards(sharded):
    blob = (sharded / B).read_bytes()
    (sharded / B).write_bytes(blob[:-1])
    refused(sharded, str(sharded / B), "truncated")
    (sharded / B).unlink()
    refused(sharded, str(sharded / B), "no such file")
    (sharded / B).symlink_to("../blobs/gone")
    refused(sharded, str(sharded / B), "does not exist")


def test_two_sets_of_weights(sharded):
    save_safetensors(sharded / "model.safetensors", ONE)
    refused(sharded, "two sets of weights")


def test_dangling_single_file_and_empty_file(tmp_path):
    write_config(tmp_path)
    (tmp_path / "model.safetensors").symlink_to("../blobs/gone")
    refused(tmp_path, "does not exist")
    (tmp_path / "model.safetensors").unlink()
    save_safetensors(tmp_path / "model.safetensors", {})
    refused(tmp_path, "holds no tensors")


def test_opening_twenty_thousand_tensors_is_quick(tmp_path):
    """0.2 s without, 1 s with the annotation checks of the tests; the limit leaves room for a busy machine."""
    layers, experts = 52, 128
    names = [
        f"model.layers.{layer}.mlp.experts.{e}.{part}_proj.weight"
        for layer in range(layers) for e in range(experts) for part in ("gate", "up", "down")
    ]  # fmt: skip
    shards = {
        f"model-{i:05}-of-00004.safetensors": dict.fromkeys(names[i::4], np.zeros((1, 2), np.int8)) for i in range(4)
    }
    write_sharded(tmp_path, shards)
    start = time.process_time()
    checkpoint = Checkpoint(tmp_path)
    seconds = time.process_time() - start
    assert len(checkpoint.names) == len(names) == 19968
    assert seconds < 30.0


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_json_that_is_no_regular_file(sharded, name, make):
    """A pipe must not be waited for."""
    (sharded / name).unlink()
    make(sharded / name)
    refuses(CheckpointError, f"{name}: not a regular file", Checkpoint, sharded)


def test_byte_order_marks_are_skipped(sharded):
    plain = Checkpoint(sharded)
    for name in ("config.json", "model.safetensors.index.json"):
        (sharded / name).write_bytes(b"\xef\xbb\xbf" + (sharded / name).read_bytes())
    marked = Checkpoint(sharded)
    assert marked.config == plain.config and marked.names == plain.names
    (sharded / "config.json").write_bytes(b"\xef\xbb\xbf" * 2 + b"{}")
    refuses(CheckpointError, "not valid JSON", Checkpoint, sharded)
