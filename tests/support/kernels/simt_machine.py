"""The threads of a CTA in NumPy: ``pallas_kernels.common.simt`` and the kernel shell.

Values are arrays of 128 threads. Warpgroups run one after the other, the first one last: it alone may read what others
wrote to shared memory, and behind a barrier. Copies to shared memory land when they are waited for, or at once
(``Machine.late``).
"""

import types
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.common import simt

THREADS = np.arange(128)


class Ref:
    """An array with the indexing of a reference; parts share its memory."""

    def __init__(self, array: Any):
        self.array = array
        self.shape, self.dtype = array.shape, array.dtype

    @property
    def at(self):
        return self

    def __getitem__(self, index):
        """index: numbers and slices, one for each of the first axes."""
        index = index if isinstance(index, tuple) else (index,)
        index = tuple(one if isinstance(one, slice) else int(one) for one in index)
        for one, size in zip(index, self.shape, strict=False):
            first, last = (one.start, one.stop) if isinstance(one, slice) else (one, one + 1)
            assert 0 <= first < last <= size
        part = self.array[index]
        return Ref(part) if isinstance(part, np.ndarray) and part.ndim else jnp.asarray(part)

    def bytes(self) -> Any:
        assert self.array.flags.c_contiguous
        return self.array.reshape(-1).view(np.uint8)

    def numbers(self, itemsize: int) -> Any:
        return self.bytes().view({1: np.uint8, 2: np.uint16, 4: np.uint32}[itemsize])


def bits(values: Any) -> Any:
    return np.broadcast_to(np.asarray(values), (128,)).view(np.uint32)


class Machine:
    """Runs bodies of ``row_kernel``.

    late: copies land when they are waited for; else when they are issued.
    """

    def __init__(self, *, late: bool):
        self.late = late
        self.cta = self.warpgroup = 0
        self.groups: list[list[Any]] = [[]]
        self.barriers = 0  # that this warpgroup has passed
        self.written: dict[int, tuple[int, int]] = {}  # address -> the warpgroup that wrote it, barriers passed before

    def row_kernel(
        self,
        body: Any,
        out_type: Any,
        num_ctas: int,
        name: str,
        *,
        num_warpgroups: int = 1,
        scratch_types: Any = (),
    ) -> Any:
        def run(*arrays):
            out = np.full(out_type.shape, np.nan, np.float32).astype(out_type.dtype)
            refs = [Ref(np.array(array)) for array in arrays] + [Ref(out)]
            for self.cta in range(num_ctas):
                scratch, passed, self.written = {}, set(), {}
                for name, (shape, dtype) in dict(scratch_types).items():
                    size = int(np.prod(shape)) * jnp.dtype(dtype).itemsize
                    scratch[name] = Ref(np.full(size, 0xFF, np.uint8).view(dtype).reshape(shape))
                for self.warpgroup in reversed(range(num_warpgroups)):
                    self.groups, self.barriers = [[]], 0
                    body(*refs, **scratch)
                    assert not any(self.groups), "every copy is waited for"
                    passed.add(self.barriers)
                assert len(passed) == 1, f"warpgroups passed {passed} barriers"
            return jnp.asarray(out)

        return run

    # -- of simt ------------------------------------------------------------------------------------------------------

    def copy(self, source, index, target, place, is_inside=None, mask=None, *, ahead=(0, 0), l1=False):
        del l1
        given = index + ahead[0], place + ahead[1], *(True if v is None else v for v in (is_inside, mask))
        index, place, inside, mask = (np.broadcast_to(np.asarray(v), (128,)) for v in given)
        given, own = source.bytes(), target.bytes()
        for thread in np.flatnonzero(mask):
            first, to = 16 * int(index[thread]), 16 * int(place[thread])
            assert 0 <= to and to + 16 <= own.size
            assert not inside[thread] or (0 <= first and first + 16 <= given.size)
            data = given[first : first + 16] if inside[thread] else np.zeros(16, np.uint8)
            if self.late:
                own[to : to + 16] = 0xFF
                self.groups[-1].append((own, to, data))
            else:
                own[to : to + 16] = data

    def end_copies(self):
        self.groups.append([])

    def wait_for_copies(self, newest):
        complete = len(self.groups) - 1 - newest
        for group in self.groups[:complete]:
            for own, to, data in group:
                own[to : to + 16] = data
            group.clear()

    def load_words(self, ref, index, count):
        index = np.asarray(index)
        assert (index % count == 0).all()
        return tuple(jnp.asarray(ref.numbers(4)[index + i].view(np.int32)) for i in range(count))

    @staticmethod
    def _masked(ref, index, mask, itemsize):
        index, mask = (np.broadcast_to(np.asarray(v), (128,)) for v in (index, mask))
        assert ((index >= 0) & (index < ref.numbers(itemsize).size))[mask].all()
        return np.where(mask, ref.numbers(itemsize)[np.where(mask, index, 0)].astype(np.uint32), 0), mask

    def load_bits(self, ref, index, mask, itemsize):
        return jnp.asarray(self._masked(ref, index, mask, itemsize)[0].view(np.int32))

    def load(self, ref, index, mask, default):
        found, mask = self._masked(ref, index, mask, 4)
        for address in self._addresses(ref, index, mask):
            warpgroup, before = self.written.get(address, (self.warpgroup, -1))
            assert warpgroup == self.warpgroup or before < self.barriers, "read before a barrier"
        return jnp.where(mask, found.view(np.int32), default)

    @staticmethod
    def _addresses(ref, index, mask):
        start = ref.array.__array_interface__["data"][0]
        index, mask = (np.broadcast_to(np.asarray(v), (128,)) for v in (index, mask))
        return (start + 4 * index[mask].astype(np.int64)).tolist()

    def load_float(self, ref, index, mask, default):
        dtype = jnp.dtype(ref.dtype)
        found, mask = self._masked(ref, index, mask, dtype.itemsize)
        kind = np.uint16 if dtype.itemsize == 2 else np.uint32
        return jnp.where(mask, jnp.asarray(found.astype(kind).view(dtype)).astype(jnp.float32), default)

    def store(self, ref, index, value, mask):
        self.store_bits(ref, index, value, mask, 4)
        self.written |= dict.fromkeys(self._addresses(ref, index, mask), (self.warpgroup, self.barriers))

    def barrier(self):
        self.barriers += 1

    def store_bits(self, ref, index, value, mask, itemsize):
        index, mask = (np.broadcast_to(np.asarray(v), (128,)) for v in (index, mask))
        numbers = ref.numbers(itemsize)
        assert ((index >= 0) & (index < numbers.size))[mask].all()
        numbers[index[mask]] = bits(value)[mask].astype(numbers.dtype)

    @staticmethod
    def float_bits(value, dtype):
        rounded = np.asarray(value.astype(dtype))
        kind = np.uint16 if rounded.dtype.itemsize == 2 else np.uint32
        return jnp.asarray(rounded.view(kind).astype(np.uint32).view(np.int32))

    def asm_of_several(self, operands, text, constraints, count):
        del constraints
        assert text.startswith("ldmatrix"), text
        ((ref, offset),) = operands
        offset = offset + int(text.split("+")[1].split("]")[0])
        return [self._matrix(ref, offset, index) for index in range(count)]

    @staticmethod
    def mma(operand, a, b, c):
        return multiplied(simt.mma_text(operand), a, b, c)

    @staticmethod
    def asm(operands, text, constraints, *, has_result):
        assert text.startswith("dp4a.s32.s32") and has_result, text
        a, b, total = (np.ascontiguousarray(one).view(np.int8 if i < 2 else np.int32) for i, one in enumerate(operands))
        return (total + (a.astype(np.int32) * b).reshape(-1, 4).sum(1, dtype=np.int32)).view(np.uint32)

    @staticmethod
    def warp_sum(value):
        lanes = np.asarray(value).reshape(-1, 32)
        return jnp.asarray(np.repeat(lanes.sum(1, dtype=value.dtype), 32))

    @staticmethod
    def _matrix(ref, offset, index):
        """Thread t of a warp gets word t % 4 of row t // 4 of a matrix; its eight threads give rows' addresses."""
        given = np.asarray(offset)[THREADS // 32 * 32 + 8 * index + THREADS % 32 // 4]
        assert (given % 16 == 0).all()
        return ref.numbers(4)[given // 4 + THREADS % 4]

    def namespace(self) -> Any:
        names = ("copy", "end_copies", "wait_for_copies", "load_words", "load_bits", "load", "load_float", "store")
        own = {
            name: getattr(self, name) for name in (*names, "store_bits", "float_bits", "asm_of_several", "mma", "asm")
        }
        return types.SimpleNamespace(
            **own,
            warp_sum=self.warp_sum,
            warp_add=self.warp_sum,
            LANES=simt.LANES,
            CHUNK=simt.CHUNK,
            thread_index=lambda: jnp.asarray((THREADS + 128 * self.warpgroup).astype(np.int32)),
            warp_of=simt.warp_of,
            constant=lambda value: jnp.full(128, value, jnp.int32),
            barrier=self.barrier,
            inline=lambda *_, **__: lambda function: lambda *given: function(None, *given),
            value_of=bits,
            wrap=lambda value: jnp.asarray(np.broadcast_to(value, (128,)).view(np.int32)),
            integer=lambda width: f"i{width}",
            integer_constant=lambda value, width: np.full(128, value, np.uint32),
        )

    def lax(self) -> Any:
        own = {name: getattr(lax, name) for name in dir(lax) if not name.startswith("_")}
        own |= dict(axis_index=lambda name: jnp.int32(getattr(self, name)), fori_loop=in_turn)
        return types.SimpleNamespace(**own)


def in_turn(first: Any, last: Any, body: Any, carry: Any) -> Any:
    for index in range(int(first), int(last)):
        carry = body(jnp.int32(index), carry)
    return carry


def multiplied(text: str, a: Any, b: Any, c: Any) -> list[Any]:
    """``mma.sync`` of each warp (PTX ISA, fragments of m16n8k16 and, of 8 bits, m16n8k32)."""
    kind = text.split(".")[7]
    dtype = jnp.dtype({"bf16": "bfloat16", "f16": "float16", "s8": "int8", "e4m3": "float8_e4m3fn"}[kind])
    count = 4 // dtype.itemsize
    total = np.int32 if kind == "s8" else np.float32
    found = [np.empty(128, np.uint32) for _ in range(4)]
    numbers = lambda register: np.ascontiguousarray(register).reshape(-1, 1).view(dtype).astype(np.float64)  # noqa: E731
    for warp in range(4):
        left, right, sums = np.zeros((16, 8 * count)), np.zeros((8 * count, 8)), np.zeros((16, 8))
        lanes = np.arange(32)
        row, t, own = lanes // 4, lanes % 4, 32 * warp + lanes
        for index, register in enumerate(a):
            for column in range(count):
                at = row + 8 * (index % 2), count * t + column + 4 * count * (index // 2)
                left[at] = numbers(register)[own, column]
        for index, register in enumerate(b):
            for column in range(count):
                right[count * t + column + 4 * count * index, row] = numbers(register)[own, column]
        for index, register in enumerate(c):
            sums[row + 8 * (index // 2), 2 * t + index % 2] = np.ascontiguousarray(register).view(total)[own]
        sums = (left @ right + sums).astype(total)
        for index in range(4):
            found[index][own] = sums[row + 8 * (index // 2), 2 * t + index % 2].view(np.uint32)
    return found
