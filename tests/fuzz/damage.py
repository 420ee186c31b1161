"""Random damage to a checkpoint directory: bytes, header, names, dtypes, shapes, values, config.json.

A mutation is a function ``(directory, rng)`` with an expectation: "refused" (the class alone says so), "harmless"
(must load with the same meaning), or "either" (whatever is accepted means what the files say: ``decoder`` decides).
"""

import json
import struct

import ml_dtypes
import numpy as np

from tests.support.checkpoints import mutations
from tests.support.checkpoints.mutations import edits_file, pick, pick_tensor

DTYPES = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "U8": np.uint8,
    "I8": np.int8,
    "I32": np.int32,
    "I64": np.int64,
}
SAME_WIDTH = {
    "F32": ("I32", "U32"),
    "I32": ("F32", "U32"),
    "I64": ("F64", "U64"),
    "BF16": ("F16", "I16", "U16"),
    "F16": ("BF16", "I16", "U16"),
    "F8_E4M3": ("F8_E5M2", "I8", "U8", "F8_E8M0", "F8_E4M3FNUZ", "BOOL"),
    "I8": ("U8", "F8_E4M3", "BOOL"),
    "U8": ("I8", "F8_E4M3", "F8_E8M0", "BOOL"),
}
SPECIAL_FLOATS = (np.nan, np.inf, -np.inf, 0.0, -0.0, -1.0, 1e-40, 1e-30, 3e38, -3e-5, 65504.0, 448.0)
SPECIAL_INTEGERS = (0, 1, -1, 127, -128, 255, 8, 16, 1 << 20, -(1 << 31), (1 << 31) - 1)
JSON_VALUES = (
    *(None, True, False, 0, 1, -1, 2, 3, 4, 8, 16, 32, 64, 128, 1.5, -0.0, 2**31, 2**70, 1e300, "", "4"),
    *("int", "float", "tensor", "channel", "group", "block", "token", "tensor_group", "local", "static", "dynamic"),
    *("weight", "gptq", "gptq_v2", "awq", "fp8", "compressed-tensors", "modelopt", "gemm", "Linear", "re:.*", "FP8"),
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized", "e5m2"),
    *("torch.uint8", "silu", "gelu", "re:(a+)+$", "re:(", "\ud800", "0.5.0", "0.20.0"),
    *([], {}, [128, 128], [64, 128], [1], {"a": 1}, ["Linear"], ["lm_head"], ["re:.*experts.1.*"], [None]),
)


@edits_file
def data_bit(header, data, rng):
    data = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
    return header, bytes(data)


@edits_file
def special_value(header, data, rng):
    """NaN, infinity, zero, negative, denormal or huge in one tensor, scales before all."""
    names = [name for name in header if name != "__metadata__"]
    scales = [name for name in names if any(word in name for word in ("scale", "zero", "g_idx", "shape", "scales"))]
    name = pick(rng, scales if scales and rng.random() < 0.8 else names)
    entry = header[name]
    start, end = entry["data_offsets"]
    values = np.frombuffer(data[start:end], DTYPES[entry["dtype"]]).copy()
    if not values.size:
        return header, data
    choices = SPECIAL_FLOATS if ml_dtypes.finfo and entry["dtype"][0] in "FB" else SPECIAL_INTEGERS
    value = pick(rng, choices)
    where = slice(None) if rng.random() < 0.2 else int(rng.integers(values.size))
    with np.errstate(all="ignore"):
        values[where] = np.array(value).astype(values.dtype)
    return header, data[:start] + values.tobytes() + data[end:]


@edits_file
def rename(header, data, rng):
    name = pick_tensor(header, rng)
    text = list(name)
    at = int(rng.integers(len(text)))
    match int(rng.integers(4)):
        case 0:
            text[at] = pick(rng, "0123456789abcxyz._A\u00e9\0")
        case 1:
            del text[at]
        case 2:
            text.insert(at, pick(rng, "0129.x_"))
        case _:
            words = name.split(".")
            del words[int(rng.integers(len(words)))]
            text = list(".".join(words))
    new = "".join(text)
    if new in header or not new:
        return header, data
    header = {new if key == name else key: entry for key, entry in header.items()}
    return header, data


@edits_file
def swap_entries(header, data, rng):
    """Two tensors exchange their dtype, shape and data."""
    a, b = pick_tensor(header, rng), pick_tensor(header, rng)
    header[a], header[b] = header[b], header[a]
    return header, data


@edits_file
def other_dtype(header, data, rng):
    entry = header[pick_tensor(header, rng)]
    entry["dtype"] = pick(rng, (*SAME_WIDTH[entry["dtype"]], "F4", "XX", 7))
    return header, data


@edits_file
def other_shape(header, data, rng):
    entry = header[pick_tensor(header, rng)]
    shape = entry["shape"]
    count = int(np.prod(shape))
    options = [shape[::-1], [count], [1, *shape], [*shape, 1], [count, 1], [], [-1], [2**62, 4], [0], None, [count / 2]]
    entry["shape"] = pick(rng, options)
    return header, data


@edits_file
def other_offsets(header, data, rng):
    entry = header[pick_tensor(header, rng)]
    start, end = entry["data_offsets"]
    by = int(rng.choice([-8, -1, 1, 2, 8, 2**63]))
    options = [[start + by, end + by], [end, start], [start, end + by], [-end, -start], [start], "0", [start, None]]
    entry["data_offsets"] = pick(rng, options)
    return header, data


@edits_file
def hole(header, data, rng):
    """Bytes that belong to no tensor, before one of them; all other offsets follow."""
    start, _ = header[pick_tensor(header, rng)]["data_offsets"]
    size = pick(rng, (1, 2, 8, 64))
    for name, entry in header.items():
        if name != "__metadata__" and entry["data_offsets"][0] >= start:
            entry["data_offsets"] = [offset + size for offset in entry["data_offsets"]]
    return header, data[:start] + bytes(size) + data[start:]


@edits_file
def resize(header, data, rng):
    """One tensor loses or gains a row, the file staying valid."""
    name = pick(rng, [n for n in header if n != "__metadata__" and header[n]["shape"] and header[n]["shape"][0]])
    entry = header[name]
    start, end = entry["data_offsets"]
    row = (end - start) // entry["shape"][0]
    grows = rng.random() < 0.5
    change = row if grows else -row
    data = data[:end] + data[start : start + row] + data[end:] if grows else data[: end - row] + data[end:]
    entry["shape"] = [entry["shape"][0] + (1 if grows else -1), *entry["shape"][1:]]
    mutations.change_size(header, name, change)
    return header, data


@edits_file
def scalar(header, data, rng):
    """One tensor becomes its first number, of shape ()."""
    name = pick(rng, [n for n in header if n != "__metadata__" and header[n]["shape"]])
    entry = header[name]
    start, end = entry["data_offsets"]
    size = (end - start) // int(np.prod(entry["shape"]))
    entry["shape"] = []
    mutations.change_size(header, name, size - (end - start))
    return header, data[: start + size] + data[end:]


INDEX, TABLE = "model.safetensors.index.json", "model.embed_tokens.weight"


def index_value(directory, rng):
    """An entry of the index is dropped, moved, renamed, replaced or doubled; of one file, something in config.json."""
    path = directory / INDEX
    if not path.exists():
        return config_value(directory, rng)
    index = json.loads(path.read_text())
    places = index["weight_map"]
    name, other = pick(rng, list(places)), pick(rng, list(places))
    text = None
    match int(rng.integers(8)):
        case 0:
            del places[name]
        case 1:
            files = sorted(set(places.values()))
            places[name] = files[1 - files.index(places[name])]
        case 2:
            places[name + pick(rng, ("x", ".", "_scale"))] = places[name]
        case 3:
            places[name] = pick(
                rng, (None, 1, "", "../model.safetensors", "/etc/passwd", "a\0b", "model.bin", "config.json")
            )
        case 4:
            places[name], places[other] = places[other], places[name]
        case 5:
            text = json.dumps(index).replace(f'"{name}":', f'"{name}": "{places[other]}", "{name}":', 1)
        case 6:
            index[pick(rng, ("weight_map", "metadata"))] = pick(rng, JSON_VALUES)
        case _:
            places[f"model.layers.0.mlp.experts.0.{pick(rng, ('gate_proj.bias', 'w1.weight'))}"] = places[name]
    path.write_text(text or json.dumps(index))


def other_head(directory, rng):
    """A tied model's files hold a head as well, alike or not; of another checkpoint, something in config.json."""
    if not json.loads((directory / "config.json").read_text()).get("tie_word_embeddings"):
        return config_value(directory, rng)
    for path in sorted(directory.glob("*.safetensors")):
        header, data = mutations.read_parts(path)
        if TABLE in header:
            start, end = header[TABLE]["data_offsets"]
            head = bytearray(data[start:end])
            if rng.random() < 0.8:
                head[int(rng.integers(len(head)))] ^= 1 << int(rng.integers(8))
            header["lm_head.weight"] = header[TABLE] | {"data_offsets": [len(data), len(data) + len(head)]}
            mutations.write_parts(path, header, data + bytes(head))
    follow(directory)


def follow(directory):
    """Have the index list what the headers of its files list, where they can be read."""
    places = {}
    for file in sorted(directory.glob("model-*.safetensors")):
        try:
            header, _ = mutations.read_parts(file)
            places |= dict.fromkeys((name for name in header if name != "__metadata__"), file.name)
        except (ValueError, TypeError, struct.error):
            return
    path = directory / INDEX
    path.write_text(json.dumps(json.loads(path.read_text()) | {"weight_map": places}))


def config_value(directory, rng):
    """A value somewhere in config.json, the quantization_config before all, is replaced, dropped, added or doubled."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    node = config.get("quantization_config") if rng.random() < 0.8 else config
    node = node if isinstance(node, dict) and node else config
    while True:
        key = pick(rng, list(node))
        child = node[key]
        if isinstance(child, dict) and child and rng.random() < 0.8:
            node = child
            continue
        break
    match int(rng.integers(6)):
        case 0:
            del node[key]
        case 1:
            node[key + pick(rng, ("x", "_", "s", ""))] = pick(rng, JSON_VALUES)
        case 2 if isinstance(child, int | float) and not isinstance(child, bool):
            node[key] = child + int(rng.choice([-1, 1]))
        case _:
            node[key] = pick(rng, JSON_VALUES)
    text = json.dumps(config)
    if rng.random() < 0.05:
        text = text.replace(f'"{key}":', f'"{key}": 1, "{key}":', 1)
    path.write_text(text)


def config_text(directory, rng):
    path = directory / "config.json"
    blob = bytearray(path.read_bytes())
    match int(rng.integers(3)):
        case 0:
            blob[int(rng.integers(len(blob)))] ^= 1 << int(rng.integers(8))
        case 1:
            del blob[int(rng.integers(len(blob))) :]
        case _:
            at = int(rng.integers(len(blob)))
            blob[at:at] = pick(rng, (b"{", b"}", b'"', b",", b"NaN", b"1e999", b"\xff", b"\\ud800", b"0", b"[" * 200))
    path.write_bytes(blob)


def extra_expert_tensor(directory, rng):
    words = ("weight_g_idx", "weight_zero_point", "bias", "weight_scale_2", "input_scale", "zeros", "weight_packed")
    expert = 0
    if rng.random() < 0.5:
        expert, words = 7, (*words, "weight", "weight_shape", "weight_scale")
    name = f"model.layers.0.mlp.experts.{expert}.gate_proj.{pick(rng, words)}"
    mutations.add_tensor(lambda header, rng: name)(directory, rng)


# (expectation, mutation, weight)
DAMAGES = (
    ("refused", mutations.truncate, 2),
    ("refused", mutations.truncate_tail, 1),
    ("refused", mutations.append_bytes, 1),
    ("either", mutations.header_bit_flip, 10),
    ("refused", mutations.header_length_flip, 2),
    ("refused", mutations.random_header, 1),
    ("either", mutations.drop_tensor, 3),  # some are optional: weight_shape, a g_idx in order
    ("harmless", mutations.reorder_keys, 1),
    ("harmless", mutations.change_metadata, 1),
    ("refused", extra_expert_tensor, 3),
    ("either", data_bit, 10),
    ("either", special_value, 20),
    ("either", rename, 8),
    ("either", swap_entries, 6),
    ("either", other_dtype, 6),
    ("either", other_shape, 6),
    ("refused", other_offsets, 3),
    ("refused", hole, 3),
    ("either", resize, 4),
    ("either", scalar, 3),
    ("either", config_value, 12),
    ("either", other_head, 16),  # of most bases a config_value
    ("either", config_text, 6),
    ("either", index_value, 8),
)


def damage(directory, rng):
    """Apply one mutation, sometimes two. Returns (names, expectation)."""
    weights = np.array([weight for _, _, weight in DAMAGES], float)
    count = 2 if rng.random() < 0.15 else 1
    chosen = rng.choice(len(DAMAGES), count, p=weights / weights.sum())
    names, expectation = [], "either"
    for index in chosen:
        expectation, mutate, _ = DAMAGES[index]
        try:
            mutate(directory, rng)
        except (ValueError, KeyError, TypeError, IndexError, OverflowError, AttributeError, UnicodeError):
            if not names:  # only a second mutation may meet a file that the first has made unreadable
                raise
        names.append(mutate.__name__)
    if (directory / INDEX).exists() and not {"index_value", "other_head"} & set(names) and rng.random() < 0.7:
        follow(directory)
    return "+".join(names), expectation if count == 1 else "either"
