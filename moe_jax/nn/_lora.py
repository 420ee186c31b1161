"""``ExpertLoRA``: the low-rank addends of a layer's experts as Variables that an optimizer finds by their type."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from moe_jax._config import MoEConfig
from moe_jax._typing import Array, DTypeLike, Leaf
from moe_jax._versions import one_version
from moe_jax.parallel import ParallelConfig, Placement
from moe_jax.parallel._logical import EMBED, EXPERT, MLP, name_axes, state_axes
from moe_jax.parallel._weights import in_slots, out_of_slots, placed_config
from moe_jax.quantization import ExpertWeights, LowRank

LoRAParam = nnx.LoRAParam

EXPERT_TARGETS = ("w13", "w2")
_AXES: dict[str, tuple[str | None, ...]] = {
    "w13_a": (EXPERT, None, None, EMBED),
    "w13_b": (EXPERT, None, MLP, None),
    "w2_a": (EXPERT, None, MLP),
    "w2_b": (EXPERT, EMBED, None),
}


class LoRAChoice(nnx.Variable[Any]):
    """(B,) or (B, S) int32: which adapter the rows or tokens of a call take, its place among the names; -1 for none."""


class Adapter(nnx.Module):
    """What modules with low-rank addends have in common: one adapter, or several whose ranks lie side by side.

    names: of the adapters, () for one without a name. ranks, alphas: of each; rank 0 where one leaves this weight.
    choice: which of them a row or a token takes; without names every row takes the one.
    """

    def _hold(self, ranks: Sequence[int], alphas: Sequence[float], names: Sequence[str]) -> None:
        self.ranks: tuple[int, ...] = tuple(ranks)
        self.alphas: tuple[float, ...] = tuple(alphas)
        self.names: tuple[str, ...] = tuple(names)
        self.choice: LoRAChoice | None = None

    @property
    def rank(self) -> int:
        return sum(self.ranks)

    @property
    def alpha(self) -> float:
        """Of the one adapter. Raises NotImplementedError where there are several."""
        if self.names:
            raise NotImplementedError(
                f"named adapters, {', '.join(self.names)}, are for inference; give a fresh model the one that you want "
                "by load_lora(model, directory)"
            )
        return self.alphas[0]

    def scales(self) -> np.ndarray:
        """(R,) float32."""
        parts = [np.full(rank, alpha / max(rank, 1)) for rank, alpha in zip(self.ranks, self.alphas, strict=True)]
        return np.concatenate(parts).astype(np.float32)

    def chosen(self, lead: tuple[int, ...]) -> Array | None:
        """(T, R) float32 for tokens of these leading axes, see ``LowRank``. Raises ValueError where none is chosen."""
        if not self.names:
            return None
        if self.choice is None:
            raise ValueError(f"adapters {', '.join(self.names)} are held; choose by moe_jax.select_lora(model, names)")
        choice = self.choice.get_value()
        if choice.shape != lead[: choice.ndim]:
            asked = f"{' x '.join(map(str, choice.shape))} {'rows' if choice.ndim == 1 else 'rows and tokens'}"
            raise ValueError(f"adapters are chosen for {asked}, the call has {lead}; choose for its rows or tokens")
        choice = jnp.broadcast_to(choice.reshape(*choice.shape, *(1,) * (len(lead) - choice.ndim)), lead)
        owner = np.repeat(np.arange(len(self.ranks)), self.ranks)
        return (choice.reshape(-1, 1) == owner).astype(jnp.float32)


def with_token_choices(module: nnx.Module, shape: tuple[int, ...], change: Callable[[Array], Array]) -> Any:
    """The module, or a copy whose choices for each of (B, S) = ``shape`` tokens are changed: a call whose tokens are
    moved or padded moves and pads their choices. Other choices stay.
    """

    def held(module: nnx.Module) -> list[Adapter]:
        nodes = (node for _, node in nnx.iter_modules(module) if isinstance(node, Adapter))
        return [node for node in nodes if node.choice is not None and node.choice.get_value().shape == shape]

    if not held(module):
        return module
    copied = one_version(module)
    adapters = held(copied)
    choice: Any = adapters[0].choice  # the same for all of a module
    changed = change(choice.get_value())
    for adapter in adapters:
        vars(adapter)["choice"] = LoRAChoice(changed)  # a copy of an outer trace is not to be set in a loop's
    return copied


class ExpertLoRA(Adapter):
    """What adapters add to a layer's experts: ``alpha / rank * b a`` to each matrix that they target.

    Variables, ``LoRAParam`` or None, with R = rank; over a mesh in slots, with I padded as the experts have it:

    w13_a: (E, 1, R, H), which gate and up share, or (E, G, R, H). w13_b: (E, G, I, R).
    w2_a: (E, R, I). w2_b: (E, H, R).

    Where all experts share their a, its first axis is 1.
    """

    def __init__(
        self,
        arrays: Mapping[str, Leaf],
        *,
        ranks: Sequence[int],
        alphas: Sequence[float],
        names: Sequence[str] = (),
    ):
        self._hold(ranks, alphas, names)
        held: Any = {name: LoRAParam(arrays[name]) if name in arrays else None for name in _AXES}
        self.w13_a, self.w13_b, self.w2_a, self.w2_b = held["w13_a"], held["w13_b"], held["w2_a"], held["w2_b"]

    def added_to(self, weights: ExpertWeights, lead: tuple[int, ...] | None = None) -> ExpertWeights:
        """The weights with these addends. lead: axes of the tokens of a call; None: no call is made."""
        chosen = None if lead is None else self.chosen(lead)
        w13, w2 = (self._addend(a, b, chosen) for a, b in ((self.w13_a, self.w13_b), (self.w2_a, self.w2_b)))
        return weights.adapted(w13, w2)

    def _addend(self, a: Any, b: Any, chosen: Array | None) -> LowRank | None:
        if a is None:
            return None
        left, right = b.get_value(), a.get_value()
        experts = left.shape[0]
        if right.shape[0] != experts:
            right = jnp.broadcast_to(right, (experts, *right.shape[1:]))
        return LowRank(right, left, jnp.broadcast_to(self.scales(), (experts, self.rank)), chosen)


def new_expert_lora(
    config: MoEConfig,
    placement: Placement | None,
    parallel: ParallelConfig | None,
    *,
    rank: int,
    alpha: float,
    targets: Collection[str],
    share_a: bool,
    dtype: DTypeLike,
    key: Array,
) -> ExpertLoRA:
    """An adapter that adds nothing yet: a uniform within +-1/sqrt(K), b zero.

    targets: some of ``EXPERT_TARGETS``. share_a: one a for all experts. key: the same for any mesh gives the same.
    """
    e, g, h, i = config.num_experts, config.num_projections, config.hidden_size, config.intermediate_size
    lead = 1 if share_a else e
    shapes = dict(w13_a=(lead, 1, rank, h), w13_b=(e, g, i, rank), w2_a=(lead, rank, i), w2_b=(e, h, rank))
    arrays = {}
    for name, one_key in zip(shapes, jax.random.split(key, len(shapes)), strict=True):
        if name.rpartition("_")[0] in targets:
            arrays[name] = (
                drawn_a(one_key, shapes[name], dtype) if name.endswith("_a") else jnp.zeros(shapes[name], dtype)
            )
    return held_expert_lora(arrays, config, placement, parallel, ranks=(rank,), alphas=(alpha,))


def drawn_a(key: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """The first factor as it starts, lead + (R, K)."""
    bound = shape[-1] ** -0.5
    return jax.random.uniform(key, shape, jnp.float32, -bound, bound).astype(dtype)


def held_expert_lora(
    arrays: Mapping[str, Leaf],
    config: MoEConfig,
    placement: Placement | None,
    parallel: ParallelConfig | None,
    *,
    ranks: Sequence[int],
    alphas: Sequence[float],
    names: Sequence[str] = (),
) -> ExpertLoRA:
    """An adapter of arrays of all experts in their order, as a layer holds it: over a mesh with its experts."""
    held: Any = dict(ranks=ranks, alphas=alphas, names=names)
    if parallel is None or placement is None:
        adapter = ExpertLoRA(arrays, **held)
        _for_each(adapter, lambda variable, axes: name_axes(variable, axes))
        return adapter
    slots = np.asarray(placement.physical_to_logical)
    if (np.bincount(slots[slots >= 0]) > 1).any():
        name = f"{config.name}: " if config.name else ""
        raise NotImplementedError(
            f"{name}experts with copies in redundant slots take no adapters; build without num_redundant_experts, and "
            f"without enable_eplb where the devices ({placement.num_devices}) do not divide the experts "
            f"({placement.num_experts}): it fills slots that are left with copies"
        )
    placed = placed_config(config, placement, parallel)
    sizes = {EXPERT: placed.num_experts, MLP: placed.intermediate_size}

    def place(name: str, array: Array) -> Array:
        is_shared = array.shape[0] == 1 and name.endswith("_a")
        shape = tuple(sizes.get(axis or "", size) for axis, size in zip(_AXES[name], array.shape, strict=True))
        host = np.asarray(array)
        host = in_slots(
            np, host, np.zeros(1, np.int32) if is_shared else slots, (1, *shape[1:]) if is_shared else shape
        )
        sharding = NamedSharding(parallel.mesh, PartitionSpec(*_mesh_axes(_AXES[name], host.shape, parallel)))
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    adapter = ExpertLoRA({name: place(name, array) for name, array in arrays.items()}, **held)
    _for_each(
        adapter, lambda variable, axes: state_axes(variable, _mesh_axes(axes, variable.get_value().shape, parallel))
    )
    return adapter


def whole_expert_lora(lora: ExpertLoRA, config: MoEConfig, placement: Placement | None) -> ExpertLoRA:
    """Inverse of ``held_expert_lora``: all experts in their order; over a mesh on the host."""
    if placement is None:
        return lora
    sizes = {EXPERT: config.num_experts, MLP: config.intermediate_size}
    arrays: dict[str, Any] = {}
    for name, axes in _AXES.items():
        if (variable := getattr(lora, name)) is None:
            continue
        value = variable.get_value()
        shape: Any = tuple(sizes.get(axis or "", size) for axis, size in zip(axes, value.shape, strict=True))
        if name.endswith("_a") and value.shape[0] == 1:
            arrays[name] = np.asarray(value)[tuple(slice(0, size) for size in (1, *shape[1:]))]
        else:
            arrays[name] = out_of_slots(value, placement, shape)
    return ExpertLoRA(arrays, ranks=lora.ranks, alphas=lora.alphas)


def _mesh_axes(axes: tuple[str | None, ...], shape: tuple[int, ...], parallel: ParallelConfig) -> tuple[Any, ...]:
    """Axes of the mesh for those of a Variable; an a that experts share is whole along its first."""
    known = {EXPERT: None if shape[0] == 1 else parallel.expert_axis, MLP: parallel.tensor_axis}
    return tuple(known.get(axis or "") for axis in axes)


def _for_each(adapter: ExpertLoRA, function: Callable[[Any, tuple[str | None, ...]], None]) -> None:
    for name, axes in _AXES.items():
        variable = getattr(adapter, name)
        if variable is not None:
            shared = variable.get_value().shape[0] == 1 and name.endswith("_a")
            function(variable, (None, *axes[1:]) if shared else axes)
