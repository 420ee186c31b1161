"""Timing layers of experts beside what the machine can do, as ``moe-jax bench`` reports it."""

from moe_jax.cli.bench import (
    MODELS,
    NUM_VARIANTS,
    SHAPES,
    BenchReport,
    Limits,
    bench,
    draw_roofline,
    header,
    layer_shape,
    measure_layer,
    measure_limits,
    operand_of,
    random_weights,
    render,
    time_in_jit,
    time_in_loop,
)

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
