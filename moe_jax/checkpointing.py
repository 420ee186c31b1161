"""Orbax save and restore of processed layers and models, with a record of what the arrays mean stored beside them.

The record is what makes a restore safe: Orbax by itself would cast arrays to the target's dtype without a word, and
nothing in an array tells which activation it was trained with.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_jax._arguments import check_not_traced
from moe_jax.layer import FusedMoE
from moe_jax.loading._errors import read_json
from moe_jax.quantization import ExpertWeights

RECORD_NAME = "moe_jax.json"
STATE_NAME = "state"
_ORBAX_FILE = "_METADATA"  # in every directory of arrays that Orbax finished
_MAX_RECORD_BYTES = 256 << 20
_PARTS = ("settings", "weights", "leaves")
# Free, or recorded with the arrays; the axes are only set while a layer runs over a mesh.
_FREE_SETTINGS = ("name", "implementation", "dtype", "param_dtype", "scheme", "split_axes", "call_axes")


def save(module: nnx.Module, directory: str | os.PathLike) -> None:
    """Write all Variables of a processed layer or model under ``directory`` (created; must not hold a save already).

    A save that was interrupted, which leaves arrays without a record, is replaced. Beside the arrays stand their
    dtypes and shapes, how they are quantized and laid out, and the settings of every ``FusedMoE`` and of a model.

    Raises:
        ValueError: the module still holds abstract weights, or the directory holds another save or other files.
    """
    import orbax.checkpoint as ocp

    check_not_traced("save", module)
    root = Path(directory).absolute()
    state = nnx.to_pure_dict(nnx.split(module)[1])
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(f"{jax.tree_util.keystr(path)} is not loaded; process the weights before saving")
    if (root / RECORD_NAME).exists():
        raise ValueError(f"{root} holds a saved module already; choose an empty directory")
    if root.exists() and not root.is_dir():
        raise ValueError(f"{root} is a file; choose an empty directory")
    if (root / STATE_NAME).exists() and not (root / STATE_NAME / _ORBAX_FILE).is_file():
        raise ValueError(f"{root / STATE_NAME} is in the way and was not written by save; choose an empty directory")
    root.mkdir(parents=True, exist_ok=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(root / STATE_NAME, state, force=True)
    # Written last and at once: a directory without the record is an unfinished save.
    partial = root / f"{RECORD_NAME}.partial"
    partial.write_text(json.dumps(_record(module, state), indent=1))
    partial.replace(root / RECORD_NAME)


def restore(module: nnx.Module, directory: str | os.PathLike) -> None:
    """Fill ``module`` (abstract or not) in place with what ``save`` wrote for a module of the same shape.

    Raises:
        ValueError: no complete save there, a damaged one, or one whose settings, schemes, layouts, shapes or dtypes
            differ; names the first few. The module is then untouched.
    """
    import orbax.checkpoint as ocp

    root = Path(directory).absolute()
    if not (root / RECORD_NAME).exists():
        raise ValueError(f"{root} holds no complete save: {RECORD_NAME} is missing")
    saved = _read_record(root / RECORD_NAME)
    target = nnx.to_pure_dict(nnx.split(module)[1])
    expected = _record(module, target)
    wrong = [
        f"{path}: saved {saved[part].get(path)}, expected {expected[part].get(path)}"
        for part in _PARTS
        for path in sorted(saved[part].keys() | expected[part].keys())
        if saved[part].get(path) != expected[part].get(path)
    ]
    if wrong:
        raise ValueError(
            f"{root} was saved from another module: " + "; ".join(wrong[:3]) + (" ..." if wrong[3:] else "")
        )
    abstract = jax.tree.map(_abstract_leaf, target)
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            state = checkpointer.restore(root / STATE_NAME, abstract)
    except Exception as error:  # Orbax raises whatever its file formats meet
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(f"{root / STATE_NAME} cannot be restored, the save is damaged: {reason}") from error
    nnx.update(module, state)


def _abstract_leaf(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _read_record(path: Path) -> dict[str, dict[str, str]]:
    record = read_json(path, max_bytes=_MAX_RECORD_BYTES)
    for part in _PARTS:
        entries = record.get(part)
        if not isinstance(entries, dict) or not all(isinstance(value, str) for value in entries.values()):
            raise ValueError(f"{path}: {part!r} is missing or damaged; save the module again")
    return record


def _record(module: nnx.Module, state: Any) -> dict[str, dict[str, str]]:
    return {"settings": _settings(module), "weights": _layout_record(state), "leaves": _leaf_record(state)}


def _settings(module: nnx.Module) -> dict[str, str]:
    """What the arithmetic depends on besides arrays, as "path.field": every ``FusedMoE``, and the module's own config.

    A function, as routing may have one, has no value to compare; only that there is one is recorded.
    """
    found: dict[str, str] = {}
    for path, node in nnx.iter_modules(module):
        config = getattr(node, "config", None)
        if not dataclasses.is_dataclass(config) or (path and not isinstance(node, FusedMoE)):
            continue
        for field in dataclasses.fields(config):
            if field.name not in _FREE_SETTINGS:
                key = ".".join(map(str, (*path, field.name)))
                found[key] = _setting_text(field.name, getattr(config, field.name))
    return found


def _setting_text(name: str, value: Any) -> str:
    """One spelling for equal values: of dtypes, which may be given as classes or names, and of NumPy scalars."""
    if name.endswith("_dtype") and value is not None:
        return jnp.dtype(value).name
    if callable(value):
        return "a function"
    return repr(value.item() if isinstance(value, np.generic) else value)


def _leaf_record(state: Any) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): f"{leaf.dtype.name}{list(leaf.shape)}" for path, leaf in leaves}


def _layout_record(state: Any) -> dict[str, str]:
    """Scheme and layouts of every ExpertWeights in the state, by path."""
    nodes = jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda node: isinstance(node, ExpertWeights))
    return {
        jax.tree_util.keystr(path): json.dumps(
            {
                "weights": str(node.scheme.weights),
                "activations": str(node.scheme.activations),
                "w13": dataclasses.asdict(node.w13.layout),
                "w2": dataclasses.asdict(node.w2.layout),
            }
        )
        for path, node in nodes
        if isinstance(node, ExpertWeights)
    }
