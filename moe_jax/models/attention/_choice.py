"""Which implementation attends in a call, and how it runs over a mesh."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
from jax.sharding import PartitionSpec

from moe_jax._typing import Array, DTypeLike
from moe_jax.models._config import DecoderConfig
from moe_jax.models._partition import Partition
from moe_jax.models.attention import _cudnn, _hopper

AttentionImplementation = Literal["auto", "xla", "hopper", "cudnn"]
# Modules with ``LEAST_QUERIES`` of a prefill, ``refusal`` and ``attend``. XLA runs what they all refuse.
KERNELS: dict[str, Any] = {"hopper": _hopper, "cudnn": _cudnn}
# The kernels that each name of ``attention=`` asks, in order.
ORDERS: dict[str, tuple[str, ...]] = {
    "auto": ("hopper", "cudnn"),
    "xla": (),
    "hopper": ("hopper",),
    "cudnn": ("cudnn",),
}
# Whether the other steps between the products of a layer are kernels too, see ``moe_jax.models._fused``.
FUSES: dict[str, bool] = {"auto": True, "xla": False, "hopper": True, "cudnn": False}


def check_implementation(name: str, config: DecoderConfig, dtype: DTypeLike) -> None:
    """Raise ValueError for an unknown ``attention=``, NotImplementedError where the kernel it names cannot serve this
    model."""
    if name not in ORDERS:
        raise ValueError(f"attention={name!r}, expected one of {', '.join(map(repr, ORDERS))}")
    if name in KERNELS and (reason := model_refusal(name, config, dtype)) is not None:
        raise NotImplementedError(f"attention={name!r}: {reason}; attention='xla' runs everywhere")


def model_refusal(name: str, config: DecoderConfig, dtype: DTypeLike) -> str | None:
    """Why this kernel cannot run a prefill of any layer of this model here, or None when it can."""
    if config.chunked_layers:
        return "attention in chunks"
    kv_heads, value_width = config.num_kv_heads, config.head_dim
    if config.mla is not None:
        kv_heads, value_width = config.num_heads, config.mla.v_head_dim
    queries = KERNELS[name].LEAST_QUERIES
    q = jax.ShapeDtypeStruct((1, queries, kv_heads, config.num_heads // kv_heads, config.head_dim), dtype)
    k, v = (jax.ShapeDtypeStruct((1, kv_heads, queries, width), dtype) for width in (config.head_dim, value_width))
    return KERNELS[name].refusal(q, k, v, scale=1.0, window=None, has_sinks=config.has_sinks)


def segments_refusal(config: DecoderConfig) -> str | None:
    """Why rows of several sequences cannot be attended, or None when they can."""
    if not all(spec.holds_slots for spec in config.layer_caches):
        return (
            "the state of linear attention goes on from one sequence of a row to the next; give each sequence a row of "
            "its own"
        )
    if config.pinned_tokens is not None:
        return (
            f"with pinned_tokens={config.pinned_tokens} a sequence begins at the first slot of a row; give each "
            "sequence a row of its own"
        )
    if config.rope.depends_on_length:
        return (
            f"the rotary embedding of type {config.rope.rope_type!r} changes with the length of a row; give each "
            "sequence a row of its own"
        )
    return None


def choose(implementation: str, q: Any, k: Any, v: Any | None, **kind: Any) -> tuple[str | None, list[str]]:
    """(the kernel that attends, None for XLA; those asked before it and why they do not). Arguments as of
    ``_hopper.refusal``."""
    refused = []
    for name in _order(implementation, k, v):
        reason = KERNELS[name].refusal(q, k, v, **kind)
        if reason is None:
            return name, refused
        refused.append(f"{name}: {reason}")
    return None, refused


def in_words(name: str | None, refused: Iterable[str]) -> str:
    """What ``choose`` found, in a line: "XLA; not hopper: needs a Hopper GPU"."""
    return "; ".join([name or "XLA", *(f"not {reason}" for reason in refused)])


def _order(implementation: str, k: Any, v: Any | None) -> tuple[str, ...]:
    """Of ``ORDERS``; turned round where keys are wider than values, as MLA's are: there cuDNN was the faster one."""
    names = ORDERS[implementation]
    return names[::-1] if v is not None and k.shape[-1] > v.shape[-1] else names


def attend_by(
    name: str,
    scale: float,
    window: int | None,
    partition: Partition | None,
    q: Array,
    k: Array,
    v: Array | None,
    places: dict[str, Array | None],
    sinks: Array | None,
    scales: tuple[Array, Array] | None = None,
    value_width: int | None = None,
) -> Array:
    """(B, S, M, G, V) by the kernel that ``choose`` named. places: starts, lengths, first_slots, (B,) int32 each;
    first_keys (B, S) and shared (B,) of rows of several sequences, else None, as of ``prefill``. Where they have a
    page_table too, (B, T) int32, k and v are pages. scales: of keys and values that are e4m3 codes.

    Over a mesh each device attends with its share of the query heads, and with all of them where they do not divide.
    """
    kv_heads, group = q.shape[2:4]
    heads = q.reshape(*q.shape[:2], kv_heads * group, q.shape[-1])
    run = functools.partial(_attend, name, scale, window, value_width)
    run = run if partition is None else functools.partial(_over_mesh, run, partition)
    return run(heads, k, v, places, sinks, scales).reshape(*q.shape[:4], -1)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _attend(name: str, scale: float, window: int | None, value_width: int | None, *operands: Any) -> Array:
    """A compiled part of its own, so that equal layers of a model lower the kernel once."""
    return KERNELS[name].attend(scale, window, value_width, *operands)


def quantizes(name: str | None, rows: tuple[str, int], q: Any, k: Any, v: Any) -> bool:
    """Whether the kernel that ``choose`` named can quantize the outputs of this call; rows: as of its ``quantizes``."""
    ask = None if name is None else getattr(KERNELS[name], "quantizes", None)
    return ask is not None and ask(rows, q, k, v)


def attend_and_quantize(name: str, *arguments: Any) -> tuple[Array, Array]:
    """(codes (B, N * V), scales) by a kernel that ``quantizes``."""
    return KERNELS[name].attend_and_quantize(*arguments)


def _over_mesh(
    run: Callable[..., Array],
    partition: Partition,
    q: Array,
    k: Array,
    v: Array | None,
    places: dict[str, Array | None],
    sinks: Array | None,
    scales: tuple[Array, Array] | None,
) -> Array:
    """``run`` on each device, with its query heads. A key head may serve the query heads of several devices."""
    axis, mesh, parts = partition.axis, partition.mesh, partition.parts
    group, own_heads = q.shape[2] // k.shape[1], q.shape[2] // parts
    splits_keys = k.shape[1] % parts == 0
    shares_key = not splits_keys and q.shape[2] % parts == 0 and group % own_heads == 0
    others = tuple(name for name in mesh.axis_names if name != axis)
    if partition.is_explicit:
        rows: Any = jax.typeof(q).sharding.spec[0]
    else:
        rows = others if q.shape[0] % math.prod(mesh.shape[name] for name in others) == 0 else None

    def of_device(q, k, v, places, sinks, scales):
        if shares_key:
            first = jax.lax.axis_index(axis) * own_heads // group
            k, v = jax.tree.map(lambda cached: jax.lax.dynamic_slice_in_dim(cached, first, 1, axis=1), (k, v))
        return run(q, k, v, places, sinks, scales)

    of_queries, of_keys = axis if splits_keys or shares_key else None, axis if splits_keys else None
    of_slots = None if "page_table" in places else rows
    by_head, by_key_head = PartitionSpec(rows, None, of_queries), PartitionSpec(of_slots, of_keys)
    mapped = jax.shard_map(
        of_device,
        mesh=mesh if jax.sharding.get_abstract_mesh().empty else None,
        in_specs=(by_head, by_key_head, by_key_head, PartitionSpec(rows), PartitionSpec(of_queries), PartitionSpec()),
        out_specs=by_head,
        check_vma=False,  # Pallas kernels do not say how their results vary
    )
    return jax.jit(mapped)(q, k, v, places, sinks, scales)
