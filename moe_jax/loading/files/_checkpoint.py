"""``Checkpoint``: a directory with config.json and safetensors files, validated as a whole before anything is read."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from moe_jax._typing import Json
from moe_jax.loading._errors import CheckpointError, listed, read_json, shorten, shown
from moe_jax.loading.files._safetensors import SafetensorsFile, TensorInfo

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_CONFIG_BYTES = 16 << 20  # an ignore list that names 20,000 modules takes about 1 MB
MAX_INDEX_BYTES = 256 << 20  # a million tensors
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_CONVERT = "convert it once with transformers: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)"
_OTHER_FORMATS = {
    **dict.fromkeys(
        _PICKLES, f"pickle files can run code when read, so moe_jax never opens one; if you trust it, {_CONVERT}"
    ),
    ".gguf": "GGUF files are not supported; use the safetensors repository that the file was made from, or convert it "
    "once with transformers: AutoModelForCausalLM.from_pretrained(DIR, gguf_file=NAME).save_pretrained(NEW_DIR)",
    ".npz": "weights in .npz are not supported; use the safetensors repository they were made from",
    ".h5": f"TensorFlow weights are not supported; {_CONVERT}",
    ".msgpack": f"Flax msgpack weights are not supported; {_CONVERT}",
}


@runtime_checkable
class TensorSource(Protocol):
    """What experts are read from: a ``Checkpoint``, a view of one, or an ``ArraySource``."""

    @property
    def names(self) -> Sequence[str]: ...

    def info(self, name: str) -> TensorInfo: ...

    def read(self, name: str) -> np.ndarray: ...


@runtime_checkable
class CheckpointLike(TensorSource, Protocol):
    """A ``TensorSource`` with a config.json."""

    @property
    def directory(self) -> Path | str: ...

    @property
    def config_path(self) -> Path | str: ...

    @property
    def config(self) -> Json: ...

    def __contains__(self, name: str) -> bool: ...

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> np.ndarray: ...


class Checkpoint:
    """A checkpoint directory as transformers lays it out: config.json with model.safetensors, or an index and shards.

    Opening reads and validates config.json, the index, and every file's header, and checks that the index and the files
    agree tensor by tensor; weights are read when they are asked for. Other files are ignored, with the exception of
    configs of other quantizers, which change what the weights mean. Raises CheckpointError. Usable from several threads
    and in a ``with`` statement, whose end raises CheckpointError when a file was written to meanwhile.

    Attributes:
        directory, config_path: where it is.
        config: config.json. Where it has no quantization_config, that of its text_config is filled in; or where another
            quantizer's own file (ModelOpt, GPTQ) stands beside it, one that names its method.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self.directory: Path = Path(directory)
        check_directory(self.directory)
        self.config_path: Path = self.directory / "config.json"
        self._config_state = _state_of(self.config_path)
        self.config: dict[str, Any] = read_json(self.config_path, max_bytes=MAX_CONFIG_BYTES)
        foreign = _foreign_quantization(self.directory, self.config)
        if foreign is not None:
            self.config["quantization_config"] = foreign
        self._files: dict[str, SafetensorsFile] = {}
        self._home: dict[str, SafetensorsFile] = {}
        index = _read_index(self.directory)
        placed = {SINGLE_FILE: None} if index is None else _by_file(index)
        for file_name, expected in placed.items():
            file = self._files[file_name] = SafetensorsFile(self.directory / file_name)
            if expected is not None and file.infos.keys() != expected:
                raise CheckpointError(_disagreement(file, file_name, expected, index or {}))
            self._home.update(dict.fromkeys(file.infos, file))
        if not self._home:
            raise CheckpointError(f"{self.directory / SINGLE_FILE}: holds no tensors")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, file by file in the order of their data."""
        return tuple(self._home)

    def __contains__(self, name: str) -> bool:
        return name in self._home

    @property
    def quantization_config(self) -> dict[str, Any] | None:
        """``quantization_config`` of ``config``, None when the checkpoint says nothing."""
        return self.config.get("quantization_config")

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the weight files."""
        return tuple(self._files)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(file.nbytes for file in self._files.values())

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors handed out by ``read`` so far."""
        return sum(file.bytes_read for file in self._files.values())

    def info(self, name: str) -> TensorInfo:
        """What the header says about a tensor. Raises CheckpointError when there is none of that name."""
        return self._file_of(name).info(name)

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> np.ndarray:
        """The tensor, or a range of rows or columns, as a read-only array; see ``SafetensorsFile.read``."""
        return self._file_of(name).read(name, rows, columns)

    def expect_scattered_reads(self) -> None:
        """Tell the system not to read ahead: only small, scattered tensors will be wanted."""
        for file in self._files.values():
            file.expect_scattered_reads()

    def check_unchanged(self) -> None:
        """Raises CheckpointError when one of the files was written to since it was opened."""
        for file in self._files.values():
            file.check_unchanged()
        if self._config_state != _state_of(self.config_path):
            raise CheckpointError(f"{self.config_path}: was written to while the weights were read; try again")

    def close(self) -> None:
        """Give up the files; arrays that were read stay valid."""
        for file in self._files.values():
            file.close()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        try:
            if kind is None:
                self.check_unchanged()
        finally:
            self.close()

    def _file_of(self, name: str) -> SafetensorsFile:
        try:
            return self._home[name]
        except KeyError:
            raise CheckpointError(
                f"{self.directory}: no tensor {shorten(name)} in {listed(list(self._files))}"
            ) from None


def check_directory(path: Path) -> None:
    """Raises CheckpointError unless ``path`` is a directory with a config.json."""
    if not path.is_dir():
        raise CheckpointError(_not_a_directory(path))
    config = path / "config.json"
    if not config.exists():
        foreign = _foreign_weights_in(path)  # a GGUF repository, for one, has no config.json at all
        missing = f"{config}: no such file; a checkpoint needs config.json beside its weights"
        raise CheckpointError(f"{path}: {foreign}" if foreign else missing)


def weight_files(directory: Path) -> tuple[str, ...]:
    """Names of the files that hold the weights: those of the index if there is one. They need not be there.

    Raises CheckpointError for an index that cannot be used.
    """
    path = directory / INDEX_FILE
    return tuple(_by_file(_read_weight_map(path))) if path.exists() else (SINGLE_FILE,)


def _state_of(path: Path) -> tuple[int, int] | None:
    """What tells that somebody wrote to a file, None when it is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _not_a_directory(path: Path) -> str:
    if not path.exists():
        return f"{path}: no such directory; pass the local directory of a checkpoint, or organization/name on a hub"
    hint = _OTHER_FORMATS.get(path.suffix)
    return f"{path}: is a file; " + (hint or "pass the directory that holds it and config.json")


def _foreign_quantization(directory: Path, config: Json) -> dict[str, Any] | None:
    """What another quantizer's own file stands for, where config.json has no quantization_config.

    ModelOpt writes hf_quant_config.json, old GPTQ repositories quantize_config.json; config.json may then say nothing.
    Kimi-K2.5 states it of its language model, in text_config.
    """
    if config.get("quantization_config") is None:
        text = config.get("text_config")
        if isinstance(text, Mapping) and text.get("quantization_config") is not None:
            return text["quantization_config"]
        for name, method in (("hf_quant_config.json", "modelopt"), ("quantize_config.json", "gptq")):
            if (directory / name).is_file():
                stated = read_json(directory / name, max_bytes=MAX_CONFIG_BYTES)
                if method == "modelopt":
                    stated = stated.get("quantization")
                return {"quant_method": method, **(stated if isinstance(stated, dict) else {})}
    return None


def _read_index(directory: Path) -> dict[str, str] | None:
    """Tensor name -> file name as model.safetensors.index.json says; None for a checkpoint of one file."""
    path = directory / INDEX_FILE
    has_single, has_index = (directory / SINGLE_FILE).exists(), path.exists()
    if not has_index:
        if not has_single and not (directory / SINGLE_FILE).is_symlink():
            raise CheckpointError(_no_weights(directory))
        return None
    weight_map = _read_weight_map(path)
    if has_single and SINGLE_FILE not in weight_map.values():
        raise CheckpointError(f"{directory}: {two_sets_of_weights('remove the one that is out of date')}")
    return weight_map


def two_sets_of_weights(way_out: str) -> str:
    return f"holds two sets of weights, {SINGLE_FILE} and the shards of {INDEX_FILE}; {way_out}"


def _read_weight_map(path: Path) -> dict[str, str]:
    """Tensor name -> file name; the files are plain names of safetensors files. path: of the index."""
    index = read_json(path, max_bytes=MAX_INDEX_BYTES)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{path}: weight_map is {shown(weight_map)}, expected an object: tensor name -> file name"
        )
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not _is_plain_name(name):
            raise CheckpointError(
                f"{path}: tensor {shorten(tensor)}: file {shown(name)}, expected the plain name of a shard"
            )
    for name in sorted(set(weight_map.values())):
        if not name.endswith(".safetensors"):
            hint = _OTHER_FORMATS.get(Path(name).suffix, "only safetensors files can be read")
            raise CheckpointError(f"{path}: refers to {shown(name)}; {hint}")
    return weight_map


def _is_plain_name(name: str) -> bool:
    """A name that cannot lead out of the directory, here or on another system."""
    return name not in ("", ".", "..") and not set(name) & set("/\\:\0") and name.isprintable() and len(name) <= 255


def _no_weights(directory: Path) -> str:
    shards = sorted(path.name for path in directory.glob("*.safetensors"))
    if shards:
        return (
            f"{directory}: holds {listed(shards, 2)} but neither {SINGLE_FILE} nor {INDEX_FILE}; download the index too"
        )
    missing = f"neither {SINGLE_FILE} nor {INDEX_FILE} is there; download the weights too"
    return f"{directory}: {_foreign_weights_in(directory) or missing}"


def _foreign_weights_in(directory: Path) -> str:
    return foreign_weights(entry.name for entry in directory.iterdir())


def foreign_weights(names: Iterable[str]) -> str:
    """What to do about weights in a format that is not read; "" when there are none, or safetensors as well."""
    names = sorted(names)
    if any(name.endswith(".safetensors") for name in names):
        return ""
    for suffix, hint in _OTHER_FORMATS.items():
        found = [name for name in names if name.endswith(suffix)]
        if found:
            return f"the weights are in {listed(found, 2)}; {hint}"
    return ""


def _by_file(index: dict[str, str]) -> dict[str, set[str]]:
    """File name -> the tensors that the index places there, files in order of their names."""
    result: dict[str, set[str]] = {name: set() for name in sorted(set(index.values()))}
    for tensor, name in index.items():
        result[name].add(tensor)
    return result


def _disagreement(file: SafetensorsFile, name: str, expected: set[str], index: dict[str, str]) -> str:
    """Why the tensors of a shard are not exactly those that the index places there."""
    way_out = "the files are from different downloads or damaged"
    surplus = [tensor for tensor in file.infos if tensor not in expected]
    if surplus:
        place = f"places it in {index[surplus[0]]}" if surplus[0] in index else "does not list it"
        return f"{file.path}: tensor {shorten(surplus[0])}: {INDEX_FILE} {place}{_and_more(surplus)}; {way_out}"
    absent = sorted(expected - file.infos.keys())
    return (
        f"{file.path.parent / INDEX_FILE}: tensor {shorten(absent[0])}: listed in {name}, "
        f"which does not have it{_and_more(absent)}; {way_out}"
    )


def _and_more(items: list[str]) -> str:
    return f" (and {len(items) - 1} more like it)" if len(items) > 1 else ""
