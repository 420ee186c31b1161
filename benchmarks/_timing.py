"""What the scripts share: the package's timer, and the limits of GPUs that results are compared with."""

import functools

import jax

from moe_jax.benchmarking import NUM_VARIANTS, Limits, header, measure_limits, time_in_jit, time_in_loop

# Measured on one H200 (benchmarks/results): what a kernel could reach at most.
READ_GBPS = 4385.0
DENSE_TFLOPS = {"bfloat16": 789.0, "float16": 789.0, "float8_e4m3fn": 1490.0, "int8": 1473.0}
# By kind of GPU; the H100's by measure_limits: copies, and products of cuBLAS (results/lent_table_h100.txt).
_H100_TFLOPS = {"bfloat16": 717.0, "float16": 717.0, "float8_e4m3fn": 1286.0, "int8": 1472.0}
_LIMITS = {"NVIDIA H200": Limits(READ_GBPS, DENSE_TFLOPS), "NVIDIA H100 80GB HBM3": Limits(2924.0, _H100_TFLOPS)}

__all__ = ["DENSE_TFLOPS", "NUM_VARIANTS", "READ_GBPS", "header", "limits_here", "time_in_jit", "time_in_loop"]


@functools.cache
def limits_here() -> Limits:
    """Of the device at hand; measured now where its kind is not known."""
    known = _LIMITS.get(jax.devices()[0].device_kind)
    return measure_limits(DENSE_TFLOPS) if known is None else known
