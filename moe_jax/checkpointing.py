"""Orbax save and restore of processed layers and models, with the weights' layout stored beside the arrays.

The layout record is what makes a restore safe: Orbax by itself would cast arrays to the target's dtype without a word.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import jax
from flax import nnx

RECORD_NAME = "moe_jax.json"
STATE_NAME = "state"


def save(module: nnx.Module, directory: str | os.PathLike) -> None:
    """Write all Variables of a processed layer or model under ``directory`` (created; must not hold a save already).

    Raises:
        ValueError: the module still holds abstract weights, or the directory holds another save.
    """
    import orbax.checkpoint as ocp

    root = Path(directory).absolute()
    state = nnx.to_pure_dict(nnx.split(module)[1])
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(f"{jax.tree_util.keystr(path)} is not loaded; process the weights before saving")
    if (root / RECORD_NAME).exists():
        raise ValueError(f"{root} holds a saved module already; choose an empty directory")
    root.mkdir(parents=True, exist_ok=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(root / STATE_NAME, state)
    # Written last: a directory without the record is an unfinished save.
    (root / RECORD_NAME).write_text(
        json.dumps({"leaves": _leaf_record(state), "weights": _layout_record(state)}, indent=1)
    )


def restore(module: nnx.Module, directory: str | os.PathLike) -> None:
    """Fill ``module`` (abstract or not) in place with what ``save`` wrote for a module of the same shape.

    Raises:
        ValueError: no complete save there, or a leaf's shape, dtype, scheme or layout differs; names the first few.
    """
    import orbax.checkpoint as ocp

    root = Path(directory).absolute()
    if not (root / RECORD_NAME).is_file():
        raise ValueError(f"{root} holds no complete save: {RECORD_NAME} is missing")
    saved = json.loads((root / RECORD_NAME).read_text())
    target = nnx.to_pure_dict(nnx.split(module)[1])
    expected = {"leaves": _leaf_record(target), "weights": _layout_record(target)}
    wrong = [
        f"{path}: saved {saved[part].get(path)}, expected {expected[part].get(path)}"
        for part in ("weights", "leaves")
        for path in sorted(saved[part].keys() | expected[part].keys())
        if saved[part].get(path) != expected[part].get(path)
    ]
    if wrong:
        raise ValueError(
            f"{root} was saved from another module: " + "; ".join(wrong[:3]) + (" ..." if wrong[3:] else "")
        )
    abstract = jax.tree.map(_abstract_leaf, target)
    with ocp.StandardCheckpointer() as checkpointer:
        state = checkpointer.restore(root / STATE_NAME, abstract)
    nnx.update(module, state)


def _abstract_leaf(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _leaf_record(state: Any) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): f"{leaf.dtype.name}{list(leaf.shape)}" for path, leaf in leaves}


def _layout_record(state: Any) -> dict[str, str]:
    """Scheme and layouts of every ExpertWeights in the state, by path."""
    from moe_jax.quantization import ExpertWeights

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
