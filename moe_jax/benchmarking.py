"""Timing layers of experts beside what the machine can do, as ``moe-jax bench`` reports it."""

from moe_jax.cli.bench._bench import BenchReport, bench
from moe_jax.cli.bench._layer import MODELS, SHAPES, layer_shape, measure_layer, operand_of, random_weights
from moe_jax.cli.bench._limits import Limits, measure_limits
from moe_jax.cli.bench._report import draw_roofline, render
from moe_jax.cli.bench._timing import NUM_VARIANTS, header, time_in_jit, time_in_loop

__all__ = [
    "MODELS",
    "NUM_VARIANTS",
    "SHAPES",
    "BenchReport",
    "Limits",
    "bench",
    "draw_roofline",
    "header",
    "layer_shape",
    "measure_layer",
    "measure_limits",
    "operand_of",
    "random_weights",
    "render",
    "time_in_jit",
    "time_in_loop",
]
