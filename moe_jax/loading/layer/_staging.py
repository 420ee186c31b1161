"""``Staging``: the leaves of one layer on the host while they are filled, and what of them is written.

Copies may be made by threads, so that files are read in parallel; ``HostCopies`` hands them over.
"""

import collections
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future

import jax
import numpy as np
from jax.typing import DTypeLike

from moe_jax._typing import HostArray
from moe_jax.loading._errors import ranges, shorten
from moe_jax.loading.layer._online import OnlineExperts
from moe_jax.loading.layer._plan import Step
from moe_jax.loading.layer._values import TensorError, check_contents, copy_checked
from moe_jax.quantization import LeafSpec, QuantFormat

_ALIGNMENT = 64  # of host memory that XLA's CPU client takes over without a copy
_BATCH_BYTES = 4 << 20  # one job for a thread; handing over a small tensor takes longer than copying it
_MOST_PENDING = 16  # jobs that wait for a thread; each keeps its arrays


class Staging:
    """Writes steps into the leaves of a layer, each element once, and into ``OnlineExperts`` what gets quantized.

    Args:
        is_gated: w13 leaves hold w1 and w3.
        fmt: of the layer's weights in the end.
        executor: its threads check values and copy; None: the caller does.

    Attributes:
        coverage: what is written.
        peak_nbytes: the most that ``nbytes`` has been.
    """

    def __init__(self, *, is_gated: bool, fmt: QuantFormat | None, executor: Executor | None):
        self._fmt = fmt
        self._copies = None if executor is None else HostCopies(executor)
        self._buffers: dict[str, np.ndarray] = {}
        self._buffered_nbytes = 0
        self._online: OnlineExperts | None = None
        self.coverage = Coverage(is_gated)
        self.peak_nbytes: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes held for tensors as the checkpoint stores them; what is quantized already does not count."""
        return self._buffered_nbytes + (self._online.pending_bytes if self._online else 0)

    @property
    def is_invalid(self) -> bool:
        """Whether a tensor that was accepted before has turned out to be damaged."""
        return bool((self._online and self._online.is_damaged) or (self._copies and self._copies.failure))

    def check(
        self,
        name: str,
        contents: Sequence[HostArray],
        steps: Sequence[Step],
        spec: LeafSpec,
        online: OnlineExperts | None,
    ) -> None:
        """Raise ValueError for values that no leaf takes, and for w1 and w3 that have to be equal and are not.

        Values are left to the thread that copies, where there is one, or to the device that quantizes.

        Args:
            name: of the tensor.
            contents: what the steps bring.
            spec: of the leaf.
            online: as for ``add``.
        """
        is_checked_later = self._defers(online) or (
            online is not None and online.checks_values and spec.kind == "weight"
        )
        for array in () if is_checked_later else contents:
            check_contents(name, array, spec, self._fmt)
        for step in steps:
            target = step.target
            if target.is_common and self.coverage.any(target.leaf, target.index[0]):
                _check_equal(name, target.leaf, self._buffers[target.leaf][target.index], step.value)

    def add(
        self,
        name: str,
        contents: Sequence[HostArray],
        steps: Sequence[Step],
        specs: Mapping[str, LeafSpec],
        online: OnlineExperts | None,
    ) -> None:
        """Write the steps of one tensor, which are checked.

        Args:
            name: of the tensor.
            contents: what the steps bring.
            specs: of the leaves that are filled.
            online: takes weights and quantizes them; None where they are stored as they come.

        Raises:
            TensorError: something was wrong with an earlier tensor.
        """
        self._online = online
        spec = specs[steps[0].target.leaf]
        is_adopted = online is None and len(contents) == 1 and self._adopt(steps, contents[0], specs)
        copies: list[tuple[np.ndarray, Step]] = []
        for step in steps:
            leaf = step.target.leaf
            if online is not None and spec.kind == "weight":
                self._quantize(step, name, online)
            elif not is_adopted:
                if leaf not in self._buffers:
                    self._keep(leaf, _aligned_zeros(spec.shape, spec.dtype))
                copies.append((self._buffers[leaf], step))
            self.coverage.mark(leaf, spec.shape[0], step.target.index[0], step.shard)
        self._note_peak()

        def copy() -> None:
            if self._defers(online) and len(copies) == 1:
                ((buffer, step),) = copies
                copy_checked(name, step.value, buffer[step.target.index], spec, self._fmt)
                return
            for array in contents if self._defers(online) else ():
                check_contents(name, array, spec, self._fmt)
            for buffer, step in copies:
                step.target.write(buffer, step.array)

        # What w1 and w3 have in common is compared when the second one comes, so it has to be there by then.
        if self._copies is not None and online is None and not any(step.target.is_common for step in steps):
            self._copies.add(name, copy, sum(array.nbytes for array in contents))
        else:
            copy()

    def finish(self) -> None:
        """Wait for what is on its way. Raises TensorError for a tensor that was damaged."""
        if self._copies is not None:
            self._copies.finish()
        if self._online is not None:
            self._online.finish()

    def leaves(self) -> dict[str, np.ndarray | jax.Array]:
        """What was written, by leaf."""
        return self._buffers | (self._online.leaves if self._online else {})

    def release(self) -> None:
        """Let go of the leaves."""
        self._buffers, self._buffered_nbytes, self._online = {}, 0, None

    def _defers(self, online: OnlineExperts | None) -> bool:
        return self._copies is not None and online is None

    def _keep(self, leaf: str, buffer: np.ndarray) -> None:
        self._buffers[leaf] = buffer
        self._buffered_nbytes += buffer.nbytes

    def _adopt(self, steps: Sequence[Step], array: HostArray, specs: Mapping[str, LeafSpec]) -> bool:
        """Use a read-only array as the buffer of a weight leaf when it fills all of it in the same layout."""
        leaf = steps[0].target.leaf
        if specs[leaf].kind != "weight" or array.shape != specs[leaf].shape:
            return False
        is_same = array.dtype == specs[leaf].dtype and not array.flags.writeable
        is_straight = all(step.array.strides == array.strides for step in steps)
        is_whole = sum(step.target.num_elements for step in steps) == array.size
        if not (is_same and is_straight and is_whole):
            return False
        self._keep(leaf, array)
        return True

    def _quantize(self, step: Step, name: str, online: OnlineExperts) -> None:
        value = step.value.copy() if step.array.flags.writeable else step.value
        experts = range(*step.target.index[0].indices(online.num_experts))
        for expert, part in zip(experts, value.reshape(len(experts), *value.shape[-2:]), strict=True):
            online.add(expert, step.shard, part, name)
            self._note_peak()
            online.quantize_if_complete(expert)

    def _note_peak(self) -> None:
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)


def _check_equal(name: str, leaf: str, stored: HostArray, value: HostArray) -> None:
    stored, value = np.broadcast_arrays(stored, value)
    differs = ~np.isclose(stored, value, rtol=1e-5, atol=0, equal_nan=True)
    if differs.any():
        raise ValueError(
            f"{shorten(name)}: {leaf} of w1 and w3 must be equal: {stored[differs][0]} and {value[differs][0]} "
            f"({differs.sum()} of {differs.size} differ)"
        )


class Coverage:
    """One byte for each expert of each leaf and projection, 1 once written: w13 leaves have w1 and w3, w2 have w2."""

    def __init__(self, is_gated: bool):
        self._w13_shards = ("w1", "w3") if is_gated else ("w1",)
        self._written: dict[str, dict[str, bytearray]] = {}

    def shards(self, leaf: str) -> tuple[str, ...]:
        """The projections that a leaf holds, in the order of its rows."""
        return ("w2",) if leaf.startswith("w2_") else self._w13_shards

    def any(self, leaf: str, experts: slice = slice(None), shards: Sequence[str] | None = None) -> bool:
        """Whether anything is written among these experts and projections (None: all of the leaf)."""
        written = self._written.get(leaf, {})
        return any(1 in row[experts] for shard, row in written.items() if shards is None or shard in shards)

    def mark(self, leaf: str, num_experts: int, experts: slice, shard: str) -> None:
        """Note that one projection of these experts is written."""
        if leaf not in self._written:
            self._written[leaf] = {each: bytearray(num_experts) for each in self.shards(leaf)}
        row = self._written[leaf][shard]
        row[experts] = b"\1" * len(row[experts])

    def missing(self, specs: Mapping[str, LeafSpec]) -> dict[str, dict[str, list[int]]]:
        """{leaf: {shard: experts}} of everything in ``specs`` that is not written."""
        result: dict[str, dict[str, list[int]]] = {}
        for leaf, spec in specs.items():
            written = self._written.get(leaf, {})
            for shard in self.shards(leaf):
                row = written.get(shard, bytes(spec.shape[0]))
                if 0 in row:
                    result.setdefault(leaf, {})[shard] = [expert for expert, is_there in enumerate(row) if not is_there]
        return result


def experts_text(experts: Sequence[int], total: int) -> str:
    """[0, 1, 2, 5] -> "experts 0-2, 5"."""
    if len(experts) == total:
        return f"all {total} experts"
    return f"expert{'s' if len(experts) > 1 else ''} {ranges(experts)}"


class HostCopies:
    """Hands copies to the threads of an executor, several small ones together.

    failure: the first error of a thread; what is in the buffers is then not to be used.
    """

    def __init__(self, executor: Executor):
        self._executor = executor
        self._batch: list[tuple[str, Callable[[], None]]] = []
        self._batch_bytes = 0
        self._pending: collections.deque[Future[None]] = collections.deque()
        self.failure: Exception | None = None

    def add(self, name: str, copy: Callable[[], None], nbytes: int) -> None:
        """``copy`` will run in a thread. Raises TensorError for what earlier ones found wrong."""
        self._batch.append((name, copy))
        self._batch_bytes += nbytes
        if self._batch_bytes >= _BATCH_BYTES:
            self._submit()
            self._wait(_MOST_PENDING)

    def finish(self) -> None:
        """Wait for all copies. Raises TensorError for the first that found something wrong."""
        self._submit()
        self._wait(0)
        if self.failure is not None:
            raise self.failure

    def _submit(self) -> None:
        if self._batch:
            self._pending.append(self._executor.submit(_run, self._batch))
            self._batch, self._batch_bytes = [], 0

    def _wait(self, most: int) -> None:
        while len(self._pending) > most:
            try:
                self._pending.popleft().result()
            except Exception as error:
                self.failure = self.failure or error
                raise self.failure from None


def _run(batch: list[tuple[str, Callable[[], None]]]) -> None:
    for name, copy in batch:
        try:
            copy()
        except ValueError as error:
            raise TensorError(name, str(error)) from None


def _aligned_zeros(shape: Sequence[int], dtype: DTypeLike) -> HostArray:
    """Zeros that the CPU client of XLA can take over without a copy."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.zeros(nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)
