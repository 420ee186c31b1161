"""Orbax save and restore of processed layers and models, with a record of what the arrays mean stored beside them.

The record is what makes a restore safe: Orbax by itself would cast arrays to the target's dtype without a word, and
nothing in an array tells which activation it was trained with.
"""

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_jax._arguments import check_not_traced
from moe_jax._output import write_output
from moe_jax._versions import Place, changing, install, one_version
from moe_jax.experts._choice import in_best_layout
from moe_jax.loading._errors import read_json
from moe_jax.nn import FusedMoE
from moe_jax.nn._variables import ExpertParams
from moe_jax.parallel._layer import PlacementParam
from moe_jax.parallel._sharding import lay_out
from moe_jax.quantization import ExpertWeights, QuantizedMatrix, method_for

RECORD_NAME = "moe_jax.json"
STATE_NAME = "state"
_ORBAX_FILE = "_METADATA"  # in every directory of arrays that Orbax finished
_MAX_RECORD_BYTES = 256 << 20
_PARTS = ("settings", "weights", "leaves")
_PLACES = ("placements", "stored")  # of layers over a mesh, by path; a module elsewhere may differ
_PATH = "."
_LAYOUTS = re.compile('"w13"|"layout"')  # from where on a record speaks of layouts
# Free, or recorded with the arrays; set while a layer runs over a mesh, or for ranks of torch alone.
_FREE_SETTINGS = ("name", "implementation", "keep_hidden", "dtype", "param_dtype", "scheme")
_FREE_SETTINGS += ("split_axes", "call_axes", "intermediate_size_full")


Directory = str | os.PathLike[str]


def save(module: nnx.Module | Directory, directory: Directory | nnx.Module) -> None:
    """Write all Variables of a processed layer or model under ``directory`` (created; must not hold a save already).

    Over a mesh every process writes what its devices hold; where experts lie is part of the record.
    A save that was interrupted, which leaves arrays without a record, is replaced. Beside the arrays stand their
    dtypes and shapes, how they are quantized and laid out, and the settings of every ``FusedMoE`` and of a model.

    The two arguments may stand in Orbax's order as well, the directory first.

    Raises:
        ValueError: the module still holds abstract weights, or the directory holds another save or other files.
        TypeError: one argument is no module, or the other no path.
    """
    import orbax.checkpoint as ocp

    module, directory = _in_order("save", module, directory)
    check_not_traced("save", module)
    module = one_version(module)
    root = Path(directory).absolute()
    state = _state_of(module)
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
    write_output(root / RECORD_NAME, [json.dumps(_record(module, state), indent=1).encode()])


def restore(module: nnx.Module | Directory, directory: Directory | nnx.Module) -> None:
    """Fill ``module`` (abstract or not) in place with what ``save`` wrote for a module of the same shape.

    The module may lie on another mesh than the saved one, on none, or hold its experts in other places: experts go to
    where the module has them. Layers that differ in this pass through the host's memory. As of ``save``, the arguments
    may stand in either order.

    Raises:
        ValueError: no complete save there, a damaged one, or one whose settings, schemes, layouts, shapes or dtypes
            differ; names the first few. The module is then untouched. TypeError: as ``save``.
    """
    import orbax.checkpoint as ocp

    module, directory = _in_order("restore", module, directory)
    root = Path(directory).absolute()
    if not (root / RECORD_NAME).exists():
        raise ValueError(f"{root} holds no complete save: {RECORD_NAME} is missing")
    saved = _read_record(root / RECORD_NAME)
    target = _state_of(module)
    expected = _record(module, target)
    wrong = [
        f"{path}: saved {saved[part].get(path)}, expected {expected[part].get(path)}"
        for part in _PARTS
        for path in sorted(saved[part].keys() | expected[part].keys())
        if saved[part].get(path) != expected[part].get(path)
    ]
    if wrong:
        raise ValueError(
            f"{root} was saved from another module: "
            + "; ".join(wrong[:3])
            + (" ..." if wrong[3:] else "")
            + _way_out(saved["weights"], expected["weights"])
        )
    moved = [
        (path, layer)
        for path, layer in _layers(module)
        if any(saved[part].get(path) != expected[part].get(path) for part in ("placements", "stored"))
    ]
    for path, layer in moved:
        if layer.lora is not None:
            raise ValueError(
                f"{root}: {path or 'the layer'} has an adapter, which restores only with experts in the same places"
            )
    abstract = jax.tree.map(_abstract_leaf, target)
    for path, layer in moved:
        _parent_of(abstract, path)["weights"] = _on_host(saved, path, layer)
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            state = checkpointer.restore(root / STATE_NAME, abstract)
    except Exception as error:  # Orbax raises whatever its file formats meet
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(f"{root / STATE_NAME} cannot be restored, the save is damaged: {reason}") from error
    with changing():
        if _placements(module) != expected["placements"]:
            raise ValueError(f"{root}: experts of the module moved to other slots meanwhile; restore again")
        for path, layer in moved:
            parent = _parent_of(state, path)
            parent["weights"] = _as_held(parent["weights"], saved["placements"].get(path), layer)
        _install(module, state)


def _in_order(function: str, module: Any, directory: Any) -> tuple[nnx.Module, Directory]:
    if isinstance(directory, nnx.Module):
        module, directory = directory, module
    if isinstance(module, nnx.Module) and isinstance(directory, str | os.PathLike):
        return module, directory
    kinds = f"{type(module).__name__} and {type(directory).__name__}"
    raise TypeError(f"{function} got {kinds}, expected an nnx.Module and the path of a directory")


def _install(module: nnx.Module, state: Any) -> None:
    """All values at once for whoever calls the module meanwhile."""
    owners = [(path, node) for path, node in nnx.iter_graph(module) if isinstance(node, nnx.Pytree)]
    places = [
        (path, Place(node, name), value)
        for path, node in owners
        if not isinstance(node, ExpertParams)  # which the layer around it has as a whole
        for name, value in vars(node).items()
        if isinstance(value, nnx.Variable | ExpertParams) and not isinstance(value, PlacementParam)
    ]
    values: dict[int, Any] = {}  # of Variables; one that several modules share is in the state once
    for path, place, variable in places:
        if id(variable) not in values:
            held = _at(state, path)
            values[id(variable)] = held[int(place.name) if place.name not in held else place.name]
    install([(place, values[id(variable)]) for _, place, variable in places])


def _way_out(saved: dict[str, str], expected: dict[str, str]) -> str:
    """What to do where the same quantized weights lie in another layout, which follows from device and version."""

    def without_layouts(records: dict[str, str]) -> dict[str, str]:
        return {path: _LAYOUTS.split(text)[0] for path, text in records.items()}

    is_alone = saved != expected and without_layouts(saved) == without_layouts(expected)
    return "; the layout of weights depends on device and version: load their checkpoint again" if is_alone else ""


def _state_of(module: nnx.Module) -> Any:
    """Values of all Variables but placements, which are part of the record; of each layer its ``ExpertWeights``."""
    rest: Any = nnx.split(module, PlacementParam, ...)[2]
    state = nnx.to_pure_dict(rest)
    for path, layer in _layers(module):
        _parent_of(state, path)["weights"] = layer.weights.get_value()
    return state


def _layers(module: nnx.Module) -> list[tuple[str, FusedMoE]]:
    """(path, layer) of every ``FusedMoE``."""
    return [(_PATH.join(map(str, path)), node) for path, node in nnx.iter_modules(module) if isinstance(node, FusedMoE)]


def _parent_of(state: Any, path: str) -> Any:
    """The dict of a layer's Variables; list indices are ints there."""
    return _at(state, tuple(filter(None, path.split(_PATH))))


def _at(state: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        state = state[int(key) if key not in state else key]
    return state


def _placements(module: nnx.Module) -> dict[str, str]:
    """Expert in each slot, of layers over a mesh."""
    return {
        path: json.dumps(np.asarray(layer.placement.get_value().physical_to_logical).tolist())
        for path, layer in _layers(module)
        if layer.placement is not None
    }


def _stored_shapes(module: nnx.Module) -> dict[str, str]:
    """Shapes of the leaves as held, of layers over a mesh."""
    return {
        path: json.dumps([list(leaf.shape) for leaf in jax.tree.leaves(layer.weights.get_value())])
        for path, layer in _layers(module)
        if layer.placement is not None
    }


def _on_host(saved: dict[str, dict[str, str]], path: str, layer: FusedMoE) -> Any:
    """Targets without memory for leaves as they were saved."""
    like = layer.weights.get_value()
    plain = method_for(layer.config.scheme).abstract_weights(layer.config)
    shapes = [leaf.shape for leaf in jax.tree.leaves(plain)]
    if path in saved["stored"]:
        shapes = json.loads(saved["stored"][path])
    leaves = zip(jax.tree.leaves(like), shapes, strict=True)
    return jax.tree.structure(like).unflatten(
        [np.broadcast_to(np.zeros((), leaf.dtype), tuple(shape)) for leaf, shape in leaves]
    )


def _as_held(weights: ExpertWeights, slots: str | None, layer: FusedMoE) -> ExpertWeights:
    """Leaves as they were saved -> as the layer holds them."""
    plain = method_for(layer.config.scheme).abstract_weights(layer.config)
    order = np.arange(layer.config.num_experts)
    if slots is not None:
        order = np.asarray([json.loads(slots).index(expert) for expert in order.tolist()])

    def unplaced(leaf: Any, wanted: Any) -> Any:
        rows = np.asarray(leaf)
        return rows[order][tuple(slice(0, size) for size in wanted.shape)] if wanted.shape else rows

    leaves = [unplaced(*pair) for pair in zip(*map(jax.tree.leaves, (weights, plain)), strict=True)]
    whole = jax.tree.structure(plain).unflatten(leaves)
    if layer.parallel is None or layer.placement is None:
        return in_best_layout(layer.config, jax.tree.map(jnp.asarray, whole))
    return lay_out(whole, layer.config, layer.placement.get_value(), layer.parallel)


def _abstract_leaf(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _read_record(path: Path) -> dict[str, dict[str, str]]:
    record = read_json(path, max_bytes=_MAX_RECORD_BYTES)
    for part in (*_PARTS, *_PLACES):
        entries = record.get(part, {} if part in _PLACES else None)
        record[part] = entries
        if not isinstance(entries, dict) or not all(isinstance(value, str) for value in entries.values()):
            raise ValueError(f"{path}: {part!r} is missing or damaged; save the module again")
    return record


def _record(module: nnx.Module, state: Any) -> dict[str, dict[str, str]]:
    return {
        "settings": _settings(module),
        "weights": _layout_record(state),
        "leaves": _leaf_record(_as_one_device_has_it(module, state)),
        "placements": _placements(module),
        "stored": _stored_shapes(module),
    }


def _as_one_device_has_it(module: nnx.Module, state: Any) -> Any:
    """The state with the experts of layers over a mesh in the shapes of a single device, which all meshes share."""
    state = jax.tree.map(lambda leaf: leaf, state)
    for path, layer in _layers(module):
        if layer.placement is not None and layer.weights.get_value().w13.layout.is_plain:
            plain = method_for(layer.config.scheme).abstract_weights(layer.config)
            _parent_of(state, path)["weights"] = plain
    return state


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
    """Scheme and layouts of every ExpertWeights and QuantizedMatrix in the state, by path.

    Formats are recorded by ``repr``, which has every field; restores compare this text with that of saves made before.
    """

    def is_weights(node: Any) -> bool:
        return isinstance(node, ExpertWeights | QuantizedMatrix)

    found = {}
    for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_weights):
        if not is_weights(node):
            continue
        parts = {"layout": node.tensor} if isinstance(node, QuantizedMatrix) else {"w13": node.w13, "w2": node.w2}
        record = {"weights": repr(node.scheme.weights), "activations": repr(node.scheme.activations)}
        record |= {name: dataclasses.asdict(part.layout) for name, part in parts.items()}
        found[jax.tree_util.keystr(path)] = json.dumps(record)
    return found
