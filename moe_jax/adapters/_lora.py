"""``lora``: gives a layer or a model adapters that train."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_jax._arguments import boolean, check_not_traced, integer, number, shown
from moe_jax.nn import FusedMoE
from moe_jax.nn._lora import EXPERT_TARGETS, new_expert_lora

_DTYPES = ("bfloat16", "float32")


def lora(
    module: Any,
    rank: Any = 16,
    alpha: Any = 32,
    targets: Any = EXPERT_TARGETS,
    *,
    share_a: Any = False,
    dtype: Any = jnp.float32,
    rngs: Any,
) -> Any:
    """Add low-rank adapters to the experts of a layer or a model, in place: W becomes ``W + alpha / rank * B A``.

    W itself stays as it is, quantized or not. A is drawn within +-1/sqrt(K), B starts at zero, so that nothing changes
    before the first step. Products of adapters take rows before these are quantized; operands have the layer's 16-bit
    ``dtype`` (float16 computes in float32), sums are float32, and all is part of the same call: the share of w13 goes
    to the sum before the activation, that of w2 to the sum before the router weights. The backends "xla" and
    "reference" run adapters; others leave such calls to these, as ``explain`` says.

    Train them alone by ``nnx.Optimizer(model, optax.adam(1e-4), wrt=moe_jax.LoRAParam)`` and gradients by
    ``nnx.value_and_grad(loss, argnums=nnx.DiffState(0, moe_jax.LoRAParam))``.

    Example:
        >>> import jax, moe_jax
        >>> from flax import nnx
        >>> layer = moe_jax.FusedMoE(8, 64, 32, top_k=2, scheme="w4a16_g32", rngs=nnx.Rngs(0))
        >>> layer = moe_jax.lora(layer, rank=4, alpha=8, rngs=nnx.Rngs(1))
        >>> layer.lora.w13_b.shape
        (8, 2, 32, 4)

    Args:
        module: a ``FusedMoE``, or what holds some: a ``MoEBlock``, a model. Nobody else may use it meanwhile.
        rank: R of every adapter.
        alpha: the scale of an adapter is alpha / rank.
        targets: "w13" (both projections; one A for gate and up) and "w2".
        share_a: one A for all experts of a layer; B is always an expert's own.
        dtype: of A and B, bfloat16 or float32.
        rngs: random state that A is drawn from.

    Returns:
        The module.

    Raises:
        ValueError: a rank below 1, an alpha that is not positive, targets that do not exist, a module without experts
            or with adapters already. TypeError: of another type.
    """
    rank = integer("rank", rank, minimum=1)
    alpha = number("alpha", alpha, "above 0")
    if not 0 < alpha < np.inf:
        raise ValueError(f"alpha={alpha}, expected a number above 0")
    share_a = boolean("share_a", share_a)
    if jnp.dtype(dtype).name not in _DTYPES:
        raise ValueError(f"dtype={jnp.dtype(dtype).name}, expected {' or '.join(_DTYPES)}")
    if not isinstance(rngs, nnx.Rngs):
        raise TypeError(f"rngs has type {type(rngs).__name__}, expected flax.nnx.Rngs, as in rngs=nnx.Rngs(0)")
    names = checked_targets(targets)
    layers = layers_of(module)
    check_not_traced("lora", module)
    for layer in layers:
        if layer.lora is not None:
            raise ValueError(f"{layer._label()} has an adapter already; merge it or take it away first")
    for layer in layers:
        adapter = new_expert_lora(
            layer.config,
            None if layer.placement is None else layer.placement.get_value(),
            layer.parallel,
            rank=rank,
            alpha=alpha,
            targets=names,
            share_a=share_a,
            dtype=dtype,
            key=rngs.params(),
        )
        layer.set_lora(adapter)
    return module


def layers_of(module: Any) -> list[FusedMoE]:
    """Every ``FusedMoE`` of a module, in their order. Raises TypeError for no module, ValueError where it has none."""
    if not isinstance(module, nnx.Module):
        raise TypeError(f"module has type {type(module).__name__}, expected a FusedMoE, a MoEBlock or a model")
    layers = [node for _, node in nnx.iter_modules(module) if isinstance(node, FusedMoE)]
    if not layers:
        raise ValueError(f"a {type(module).__name__} without FusedMoE has no experts to adapt")
    return layers


def checked_targets(targets: Any) -> tuple[str, ...]:
    names = (targets,) if isinstance(targets, str) else tuple(targets) if isinstance(targets, Iterable) else ()
    unknown = [name for name in names if name not in EXPERT_TARGETS]
    if not names or unknown:
        found = shown(unknown[0] if unknown else targets)
        raise ValueError(f"targets has {found}, expected some of {', '.join(map(repr, EXPERT_TARGETS))}")
    return tuple(dict.fromkeys(names))
