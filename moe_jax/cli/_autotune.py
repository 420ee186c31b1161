"""``moe-jax autotune``: the user's own table of configurations, for the layers of a model on the GPU at hand."""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

from moe_jax._config import MoEConfig
from moe_jax._terminal import printable
from moe_jax.cli._inspect import inspect_checkpoint
from moe_jax.cli._progress import progress_bar
from moe_jax.cli.bench._layer import SHAPES, layer_shape
from moe_jax.experts._choice import first_choice
from moe_jax.parallel._mesh import mesh_sizes
from moe_jax.quantization import Scheme
from pallas_kernels.autotune import GpuTimer
from pallas_kernels.common.device import hopper_gpu
from pallas_kernels.tuning import Entry, tune, update, user_path
from pallas_kernels.tuning.layer import AnyKey
from pallas_kernels.tuning.search import Timer

_AXES = ("expert", "tensor")


def run_autotune(args: argparse.Namespace, timer: Timer | None = None) -> int:
    """Run the command; returns how many cells no configuration runs. Raises ValueError and NotImplementedError for bad
    input, and where there is no GPU to measure.
    """
    tokens = _tokens(args.tokens)
    mesh: dict[str, int] = dict.fromkeys(_AXES, 1)
    if args.mesh is not None:
        mesh |= mesh_sizes(args.mesh, "--mesh", _AXES)
    layers = {layer.key: layer for layer in _layers(args, mesh)}
    gpu = hopper_gpu()
    path = user_path(gpu.kind)
    table = update(path, gpu.kind, ())  # a file that cannot be extended is an error before anything is measured
    cells, left = [], 0
    for layer in layers.values():
        for count in tokens:
            if reason := layer.refusal(count):
                print(f"{layer.name} {count} tokens: not measured: {reason}", flush=True)
            elif args.again or count not in table.buckets(layer.key):
                cells.append((layer.key, count))
            else:
                left += 1
    missing, timer = 0, timer or GpuTimer()
    with progress_bar("tuning", unit="cell", before="compiling ...") as progress:
        for done, (key, count) in enumerate(cells):
            # Saved after each cell, so that a run that ends early loses one.
            found = tune([key], [count], timer, gpu.num_sms)
            update(path, gpu.kind, found)
            missing += not found
            print(_line(layers[key].name, count, found), flush=True)
            if progress is not None:
                progress(done + 1, len(cells))
    kept = f"; {left} were there, --again measures them anew" if left else ""
    print(f"{len(cells) - missing} of {len(cells)} measured on {gpu.kind}{kept}: {printable(str(path))}")
    return missing


def _line(name: str, tokens: int, found: list[Entry]) -> str:
    if not found:
        return f"{name} {tokens} tokens: no configuration runs"
    gemms = (found[0].config.gemm1, found[0].config.gemm2)
    configs = "; ".join(
        ", ".join(f"{field}={value}" for field, value in _changed(gemm).items() if field != "num_sms") for gemm in gemms
    )
    return f"{name} {tokens} tokens: {found[0].micros:.1f} us with {configs}"


def _changed(config: object) -> dict[str, object]:
    fields = dataclasses.fields(config)  # type: ignore[arg-type]
    return {field.name: getattr(config, field.name) for field in fields if getattr(config, field.name) != field.default}


@dataclasses.dataclass(frozen=True)
class _Layer:
    """A layer to measure. key: as tables know it. name: what to call it. refusal: why a call of so many tokens takes
    nothing from a table, or None."""

    key: AnyKey
    name: str
    refusal: Callable[[int], str | None]


def _layers(args: argparse.Namespace, mesh: dict[str, int]) -> Iterator[_Layer]:
    for config in _configs(args):
        sizes = dict(num_experts=mesh["expert"], intermediate_size=mesh["tensor"])
        for (field, parts), axis in zip(sizes.items(), _AXES, strict=True):
            if getattr(config, field) % parts:
                raise ValueError(
                    f"--mesh {axis}={parts} does not divide {field}={getattr(config, field)} of the layers"
                )
        own = {field: getattr(config, field) // parts for field, parts in sizes.items()}
        config = dataclasses.replace(config, dtype=args.dtype, **own)
        if config.top_k > config.num_experts:
            raise ValueError(f"--mesh leaves {config.num_experts} experts on a device, fewer than top_k={config.top_k}")
        name = f"{config.num_experts} experts of {config.hidden_size} x {config.intermediate_size}"
        backend = first_choice(config, "gpu")
        # Layers on a mesh pin their tiles, so that those of any number of tokens come from the table.
        as_it_runs = dataclasses.replace(config, pinned_tokens=1) if max(mesh.values()) > 1 else config
        refusal = functools.partial(backend.tuning_refusal, as_it_runs)
        yield _Layer(backend.tuning_key(config), f"{name} in {config.scheme.name},", refusal)


def _configs(args: argparse.Namespace) -> Iterator[MoEConfig]:
    schemes = [Scheme.parse(name.strip()) for name in args.scheme.split(",")] if args.scheme else []
    is_shape = args.model in SHAPES or args.model.count(",") == 3
    if is_shape and not Path(args.model).exists():
        if not schemes:
            raise ValueError(f"--model {args.model} is a shape; say with --scheme how its experts are quantized")
        for scheme in schemes:
            yield MoEConfig(*layer_shape(args.model), scheme=scheme, name="")
        return
    report = inspect_checkpoint(args.model, revision=args.revision)
    found = [run.config for run in report.expert_runs if run.config is not None]
    if not found:
        raise ValueError(f"{args.model}: no layers of experts found: {'; '.join(report.problems) or 'it has none'}")
    for config in found:
        for scheme in schemes or [config.scheme]:
            yield dataclasses.replace(config, scheme=scheme, implementation=None, name="")


def _tokens(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"--tokens {text!r}: expected positive integers separated by commas")
    return sorted(set(map(int, parts)))
