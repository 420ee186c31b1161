"""The words of common/simt.py in NumPy: all threads of a block take each statement together.

For kernels made of them alone, whose indices and masks can so be checked without a GPU; what threads race for cannot.
Run under ``jax.disable_jit``. An access out of bounds, and a read of what nobody has written, fail.
"""

import types
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.common import simt


class Memory:
    """A flat int32 array, nothing written yet where no values are given. As floats its bits are float32."""

    dtype = np.dtype(np.float32)

    def __init__(self, size: int, values: Any = None):
        self.values = np.zeros(size, np.int32) if values is None else np.array(values, np.int32)
        self.is_written = np.full(size, values is not None)

    def __getitem__(self, index: int) -> Any:
        assert self.is_written[index], "read before it was written"
        return jnp.int32(self.values[index])

    def __setitem__(self, index: int, value: Any) -> None:
        self.values[index], self.is_written[index] = value, True

    def _at(self, index: Any, mask: Any) -> tuple[np.ndarray, np.ndarray]:
        mask = np.asarray(mask)
        index = np.asarray(index)[mask]
        assert np.all((index >= 0) & (index < len(self.values))), "out of bounds"
        return index, mask

    def load(self, index: Any, mask: Any, default: int) -> Any:
        index, mask = self._at(index, mask)
        assert np.all(self.is_written[index]), "read before it was written"
        found = np.full(mask.shape, default, np.int32)
        found[mask] = self.values[index]
        return jnp.asarray(found)

    def store(self, index: Any, value: Any, mask: Any) -> None:
        index, mask = self._at(index, mask)
        self.values[index], self.is_written[index] = np.asarray(value)[mask], True

    def set_bits(self, index: Any, bits: Any, mask: Any) -> None:
        index, mask = self._at(index, mask)
        assert np.all(self.is_written[index]), "bits of what was not cleared"
        np.bitwise_or.at(self.values, index, np.asarray(bits)[mask])

    def count(self, index: Any, mask: Any) -> Any:
        index, mask = self._at(index, mask)
        assert np.all(self.is_written[index]), "counted before it was cleared"
        found = np.zeros(mask.shape, np.int32)
        taken = []
        for i in np.random.default_rng(0).permutation(len(index)):
            taken.append((i, self.values[index[i]]))
            self.values[index[i]] += 1
        places = np.flatnonzero(mask)
        for i, value in taken:
            found[places[i]] = value
        return jnp.asarray(found)


def simt_of(threads: int) -> Any:
    """What stands for the module, for blocks of so many threads."""
    return types.SimpleNamespace(
        LANES=None,
        thread_index=lambda: jnp.arange(threads, dtype=jnp.int32),
        warp_of=simt.warp_of,
        constant=lambda value: jnp.full(threads, value, jnp.int32),
        barrier=lambda: None,
        load=lambda ref, index, mask, default: ref.load(index, mask, default),
        load_float=_load_float,
        store=lambda ref, index, value, mask: ref.store(index, value, mask),
        count=lambda ref, index, mask: ref.count(index, mask),
        set_bits=lambda ref, index, bits, mask: ref.set_bits(index, bits, mask),
        store_bits=lambda ref, index, value, mask, itemsize: ref.store(index, value, mask),
        load_floats=lambda ref, index, mask, n: tuple(_load_float(ref, index + i, mask, 0.0) for i in range(n)),
        store_words=_store_halves,
        warp_max=lambda value: jnp.repeat(value.reshape(-1, 32).max(axis=1), 32),
        warp_min=lambda value: jnp.repeat(value.reshape(-1, 32).min(axis=1), 32),
        warp_add=lambda value: jnp.repeat(value.reshape(-1, 32).sum(axis=1), 32),
        warp_sum=lambda value: jnp.repeat(value.reshape(-1, 32).sum(axis=1), 32),
        of_lane=lambda value, distance: value[jnp.arange(threads) ^ distance],
        of_lower_lane=_of_lower_lane,
        ballot=_ballot,
        count_bits=lambda value: lax.population_count(value.view(jnp.uint32)).astype(jnp.int32),
        e4m3_bits=lambda value: jnp.clip(value, -448, 448).astype(jnp.float8_e4m3fn).view(jnp.uint8).astype(jnp.int32),
        rounded=lambda value: jnp.rint(value).astype(jnp.int32),
    )


def _of_lower_lane(value: Any, distance: int) -> Any:
    by_warp = np.asarray(value).reshape(-1, 32)
    return jnp.asarray(np.concatenate([by_warp[:, :distance], by_warp[:, :-distance]], axis=1).reshape(-1))


def _ballot(mask: Any) -> Any:
    bits = np.asarray(mask).reshape(-1, 32).astype(np.uint64) << np.arange(32, dtype=np.uint64)
    return jnp.asarray(np.repeat(bits.sum(axis=1).astype(np.uint32).view(np.int32), 32))


def _store_halves(ref: Memory, index: Any, words: Any, mask: Any) -> None:
    """Of a memory whose elements have 16 bits."""
    for i, word in enumerate(words):
        ref.store(index + 2 * i, word & 0xFFFF, mask)
        ref.store(index + 2 * i + 1, lax.shift_right_logical(word, 16), mask)


def _load_float(ref: Memory, index: Any, mask: Any, default: float) -> Any:
    """Of a memory that holds the bits of float32 values."""
    return ref.load(index, mask, int(np.float32(default).view(np.int32))).view(jnp.float32)
