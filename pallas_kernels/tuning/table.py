"""Tables of measured configurations, one JSON file for each kind of device.

A layer's configuration comes from the user's own table (``user_path``), then from the one that is shipped for this kind
of GPU, then from that of a kind that runs kernels alike.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from pallas_kernels.common.device import Gpu
from pallas_kernels.grouped_gemm import GemmConfig
from pallas_kernels.grouped_gemm.config import SMALL_M
from pallas_kernels.grouped_gemm.heuristics import height_for
from pallas_kernels.grouped_gemm.packed import PackedConfig
from pallas_kernels.tuning.layer import (
    FORMATS,
    PACKED_FORMATS,
    SIZES,
    AnyConfig,
    AnyKey,
    LayerConfig,
    LayerKey,
    PackedLayerKey,
)

FOLDER = Path(__file__).parent / "tuned"
FORMAT = 2
KERNELS = 1  # In the path of users' tables: raise it when kernels change so that old times mislead.
_MEASURED_ON = (Gpu("NVIDIA H200", 132),)  # GPUs whose shipped table others may take
_FEWEST = 8  # An entry serves down to an eighth of its tokens: measured numbers are four or eight times apart.
_MANY_ROWS = 128  # Above so many rows per expert, more tokens only add tiles of the same height.
_GEMMS = ("gemm1", "gemm2")
_HERE = "here"  # where a user's own table was measured
_Built = TypeVar("_Built", bound=AnyKey | AnyConfig)


@dataclasses.dataclass(frozen=True)
class Entry:
    """The best configuration of a layer for a number of tokens. micros: what both products took together.

    source: whose times decided, where they are not the layer's own, in words; None where they are.
    where: on what it was measured, in words, where that is not said by the table's kind of GPU. Not saved.
    """

    key: AnyKey
    tokens: int
    config: LayerConfig
    micros: float
    source: str | None = None
    where: str | None = None

    def reaches(self, num_tokens: int) -> bool:
        """Whether tiles chosen for ``tokens`` suit ``num_tokens``.

        Below an eighth, experts would leave them nearly empty. Up to twice as many, as long as small-M tiles hold
        nearly every expert: a second tile reads its weights again. Any number where experts have many rows already.
        """
        of_expert = self.key.top_k / self.key.num_experts  # rows of a token
        if self.tokens > _FEWEST * num_tokens:
            return False
        if num_tokens <= self.tokens or self.tokens * of_expert >= _MANY_ROWS:
            return True
        block_m = self.config.block_m
        fits = block_m > SMALL_M or height_for(num_tokens * of_expert, (block_m,)) is not None
        return num_tokens <= 2 * self.tokens and fits


@dataclasses.dataclass(frozen=True)
class Table:
    """device: the kind it was measured on, in JAX's words. entries: at most one for each key and number of tokens."""

    device: str
    entries: tuple[Entry, ...] = ()

    @functools.cached_property
    def _by_key(self) -> dict[AnyKey, list[Entry]]:
        found: dict[AnyKey, list[Entry]] = {}
        for entry in sorted(self.entries, key=lambda entry: entry.tokens):
            found.setdefault(entry.key, []).append(entry)
        return found

    @property
    def own_entries(self) -> tuple[Entry, ...]:
        """Those of the user's own table."""
        return tuple(entry for entry in self.entries if entry.where == _HERE)

    def buckets(self, key: AnyKey) -> tuple[int, ...]:
        """Numbers of tokens that were measured for ``key``, ascending."""
        return tuple(entry.tokens for entry in self._by_key.get(key, ()))

    def lookup(self, key: AnyKey, num_tokens: int) -> Entry | None:
        """The entry of the smallest bucket that holds ``num_tokens``, of the largest for more. Where none of a layer's
        own reaches so many, its format's ``lender`` may have one that does, or that is the only one; its source says
        so. None without any.
        """
        own = self._by_key.get(key, ())
        nearest = next((entry for entry in own if entry.tokens >= num_tokens), own[-1] if own else None)
        if key.lender is None or (nearest is not None and nearest.reaches(num_tokens)):
            return nearest
        lent = self.lookup(key.lender, num_tokens)
        if lent is None or (nearest is not None and not lent.reaches(num_tokens)):
            return nearest
        return dataclasses.replace(lent, key=key, source=lent.source or f"with times of {lent.key.format_name}")

    def merged(self, entries: Iterable[Entry]) -> "Table":
        """With ``entries`` in place of those of the same key and number of tokens."""
        found = {(entry.key, entry.tokens): entry for entry in (*self.entries, *entries)}
        return Table(self.device, tuple(found.values()))

    def save(self, path: Path) -> None:
        """Write JSON: a line for each shape of a layer, below it one for each format, below that one for each number of
        tokens, sorted, so that a difference reads well. A field of both products stands once, or as the pair of their
        values; what is a default in both stands nowhere.
        """
        layers: dict[str, dict[str, list[str]]] = {}
        for entry in sorted(self.entries, key=lambda e: (_sizes(e.key), str(_format(e.key)), e.tokens)):
            formats = layers.setdefault(_json(_sizes_as_json(entry.key)), {})
            formats.setdefault(_json(_format(entry.key)), []).append(_json(_as_json(entry)))
        body = ",\n".join(
            f'{sizes[:-1]}, "formats": [\n'
            + ",\n".join(
                f' {{"format": {name}, "entries": [\n' + ",\n".join(f"  {line}" for line in lines) + "]}"
                for name, lines in formats.items()
            )
            + "]}"
            for sizes, formats in layers.items()
        )
        _write(path, f'{{"format": {FORMAT}, "device": {_json(self.device)}, "layers": [\n{body}]}}\n')


def load_table(path: Path) -> Table:
    """Read and check a table. Raises ValueError, naming file and entry, for anything that ``save`` did not write."""
    try:
        stored = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error}); write it anew with python -m pallas_kernels.autotune") from None
    version = stored.get("format") if isinstance(stored, dict) else None
    if type(version) is not int or version != FORMAT or stored.keys() != {"format", "device", "layers"}:
        raise ValueError(
            f"{path}: expected an object of format {FORMAT}, device and layers; write it anew with "
            "python -m pallas_kernels.autotune"
        )
    device, layers = stored["device"], stored["layers"]
    if not isinstance(device, str) or not isinstance(layers, list):
        raise ValueError(f"{path}: device is {device!r} and layers a {type(layers).__name__}")
    entries = tuple(_entry(one, where) for where, one in _flat(layers, path))
    if len({(entry.key, entry.tokens) for entry in entries}) < len(entries):
        raise ValueError(f"{path}: two entries for one layer and number of tokens; remove one")
    return Table(device, entries)


def path_for(device: str) -> Path:
    """Where the shipped table of a kind of device lies, or would."""
    return FOLDER / f"{re.sub(r'[^a-z0-9]+', '_', device.lower()).strip('_')}.json"


def user_cache() -> Path:
    """Our folder among the user's caches, which may not be there yet."""
    if sys.platform == "darwin":
        caches = Path.home() / "Library" / "Caches"
    else:
        named = os.environ.get("XDG_CACHE_HOME", "")
        caches = Path(named) if os.path.isabs(named) else Path.home() / ".cache"
    return caches / "moe_jax"


def user_path(device: str) -> Path:
    """Where the user's own table of a kind of device lies, or would."""
    return user_cache() / "tuning" / f"kernels-{KERNELS}" / path_for(device).name


@functools.cache
def table_for(device: Gpu | str) -> Table:
    """The measured configurations for a GPU, an empty table without any.

    For each layer and number of tokens the user's own table comes first, then what is shipped for this kind, then what
    is shipped for a kind of the same number of SMs. ``Entry.where`` says so. For the name of a kind alone: what is
    shipped for it. A user's table that cannot be read is left out, with a warning.
    """
    if isinstance(device, str):
        path = path_for(device)
        return load_table(path) if path.exists() else Table(device)
    table = table_for(device.kind)
    lender = next((other for other in _MEASURED_ON if other.is_like(device)), None)
    if lender is not None and lender.kind != device.kind:
        where = _beside(lender, device)
        lent = table_for(lender.kind).entries
        lent = Table(device.kind, tuple(dataclasses.replace(entry, where=where) for entry in lent))
        table = lent.merged(table.entries)
    return table.merged(dataclasses.replace(entry, where=_HERE) for entry in _of_user(device.kind).entries)


def _beside(lender: Gpu, device: Gpu) -> str:
    """On what a lent entry was measured, and how the GPU at hand differs."""
    rates = [gpu.memory_gbps for gpu in (lender, device)]
    memory = f", {rates[0] / 1e3:g} TB/s beside {rates[1] / 1e3:g} here" if rates[0] and rates[1] else ""
    return f"on {lender.kind} ({lender.num_sms} SMs as here{memory})"


def _of_user(device: str) -> Table:
    path = user_path(device)
    try:
        table = load_table(path) if path.exists() else Table(device)
        if table.device != device:
            raise ValueError(f"{path}: of {table.device!r}, expected {device!r}")
    except (ValueError, OSError) as error:
        warnings.warn(f"{error}; the table is left out: remove the file, moe-jax autotune makes it anew", stacklevel=2)
        return Table(device)
    return table


def update(path: Path, device: str, entries: Iterable[Entry]) -> Table:
    """Add entries to the table at ``path``, in place of those of the same layer and number of tokens; others stay.

    Two processes may update one file at a time: each waits for the other. Raises ValueError where the file is of
    another device or no table. Returns the whole table.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_suffix(".lock")):
        held = load_table(path) if path.exists() else Table(device)
        if held.device != device:
            raise ValueError(f"{path}: of {held.device!r}, this is {device!r}; name another file")
        table = held.merged(entries)
        table.save(path)
    table_for.cache_clear()
    return table


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    import fcntl  # where the GPUs are; not on Windows

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(path: Path, text: str) -> None:
    """Whole or not at all: a reader sees the old file or the new one."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.chmod(name, path.stat().st_mode & 0o777 if path.exists() else 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _json(value: object) -> str:
    return json.dumps(value)


def _changed(value: AnyKey) -> dict[str, object]:
    """The fields that are not their defaults."""
    defaults = {field.name: field.default for field in dataclasses.fields(value)}
    return {name: v for name, v in dataclasses.asdict(value).items() if v != defaults[name]}


def _sizes(key: AnyKey) -> tuple[int, ...]:
    return tuple(getattr(key, name) for name in SIZES)


def _sizes_as_json(key: AnyKey) -> dict[str, object]:
    return {name: value for name, value in _changed(key).items() if name in SIZES}


def _format(key: AnyKey) -> str | dict[str, object]:
    """Its name, or its fields where it has none."""
    fields: dict[str, object] = {name: value for name, value in _changed(key).items() if name not in SIZES}
    return key.format_name or fields


def _as_json(entry: Entry) -> dict[str, object]:
    stored: dict[str, object] = {"tokens": entry.tokens}
    for field in dataclasses.fields(entry.config.gemm1):
        pair = [getattr(gemm, field.name) for gemm in (entry.config.gemm1, entry.config.gemm2)]
        if pair != [field.default] * 2:
            stored[field.name] = pair[0] if pair[0] == pair[1] else pair
    stored["micros"] = round(entry.micros, 1)
    return stored if entry.source is None else stored | {"source": entry.source}


def _flat(layers: list[object], path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where it stands, and an entry with the fields of its layer and of both products."""
    for index, layer in enumerate(layers):
        sizes = _object(layer, f"{path}: layer {index}", "formats")
        for stored in _list(sizes.pop("formats"), f"{path}: layer {index}: formats"):
            how = _object(stored, f"{path}: layer {index}: a format", "format", "entries")
            name, where = how["format"], f"{path}: layer {index}, {how['format']}"
            known = (FORMATS | PACKED_FORMATS).get(name) if isinstance(name, str) else _object(name, where)
            if known is None or how.keys() != {"format", "entries"}:
                raise ValueError(f"{where}: expected entries and a format of {', '.join((*FORMATS, *PACKED_FORMATS))}")
            for number, one in enumerate(_list(how["entries"], where)):
                fields = _object(one, f"{where}, entry {number}")
                entry = {name: fields.pop(name) for name in ("tokens", "micros", "source") if name in fields}
                gemms = {name: {n: _of_pair(v, at) for n, v in fields.items()} for at, name in enumerate(_GEMMS)}
                yield f"{where}, entry {number}", {"layer": {**sizes, **known}, **entry, **gemms}


def _of_pair(value: object, at: int) -> object:
    return value[at] if isinstance(value, list) and len(value) == len(_GEMMS) else value


def _object(stored: object, where: str, *names: str) -> dict[str, object]:
    """A copy of a JSON object that has at least the fields ``names``."""
    if not isinstance(stored, dict) or not stored.keys() >= set(names):
        found = sorted(stored) if isinstance(stored, dict) else type(stored).__name__
        raise ValueError(f"{where}: found {found}, expected an object with {', '.join(names) or 'fields'}")
    return dict(stored)


def _list(stored: object, where: str) -> list[object]:
    if not isinstance(stored, list):
        raise ValueError(f"{where} is a {type(stored).__name__}, expected a list")
    return stored


def _entry(stored: dict[str, Any], where: str) -> Entry:
    expected = {"layer", "tokens", "gemm1", "gemm2", "micros"}
    if stored.keys() - {"source"} != expected:
        raise ValueError(f"{where}: found {sorted(stored)}, expected the fields {sorted(expected)}")
    is_packed = "element" in stored["layer"]
    key = _build(PackedLayerKey if is_packed else LayerKey, stored["layer"], f"{where}: layer")
    config_kind = PackedConfig if is_packed else GemmConfig
    gemm1, gemm2 = (_build(config_kind, stored[name], f"{where}: {name}") for name in _GEMMS)
    tokens, micros, source = stored["tokens"], stored["micros"], stored.get("source")
    if not isinstance(source, str | None):
        raise ValueError(f"{where}: source={source!r}, expected a string")
    if type(tokens) is not int or tokens < 1 or type(micros) not in (int, float) or not 0 < micros < math.inf:
        raise ValueError(f"{where}: tokens={tokens!r} and micros={micros!r}, expected a positive integer and number")
    if gemm1.block_m != gemm2.block_m:
        raise ValueError(f"{where}: block_m is {gemm1.block_m} and {gemm2.block_m}; both products share their tiles")
    for name, desc, config in zip(_GEMMS, key.products(tokens, gemm1.block_m), (gemm1, gemm2), strict=True):
        if reason := key.config_error(desc, config):
            raise ValueError(f"{where}: {name} cannot run: {reason}")
    return Entry(key, tokens, LayerConfig(gemm1.block_m, gemm1, gemm2), float(micros), source)


def _build(kind: type[_Built], stored: dict[str, Any], where: str) -> _Built:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if stored.keys() - fields.keys():
        raise ValueError(f"{where} is {stored!r}, expected an object with fields of {', '.join(fields)}")
    missing = [name for name, field in fields.items() if field.default is dataclasses.MISSING and name not in stored]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    hints = _hints(kind)
    for name, value in stored.items():
        if not _is_of(value, hints[name]):
            raise ValueError(f"{where}: {name} is {value!r}, expected {_spelled(hints[name])}")
    return kind(**stored)


_hints = functools.cache(get_type_hints)


def _is_of(value: object, hint: Any) -> bool:
    """Whether a value of JSON suits a field's annotation. Integers are positive everywhere."""
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    return type(value) in (get_args(hint) or (hint,)) and (type(value) is not int or value > 0)


def _spelled(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return f"one of {', '.join(get_args(hint))}"
    words = {int: "a positive integer", bool: "true or false", str: "a string", type(None): "null"}
    return " or ".join(words[kind] for kind in get_args(hint) or (hint,))
