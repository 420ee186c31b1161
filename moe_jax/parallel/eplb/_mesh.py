"""A mesh that changes: the experts of a layer, wherever they lie, given to a layer on other devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax._arguments import check_not_traced
from moe_jax._versions import one_version
from moe_jax.experts._choice import plain_layout
from moe_jax.quantization import ExpertWeights, method_for


def logical_weights(module: Any) -> ExpertWeights:
    """All experts of a ``FusedMoE`` by id, once each and without padding, in layout "plain", as NumPy arrays.

    Over a mesh the process needs all shares: one layer's worth of host memory. Raises ValueError for a layer without
    weights, TypeError inside ``jax.jit``.
    """
    check_not_traced("logical_weights", module)
    module = one_version(module)
    weights = module.weights.get_value()
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(weights)):
        raise ValueError(f"{module!r} has no weights yet; load them first")
    if module.placement is None:
        return jax.tree.map(np.asarray, plain_layout(weights))
    first_slot = np.asarray(module.placement.get_value().logical_to_physical)[:, 0]

    def take(leaf: jax.Array, wanted: jax.ShapeDtypeStruct) -> np.ndarray:
        host = np.asarray(leaf)
        return host[first_slot][tuple(map(slice, wanted.shape))] if host.ndim else host

    wanted = method_for(module.config.scheme).abstract_weights(module.config)
    leaves = [take(*pair) for pair in zip(jax.tree.leaves(weights), jax.tree.leaves(wanted), strict=True)]
    return jax.tree.unflatten(jax.tree.structure(wanted), leaves)


def transfer_experts(source: Any, target: Any) -> None:
    """Give a layer the experts of another one: after devices came or went, or to leave the mesh.

    No checkpoint is read. The recorded load stays true: ``EplbState.with_devices`` takes over the new placement.

    Args:
        source: a ``FusedMoE`` with weights.
        target: a ``FusedMoE`` of the same config, abstract or loaded, with its own mesh, axes and placement.

    Raises:
        ValueError: the layers differ in more than where they run, or the source has no weights.
    """
    if source.config != target.config:
        raise ValueError(f"the layers differ: expected {source.config}, found {target.config}")
    source = one_version(source)
    bias = source.correction_bias.get_value() if source.loads_correction_bias else None
    weights = logical_weights(source)
    if target.parallel is None:
        weights = jax.tree.map(jnp.asarray, weights)
    target.set_weights(weights, correction_bias=bias)
