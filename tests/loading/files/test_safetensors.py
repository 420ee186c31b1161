"""The safetensors reader: the safetensors package writes the files and judges what is valid."""

import concurrent.futures
import json
import os
import re
import struct
import sys
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

from moe_jax.loading import CheckpointError, SafetensorsFile, save_safetensors
from moe_jax.loading.files._safetensors import DTYPES, PACKED_BITS
from tests.support.refusals import refuses

TORCH_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}


def raw_file(path, header, data=b""):
    """A safetensors file from a header (dict, text or bytes), without any help that could repair it."""
    text = json.dumps(header) if isinstance(header, dict) else header
    blob = text.encode() if isinstance(text, str) else text
    path.write_bytes(struct.pack("<Q", len(blob)) + blob + data)
    return path


def entry(dtype, shape, offsets):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def torch_tensor(name, shape=(3, 5)):
    count = int(np.prod(shape))
    size = count * TORCH_DTYPES[name].itemsize
    raw = np.random.default_rng(len(name)).integers(0, 2 if name == "BOOL" else 120, size)
    return torch.from_numpy(raw.astype(np.uint8)).view(TORCH_DTYPES[name]).reshape(shape)


def as_bytes(array):
    return np.ascontiguousarray(array).tobytes()


# -- reading ----------------------------------------------------------------------------------------------------------


def test_all_dtypes_written_by_torch(tmp_path):
    tensors = {name: torch_tensor(name) for name in TORCH_DTYPES}
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors")
    with SafetensorsFile(tmp_path / "a.safetensors") as file:
        assert set(file.names) == set(tensors)
        for name, tensor in tensors.items():
            array = file.read(name)
            assert array.dtype == DTYPES[name] and file.info(name).dtype == name
            assert as_bytes(array) == bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())
            if tensor.dtype not in (torch.bool, torch.complex64):
                expected = tensor.to(torch.float64).numpy()
                np.testing.assert_array_equal(array.astype(np.float64), expected)


def test_every_dtype_of_the_format_is_known(tmp_path):
    """The package's own list, taken from its error message, is ours."""
    path = raw_file(tmp_path / "a.safetensors", {"a": entry("NOPE", [1], [0, 1])}, b"a")
    with pytest.raises(Exception, match="expected one of") as error:
        safetensors.deserialize(path.read_bytes())
    theirs = re.findall(r"`(\w+)`", str(error.value).split("expected one of")[1])
    assert set(theirs) == set(DTYPES) | set(PACKED_BITS)


def test_e8m0_and_packed_kinds(tmp_path):
    header = {
        "f4": entry("F4", [2, 6], [0, 6]),
        "f6": entry("F6_E2M3", [2, 4], [6, 12]),
        "ragged": entry("F4", [2, 3], [12, 15]),
        "scale": entry("F8_E8M0", [3], [15, 18]),
    }
    path = raw_file(tmp_path / "a.safetensors", header, bytes(range(15)) + bytes([127, 128, 130]))
    safetensors.deserialize(path.read_bytes())
    with SafetensorsFile(path) as file:
        np.testing.assert_array_equal(file.read("f4"), np.arange(6, dtype=np.uint8).reshape(2, 3))
        np.testing.assert_array_equal(file.read("f4", slice(1, 2)), [[3, 4, 5]])
        np.testing.assert_array_equal(file.read("f6"), np.arange(6, 12, dtype=np.uint8).reshape(2, 3))
        np.testing.assert_array_equal(file.read("ragged"), [12, 13, 14])
        np.testing.assert_array_equal(file.read("scale").astype(np.float32), [1.0, 2.0, 8.0])
        with pytest.raises(ValueError, match="no rows"):
            file.read("ragged", slice(0, 1))


def test_scalars_empty_tensors_and_metadata(tmp_path):
    tensors = {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 7), "inner": torch.zeros(3, 0, 2)}
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt", "note": "é"})
    with SafetensorsFile(tmp_path / "a.safetensors") as file:
        assert file.metadata == {"format": "pt", "note": "é"}
        assert {name: file.read(name).shape for name in file.names} == {k: tuple(v.shape) for k, v in tensors.items()}
        assert float(file.read("scalar")) == 2.5
        assert file.read("empty", slice(0, 5)).shape == (0, 7) and file.read("inner", slice(1, 3)).shape == (2, 0, 2)
        with pytest.raises(ValueError, match="no rows"):
            file.read("scalar", slice(0, 1))


@pytest.mark.parametrize("rows", [slice(0, 2), slice(3, 7), slice(7, 99), slice(-2, None), slice(5, 2), slice(None)])
def test_row_ranges_equal_slicing(tmp_path, rows):
    tensor = torch.randn(9, 4, 3, dtype=torch.float32).to(torch.bfloat16)
    safetensors.torch.save_file({"pad": torch.ones(3), "w": tensor}, tmp_path / "a.safetensors")
    with SafetensorsFile(tmp_path / "a.safetensors") as file:
        part = file.read("w", rows)
        assert as_bytes(part) == as_bytes(tensor.view(torch.int16).numpy()[rows])
        assert file.bytes_read == part.nbytes == len(range(9)[rows]) * 24
        with pytest.raises(ValueError, match="step 1"):
            file.read("w", slice(0, 4, 2))


def bytes_from_files():
    """The kernel's own count of what this process has read."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.skipif(sys.platform != "linux", reason="counts through /proc")
def test_a_row_range_reads_no_other_row(tmp_path):
    """1/64 of a 32 MiB tensor."""
    save_safetensors(tmp_path / "a.safetensors", {"w": np.ones((64, 1 << 17), np.float32)})
    before = bytes_from_files()
    with SafetensorsFile(tmp_path / "a.safetensors") as file:
        assert float(file.read("w", slice(40, 41)).sum()) == 1 << 17
    assert 1 << 19 <= bytes_from_files() - before < 1 << 20


@pytest.mark.parametrize("columns", [slice(1, 3), slice(-2, None), slice(2, 2), slice(0, 99)])
@pytest.mark.parametrize("rows", [None, slice(1, 4), slice(3, 3)])
@pytest.mark.parametrize("buffer", [1, 30, 1 << 24])
def test_column_ranges_equal_slicing(tmp_path, monkeypatch, rows, columns, buffer):
    """Of a matrix and of one per expert, whole rows at a time through the buffer."""
    monkeypatch.setattr("moe_jax.loading.files._safetensors._BUFFER_BYTES", buffer)
    arrays = {"pad": np.ones(3, np.uint8), "w": np.arange(30).reshape(6, 5), "e": np.arange(60, dtype=np.int16)}
    arrays["e"] = arrays["e"].reshape(5, 3, 4)
    save_safetensors(tmp_path / "a.safetensors", arrays)
    with SafetensorsFile(tmp_path / "a.safetensors") as file:
        for name in ("w", "e"):
            expected = (arrays[name] if rows is None else arrays[name][rows])[..., columns]
            found = file.read(name, rows, columns)
            np.testing.assert_array_equal(found, expected)
            assert found.dtype == expected.dtype and found.base is None or found.base.nbytes == found.nbytes


def test_arrays_are_read_only_and_outlive_the_file(tmp_path):
    save_safetensors(tmp_path / "a.safetensors", {"w": np.arange(6, dtype=np.float32).reshape(2, 3)})
    file = SafetensorsFile(tmp_path / "a.safetensors")
    number, array = file._descriptor.number, file.read("w")
    with pytest.raises(ValueError, match="read-only"):
        array[0, 0] = 1.0
    os.truncate(tmp_path / "a.safetensors", 0)
    file.close()
    file.close()
    np.testing.assert_array_equal(array, [[0, 1, 2], [3, 4, 5]])
    refuses(ValueError, "after close", file.read, "w")
    refuses(OSError, "Bad file descriptor", os.fstat, number)


def test_a_file_that_is_cut_while_it_is_open(tmp_path):
    """One line that names the tensor; of a mapped file the system would end the process."""
    path = tmp_path / "a.safetensors"
    save_safetensors(path, {"a": np.ones(1000, np.float32), "b": np.ones((1000, 100), np.float32)})
    with pytest.raises(CheckpointError, match="written to while it was read"), SafetensorsFile(path) as file:
        os.truncate(path, path.stat().st_size - 1)
        assert file.read("a").sum() == 1000
        for columns in (None, slice(0, 7)):
            with pytest.raises(CheckpointError, match=r"tensor b: the file ends at \d+, 1 bytes too early"):
                file.read("b", columns=columns)
        file.check_unchanged()


def test_a_file_that_is_rewritten_while_it_is_open(tmp_path):
    path = tmp_path / "a.safetensors"
    save_safetensors(path, {"a": np.ones(1000, np.float32)})
    with SafetensorsFile(path) as file:
        path.chmod(0o600)  # which changes nothing that was read
        file.check_unchanged()
        with open(path, "r+b") as writer:
            writer.seek(-4, os.SEEK_END)
            writer.write(b"else")
        os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))  # clocks of file systems are coarse
        refuses(CheckpointError, "a.safetensors: was written to while it was read", file.check_unchanged)


def test_data_need_not_be_aligned(tmp_path):
    """Files of other writers start tensors anywhere; what is read works in NumPy and JAX."""
    header = {"a": entry("U8", [1], [0, 1]), "b": entry("F32", [2], [1, 9]), "c": entry("BF16", [2], [9, 13])}
    data = b"\7" + np.array([1.5, -2.0], np.float32).tobytes() + np.array([3.0, 4.0], ml_dtypes.bfloat16).tobytes()
    path = raw_file(tmp_path / "a.safetensors", json.dumps(header), data)
    with SafetensorsFile(path) as file:
        np.testing.assert_array_equal(file.read("b") * 2, [3.0, -4.0])
        np.testing.assert_array_equal(np.asarray(jnp.asarray(file.read("b"))), [1.5, -2.0])
        np.testing.assert_array_equal(np.asarray(jnp.asarray(file.read("c"))).astype(np.float32), [3.0, 4.0])


def test_order_of_the_header_does_not_matter(tmp_path):
    header = {"z": entry("U8", [2], [1, 3]), "a": entry("U8", [], [0, 1]), "none": entry("F32", [0], [1, 1])}
    with SafetensorsFile(raw_file(tmp_path / "a.safetensors", header, b"abc")) as file:
        assert file.names == ("a", "none", "z")
        assert file.nbytes == 3 and bytes(file.read("z")) == b"bc"


def test_threads_read_at_once(tmp_path):
    save_safetensors(tmp_path / "a.safetensors", {str(i): np.full((64, 64), i, np.int32) for i in range(32)})
    with SafetensorsFile(tmp_path / "a.safetensors") as file, concurrent.futures.ThreadPoolExecutor(8) as pool:
        sums = list(pool.map(lambda i: int(file.read(str(i % 32)).sum()), range(512)))
        assert sums == [i % 32 * 4096 for i in range(512)]
        assert file.bytes_read == 512 * 4096 * 4


def test_save_safetensors_is_readable_by_torch(tmp_path):
    arrays = {
        "bf16": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3),
        "fp8": np.ones((2, 2), ml_dtypes.float8_e4m3fn).T,
        "scalar": np.float32(3.0),
    }
    save_safetensors(tmp_path / "a.safetensors", arrays)
    loaded = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert loaded["bf16"].dtype == torch.bfloat16 and loaded["bf16"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert loaded["fp8"].dtype == torch.float8_e4m3fn and loaded["scalar"].shape == ()


# -- refusing ---------------------------------------------------------------------------------------------------------

U8_2 = entry("U8", [2], [0, 2])
FLAWS = {
    "huge product": ({"a": entry("U8", [2**40, 2**40], [0, 2])}, b"ab", "overflows"),
    "product wraps to the right size": ({"a": entry("U8", [2**63 + 1, 2], [0, 2])}, b"ab", "overflows"),
    "empty but unaddressable": ({"a": entry("U8", [2**40, 2**40, 0], [0, 0])}, b"", "overflows"),
    "bytes do not match": ({"a": entry("U8", [3], [0, 2])}, b"ab", "expected 3 for U8"),
    "dtype too wide": ({"a": entry("F32", [2], [0, 2])}, b"ab", "expected 8 for F32"),
    "sub-byte remainder": ({"a": entry("F4", [3], [0, 2])}, b"ab", "whole bytes"),
    "negative dimension": ({"a": entry("U8", [-2], [0, 2])}, b"ab", "integers >= 0"),
    "dimension as float": ({"a": entry("U8", [2.0], [0, 2])}, b"ab", "integers >= 0"),
    "dimension as bool": ({"a": entry("U8", [True], [0, 1])}, b"a", "integers >= 0"),
    "shape as int": ({"a": entry("U8", 2, [0, 2])}, b"ab", "integers >= 0"),
    "too many dimensions": ({"a": entry("U8", [1] * 99, [0, 1])}, b"a", "at most 32"),
    "dtype unknown": ({"a": entry("F7", [2], [0, 2])}, b"ab", "dtype 'F7' is unknown"),
    "dtype not a string": ({"a": entry(["U8"], [2], [0, 2])}, b"ab", "is unknown"),
    "reversed offsets": ({"a": entry("U8", [2], [2, 0])}, b"ab", "span -2 bytes"),
    "negative offset": ({"a": entry("U8", [2], [-2, 0])}, b"ab", "two integers"),
    "three offsets": ({"a": entry("U8", [2], [0, 2, 2])}, b"ab", "two integers"),
    "field missing": ({"a": {"dtype": "U8", "shape": [2]}}, b"ab", "expected dtype, shape and data_offsets"),
    "field unknown": ({"a": U8_2 | {"strides": [1]}}, b"ab", "expected dtype, shape and data_offsets"),
    "entry a list": ({"a": ["U8", [2], [0, 2]]}, b"ab", "expected dtype, shape and data_offsets"),
    "name too long": ({"a" * 1001: U8_2}, b"ab", "its name has 1001 characters, expected at most 1000"),
    "overlap": ({"a": U8_2, "b": entry("U8", [2], [1, 3])}, b"abc", "tensor b: .*overlaps"),
    "same place twice": ({"a": U8_2, "b": U8_2}, b"ab", "overlaps"),
    "hole": ({"a": U8_2, "b": entry("U8", [1], [3, 4])}, b"abcd", "tensor b: .*hole"),
    "hole in front": ({"a": entry("U8", [2], [1, 3])}, b"abc", "hole"),
    "empty tensor off the grid": ({"a": U8_2, "b": entry("U8", [0], [1, 1])}, b"ab", "overlaps"),
    "trailing data": ({"a": U8_2}, b"abc", "1 bytes after the last tensor"),
    "data cut off": ({"a": U8_2, "b": entry("U8", [4], [2, 6])}, b"abc", "truncated in b"),
    "duplicate tensor": (f'{{"a": {json.dumps(U8_2)}, "a": {json.dumps(U8_2)}}}', b"ab", "'a' occurs twice"),
    "duplicate field": (f'{{"a": {{"dtype": "I8", {json.dumps(U8_2)[1:]}}}', b"ab", "'dtype' occurs twice"),
    "duplicate metadata": ('{"__metadata__": {}, "__metadata__": {}}', b"", "occurs twice"),
    "metadata not strings": ({"__metadata__": {"a": 1}}, b"", "__metadata__ is"),
    "metadata a list": ({"__metadata__": ["a"]}, b"", "__metadata__ is"),
    "not an object": ("[1, 2]", b"", "starts with"),
    "leading blank": (" {}", b"", "starts with"),
    "empty header": ("", b"", "starts with"),
    "cut JSON": ('{"a": {"dtype"', b"", "not valid JSON"),
    "two values": ("{}{}", b"", "not valid JSON"),
    "single quotes": ("{'a': 1}", b"", "not valid JSON"),
    "NaN": ('{"a": NaN}', b"", "NaN is not a JSON number"),
    "float overflow": ('{"a": 1e999}', b"", "too large"),
    "ten thousand digits": ('{"a": %s}' % ("9" * 10_000), b"", "not valid JSON"),
    "nested deep": ('{"a":' * 100_000 + "1" + "}" * 100_000, b"", "too deeply"),
    "nested": ('{"a":' * 200 + "1" + "}" * 200, b"", "too deeply"),
    "not UTF-8": (b'{"\xff": 1}', b"", "not UTF-8"),
    "unpaired surrogate": (r'{"\ud800": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}', b"ab", "surrogate"),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_flawed_headers_are_refused(tmp_path, flaw):
    header, data, message = FLAWS[flaw]
    path = raw_file(tmp_path / "a.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message) as error:
        SafetensorsFile(path)
    text = str(error.value)
    assert text.startswith(str(path)) and "\n" not in text and len(text) < 1000


def test_lengths_of_file_and_header(tmp_path):
    path = tmp_path / "a.safetensors"
    for size in range(8):
        path.write_bytes(b"x" * size)
        refuses(CheckpointError, "expected at least 8", SafetensorsFile, path)
    path.write_bytes(struct.pack("<Q", 100_000_001) + b"{}")
    refuses(CheckpointError, "expected at most 100000000", SafetensorsFile, path)
    path.write_bytes(struct.pack("<Q", 2**63) + b"{}")
    refuses(CheckpointError, "expected at most", SafetensorsFile, path)
    path.write_bytes(struct.pack("<Q", 3) + b"{}")
    refuses(CheckpointError, "truncated", SafetensorsFile, path)


def test_what_is_not_a_file(tmp_path):
    refuses(CheckpointError, "no such file", SafetensorsFile, tmp_path / "a.safetensors")
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "gone")
    refuses(CheckpointError, "link to .*gone, which does not exist", SafetensorsFile, tmp_path / "link.safetensors")
    refuses(CheckpointError, "not a regular file", SafetensorsFile, tmp_path)
    os.mkfifo(tmp_path / "pipe")
    refuses(CheckpointError, "not a regular file", SafetensorsFile, tmp_path / "pipe")


def test_a_hostile_name_stays_on_one_line(tmp_path):
    header = {"a\n\x1b[31mred" + "x" * 5000: entry("F7", [2], [0, 2])}
    with pytest.raises(CheckpointError) as error:
        SafetensorsFile(raw_file(tmp_path / "a.safetensors", header, b"ab"))
    assert str(error.value).isprintable() and len(str(error.value)) < 1000


def judge(blob):
    try:
        views = safetensors.deserialize(blob)
    except safetensors.SafetensorError:
        return None
    return {name: (view["dtype"], tuple(view["shape"]), bytes(view["data"])) for name, view in views}


def test_bit_flips_and_truncations_against_the_package(tmp_path):
    """Every bit of a small header and every length of the file.

    Never anything but CheckpointError; what we accept the package accepts with equal contents. We may refuse more:
    the package ignores unknown fields and lets duplicate keys overwrite each other.
    """
    header = {
        "__metadata__": {"format": "pt"},
        "a.weight": entry("F32", [2, 3], [0, 24]),
        "b": entry("BF16", [], [24, 26]),
        "c": entry("U8", [0, 4], [26, 26]),
    }
    path = raw_file(tmp_path / "a.safetensors", header, bytes(range(26)))
    blob = path.read_bytes()
    (length,) = struct.unpack("<Q", blob[:8])
    flips = [(i, bit) for i in range(8 + length) for bit in range(8)]
    mutants = [blob[:i] + bytes([blob[i] ^ 1 << bit]) + blob[i + 1 :] for i, bit in flips]
    mutants += [blob[:n] for n in range(len(blob))] + [blob + b"\0"]
    accepted = 0
    for mutant in mutants:
        path.write_bytes(mutant)
        try:
            with SafetensorsFile(path) as file:
                ours = {n: (info.dtype, info.shape, as_bytes(file.read(n))) for n, info in file.infos.items()}
        except CheckpointError as error:
            assert str(error).isprintable()
            continue
        assert ours == judge(mutant)
        accepted += 1
    assert 50 < accepted < len(mutants) / 4  # flips inside names and metadata are valid files
