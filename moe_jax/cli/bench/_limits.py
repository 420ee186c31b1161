"""What the machine can do at most: how fast it multiplies and how fast it copies, measured with XLA's own programs."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.cli.bench._timing import time_in_jit

_CALLS = (1, 3)
_PASSES = 4


@dataclasses.dataclass(frozen=True)
class Limits:
    """gbps: bytes read and written, in 1e9 a second. tflops: dtype of the operands -> 1e12 operations a second."""

    gbps: float
    tflops: Mapping[str, float]

    def ceiling(self, operand: str) -> float:
        """TFLOP/s a product of ``operand`` can reach: in this dtype, or widened to a larger one that is faster here."""
        width = jnp.dtype(operand).itemsize
        rates = [rate for name, rate in self.tflops.items() if name == operand or jnp.dtype(name).itemsize > width]
        if not rates:
            raise ValueError(f"no matmul rate for {operand}; measured are {', '.join(self.tflops)}")
        return max(rates)

    def fraction(self, tflops: float, gbps: float, operand: str) -> float:
        """The larger of both rates' shares of their limit: 1.0 is as fast as this machine can be."""
        return max(tflops / self.ceiling(operand), gbps / self.gbps)


def measure_limits(operands: Iterable[str], *, size: int | None = None, copied_bytes: int | None = None) -> Limits:
    """Measure now, on the default device.

    operands: dtypes of the products, such as "bfloat16". A CPU widens 8-bit operands: float32 and bfloat16 stand for
    them there. size: rows and columns of the matrices, copied_bytes: of the array; None for sizes that no cache holds.
    """
    is_cpu = jax.default_backend() == "cpu"
    names = sorted({"float32", "bfloat16"} if is_cpu else {"bfloat16", *operands})
    size = size or (1024 if is_cpu else 8192)
    return Limits(
        _copy_rate(copied_bytes or (1 << 26 if is_cpu else 1 << 30)), {n: _matmul_rate(n, size) for n in names}
    )


def _matmul_rate(name: str, size: int) -> float:
    """TFLOP/s of a square product, both operands with the contraction contiguous: on a GPU the best of cuBLAS."""
    dtype = jnp.dtype(name)
    accumulator = jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else jnp.float32

    def product(a: Any, b: Any) -> Any:
        out = lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=accumulator)
        return out if accumulator == jnp.int32 else out.astype(jnp.bfloat16)

    def matrix(seed: int) -> Any:
        values = jax.random.normal(jax.random.key(seed), (size, size), jnp.float32)
        return (values * 16).astype(dtype)

    variants = [matrix(seed) for seed in range(1, 1 + _CALLS[1])]
    # With Triton's candidates too, XLA tries them for 44 s in e4m3 on an H200, and takes cuBLAS.
    options = {"xla_gpu_enable_triton_gemm": False} if jax.default_backend() == "gpu" else None
    micros = time_in_jit(
        product,
        (matrix(0), variants[0]),
        1,
        variants=variants,
        samples=3,
        calls=_CALLS,
        compiler_options=options,
    )
    return 2 * size**3 / micros / 1e6


def _copy_rate(nbytes: int) -> float:
    """GB/s, reads and writes counted: an array is copied once and then rewritten _PASSES times."""

    def rewrite(x: Any, passes: Any) -> Any:
        return lax.fori_loop(0, passes, lambda _, x: x + jnp.float32(1), x)  # a traced count: nothing to unroll or fuse

    x = jnp.zeros(nbytes // 4, jnp.float32)
    micros = time_in_jit(rewrite, (x, jnp.int32(_PASSES)), 1, samples=3, calls=_CALLS)
    return 2 * (_PASSES + 1) * nbytes / micros / 1e3
