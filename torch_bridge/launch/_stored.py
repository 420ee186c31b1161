"""Programs on disk: what tracing and lowering made, so that a second process need not trace again.

A file is a line of JSON with the digest of what follows, a line of JSON with the steps, and the modules of the kernels.
Its name is a digest of everything that the program depends on: the versions of JAX, the sources of these packages, the
function with its configuration, the shapes, the GPU, and the user's own tuning table for it. Files are written beside
their place and renamed into it. One that is damaged is refused and written again.
"""

import functools
import hashlib
import json
import os
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from moe_jax import _kept
from pallas_kernels.common.device import hopper_gpu
from pallas_kernels.tuning import table_for
from torch_bridge._tensors import numpy_dtype, torch_dtype
from torch_bridge.launch._gpu import Gpu
from torch_bridge.launch._kernels import Cast, Kernel, KernelProgram, Spread
from torch_bridge.launch._launch import View


def directory() -> Path | None:
    """Where programs are kept: MOE_JAX_CACHE_DIR, else moe_jax in the user's cache. None where that is set to ""."""
    return _kept.folder("programs")


def name_of(function: Any, structs: Any, gpu: Gpu) -> str:
    """The name of a program's file. function: a frozen dataclass whose repr tells it from others."""
    leaves, structure = jax.tree.flatten(structs)
    shapes = [f"{np.dtype(leaf.dtype).name}{tuple(leaf.shape)}" for leaf in leaves]
    with gpu.tracing():
        own = table_for(hopper_gpu()).own_entries
    which = (repr(function), str(structure), *shapes, repr(gpu), repr(own))
    facts = (jax.__version__, version("jaxlib"), _sources(), *which)
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def load(name: str) -> KernelProgram | None:
    """The program of a name; None where there is none, or none that is whole."""
    folder = directory()
    if folder is None:
        return None
    try:
        head, _, body = (folder / name).read_bytes().partition(b"\n")
        if json.loads(head) != {"sha256": hashlib.sha256(body).hexdigest()}:
            return None
        return _decoded(body)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_there(name: str) -> bool:
    """Whether there is a file of a name, whole or not."""
    folder = directory()
    return folder is not None and (folder / name).is_file()


def can_save() -> bool:
    """Whether programs can be kept."""
    folder = directory()
    if folder is None:
        return False
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def save(name: str, program: KernelProgram) -> None:
    """Keep a program of one result. A folder that cannot be written to is left alone: the program is there anyway."""
    folder = directory()
    if folder is None:
        return
    body = _encoded(program)
    head = json.dumps({"sha256": hashlib.sha256(body).hexdigest()}).encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(head + b"\n" + body)
        os.replace(file.name, folder / name)
    except OSError:
        return


@functools.cache
def _sources() -> str:
    """Of what makes programs; the version alone does not tell two checkouts apart."""
    return _kept.digest_of(_kept.sources("pallas_kernels", "moe_jax", "torch_bridge"))


def _encoded(program: KernelProgram) -> bytes:
    num_leaves, steps, constants, results = program.parts
    modules, written = [], []
    for run, read, slots in steps:
        match run:
            case Kernel(module, shapes):
                modules.append(module)
                named = [(shape, numpy_dtype(dtype).name) for shape, dtype in shapes]
                what: dict[str, Any] = dict(kernel=len(module), results=named)
            case View(shape):
                what = dict(view=shape)
            case Spread(sizes, shape):
                what = dict(spread=sizes, shape=shape)
            case Cast(dtype):
                what = dict(cast=numpy_dtype(dtype).name)
            case _:
                raise TypeError(f"a step of type {type(run).__name__} cannot be kept on disk")
        written.append((what, read, slots))
    values = [(slot, np.asarray(v).dtype.name, np.asarray(v).tolist()) for slot, v in constants]
    text = dict(num_leaves=num_leaves, steps=written, constants=values, results=results)
    return json.dumps(text).encode() + b"\n" + b"".join(modules)


def _decoded(body: bytes) -> KernelProgram:
    text, _, modules = body.partition(b"\n")
    found, start = json.loads(text), 0
    steps = []
    for what, read, slots in found["steps"]:
        run: Any
        if "kernel" in what:
            size = what["kernel"]
            results = tuple((tuple(shape), torch_dtype(dtype)) for shape, dtype in what["results"])
            run = Kernel(modules[start : start + size], results)
            start += size
        elif "view" in what:
            run = View(tuple(what["view"]))
        elif "spread" in what:
            run = Spread(tuple(what["spread"]), tuple(what["shape"]))
        else:
            run = Cast(torch_dtype(what["cast"]))
        steps.append((run, tuple(read), tuple(slots)))
    constants = [(slot, np.asarray(value, np.dtype(dtype))) for slot, dtype, value in found["constants"]]
    structure = jax.tree.structure(0)
    return KernelProgram.of_parts(found["num_leaves"], steps, constants, found["results"], structure)
