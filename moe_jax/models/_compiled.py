"""Crossing into ``jax.jit`` with a whole model: split once, pass flat leaves, pad lengths to buckets.

A model of 48 layers has hundreds of Variables; passed as a module each costs time per call (576 of them: 13 ms under
nnx.jit, 0.8 ms under jax.jit, 0.1 ms as leaves). The structure is hashable and serves as a static argument; values
never enter it, so a reload of weights does not recompile.
"""

from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer

from moe_jax._typing import Bool, Int
from moe_jax._versions import one_version
from moe_jax.models._inputs import check_ids

SMALLEST_BUCKET = 16
LARGEST_DOUBLING = 1024


def split_model(model: nnx.Module) -> tuple[Any, list[Any]]:
    """(hashable structure, array leaves) of a loaded model, of one version whatever other threads reload."""
    graphdef, state = nnx.split(one_version(model))
    leaves, treedef = jax.tree.flatten(state)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        raise ValueError("the model has no weights yet: build it with load_pretrained or rngs=")
    return (graphdef, treedef), leaves


def merge_model(structure: Any, leaves: list[Any]) -> Any:
    """The inverse of ``split_model``, on tracers too."""
    graphdef, treedef = structure
    return nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))


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
