"""Programs of whole models, kept as they were lowered for the processes that come later.

JAX's compilation cache spares a later process the compilation of a program, which it finds by what the program was
lowered to. Tracing and lowering 48 layers takes as long again. So where that cache is on, a program is kept beside it
under what it was traced from: the sources of these packages, versions, settings, the GPU, tuning tables, the structure
of the model and the shapes of the arguments.
"""

import dataclasses
import enum
import functools
import hashlib
import importlib.util
import os
import sys
import threading
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export
from jax.core import Tracer

from moe_jax import _began
from moe_jax._compat import installed_version
from moe_jax._kept import digest_of, sources
from moe_jax._output import write_output
from moe_jax.models._compiled import Structure
from pallas_kernels.common.device import hopper_gpu
from pallas_kernels.tuning import table_for

_sources = functools.partial(sources, "moe_jax", "pallas_kernels")
# Distributions whose code runs while a program is traced, where they are installed.
_TRACING = "jax", "jaxlib", "flax", "numpy", "ml_dtypes", "opt_einsum"
_TRACING += "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"
# Packages whose classes and functions a program may be traced from: their sources or versions are part of the key.
_KNOWN = {"moe_jax", "pallas_kernels", "jax", "jaxlib", "flax", "numpy", "ml_dtypes", *sys.stdlib_module_names}
_DIGEST = hashlib.sha256().digest_size


def program(num_static: int, donated: Sequence[int] = ()) -> Callable[[Callable[..., Any]], Any]:
    """``jax.jit``, but a program for a model on one device is traced and lowered once for all processes that share
    JAX's cache.

    The function has a ``jitted``, which takes the folder of programs, or None, in front of the other arguments.

    Args:
        num_static: of the function's arguments the first are static, then come the leaves of a model, then arrays.
        donated: places of arguments whose memory is used up.
    """
    return functools.partial(_program, num_static, donated)


def _program(num_static: int, donated: Sequence[int], function: Callable[..., Any]) -> Any:
    def traced(folder, *args):
        static, arrays = args[:num_static], args[num_static:]
        path = None if folder is None else _path(folder, function, static, arrays)
        if path is None:
            return function(*args)
        exported = _read(path)
        if exported is None:
            try:
                exported = _exported(function, static, arrays)
                stored = bytes(exported.serialize())
            except Exception as error:  # the function's own, which comes again here, or it cannot be exported
                results = function(*args)
                warnings.warn(f"{path.name} is not kept: {error}", stacklevel=2)
                return results
            if _are_sources_unchanged():
                _write(path, stored)
        return exported.call(*arrays)

    traced.__name__ = function.__name__
    donate_argnums = [place + 1 for place in donated]
    jitted = jax.jit(traced, static_argnums=range(num_static + 1), donate_argnums=donate_argnums)

    @functools.wraps(function)
    def run(*args):
        folder = _folder(args[num_static])
        if folder is not None:  # results of what was exported are committed, and used up by the next call
            args = tuple(_committed(arg) if place in donated else arg for place, arg in enumerate(args))
        return jitted(folder, *args)

    run.jitted = jitted  # type: ignore[attr-defined]
    return run


def _folder(weights: Sequence[Any]) -> Path | None:
    """Where programs of a model with these leaves are kept; None where they are not."""
    place = _setting("jax_compilation_cache_dir")
    if not place or not _setting("jax_enable_compilation_cache") or "://" in place:
        return None
    if os.environ.get("MOE_JAX_PROGRAM_CACHE") == "0" or not _can_be_written():
        return None
    sharding = getattr(weights[0], "sharding", None) if weights else None
    if not isinstance(sharding, jax.sharding.SingleDeviceSharding):
        return None
    (device,) = sharding.device_set
    return Path(place) / "moe_jax" if device in jax.local_devices()[:1] else None


@functools.cache
def _can_be_written() -> bool:
    """Whether JAX finds the package that it writes programs with; ``moe-jax doctor`` says so."""
    return importlib.util.find_spec("flatbuffers") is not None


def _committed(arrays: Any) -> Any:
    """Arrays on the device where they lie, committed to it."""
    leaves, treedef = jax.tree.flatten(arrays)
    first = next((leaf for leaf in leaves if isinstance(leaf, jax.Array)), None)  # others come from the same program
    if first is None or first.committed:
        return arrays
    return treedef.unflatten(jax.device_put(a, a.sharding) if isinstance(a, jax.Array) else a for a in leaves)


def _are_sources_unchanged() -> bool:
    """Whether all are those that this process has read, or will: none came after it began, nor lies in an archive."""
    try:
        times = [max(stat.st_mtime, stat.st_ctime) for stat in (file.stat() for _, file in _sources())]
    except OSError:  # one is just being replaced
        return False
    return bool(times) and max(times) < _began.TIME


@functools.cache
def _fixed() -> str:
    """What holds as long as a process runs: sources, versions, the device."""
    facts: list[Any] = [digest_of(_sources()), *((name, installed_version(name)) for name in _TRACING)]
    device, about = jax.local_devices()[0], ("device_kind", "compute_capability", "core_count")
    facts += [sys.version, device.client.platform_version, *(getattr(device, name, None) for name in about)]
    return repr(facts)


def _tables() -> str:
    """The tuning table of the GPU at hand."""
    try:
        gpu = hopper_gpu()
    except NotImplementedError:
        return ""
    return repr((gpu, table_for(gpu)))


def _is_in_context() -> bool:
    """Whether JAX traces otherwise here than in a new thread: under one of its context managers."""
    traces: list[int] = []
    probe = jax.jit(lambda: traces.append(0))
    elsewhere = threading.Thread(target=jax.eval_shape, args=(probe,))
    elsewhere.start()
    elsewhere.join()
    jax.eval_shape(probe)
    return len(traces) > 1


def _spelled(value: Any) -> str:
    """A value, the same in every process and for nothing else. Raises TypeError for one that is made of anything whose
    source or content is not known."""
    kind = type(value)
    if value is None or kind in (bool, int, float, complex, str, bytes):
        return repr(value)
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        if value.__module__.partition(".")[0] not in _KNOWN or "<" in value.__qualname__:
            raise TypeError(f"{value.__module__}.{value.__qualname__} is not in the key")
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, jax.tree_util.PyTreeDef):
        parts = [_spelled(value.node_data()), *map(_spelled, value.children())]
    elif isinstance(value, enum.Enum):
        parts = [value.name]
    elif isinstance(value, np.dtype | np.generic):
        parts = [repr(value)]
    elif isinstance(value, tuple | list):
        parts = list(map(_spelled, value))
    elif isinstance(value, set | frozenset):
        parts = sorted(map(_spelled, value))
    elif isinstance(value, Mapping):
        parts = sorted(f"{_spelled(key)}: {_spelled(held)}" for key, held in value.items())
    elif isinstance(value, functools.partial):
        parts = [_spelled((value.func, value.args, value.keywords))]
    elif isinstance(value, Structure):
        parts = [_spelled_structure(value)]
    elif dataclasses.is_dataclass(value):
        parts = [f"{field.name}={_spelled(getattr(value, field.name))}" for field in dataclasses.fields(value)]
    else:
        raise TypeError(f"{kind.__module__}.{kind.__qualname__} is not in the key")
    return f"{_spelled(kind)}({', '.join(parts)})"


@functools.lru_cache(4)
def _spelled_structure(structure: Structure) -> str:
    """All programs of a model share it."""
    return _spelled((structure.graphdef, structure.treedef))


def _path(folder: Path, function: Callable[..., Any], static: Sequence[Any], arrays: Sequence[Any]) -> Path | None:
    """Of a program; None where not all that it is traced from is in the key, or nothing is traced
    (``jax.disable_jit``)."""
    leaves, treedef = jax.tree.flatten(arrays)
    if not all(isinstance(leaf, Tracer) for leaf in leaves):
        return None
    if any(getattr(leaf.aval, "memory_space", None) != jax.memory.Space.Device for leaf in leaves):
        return None
    if _began.environment() != _began.ENVIRONMENT or _is_in_context() or not _are_sources_unchanged():
        return None
    names = (name for name in sorted(jax.config.values) if "cache" not in name and "log" not in name)
    settings = [(name, repr(_setting(name))) for name in names]
    shapes = [(leaf.shape, str(leaf.dtype), leaf.aval.weak_type) for leaf in leaves]
    try:
        key = _spelled((function, static, treedef, shapes, settings, _began.ENVIRONMENT, _fixed(), _tables()))
    except (TypeError, AttributeError):
        return None
    return folder / f"{function.__name__}-{hashlib.sha256(key.encode()).hexdigest()}"


def _setting(name: str) -> Any:
    """Of JAX, as it is in this thread."""
    return getattr(jax.config, name, jax.config.values[name])


def _exported(function: Callable[..., Any], static: Sequence[Any], arrays: Sequence[Any]) -> export.Exported:
    """The program, lowered."""

    def of_arrays(*arrays):
        return function(*static, *arrays)

    of_arrays.__name__ = function.__name__
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.aval.weak_type), arrays)
    # Calls whose form may change with the version of jaxlib are fine: the version is part of the key.
    return export.export(jax.jit(of_arrays), disabled_checks=[export.DisabledSafetyCheck.custom_call("ALL")])(*shapes)


def _read(path: Path) -> export.Exported | None:
    """What ``_write`` wrote; None where it is not there, or not as it was."""
    try:
        stored = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        warnings.warn(f"{error}; the program is traced anew", stacklevel=2)
        return None
    digest, program = stored[:_DIGEST], stored[_DIGEST:]
    if hashlib.sha256(program).digest() != digest:
        warnings.warn(f"{path} is damaged; the program is traced anew", stacklevel=2)
        return None
    return export.deserialize(bytearray(program))


def _write(path: Path, program: bytes) -> None:
    """For ``_read``; whole or not at all, whoever else writes."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_output(path, (hashlib.sha256(program).digest(), program), "program")
    except (OSError, ValueError) as error:
        warnings.warn(f"{error}; the program is not kept", stacklevel=2)
