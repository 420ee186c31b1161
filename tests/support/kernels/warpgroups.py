"""A kernel's body run by Python threads, one for each warpgroup, on NumPy arrays: its values and its barriers.

The names of Pallas that the body uses are replaced (``stand_ins``). A wait that nothing can end, a barrier that runs
ahead of a warpgroup that waits for it, and an arrival that nobody counts on, fail. Products and copies are done at
once, so what races within the tensor core or the copy engine does not show.
"""

import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.common.mosaic import column_predicate, row_a_warp

SECONDS = 60  # that a warpgroup waits at most
_here = threading.local()


class Memory:
    """A view of a NumPy array, as a reference in global or shared memory."""

    def __init__(self, array: np.ndarray):
        self.array = array

    shape = property(lambda self: self.array.shape)
    dtype = property(lambda self: self.array.dtype)
    at = property(lambda self: self)

    def __getitem__(self, index: Any) -> Any:
        found = self.array[_index(index)]
        return Memory(found) if found.ndim else _now(found)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.array[_index(index)] = np.asarray(value)

    def transpose(self, axes: tuple[int, ...]) -> "Memory":
        return Memory(self.array.transpose(axes))


class Sums:
    """An accumulator of wgmma."""

    def __init__(self, shape: tuple[int, ...]):
        self.value = np.zeros(shape, np.float32)

    def __getitem__(self, index: Any) -> Any:
        return jnp.asarray(self.value)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.value = np.asarray(value)


class Barriers:
    """An array of barriers; each completes a phase when ``num_arrivals`` have arrived."""

    def __init__(self, num_barriers: int, num_arrivals: int = 1):
        self.num_arrivals, self.changed = num_arrivals, threading.Condition()
        self.arrived, self.completed = np.zeros(num_barriers, int), np.zeros(num_barriers, int)
        self.waited: dict[tuple[int, int], int] = {}  # (warpgroup, barrier) -> phases it has waited for
        self.has_failed = False

    at = property(lambda self: self)

    def __getitem__(self, index: Any) -> Any:
        return self, int(index)

    def arrive(self, index: int) -> None:
        with self.changed:
            self.arrived[index] += 1
            if self.arrived[index] == self.num_arrivals:
                self.arrived[index] = 0
                self.completed[index] += 1
            self.changed.notify_all()

    def wait(self, index: int) -> None:
        """For the phase after the last one that this warpgroup has waited for; only its parity is known."""
        with self.changed:
            phase = self.waited.get((_here.warpgroup, index), 0)
            if not self.changed.wait_for(lambda: self.completed[index] > phase or self.has_failed, SECONDS):
                raise AssertionError(f"warpgroup {_here.warpgroup} waits for ever for phase {phase} of {index}")
            assert self.completed[index] <= phase + 1, f"barrier {index} ran ahead of warpgroup {_here.warpgroup}"
            self.waited[_here.warpgroup, index] = phase + 1

    def check_end(self) -> None:
        """Nobody arrived in vain, and each phase was waited for by somebody."""
        assert not self.arrived.any(), f"arrivals that complete no phase: {self.arrived}"
        for index, completed in enumerate(self.completed):
            seen = max((count for (_, at), count in self.waited.items() if at == index), default=0)
            assert seen == completed, f"barrier {index} completed {completed} phases, {seen} were waited for"


def run(
    body: Callable[..., None], num_ctas: int, num_warpgroups: int, make_scratch: Callable[[], Mapping[str, Any]]
) -> None:
    """The body in each CTA, one after the other. make_scratch: shared memory and barriers of a CTA, by name."""
    for cta in range(num_ctas):
        scratch, failures = make_scratch(), []

        def one(warpgroup, cta=cta, scratch=scratch, failures=failures):
            _here.warpgroup, _here.cta = warpgroup, cta
            try:
                with jax.disable_jit():
                    body(**scratch)
            except BaseException as error:
                failures.append(error)
                for barriers in _barriers(scratch):
                    barriers.has_failed = True
                    with barriers.changed:
                        barriers.changed.notify_all()

        threads = [threading.Thread(target=one, args=(index,), daemon=True) for index in range(num_warpgroups)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        for barriers in _barriers(scratch):
            barriers.check_end()


def stand_ins() -> dict[str, Any]:
    """Module name in a body -> what takes its place."""
    of_lax = types.SimpleNamespace(**{name: getattr(lax, name) for name in dir(lax) if not name.startswith("__")})
    of_lax.axis_index = lambda name: jnp.int32(_here.warpgroup if name == "warpgroup" else _here.cta)
    of_lax.fori_loop = _fori_loop
    of_pallas = types.SimpleNamespace(
        when=lambda condition: lambda function: function() if bool(condition) else None,
        run_scoped=lambda function, *kinds: function(*(Sums(kind) for kind in kinds)),
        ds=lambda start, size: slice(int(start), int(start) + size),
        multiple_of=lambda value, _: value,
    )
    nothing = lambda *args, **kwargs: None  # noqa: E731
    of_mosaic_gpu = types.SimpleNamespace(
        set_max_registers=nothing,
        wgmma_wait=nothing,
        commit_smem=nothing,
        wait_smem_to_gmem=nothing,
        barrier_wait=_wait,
        barrier_arrive=_arrive,
        copy_gmem_to_smem=_copy_in,
        copy_smem_to_gmem=_copy_out,
        wgmma=_multiply,
        wgmma_accumulator_load=lambda sums, wait_n: jnp.asarray(sums.value),
        layout_cast=lambda value, _: value,
        broadcasted_iota=lambda dtype, shape, axis, layout: lax.broadcasted_iota(dtype, shape, axis),
    )
    of_mosaic = types.SimpleNamespace(begin=nothing, Accumulator=lambda shape, dtype: shape, WGMMA=None, ROWS=None)
    of_mosaic.load = lambda ref, layout, optimized=True: _now(ref.array)
    of_mosaic.column_predicate, of_mosaic.row_a_warp = column_predicate, row_a_warp
    return dict(lax=of_lax, pl=of_pallas, plgpu=of_mosaic_gpu, mosaic=of_mosaic)


def stand_in_for(monkeypatch: Any, modules: Sequence[Any]) -> None:
    """Replace the names of Pallas in the modules of a grouped GEMM."""
    found = stand_ins()
    found["mosaic"].release = found["plgpu"].barrier_arrive
    found["mosaic"].COLUMNS = None
    found["mosaic"].tiled = lambda dtype, swizzle: ()
    found["store_by_row"] = store_by_row
    found["plgpu"].Layout = types.SimpleNamespace(WGMMA_TRANSPOSED=None)
    found["plgpu"].SMEM = lambda shape, dtype, transforms: Memory(np.full(shape, np.nan, dtype))
    found["plgpu"].Barrier = lambda num_arrivals=1, num_barriers=1: Barriers(num_barriers, num_arrivals)
    for module in modules:
        for name, stand_in in found.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, stand_in)


def store_by_row(value: Any, target: Memory, bits: Any, columns: Any) -> None:
    """In place of ``pallas_kernels.grouped_gemm.epilogue_sm90.store_by_row``."""
    for row, own in enumerate(target.array):
        if int(bits) >> row & 1:
            own[: int(columns)] = np.asarray(value[row])[: len(own)]


def clear_rows(values: Memory, start: Any, end: Any) -> None:
    """In place of ``pallas_kernels.common.clear_rows_sm90.clear_rows``."""
    values.array[: max(int(start), 0)] = 0
    values.array[max(int(end), 0) :] = 0


def _fori_loop(first: Any, end: Any, body: Callable[..., Any], carry: Any) -> Any:
    for index in range(int(first), int(end)):
        carry = body(jnp.int32(index), carry)
    return carry


def _copy_in(source: Any, target: Memory, at: Any) -> None:
    """Of what lies within the array; the rest of the target becomes zero, as TMA copies have it."""
    target.array[...] = 0
    found = source.array
    target.array[tuple(slice(extent) for extent in found.shape)] = found
    _arrive(at)


def _copy_out(source: Memory, target: Memory, predicate: Any = None) -> None:
    if predicate is None or bool(predicate):
        target.array[...] = source.array[tuple(slice(extent) for extent in target.shape)]


def _multiply(sums: Sums, left: Any, right: Memory) -> None:
    left = left.array if isinstance(left, Memory) else np.asarray(left)
    # By way of float64: in float32 a column's bits depend on the number of columns on some CPUs.
    product = left.astype(np.float64) @ right.array.astype(np.float64)
    sums.value = sums.value + product.astype(np.float32)


def _now(array: np.ndarray) -> jax.Array:
    """What memory holds: JAX would read it when it computes with it, and a producer may have written by then."""
    return jnp.asarray(np.array(array))


def _one(at: Any) -> tuple[Barriers, int]:
    """A barrier of an array, or the only one of it."""
    return (at, 0) if isinstance(at, Barriers) else at


def _arrive(at: Any) -> None:
    barriers, index = _one(at)
    barriers.arrive(index)


def _wait(at: Any) -> None:
    barriers, index = _one(at)
    barriers.wait(index)


def _barriers(scratch: Mapping[str, Any]) -> list[Barriers]:
    return [held for held in scratch.values() if isinstance(held, Barriers)]


def _index(index: Any) -> Any:
    parts = index if isinstance(index, tuple) else (index,)
    firsts = [part.start or 0 if isinstance(part, slice) else part for part in parts if part is not Ellipsis]
    assert all(int(first) >= 0 for first in firsts), f"before the first element: {firsts}"
    return tuple(part if part is Ellipsis or isinstance(part, slice) else int(part) for part in parts)
