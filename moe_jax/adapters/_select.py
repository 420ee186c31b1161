"""``select_lora``: which of several adapters the rows or tokens of a call take."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_jax._arguments import check_array, shown
from moe_jax._versions import one_version
from moe_jax.nn._lora import Adapter, LoRAChoice
from moe_jax.parallel._explicit import gathered


def select_lora(module: Any, adapters: Any) -> Any:
    """A copy of a module, with the same Variables, whose calls take these adapters.

    Args:
        module: with adapters of several names, from ``load_lora(model, {name: directory, ...})``.
        adapters: for each row of a batch a name, or None for none; or int (B,), (T,) for a layer of tokens: the place
            of the name among those loaded, -1 for none; (B, S) chooses for each token. Arrays may be traced: another
            choice compiles nothing. Over a mesh they may have any sharding.

    Returns:
        The copy, for calls with as many rows, or rows and tokens; with rows also for ``generate`` with one array of
        prompts.

    Raises:
        ValueError: a name that is not loaded, a place in a NumPy array that no name has, a module without names, no
            rows. Places in JAX arrays are not checked: those that no name has choose none. TypeError: neither names nor
            integers.
    """
    if not isinstance(module, nnx.Module):
        raise TypeError(f"module has type {type(module).__name__}, expected a layer or a model with adapters")
    copied = one_version(module)
    held = [node for _, node in nnx.iter_modules(copied) if isinstance(node, Adapter) and node.names]
    if not held:
        raise ValueError(f"a {type(module).__name__} without named adapters has none to choose; see moe_jax.load_lora")
    choice = _places(adapters, held[0].names)
    for adapter in held:
        adapter.choice = nnx.data(LoRAChoice(choice))
    return copied


def _places(adapters: Any, names: tuple[str, ...]) -> Any:
    if not isinstance(adapters, list | tuple):
        check_array("adapters", adapters, jnp.integer, "(B,) or (B, S)")
        if adapters.ndim not in (1, 2) or 0 in adapters.shape:
            raise ValueError(f"adapters has shape {adapters.shape}, expected (B,) or (B, S)")
        is_wrong = (adapters < -1) | (adapters >= len(names)) if isinstance(adapters, np.ndarray) else np.False_
        if is_wrong.any():
            raise ValueError(
                f"adapters has {adapters[is_wrong][0]}, expected -1 for none to {len(names) - 1}, places in {names}"
            )
        return gathered(jnp.asarray(adapters, jnp.int32))
    unknown = [name for name in adapters if name is not None and name not in names]
    if unknown or not adapters:
        found = shown(unknown[0] if unknown else adapters)
        raise ValueError(f"adapters has {found}, expected names or None for each row; loaded are {', '.join(names)}")
    return jnp.asarray(np.asarray([-1 if name is None else names.index(name) for name in adapters], np.int32))
