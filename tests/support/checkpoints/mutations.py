"""Mutated checkpoints: each yields a directory and what must happen to it.

A mutation is ``(name, expectation, function(directory, rng))``. Expectations:
"refused": exit code 2 and one line; "harmless": the logits are bit-identical to the original's; "either": one of both,
for random bit flips that may hit bytes without meaning.
"""

import functools
import json
import struct
from pathlib import Path

import numpy as np

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def weights_file(directory, rng):
    """The file of a checkpoint's weights; one of them, where an index says that there are several."""
    path = directory / FILE
    return path if path.exists() else pick(rng, sorted(directory.glob("*.safetensors")))


def read_parts(path: Path):
    """(header dict, data bytes) of a safetensors file."""
    blob = path.read_bytes()
    (size,) = struct.unpack("<Q", blob[:8])
    return json.loads(blob[8 : 8 + size]), blob[8 + size :]


def write_parts(path: Path, header, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def expert_names(header, suffix="weight"):
    return sorted(n for n in header if ".experts." in n and n.endswith("." + suffix))


def pick(rng, items):
    return items[int(rng.integers(len(items)))]


def pick_tensor(header, rng):
    return pick(rng, [name for name in header if name != "__metadata__"])


def edits_bytes(file):
    """Decorates ``(bytearray, rng) -> bytes``: what becomes of a file of the directory."""

    def decorate(change):
        @functools.wraps(change)
        def mutate(directory, rng):
            path = weights_file(directory, rng) if file == FILE else directory / file
            path.write_bytes(change(bytearray(path.read_bytes()), rng))

        return mutate

    return decorate


def edits_file(change):
    """Decorates ``(header, data, rng) -> (header, data)``: what becomes of the safetensors file."""

    @functools.wraps(change)
    def mutate(directory, rng):
        path = weights_file(directory, rng)
        write_parts(path, *change(*read_parts(path), rng))

    return mutate


# -- the file as bytes ------------------------------------------------------------------------------------------------


def flip_bit(blob, at, rng):
    blob[at] ^= 1 << int(rng.integers(8))
    return blob


@edits_bytes(FILE)
def truncate(blob, rng):
    return blob[: int(rng.integers(len(blob)))]


@edits_bytes(FILE)
def truncate_tail(blob, rng):
    return blob[: -int(rng.integers(1, 64))]


@edits_bytes(FILE)
def append_bytes(blob, rng):
    return blob + rng.bytes(int(rng.integers(1, 64)))


@edits_bytes(FILE)
def header_bit_flip(blob, rng):
    (size,) = struct.unpack("<Q", blob[:8])
    return flip_bit(blob, int(rng.integers(8, 8 + size)), rng)


@edits_bytes(FILE)
def header_length_flip(blob, rng):
    return flip_bit(blob, int(rng.integers(8)), rng)


@edits_file
def random_header(header, data, rng):
    return rng.bytes(int(rng.integers(1, 300))), data


# -- the header's meaning ---------------------------------------------------------------------------------------------


def edit_header(change):
    """change(header, rng) edits the header in place, or returns what stands in its place."""
    return edits_file(lambda header, data, rng: (change(header, rng) or header, data))


def _set(field, value):
    def change(header, rng):
        entry = header[pick(rng, expert_names(header))]
        entry[field] = value(entry[field], rng)

    return edit_header(change)


def _swap_names(header, rng):
    """Exchange two tensors of different shape under each other's name."""
    a = pick(rng, [n for n in header if n.endswith("q_proj.weight")])
    b = pick(rng, [n for n in header if n.endswith("k_proj.weight")])
    header[a], header[b] = header[b], header[a]


def _overlap(header, rng):
    a, b = rng.choice([n for n in header if n != "__metadata__"], 2, replace=False)
    header[str(b)]["data_offsets"] = header[str(a)]["data_offsets"]


def _rename(header, rng):
    name = pick(rng, expert_names(header))
    header[name.replace(".experts.", ".expertz.")] = header.pop(name)


def _expert_out_of_range(header, rng):
    name = pick(rng, expert_names(header))
    head, _, tail = name.partition(".experts.")
    header[f"{head}.experts.99.{tail.split('.', 1)[1]}"] = header.pop(name)


def _duplicate_key(header, rng):
    name = pick(rng, expert_names(header))
    text = json.dumps(header)
    return (text[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}").encode()


def _huge_shape(header, rng):
    header[pick(rng, expert_names(header))]["shape"] = pick(
        rng, [[2**62, 4], [2**32, 2**32], [2**63 - 1], [-1, 4], [1e3, 2]]
    )


def _other_dtype(header, rng):
    """One expert tensor takes another dtype of the same width."""
    entry = header[pick(rng, expert_names(header))]
    same_width = {"BF16": ["F16", "I16", "U16"], "F8_E4M3": ["F8_E5M2", "I8", "U8", "F8_E8M0"], "I8": ["U8", "F8_E4M3"]}
    entry["dtype"] = pick(rng, same_width[entry["dtype"]])


def _unknown_dtype(header, rng):
    header[pick(rng, list(header))]["dtype"] = pick(rng, ["F7", "", None, 8, "bf16"])


def change_size(header, name, by):
    """A tensor ends ``by`` bytes later, and those behind it move."""
    end = header[name]["data_offsets"][1]
    for other in (entry for key, entry in header.items() if key not in ("__metadata__", name)):
        if other["data_offsets"][0] >= end:
            other["data_offsets"] = [offset + by for offset in other["data_offsets"]]
    header[name]["data_offsets"][1] += by


@edits_file
def drop_tensor(header, data, rng):
    """Remove one tensor with its bytes: the file stays valid, the model is incomplete."""
    name = pick_tensor(header, rng)
    start, end = header[name]["data_offsets"]
    change_size(header, name, start - end)
    del header[name]
    return header, data[:start] + data[end:]


def add_tensor(name_of):
    @edits_file
    def mutate(header, data, rng):
        header[name_of(header, rng)] = {"dtype": "F32", "shape": [2], "data_offsets": [len(data), len(data) + 8]}
        return header, data + b"\0" * 8

    return mutate


@edits_file
def reorder_keys(header, data, rng):
    names = list(header)
    rng.shuffle(names)
    return {name: header[name] for name in names}, data


@edit_header
def change_metadata(header, rng):
    header["__metadata__"] = {"format": "pt", "note": str(rng.integers(1000))}


# -- values -----------------------------------------------------------------------------------------------------------


def bad_scale(value):
    @edits_file
    def mutate(header, data, rng):
        entry = header[pick(rng, expert_names(header, "weight_scale") + expert_names(header, "weight_scale_inv"))]
        start, end = entry["data_offsets"]
        assert entry["dtype"] == "F32"
        values = np.frombuffer(data[start:end], np.float32).copy()
        values[int(rng.integers(values.size))] = value
        return header, data[:start] + values.tobytes() + data[end:]

    return mutate


def nan_weight(directory, rng):
    """One code that is NaN in an expert's weight; integers have none, there a scale becomes NaN."""
    header, data = read_parts(directory / FILE)
    entry = header[pick(rng, expert_names(header))]
    if entry["dtype"] == "I8":
        return bad_scale(np.nan)(directory, rng)
    code = {"BF16": b"\xc0\x7f", "F8_E4M3": b"\x7f"}[entry["dtype"]]
    start, end = entry["data_offsets"]
    at = start + len(code) * int(rng.integers((end - start) // len(code)))
    write_parts(directory / FILE, header, data[:at] + code + data[at + len(code) :])


# -- config.json ------------------------------------------------------------------------------------------------------


def edit_config(change):
    def mutate(directory, rng):
        path = directory / "config.json"
        config = json.loads(path.read_text())
        result = change(config, rng)
        path.write_text(json.dumps(config) if result is None else result)

    return mutate


def _experts_key(config):
    return next(key for key in ("num_experts", "num_local_experts") if key in config)


def _inter_key(config):
    return "moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size"


def config_set(key, value):
    def change(config, rng):
        name = key(config) if callable(key) else key
        config[name] = value(config.get(name)) if callable(value) else value

    return edit_config(change)


def config_drop(key):
    return edit_config(lambda config, rng: config.pop(key(config) if callable(key) else key) and None)


def quantization(change):
    def mutate(config, rng):
        change(config["quantization_config"])

    return edit_config(mutate)


def _group(q):
    return next(iter(q["config_groups"].values()))


def delete_file(name):
    return lambda directory, rng: (directory / name).unlink()


def write_file(name, content):
    return lambda directory, rng: (directory / name).write_bytes(content)


COMMON = [
    ("truncate", "refused", truncate, 22),
    ("truncate_tail", "refused", truncate_tail, 8),
    ("append_bytes", "refused", append_bytes, 4),
    ("header_bit_flip", "either", header_bit_flip, 40),
    ("header_length_flip", "refused", header_length_flip, 10),
    ("random_header", "refused", random_header, 5),
    ("swap_shape", "refused", _set("shape", lambda s, rng: s[::-1]), 3),
    ("flat_shape", "refused", _set("shape", lambda s, rng: [int(np.prod(s))]), 1),
    ("huge_shape", "refused", edit_header(_huge_shape), 5),
    ("shift_offsets", "refused", _set("data_offsets", lambda o, rng: [o[0] + 8, o[1] + 8]), 2),
    ("negative_offsets", "refused", _set("data_offsets", lambda o, rng: [-o[1], -o[0]]), 1),
    ("reversed_offsets", "refused", _set("data_offsets", lambda o, rng: o[::-1]), 1),
    ("overlap", "refused", edit_header(_overlap), 3),
    ("swap_names", "refused", edit_header(_swap_names), 1),
    ("rename_expert", "refused", edit_header(_rename), 2),
    ("expert_out_of_range", "refused", edit_header(_expert_out_of_range), 2),
    ("duplicate_key", "refused", edit_header(_duplicate_key), 2),
    ("other_dtype", "refused", edit_header(_other_dtype), 4),
    ("unknown_dtype", "refused", edit_header(_unknown_dtype), 4),
    ("drop_tensor", "refused", drop_tensor, 8),
    ("nan_weight", "refused", nan_weight, 3),
    ("layers_huge", "refused", config_set("num_hidden_layers", 10**7), 1),
    ("eps_huge", "refused", config_set("rms_norm_eps", 10**400), 1),
    ("unknown_expert_tensor", "refused", add_tensor(lambda h, rng: expert_names(h)[0] + "_g_idx"), 1),
    ("unknown_dense_tensor", "refused", add_tensor(lambda h, rng: "model.layers.0.self_attn.r_proj.weight"), 1),
    ("rotary_buffer", "harmless", add_tensor(lambda h, rng: "model.layers.0.self_attn.rotary_emb.inv_freq"), 1),
    ("kv_scale", "harmless", add_tensor(lambda h, rng: "model.layers.0.self_attn.k_scale"), 1),
    ("reorder_keys", "harmless", reorder_keys, 2),
    ("change_metadata", "harmless", change_metadata, 1),
    ("extra_file", "harmless", write_file("recipe.yaml", b"a: 1\n"), 1),
    ("no_weights", "refused", delete_file(FILE), 1),
    ("no_config", "refused", delete_file("config.json"), 1),
    ("empty_config", "refused", write_file("config.json", b""), 1),
    ("config_not_json", "refused", write_file("config.json", b"{'a': 1}"), 1),
    ("config_not_object", "refused", write_file("config.json", b"[1, 2]"), 1),
    ("config_not_utf8", "refused", write_file("config.json", b"\xff\xfe{}"), 1),
    ("config_deep", "refused", write_file("config.json", b'{"a":' * 5000 + b"1" + b"}" * 5000), 1),
    ("missing_shard", "refused", write_file(INDEX, b'{"weight_map": {"a": "b.safetensors"}}'), 1),
    ("shard_outside", "refused", write_file(INDEX, b'{"weight_map": {"a": "../b.safetensors"}}'), 1),
    ("model_type", "refused", config_set("model_type", "no_such_model"), 1),
    ("architecture", "refused", config_set("architectures", ["NoSuchForCausalLM"]), 1),
    ("more_experts", "refused", config_set(_experts_key, lambda v: v + 1), 1),
    ("fewer_experts", "refused", config_set(_experts_key, lambda v: v - 1), 1),
    ("experts_text", "refused", config_set(_experts_key, "four"), 1),
    ("experts_zero", "refused", config_set(_experts_key, 0), 1),
    ("top_k_too_large", "refused", config_set("num_experts_per_tok", 99), 1),
    ("top_k_zero", "refused", config_set("num_experts_per_tok", 0), 1),
    ("hidden_size", "refused", config_set("hidden_size", lambda v: v * 2), 1),
    ("inter_size", "refused", config_set(_inter_key, lambda v: v + 16), 1),
    ("vocab_size", "refused", config_set("vocab_size", lambda v: v + 1), 1),
    ("fewer_heads", "refused", config_set("num_attention_heads", 3), 1),
    ("more_layers", "refused", config_set("num_hidden_layers", lambda v: v + 1), 1),
    ("layers_negative", "refused", config_set("num_hidden_layers", -1), 1),
    ("activation", "refused", config_set("hidden_act", "swoosh"), 1),
    ("rms_eps_text", "refused", config_set("rms_norm_eps", "tiny"), 1),
    ("rope_unknown", "refused", config_set("rope_scaling", {"rope_type": "spiral", "factor": 2.0}), 1),
    ("quant_method_unknown", "refused", config_set("quantization_config", {"quant_method": "magic"}), 1),
    ("quant_method_missing", "refused", config_set("quantization_config", {"bits": 4}), 1),
    ("quant_config_text", "refused", config_set("quantization_config", "fp8"), 1),
    ("unrelated_config_key", "harmless", config_set("transformers_version", "0.0.0"), 1),
]

SCALED = [
    ("nan_scale", "refused", bad_scale(np.nan), 3),
    ("inf_scale", "refused", bad_scale(np.inf), 2),
    ("config_dropped", "refused", config_drop("quantization_config"), 1),
]

COMPRESSED_TENSORS = [
    ("format_unknown", "refused", quantization(lambda q: (q.update(format="zip"), _group(q).update(format="zip"))), 1),
    ("format_retired", "refused", quantization(
        lambda q: (q.update(format="marlin-24"), _group(q).update(format="marlin-24"))), 1),
    ("num_bits", "refused", quantization(lambda q: _group(q)["weights"].update(num_bits=4)), 1),
    ("type_swapped", "refused", quantization(
        lambda q: _group(q)["weights"].update(type={"float": "int", "int": "float"}[_group(q)["weights"]["type"]])), 1),
    ("strategy_tensor", "refused", quantization(lambda q: _group(q)["weights"].update(strategy="tensor")), 1),
    ("strategy_unknown", "refused", quantization(lambda q: _group(q)["weights"].update(strategy="diagonal")), 1),
    ("asymmetric", "refused", quantization(lambda q: _group(q)["weights"].update(symmetric=False)), 1),
    ("no_groups", "refused", quantization(lambda q: q.pop("config_groups")), 1),
    ("groups_empty", "refused", quantization(lambda q: q.update(config_groups={})), 1),
    ("sparsity", "refused", quantization(lambda q: q.update(sparsity_config={"format": "sparse-24-bitmask"})), 1),
    ("transform", "refused", quantization(
        lambda q: q.update(transform_config={"config_groups": {"a": {"type": "hadamard"}}})), 1),
    ("output_activations", "refused", quantization(
        lambda q: _group(q).update(output_activations={"num_bits": 8, "type": "float", "strategy": "tensor"})), 1),
    ("ignore_an_expert", "refused", quantization(lambda q: q.update(ignore=[*q["ignore"], r"re:.*experts\.1\..*"])), 1),
    ("ignore_all", "refused", quantization(lambda q: q.update(ignore=["re:.*"])), 1),
    ("evil_regex", "refused", quantization(
        lambda q: q.update(ignore=[*q["ignore"], "re:(a+)+$", "re:(.*)*" * 20 + "x"])), 1),
    ("broken_regex", "refused", quantization(lambda q: q.update(ignore=["re:(unclosed"])), 1),
    ("ignore_container", "harmless", quantization(
        lambda q: q.update(ignore=[*q["ignore"], "model.layers.0.mlp.experts.0"])), 1),
    ("quantization_metadata", "harmless", quantization(lambda q: q.update(global_compression_ratio=1.5)), 1),
]  # fmt: skip

NATIVE_FP8 = [
    ("block_size", "refused", quantization(lambda q: q.update(weight_block_size=[64, 128])), 1),
    ("block_size_text", "refused", quantization(lambda q: q.update(weight_block_size="128")), 1),
    ("fmt", "refused", quantization(lambda q: q.update(fmt="e5m2")), 1),
    ("activation_scheme", "refused", quantization(lambda q: q.update(activation_scheme="magic")), 1),
]
