"""What a checkpoint of ``bases`` or ``models`` means, read in NumPy from its files as formats.md states it: the fuzz's
oracle.

It knows none of moe_jax. Where config and tensors do not fit each other it raises ``Meaningless``.
"""

import json
import re
import struct

import ml_dtypes
import numpy as np

F = np.float32
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], F)
DTYPES = {
    "F32": F,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F64": np.float64,
    "U8": np.uint8,
    "I8": np.int8,
    "I32": np.int32,
    "I64": np.int64,
    "U32": np.uint32,
    "U64": np.uint64,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}
FLOATS = ("F32", "F16", "BF16")
SHARDS = {"gate_proj": "w1", "w1": "w1", "up_proj": "w3", "w3": "w3", "down_proj": "w2", "w2": "w2"}
SUFFIXES = {"weight_scale_inv": "weight_scale", "scale": "weight_scale", "scale_inv": "weight_scale"}
CONTAINERS = "(?:mlp|block_sparse_moe|feed_forward)"
EXPERT = re.compile(rf"(?:model\.)?layers\.(\d+)\.{CONTAINERS}\.experts\.(.*)")
ROUTER = re.compile(rf"(model\.layers\.\d+)\.{CONTAINERS}\.(gate\..*)")
CORRECTION = "e_score_correction_bias"
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


class Meaningless(Exception):
    """Config and tensors do not fit."""


def need(condition, text):
    if not condition:
        raise Meaningless(text)


def unique(pairs):
    need(len(dict(pairs)) == len(pairs), "a key twice")
    return dict(pairs)


def read(directory):
    """(config, {name: (dtype name, array)})"""
    config = json.loads((directory / "config.json").read_text(), object_pairs_hook=unique)
    index, tensors = directory / "model.safetensors.index.json", {}
    if not index.exists():
        return config, _read_file(directory / "model.safetensors")
    weight_map = json.loads(index.read_text(), object_pairs_hook=unique)["weight_map"]
    for file in sorted(set(weight_map.values())):
        own = _read_file(directory / file)
        need(set(own) == {name for name, place in weight_map.items() if place == file}, f"index and {file}")
        tensors |= own
    return config, tensors


def _read_file(path):
    blob = path.read_bytes()
    (size,) = struct.unpack("<Q", blob[:8])
    header, data = json.loads(blob[8 : 8 + size], object_pairs_hook=unique), blob[8 + size :]
    tensors, covered = {}, 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        need(0 <= start <= end <= len(data), "offsets")
        covered += end - start
        dtype = DTYPES.get(entry["dtype"])  # None: no tensor that is used may be stored so
        array = np.frombuffer(data[start:end], np.uint8 if dtype is None else dtype)
        tensors[name] = entry["dtype"], array if dtype is None else array.reshape(entry["shape"])
    need(covered == len(data), "bytes that belong to no tensor, or to two")
    return tensors


def decode_layer(config, tensors, layer, num_experts, hidden, intermediate):
    """{(expert, shard): float32 (n, k)}; for "bias": {(expert, shard): (n,)}; for "w13" and "w2" the input scale of the
    product, None without."""
    parts, result = {}, {}
    for name, (dtype, array) in tensors.items():
        match = EXPERT.fullmatch(name)
        if match is None or int(match[1]) != layer:
            continue
        words = match[2].split(".")
        if words[0].isdecimal():
            need(len(words) == 3 and words[1] in SHARDS, f"name {name}")
            key = int(words[0]), SHARDS[words[1]]
            suffix = SUFFIXES.get(words[2], words[2])
            need(suffix not in parts.setdefault(key, {}), f"{name} twice")
            parts[key][suffix] = dtype, array
        else:
            _fused(parts, words, dtype, array, num_experts)
    expected = {(e, shard) for e in range(num_experts) for shard in ("w1", "w3", "w2")}
    need(set(parts) == expected, f"experts {sorted(parts)}")
    stated = config.get("quantization_config")
    for (expert, shard), own in parts.items():
        n, k = (hidden, intermediate) if shard == "w2" else (intermediate, hidden)
        result[expert, shard] = _matrix(stated, {s: leaf for s, leaf in own.items() if s != "bias"}, n, k)
    result["bias"] = {key: own["bias"][1].astype(F) for key, own in parts.items() if "bias" in own}
    for product, shards in (("w13", ("w1", "w3")), ("w2", ("w2",))):
        own = [parts[expert, shard] for expert in range(num_experts) for shard in shards]
        result[product] = _input_scale(stated, own)
    return result


def _input_scale(stated, parts):
    """One for all experts, and for gate and up: the one of the largest range. Global scales of compressed-tensors
    divide, so theirs is the smallest; 1 and infinity stand for experts that saw no token."""
    divides = any("input_global_scale" in own for own in parts)
    name = "input_global_scale" if divides else "input_scale"
    if not any(name in own for own in parts):
        return None
    values = np.array([_one(own, name) for own in parts])
    if not divides:
        return values.max()
    seen = values[np.isfinite(values) & (values != 1)]
    return seen.min() if seen.size else F(1)


def decode_dense(config, tensors, name, shape):
    """float32, of a parameter that belongs to no expert."""
    tensors = {re.sub(ROUTER, r"\1.mlp.\2", key): leaf for key, leaf in tensors.items()}
    module, _, attribute = name.rpartition(".")
    own = {key[len(module) + 1 :]: leaf for key, leaf in tensors.items() if key.rpartition(".")[0] == module}
    own = {SUFFIXES.get(suffix, suffix): leaf for suffix, leaf in own.items() if suffix not in ("bias", CORRECTION)}
    if attribute != "weight" or len(shape) != 2 or set(own) == {"weight"}:
        need(name in tensors and tensors[name][0] in FLOATS, f"{name} missing")
        need(tensors[name][1].shape == shape, f"{name} {tensors[name][1].shape}")
        return tensors[name][1].astype(F)
    return _matrix(config.get("quantization_config"), own, *shape)


def _fused(parts, words, dtype, array, num_experts):
    match = re.fullmatch(r"(gate_up_proj|down_proj)_(blocks|scales|bias)", ".".join(words))
    need(match is not None and array.shape[0] == num_experts, "fused name")
    for expert in range(num_experts):
        views = {"w2": array[expert]}
        if match[1] == "gate_up_proj":
            views = {"w1": array[expert][0::2], "w3": array[expert][1::2]}
        for shard, view in views.items():
            parts.setdefault((expert, shard), {})[match[2]] = dtype, view


def _matrix(stated, own, n, k):
    if stated is None:
        need(set(own) == {"weight"}, "surplus")
        return _values(own, "weight", FLOATS, (n, k))
    need(isinstance(stated, dict), "quantization_config")
    method = stated.get("quant_method", "compressed-tensors" if "config_groups" in stated else None)
    match method:
        case "compressed-tensors":
            return _compressed(stated, own, n, k)
        case "fp8":
            if stated.get("weight_block_size") is None:
                scales = {"weight_scale"} | ({"input_scale"} if stated.get("activation_scheme") == "static" else set())
                need(set(own) == {"weight"} | scales, "leaves")
                return _values(own, "weight", ("F8_E4M3",), (n, k)) * _one(own, "weight_scale")
            need(stated["weight_block_size"] == [128, 128] and set(own) == {"weight", "weight_scale"}, "blocks")
            return _values(own, "weight", ("F8_E4M3",), (n, k)) * _spread(own, (128, 128), n, k)
        case "fbgemm_fp8":
            return _values(own, "weight", ("F8_E4M3",), (n, k)) * _spread(own, (1, k), n, k)
        case "gptq":
            return _gptq(stated, own, n, k)
        case "awq":
            return _awq(stated, own, n, k)
        case "modelopt":
            return _modelopt(stated, own, n, k)
        case "mxfp4":
            need(set(own) == {"blocks", "scales"}, "leaves")
            need(own["blocks"][0] == own["scales"][0] == "U8" and own["blocks"][1].shape == (n, k // 32, 16), "shape")
            return _nibbles(own["blocks"][1].reshape(n, -1)) * np.repeat(_powers(own["scales"][1]), 32, axis=1)
    raise Meaningless(f"quant_method {method!r}")


def _compressed(stated, own, n, k):
    need(isinstance(stated.get("config_groups"), dict) and len(stated["config_groups"]) == 1, "groups")
    ((_, scheme),) = stated["config_groups"].items()
    need("Linear" in scheme["targets"] or any(t.startswith("re:") for t in scheme["targets"]), "targets")
    args = scheme["weights"]
    bits, kind, strategy, size = (args.get(key) for key in ("num_bits", "type", "strategy", "group_size"))
    bits, kind = (8 if bits is None else bits), (kind or "int").lower()  # null values stand for defaults
    size = None if size == -1 else size
    if strategy is None:
        strategy = "group" if size else "channel" if args.get("group_size") == -1 else "tensor"
    strategy = strategy.lower()
    extent = {"tensor": (n, k), "channel": (1, k), "group": (1, size), "tensor_group": (1, size)}.get(strategy)
    if strategy == "block":
        block = args["block_structure"]
        extent = tuple(int(v) for v in (block.split("x") if isinstance(block, str) else block))
    need(extent is not None, "strategy")
    allowed = {"weight_scale", "weight_shape", "input_scale", "input_global_scale", "weight_g_idx"}
    if kind == "float" and bits == 4:
        allowed |= {"weight_packed", "weight_global_scale"}
        need(set(own) <= allowed, f"leaves {sorted(own)}")
        codes = _nibbles(_raw(own, "weight_packed", "U8", (n, k // 2)))
        if strategy == "tensor_group":
            scale = _values(own, "weight_scale", ("F8_E4M3",), (n, k // 16)) / _one(own, "weight_global_scale")
            return codes * np.repeat(scale, 16, axis=1)
        need(own["weight_scale"][0] in ("U8", "F8_E8M0") and own["weight_scale"][1].shape == (n, k // 32), "scale")
        return codes * np.repeat(_powers(own["weight_scale"][1]), 32, axis=1)
    if kind == "float":
        need(bits == 8 and set(own) <= allowed | {"weight"}, f"leaves {sorted(own)}")
        weight = _values(own, "weight", ("F8_E4M3",), (n, k))
        if size == 32 and strategy == "group":
            return weight * np.repeat(_powers(own["weight_scale"][1]), 32, axis=1)
        return weight * _spread(own, extent, n, k)
    symmetric = args.get("symmetric") is not False
    allowed |= {"weight", "weight_packed"} | (set() if symmetric else {"weight_zero_point"})
    need(set(own) <= allowed and ("weight" in own) != ("weight_packed" in own), f"leaves {sorted(own)}")
    if "weight" in own:
        codes = _raw(own, "weight", "I8", (n, k)).astype(np.int32)
        need(codes.min() >= -(1 << (bits - 1)) and codes.max() < 1 << (bits - 1), "range")
    else:
        if "weight_shape" in own:
            need(own["weight_shape"][1].reshape(-1).tolist() == [n, k], "weight_shape")
        codes = _words(own, "weight_packed", n, bits, k) - (1 << (bits - 1))
    groups = -(-k // (size or k))
    columns = np.arange(k) // (size or k)
    # "weight" and "static" leave no trace
    if args.get("actorder") in ("group", "dynamic", True):
        g_idx = _raw(own, "weight_g_idx", "I32", (k,))
        columns = columns if (g_idx == -1).all() else g_idx
        need(((columns >= 0) & (columns < groups)).all(), "g_idx")
    else:
        need("weight_g_idx" not in own, "g_idx")
    if not symmetric:
        zero = own["weight_zero_point"][1]
        if zero.dtype == np.int32:
            own = own | {"turned": ("I32", own["weight_zero_point"][1].T)}
            zero = _words(own, "turned", groups, bits, n).T - (1 << (bits - 1))
        codes = codes - zero.reshape(n, groups)[:, columns]
    scale = _values(own, "weight_scale", FLOATS, None).reshape(n, groups)
    return codes.astype(F) * scale[:, columns]


def _gptq(stated, own, n, k):
    bits, size = stated["bits"], stated.get("group_size", 128)
    size = k if size == -1 else size
    need(bits == 4 and k % size == 0, "bits")
    codes = _bits(_raw(own, "qweight", "I32", (k // 8, n)).T, 4, k).T
    symmetric = stated.get("sym", True)
    zero = np.full((k // size, n), 8)
    if "qzeros" in own or not symmetric:
        zero = _bits(_raw(own, "qzeros", "I32", (k // size, n // 8)), 4, n)
        zero = zero + (0 if stated.get("checkpoint_format") == "gptq_v2" else 1)
    if symmetric:
        need((zero == 8).all(), "zeros of symmetric")
    in_order = np.arange(k) // size
    # where columns are in order the tensor only has to say so
    g_idx = own["g_idx"][1].astype(np.int64).reshape(k) if "g_idx" in own else in_order
    g_idx = in_order if (g_idx == -1).all() else g_idx
    if not stated.get("desc_act", False):
        need((g_idx == in_order).all(), "order")
    need(((g_idx >= 0) & (g_idx < k // size)).all(), "g_idx")
    scales = _values(own, "scales", FLOATS, (k // size, n))
    return ((codes - zero[g_idx]).astype(F) * scales[g_idx]).T


def _awq(stated, own, n, k):
    size = stated.get("group_size", stated.get("q_group_size", 128))
    size = k if size == -1 else size
    need(k % size == 0, "group_size")

    def codes_of(words, rows):
        words = words.view(np.uint32)[..., None] >> (4 * np.array(AWQ_ORDER, np.uint32)) & 15
        return words.reshape(rows, n).astype(np.int32)

    codes = codes_of(_raw(own, "qweight", "I32", (k, n // 8)), k)
    zero = codes_of(_raw(own, "qzeros", "I32", (k // size, n // 8)), k // size)
    if stated.get("zero_point", True) is False:
        need((zero == 8).all(), "zeros")
    groups = np.arange(k) // size
    return ((codes - zero[groups]).astype(F) * _values(own, "scales", FLOATS, (k // size, n))[groups]).T


def _modelopt(stated, own, n, k):
    algorithm = stated.get("quant_algo")
    if algorithm == "FP8":
        need(set(own) == {"weight", "weight_scale", "input_scale"}, "leaves")
        return _values(own, "weight", ("F8_E4M3",), (n, k)) * _one(own, "weight_scale")
    if algorithm in ("FP8_PER_CHANNEL_PER_TOKEN",):
        return _values(own, "weight", ("F8_E4M3",), (n, k)) * _spread(own, (1, k), n, k)
    need(algorithm in ("NVFP4", "W4A16_NVFP4"), "quant_algo")
    need(("input_scale" in own) == (algorithm == "NVFP4"), "input scale")
    scale = _values(own, "weight_scale", ("F8_E4M3",), (n, k // 16)) * _one(own, "weight_scale_2")
    return _nibbles(_raw(own, "weight", "U8", (n, k // 2))) * np.repeat(scale, 16, axis=1)


def _raw(own, suffix, dtype, shape):
    need(suffix in own and own[suffix][0] == dtype and own[suffix][1].shape == shape, f"{suffix} {own.get(suffix)}")
    return own[suffix][1]


def _values(own, suffix, dtypes, shape):
    need(suffix in own and own[suffix][0] in dtypes, f"{suffix}")
    array = own[suffix][1]
    need(shape is None or array.shape == shape, f"{suffix} {array.shape}")
    return array.astype(F)


def _one(own, suffix):
    value = _values(own, suffix, (*FLOATS, "F8_E8M0"), None)
    need(value.size == 1, suffix)
    return value.reshape(())


def _spread(own, extent, n, k):
    """The scale of every element, block by block from the top left."""
    scale = _values(own, "weight_scale", (*FLOATS, "F8_E8M0"), None)
    rows, columns = -(-n // extent[0]), -(-k // extent[1])
    need(scale.size == rows * columns, "scale size")
    return np.kron(scale.reshape(rows, columns), np.ones(extent, F))[:n, :k]


def _nibbles(data):
    return E2M1[np.stack([data & 15, data >> 4], -1).reshape(data.shape[0], -1)]


def _powers(exponents):
    exponents = exponents.view(np.uint8)
    return np.where(exponents == 255, np.nan, np.exp2(exponents.astype(F) - 127)).astype(F)


def _words(own, suffix, rows, bits, count):
    """Codes in words without gaps, or where the number of words says so with 32 // bits of them in each."""
    need(suffix in own and own[suffix][0] == "I32" and own[suffix][1].ndim == 2, suffix)
    words = np.ascontiguousarray(own[suffix][1])
    dense, padded = -(-count * bits // 32), -(-count // (32 // bits))
    need(words.shape[0] == rows and words.shape[1] in (dense, padded), f"{suffix} {words.shape}")
    if words.shape[1] == dense:
        return _bits(words, bits, count)
    per_word = 32 // bits
    spread = words.view(np.uint32)[..., None] >> (bits * np.arange(per_word, dtype=np.uint32)) & (2**bits - 1)
    return spread.reshape(rows, -1)[:, :count].astype(np.int32)


def _bits(words, bits, count):
    """(rows, words) int32 -> (rows, count): a stream of bits per row, lowest first."""
    stream = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little")
    weights = 1 << np.arange(bits)
    return (stream[:, : count * bits].reshape(words.shape[0], count, bits) * weights).sum(-1).astype(np.int32)
