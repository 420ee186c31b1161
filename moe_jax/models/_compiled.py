"""Crossing into ``jax.jit`` with a whole model: split once, pass flat leaves, pad lengths to buckets.

A model of 48 layers has hundreds of Variables; passed as a module each costs time per call (576 of them: 13 ms under
nnx.jit, 0.8 ms under jax.jit, 0.1 ms as leaves). The structure is hashable and serves as a static argument; values
never enter it, so a reload of weights does not recompile.
"""

import functools
import weakref
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer

from moe_jax._typing import Bool, Int
from moe_jax._versions import one_version
from moe_jax.models._inputs import check_ids

SMALLEST_BUCKET = 16
LARGEST_DOUBLING = 1024


class Structure:
    """What a model is apart from its arrays, as a static argument of jitted functions: hashed once, not each call."""

    def __init__(self, graphdef: Any, treedef: Any):
        self.graphdef, self.treedef = graphdef, treedef
        self._hash = hash((graphdef, treedef))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: Any) -> bool:
        if self is other or not isinstance(other, Structure):
            return self is other
        return self._hash == other._hash and (self.graphdef, self.treedef) == (other.graphdef, other.treedef)


class _Parts(NamedTuple):
    """What one walk over a model meets, in its order.

    facts: all that is no array, as ``_same`` compares it. leaves: the arrays of each Variable. places: of a Variable,
    by its id, its place in ``leaves``.
    """

    facts: list[Any]
    leaves: list[list[Any]]
    places: dict[int, int]


class _Known(NamedTuple):
    """A model that was split before. order: places in ``_Parts.leaves`` in the order of all leaves."""

    facts: list[Any]
    structure: Structure
    order: list[int]


_known: "weakref.WeakKeyDictionary[nnx.Module, _Known]" = weakref.WeakKeyDictionary()


def split_model(model: nnx.Module) -> tuple[Structure, list[Any]]:
    """(hashable structure, array leaves) of a loaded model, of one version whatever other threads reload.

    ``nnx.split`` takes longer than the prefill of a short prompt. It runs again only when a walk over the model meets
    anything but other arrays.
    """
    version = one_version(model)
    parts, known = _parts(version), _known.get(model)
    if known is not None and parts is not None and _same(known.facts, parts.facts):
        leaves = [leaf for place in known.order for leaf in parts.leaves[place]]
        structure = known.structure
    else:
        graphdef, state = nnx.split(version)
        leaves, treedef = jax.tree.flatten(state)
        structure = Structure(graphdef, treedef)
        order = None if parts is None else _order(version, state, parts)
        if parts is not None and order is not None:
            _known[model] = _Known(parts.facts, structure, order)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        raise ValueError("the model has no weights yet: build it with load_pretrained or rngs=")
    return structure, leaves


def merge_model(structure: Structure, leaves: list[Any]) -> Any:
    """The inverse of ``split_model``, on tracers too."""
    return nnx.merge(structure.graphdef, jax.tree.unflatten(structure.treedef, leaves))


@functools.cache
def _kind(cls: type) -> type | None:
    """Of the kinds that a walk tells apart, the one of a class."""
    kinds = nnx.Variable, nnx.Pytree, jax.Array, Tracer, np.ndarray, list, dict
    return next((kind for kind in kinds if issubclass(cls, kind)), None)


def _parts(model: nnx.Module) -> _Parts | None:
    """None for a model with arrays outside of Variables, or with what changes in place, which must be split each
    time."""
    parts, seen = _Parts([], [], {}), {id(model): 0}
    facts = parts.facts

    def walk(node: Any) -> bool:
        facts.append(type(node))
        for name, value in vars(node).items():
            facts.append(name)
            kind = _kind(type(value))
            if kind is None:
                facts.append(value)
                continue
            if kind is not nnx.Variable and kind is not nnx.Pytree:
                return False
            place = seen.setdefault(id(value), len(seen))
            facts.append(place)
            if place < len(seen) - 1:
                continue
            if kind is nnx.Variable:
                held, metadata = value.get_raw_value(), value.get_metadata()
                leaves, treedef = ([held], None) if _kind(type(held)) is jax.Array else jax.tree.flatten(held)
                facts.extend((type(value), metadata, treedef))
                parts.places[id(value)] = len(parts.leaves)
                parts.leaves.append(leaves)
            elif not walk(value):
                return False
        return True

    return parts if walk(model) else None


def _order(model: nnx.Module, state: Any, parts: _Parts) -> list[int] | None:
    """Places in ``parts.leaves`` of what ``nnx.split`` found, in its order; None where it found more than Variables in
    modules. A shared module may have another path in the walk, so objects are compared."""
    order = []
    for path, _ in nnx.to_flat_state(state):
        found: Any = model
        for name in path:
            found = vars(found).get(str(name)) if isinstance(found, nnx.Pytree) else None
        place = parts.places.get(id(found))
        if place is None:
            return None
        order.append(place)
    return order


def _same(before: list[Any], now: list[Any]) -> bool:
    return len(before) == len(now) and all(
        a is b or (type(a) is type(b) and a == b) for a, b in zip(before, now, strict=True)
    )


def bucket(n: int) -> int:
    """Length to pad ``n`` tokens to, so that few are compiled: powers of two from 16, multiples of 1024 beyond 1024."""
    if n > LARGEST_DOUBLING:
        return -(-n // LARGEST_DOUBLING) * LARGEST_DOUBLING
    return max(SMALLEST_BUCKET, 1 << (n - 1).bit_length())


def padded_prompt(
    input_ids: Any, attention_mask: Any, vocab_size: int
) -> tuple[Int[np.ndarray, "B P"], Bool[np.ndarray, "B P"]]:
    """Checked prompt and its mask, padded on the right to a bucket.

    Args:
        input_ids: (B, S) integers, an array or nested lists.
        attention_mask: (B, S) bool or 0/1, or None when every token is real.

    Raises:
        TypeError: ids are not integers. ValueError: a wrong shape, an id outside the vocabulary, a row without tokens.
    """
    ids = _as_array("input_ids", input_ids)
    mask = np.ones(ids.shape, bool) if attention_mask is None else _as_array("attention_mask", attention_mask)
    check_ids(ids, mask, vocab_size)
    mask = mask.astype(bool)
    if not mask.any(axis=1).all():
        raise ValueError(f"attention_mask leaves row {int(np.argmin(mask.any(axis=1)))} of input_ids without tokens")
    # What stands in padding is not a token: -100 and the like must not reach the embedding.
    ids = np.where(mask, ids, 0).astype(np.int32)
    pad = ((0, 0), (0, bucket(ids.shape[1]) - ids.shape[1]))
    return np.pad(ids, pad), np.pad(mask, pad)


def _as_array(name: str, value: Any) -> np.ndarray:
    if isinstance(value, Tracer):
        raise TypeError(
            f"{name} is traced: this call compiles itself, make it outside jax.jit; inside, call model(ids)"
        )
    try:
        return np.asarray(value)
    except ValueError:  # nested lists of unequal length
        raise ValueError(f"{name} has rows of unequal length; pad them and say so in attention_mask") from None
