"""What the scripts share: the package's timer, and the limits of the H200 that results are compared with."""

from moe_jax.benchmarking import NUM_VARIANTS, Limits, header, time_in_jit, time_in_loop

# Measured on one H200 (benchmarks/results): what a kernel could reach at most.
READ_GBPS = 4385.0
DENSE_TFLOPS = {"bfloat16": 789.0, "float16": 789.0, "float8_e4m3fn": 1490.0, "int8": 1473.0}
H200 = Limits(READ_GBPS, DENSE_TFLOPS)

__all__ = ["DENSE_TFLOPS", "H200", "NUM_VARIANTS", "READ_GBPS", "header", "time_in_jit", "time_in_loop"]
