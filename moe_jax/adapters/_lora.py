"""``lora``: gives a layer or a model adapters that train."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_jax._arguments import boolean, check_not_traced, integer, number, shown
from moe_jax.models._layers import Linear, LinearLoRA
from moe_jax.models._partition import hold_lora
from moe_jax.models.attention._attention import Attention
from moe_jax.models.attention._gated_delta_net import GatedDeltaNet
from moe_jax.models.attention._mla import LatentAttention
from moe_jax.nn import FusedMoE
from moe_jax.nn._lora import EXPERT_TARGETS, drawn_a, new_expert_lora

ATTENTION = "attention"
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
    """Add low-rank adapters to a layer or a model, in place: a weight W becomes ``W + alpha / rank * B A``.

    W itself stays as it is, quantized or not. A is drawn within +-1/sqrt(K), B starts at zero, so that nothing changes
    before the first step. Products of adapters take rows before these are quantized; operands have the layer's 16-bit
    ``dtype`` (float16 computes in float32), sums are float32, and all is part of the same call: the share of w13 goes
    to the sum before the activation, that of w2 to the sum before the router weights. The backends "hopper", "xla" and
    "reference" run adapters of experts; "portable" leaves such calls to these, as ``explain`` says.

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
        targets: of experts "w13" (both projections; one A for gate and up) and "w2"; of a model's attention the names
            of projections such as "q_proj", or "attention" for all of them but ``kv_b_proj`` of latent attention.
        share_a: one A for all experts of a layer; B is always an expert's own.
        dtype: of A and B, bfloat16 or float32.
        rngs: random state that A is drawn from.

    Returns:
        The module.

    Raises:
        ValueError: a rank below 1, an alpha that is not positive, targets that do not exist, a module that has adapters
            already. TypeError: of another type.
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
    layers, projections = adaptable(module)
    names = _checked_targets(targets, module, bool(layers), {place.name for place in projections})
    check_not_traced("lora", module)
    own = [name for name in names if name in EXPERT_TARGETS]
    layers = layers if own else []
    projections = [place for place in projections if place.name in names]
    for label, target in (*((layer._label(), layer) for layer in layers), *((p.label, p.linear) for p in projections)):
        if target.lora is not None:
            raise ValueError(f"{label} has an adapter already; moe_jax.lora gives each weight one")
    options: Any = dict(rank=rank, alpha=alpha)
    for layer in layers:
        placement = None if layer.placement is None else layer.placement.get_value()
        made: Any = dict(targets=own, share_a=share_a, dtype=dtype, key=rngs.params())
        layer.set_lora(new_expert_lora(layer.config, placement, layer.parallel, **options, **made))
    for place in projections:
        n, k = place.linear.weight.shape
        a, b = drawn_a(rngs.params(), (rank, k), dtype), jnp.zeros((n, rank), dtype)
        hold_lora(place.owner, place.name, LinearLoRA(a, b, ranks=(rank,), alphas=(alpha,)))
    return module


class Projection(NamedTuple):
    """A Linear of attention that takes an adapter. path: of ``owner`` in the module. name: of its attribute."""

    path: tuple[Any, ...]
    owner: Any
    name: str

    @property
    def label(self) -> str:
        return ".".join(map(str, (*self.path, self.name)))

    @property
    def linear(self) -> Linear:
        return getattr(self.owner, self.name)


def adaptable(module: Any) -> tuple[list[FusedMoE], list[Projection]]:
    """Every ``FusedMoE`` of a module and every projection of its attention, in their order.

    Raises TypeError for no module, ValueError where it has neither.
    """
    if not isinstance(module, nnx.Module):
        raise TypeError(f"module has type {type(module).__name__}, expected a FusedMoE, a MoEBlock or a model")
    layers, projections = [], []
    for path, node in nnx.iter_modules(module):
        if isinstance(node, FusedMoE):
            layers.append(node)
        if isinstance(node, Attention | LatentAttention | GatedDeltaNet):
            parts = node.dense_modules().items()
            own = [
                (name, part) for name, part in parts if hasattr(node, name)
            ]  # what an indexer selects has no gradient
            linears = [name for name, part in own if isinstance(part, Linear) and not part.is_dequantized]
            projections += [Projection(path, node, name) for name in linears]
    if not layers and not projections:
        raise ValueError(f"a {type(module).__name__} without FusedMoE and attention has nothing to adapt")
    return layers, projections


def _checked_targets(targets: Any, module: Any, has_experts: bool, projections: set[str]) -> set[str]:
    """The names of weights that targets mean."""
    known = [*(EXPERT_TARGETS if has_experts else ()), *((ATTENTION, *sorted(projections)) if projections else ())]
    names = (targets,) if isinstance(targets, str) else tuple(targets) if isinstance(targets, Iterable) else ()
    unknown = [name for name in names if name not in known]
    if not names or unknown:
        found = shown(unknown[0] if unknown else targets)
        of = type(module).__name__
        raise ValueError(f"targets has {found}, expected some of {', '.join(map(repr, known))}, which a {of} has")
    return set(names) - {ATTENTION} | (projections if ATTENTION in names else set())
