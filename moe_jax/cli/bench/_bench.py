"""``bench``: one layer's shape in several schemes and numbers of tokens, beside limits measured in the same process."""

import dataclasses
import datetime
import platform
from collections.abc import Callable, Sequence
from typing import Any

import jax

from moe_jax._config import MoEConfig
from moe_jax._version import __version__
from moe_jax.cli.bench._layer import layer_shape, measure_layer, operand_of, random_weights
from moe_jax.cli.bench._limits import Limits, measure_limits
from moe_jax.experts._backend import Problem
from moe_jax.experts._choice import choose, nothing_runs, order_of
from moe_jax.quantization import Scheme

# backend: (model, schemes, tokens) where the caller names none
DEFAULTS = {
    "cpu": ("toy", ("bf16", "fp8_channel", "int8_w8a8", "w4a16_g128"), (1, 16, 256)),
    "gpu": (
        "qwen3-30b-a3b",
        ("bf16", "fp8_channel", "fp8_block", "int8_w8a8", "w4a16_g128", "mxfp4_a16"),
        (1, 64, 1024),
    ),
}
_CPU_TIMING: dict[str, Any] = dict(calls=(1, 4), samples=3)  # calls take milliseconds there, launches matter less


@dataclasses.dataclass(frozen=True)
class BenchReport:
    """device, versions, date: where and when. model: the shape's name. shape: (experts, top_k, hidden, intermediate).

    cells: one dict for each scheme and number of tokens, with what ``measure_layer`` returns and the implementation
    and operand it ran with, or with an "error" instead of figures.
    """

    device: str
    versions: dict[str, str]
    date: str
    model: str
    shape: tuple[int, int, int, int]
    limits: Limits
    cells: tuple[dict[str, Any], ...]

    def as_json(self) -> dict[str, Any]:
        """The report in lists, dicts, numbers and text."""
        return dataclasses.asdict(self) | {"shape": list(self.shape), "cells": list(self.cells)}


def bench(
    model: str | None = None,
    schemes: Sequence[str] | None = None,
    tokens: Sequence[int] | None = None,
    *,
    implementation: Sequence[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> BenchReport:
    """Measure a layer with random weights in bfloat16 on the default device; None takes what suits the device.

    model: a name in ``SHAPES`` or "experts,top_k,hidden,intermediate". schemes: names. tokens: in a call. progress:
    called with (cells done, cells in all).

    Raises ValueError for an unknown model or scheme, a scheme whose activation scales only a checkpoint has, tokens
    that are not positive, and an unknown implementation. A cell that fails, for want of memory or of a kernel, is
    reported in its place.
    """
    backend = "gpu" if jax.default_backend() == "gpu" else "cpu"
    defaults = DEFAULTS[backend]
    model = model or defaults[0]
    shape, tokens = layer_shape(model), tuple(defaults[2] if tokens is None else tokens)
    if not tokens or min(tokens) < 1:
        raise ValueError(f"tokens is {list(tokens)}, expected one or more numbers of at least 1")
    configs = [_config(shape, name, implementation, backend) for name in schemes or defaults[1]]
    limits = measure_limits({operand_of(config) for config in configs})
    cells: list[dict[str, Any]] = []
    for config in configs:
        weights = None
        for count in tokens:
            row = dict(model=model, scheme=config.scheme.name, tokens=count, operand=operand_of(config))
            try:
                weights = random_weights(config) if weights is None else weights
                chosen, skipped = choose(Problem(config, weights, count, backend))
                if chosen is None:
                    raise NotImplementedError(nothing_runs(skipped))
                row["implementation"] = chosen.name
                timing = _CPU_TIMING if backend == "cpu" else {}
                cells.append(row | measure_layer(config, model, weights, count, limits, **timing))
            except Exception as error:  # one cell that fails must not hide the others
                cells.append(row | {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"})
            if progress is not None:
                progress(len(cells), len(configs) * len(tokens))
    return BenchReport(
        device=jax.devices()[0].device_kind,
        versions={"moe_jax": __version__, "jax": jax.__version__, "Python": platform.python_version()},
        date=datetime.date.today().isoformat(),
        model=model,
        shape=shape,
        limits=limits,
        cells=tuple(cells),
    )


def _config(
    shape: tuple[int, int, int, int],
    name: str,
    implementation: Sequence[str] | None,
    backend: str,
) -> MoEConfig:
    scheme = Scheme.parse(name)
    if scheme.activations is not None and scheme.activations.needs_input_scale:
        raise ValueError(f"scheme {name!r} takes activation scales from a checkpoint, and random weights have none")
    config = MoEConfig(
        *shape,
        scheme=scheme,
        dtype="bfloat16",
        implementation=None if implementation is None else tuple(implementation),
    )
    order_of(config, backend)  # refuses unknown names
    return config
