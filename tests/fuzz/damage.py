"""Random damage to a checkpoint directory: bytes, header, names, dtypes, shapes, values, config.json.

A mutation is a function ``(directory, rng) -> expectation``: "refused" (the class alone says so), "harmless" (must load
with the same meaning), or "either" (whatever is accepted has to mean what the files say: ``decoder`` decides).
"""

import json

import ml_dtypes
import numpy as np

from tests.support.checkpoints import mutations
from tests.support.checkpoints.mutations import FILE, pick, read_parts, write_parts

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


def pick_tensor(header, rng):
    return pick(rng, [name for name in header if name != "__metadata__"])


def data_bit(directory, rng):
    header, data = read_parts(directory / FILE)
    data = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
    write_parts(directory / FILE, header, bytes(data))
    return "either"


def special_value(directory, rng):
    """NaN, infinity, zero, negative, denormal or huge in one tensor, scales before all."""
    header, data = read_parts(directory / FILE)
    names = [name for name in header if name != "__metadata__"]
    scales = [name for name in names if any(word in name for word in ("scale", "zero", "g_idx", "shape", "scales"))]
    name = pick(rng, scales if scales and rng.random() < 0.8 else names)
    entry = header[name]
    start, end = entry["data_offsets"]
    values = np.frombuffer(data[start:end], DTYPES[entry["dtype"]]).copy()
    if not values.size:
        return "either"
    choices = SPECIAL_FLOATS if ml_dtypes.finfo and entry["dtype"][0] in "FB" else SPECIAL_INTEGERS
    value = pick(rng, choices)
    where = slice(None) if rng.random() < 0.2 else int(rng.integers(values.size))
    with np.errstate(all="ignore"):
        values[where] = np.array(value).astype(values.dtype)
    write_parts(directory / FILE, header, data[:start] + values.tobytes() + data[end:])
    return "either"


def rename(directory, rng):
    header, data = read_parts(directory / FILE)
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
        return "either"
    header = {new if key == name else key: entry for key, entry in header.items()}
    write_parts(directory / FILE, header, data)
    return "either"


def swap_entries(directory, rng):
    """Two tensors exchange their dtype, shape and data."""
    header, data = read_parts(directory / FILE)
    a, b = pick_tensor(header, rng), pick_tensor(header, rng)
    header[a], header[b] = header[b], header[a]
    write_parts(directory / FILE, header, data)
    return "either"


def other_dtype(directory, rng):
    header, data = read_parts(directory / FILE)
    entry = header[pick_tensor(header, rng)]
    entry["dtype"] = pick(rng, (*SAME_WIDTH[entry["dtype"]], "F4", "XX", 7))
    write_parts(directory / FILE, header, data)
    return "either"


def other_shape(directory, rng):
    header, data = read_parts(directory / FILE)
    entry = header[pick_tensor(header, rng)]
    shape = entry["shape"]
    count = int(np.prod(shape))
    options = [shape[::-1], [count], [1, *shape], [*shape, 1], [count, 1], [], [-1], [2**62, 4], [0], None, [count / 2]]
    entry["shape"] = pick(rng, options)
    write_parts(directory / FILE, header, data)
    return "either"


def other_offsets(directory, rng):
    header, data = read_parts(directory / FILE)
    entry = header[pick_tensor(header, rng)]
    start, end = entry["data_offsets"]
    by = int(rng.choice([-8, -1, 1, 2, 8, 2**63]))
    options = [[start + by, end + by], [end, start], [start, end + by], [-end, -start], [start], "0", [start, None]]
    entry["data_offsets"] = pick(rng, options)
    write_parts(directory / FILE, header, data)
    return "refused"


def resize(directory, rng):
    """One tensor loses or gains a row, the file staying valid."""
    header, data = read_parts(directory / FILE)
    name = pick(rng, [n for n in header if n != "__metadata__" and header[n]["shape"] and header[n]["shape"][0]])
    entry = header[name]
    start, end = entry["data_offsets"]
    row = (end - start) // entry["shape"][0]
    grows = rng.random() < 0.5
    change = row if grows else -row
    data = data[:end] + data[start : start + row] + data[end:] if grows else data[: end - row] + data[end:]
    entry["shape"] = [entry["shape"][0] + (1 if grows else -1), *entry["shape"][1:]]
    for other in (e for n, e in header.items() if n != "__metadata__"):
        if other["data_offsets"][0] >= end:
            other["data_offsets"] = [x + change for x in other["data_offsets"]]
    entry["data_offsets"] = [start, end + change]
    write_parts(directory / FILE, header, data)
    return "either"


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
    return "either"


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
    return "either"


def _reused(name, expectation):
    def mutate(directory, rng):
        getattr(mutations, name)(directory, rng)
        return expectation

    mutate.__name__ = name
    return mutate


def _extra_expert_tensor(directory, rng):
    words = ("weight_g_idx", "weight_zero_point", "bias", "weight_scale_2", "input_scale", "zeros", "weight_packed")
    name = pick(rng, words)
    mutations.add_tensor(lambda header, rng: f"model.layers.0.mlp.experts.0.gate_proj.{name}")(directory, rng)
    return "refused"


# (mutation, weight)
DAMAGES = (
    (_reused("truncate", "refused"), 2),
    (_reused("truncate_tail", "refused"), 1),
    (_reused("append_bytes", "refused"), 1),
    (_reused("header_bit_flip", "either"), 10),
    (_reused("header_length_flip", "refused"), 2),
    (_reused("random_header", "refused"), 1),
    (_reused("drop_tensor", "either"), 3),  # some are optional: weight_shape, a g_idx in order
    (_reused("reorder_keys", "harmless"), 1),
    (_reused("change_metadata", "harmless"), 1),
    (_extra_expert_tensor, 3),
    (data_bit, 10),
    (special_value, 20),
    (rename, 8),
    (swap_entries, 6),
    (other_dtype, 6),
    (other_shape, 6),
    (other_offsets, 3),
    (resize, 4),
    (config_value, 24),
    (config_text, 6),
)


def damage(directory, rng):
    """Apply one mutation, sometimes two. Returns (names, expectation)."""
    weights = np.array([weight for _, weight in DAMAGES], float)
    count = 2 if rng.random() < 0.15 else 1
    chosen = rng.choice(len(DAMAGES), count, p=weights / weights.sum())
    names, expectation = [], None
    for index in chosen:
        mutate = DAMAGES[index][0]
        try:
            expectation = mutate(directory, rng)
        except (ValueError, KeyError, TypeError, IndexError, OverflowError, AttributeError, UnicodeError):
            if not names:  # only a second mutation may meet a file that the first has made unreadable
                raise
        names.append(mutate.__name__.lstrip("_"))
    return "+".join(names), expectation if count == 1 else "either"
