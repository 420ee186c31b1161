"""Tables of measured configurations, one JSON file for each kind of device."""

import dataclasses
import functools
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pallas_kernels.grouped_gemm import GemmConfig
from pallas_kernels.grouped_gemm.packed import PackedConfig
from pallas_kernels.tuning.layer import LayerConfig, LayerKey, PackedLayerKey

FOLDER = Path(__file__).parent / "tuned"
FORMAT = 1
AnyKey = LayerKey | PackedLayerKey
_FEWEST = 8  # times fewer tokens: buckets are four or eight times apart, but for layers that were timed at few of them
_MANY_ROWS = 128  # of an expert, from which on more tokens are more tiles of the same height


@dataclasses.dataclass(frozen=True)
class Entry:
    """The best configuration of a layer for a number of tokens. micros: what both products took together.

    source: whose times decided, where they are not the layer's own, in words; None where they are.
    """

    key: AnyKey
    tokens: int
    config: LayerConfig
    micros: float
    source: str | None = None

    def reaches(self, num_tokens: int) -> bool:
        """Whether tiles chosen for ``tokens`` suit ``num_tokens``: neither fewer than an eighth, whose experts would
        leave them nearly empty, nor more than twice as many, unless experts have many rows already.
        """
        rows_per_expert = self.tokens * self.key.top_k / self.key.num_experts
        return self.tokens <= _FEWEST * num_tokens and (num_tokens <= 2 * self.tokens or rows_per_expert >= _MANY_ROWS)


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
        """Write JSON, one entry a line, sorted, so that a difference reads well."""
        stored = [(type(e.key).__name__, dataclasses.astuple(e.key), e.tokens, _as_json(e)) for e in self.entries]
        lines = [json.dumps(text) for *_, text in sorted(stored, key=lambda one: one[:3])]
        body = ",\n".join(f"  {text}" for text in lines)
        head = f'{{"format": {FORMAT}, "device": {json.dumps(self.device)}, "entries": ['
        path.write_text(f"{head}\n{body}\n]}}\n" if lines else f"{head}]}}\n")


def load_table(path: Path) -> Table:
    """Read and check a table. Raises ValueError, naming file and entry, for anything that ``save`` did not write."""
    try:
        stored = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error}); write it anew with python -m pallas_kernels.autotune") from None
    if not isinstance(stored, dict) or stored.keys() != {"format", "device", "entries"} or stored["format"] != FORMAT:
        raise ValueError(
            f"{path}: expected an object of format {FORMAT}, device and entries; write it anew with "
            "python -m pallas_kernels.autotune"
        )
    if not isinstance(stored["device"], str) or not isinstance(stored["entries"], list):
        raise ValueError(f"{path}: device is {stored['device']!r} and entries a {type(stored['entries']).__name__}")
    entries = tuple(_entry(one, f"{path}: entry {index}") for index, one in enumerate(stored["entries"]))
    if len({(entry.key, entry.tokens) for entry in entries}) < len(entries):
        raise ValueError(f"{path}: two entries for one layer and number of tokens; remove one")
    return Table(stored["device"], entries)


def path_for(device: str) -> Path:
    """Where the shipped table of a kind of device lies, or would."""
    return FOLDER / f"{re.sub(r'[^a-z0-9]+', '_', device.lower()).strip('_')}.json"


@functools.cache
def table_for(device: str) -> Table:
    """The table shipped for a kind of device, an empty one where there is none."""
    path = path_for(device)
    return load_table(path) if path.exists() else Table(device)


def _as_json(entry: Entry) -> dict[str, Any]:
    def changed(value):
        defaults = {field.name: field.default for field in dataclasses.fields(value)}
        return {name: v for name, v in dataclasses.asdict(value).items() if v != defaults[name]}

    stored = {
        "layer": changed(entry.key),
        "tokens": entry.tokens,
        "gemm1": changed(entry.config.gemm1),
        "gemm2": changed(entry.config.gemm2),
        "micros": round(entry.micros, 1),
    }
    return stored if entry.source is None else stored | {"source": entry.source}


def _entry(stored: Any, where: str) -> Entry:
    expected = {"layer", "tokens", "gemm1", "gemm2", "micros"}
    if not isinstance(stored, dict) or stored.keys() - {"source"} != expected:
        found = sorted(stored) if isinstance(stored, dict) else type(stored).__name__
        raise ValueError(f"{where}: found {found}, expected the fields {sorted(expected)}")
    is_packed = isinstance(stored["layer"], dict) and "element" in stored["layer"]
    kinds: Any = (PackedLayerKey, PackedConfig) if is_packed else (LayerKey, GemmConfig)
    key = _build(kinds[0], stored["layer"], f"{where}: layer")
    gemm1, gemm2 = (_build(kinds[1], stored[name], f"{where}: {name}") for name in ("gemm1", "gemm2"))
    tokens, micros, source = stored["tokens"], stored["micros"], stored.get("source")
    if not isinstance(source, str | None):
        raise ValueError(f"{where}: source={source!r}, expected a string")
    if type(tokens) is not int or tokens < 1 or not isinstance(micros, int | float) or micros <= 0:
        raise ValueError(f"{where}: tokens={tokens!r} and micros={micros!r}, expected a positive integer and number")
    if gemm1.block_m != gemm2.block_m:
        raise ValueError(f"{where}: block_m is {gemm1.block_m} and {gemm2.block_m}; both products share their tiles")
    for name, desc, config in zip(("gemm1", "gemm2"), key.products(tokens, gemm1.block_m), (gemm1, gemm2), strict=True):
        if reason := key.config_error(desc, config):
            raise ValueError(f"{where}: {name} cannot run: {reason}")
    return Entry(key, tokens, LayerConfig(gemm1.block_m, gemm1, gemm2), float(micros), source)


def _build(kind: Any, stored: Any, where: str) -> Any:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if not isinstance(stored, dict) or stored.keys() - fields.keys():
        raise ValueError(f"{where} is {stored!r}, expected an object with fields of {', '.join(fields)}")
    missing = [name for name, field in fields.items() if field.default is dataclasses.MISSING and name not in stored]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    for name, value in stored.items():
        if not isinstance(value, str | int | None):
            raise ValueError(f"{where}: {name} is {value!r}, expected a string, an integer, true, false or null")
    return kind(**stored)
