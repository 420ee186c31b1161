"""Attention by the Hopper kernels, of prefills and of decode steps: when they can run, and how on a mesh."""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from moe_jax._typing import Array, DTypeLike
from moe_jax.models._config import DecoderConfig
from moe_jax.models._partition import Partition
from pallas_kernels.attention import PrefillDesc, choose_config, config_error, prefill
from pallas_kernels.common.device import hopper_sms
from pallas_kernels.decode_attention import DecodeDesc, decode_attention
from pallas_kernels.decode_attention import choose_config as choose_decode_config
from pallas_kernels.decode_attention import config_error as decode_config_error

AttentionImplementation = Literal["xla", "hopper"]
USES_KERNELS: dict[str, bool] = {"xla": False, "hopper": True}
# Fewer queries fill less than half of a tile; all scores of so few are small.
LEAST_QUERIES = 64
# More queries a row are no decode step.
MOST_DECODED = 8


def check_implementation(name: str, config: DecoderConfig, dtype: DTypeLike) -> None:
    """Raise ValueError for an unknown ``attention=``, NotImplementedError where "hopper" cannot serve this model."""
    if name not in USES_KERNELS:
        raise ValueError(f"attention={name!r}, expected one of {', '.join(map(repr, USES_KERNELS))}")
    reason = model_refusal(config, dtype) if USES_KERNELS[name] else None
    if reason is not None:
        raise NotImplementedError(f"attention={name!r}: {reason}; attention='xla' runs everywhere")


def check_takes_segments(name: str, config: DecoderConfig) -> None:
    """Raise NotImplementedError where rows of several sequences cannot be attended."""
    if USES_KERNELS[name]:
        raise NotImplementedError(
            f"segment_ids: attention={name!r} takes rows of one sequence; load the model with attention='xla'"
        )
    if config.rope.depends_on_length:
        raise NotImplementedError(
            f"segment_ids: the rotary embedding of type {config.rope.rope_type!r} changes with the length of a row; "
            "give each sequence a row of its own"
        )


def model_refusal(config: DecoderConfig, dtype: DTypeLike) -> str | None:
    """Why the kernel cannot run a prefill of any layer of this model here, or None when it can."""
    if jax.__version_info__ < (0, 11):
        return f"jax {jax.__version__}; on a GPU it was seen with jax 0.11 alone"
    if config.chunked_layers:
        return "attention in chunks"
    kv_heads, value_width = config.num_kv_heads, config.head_dim
    if config.mla is not None:
        kv_heads, value_width = config.num_heads, config.mla.v_head_dim
    q = jax.ShapeDtypeStruct((1, LEAST_QUERIES, kv_heads, config.num_heads // kv_heads, config.head_dim), dtype)
    k, v = (jax.ShapeDtypeStruct((1, kv_heads, LEAST_QUERIES, w), dtype) for w in (config.head_dim, value_width))
    return refusal(q, k, v, scale=1.0, window=None)


def refusal(
    q: Any, k: Any, v: Any | None, *, scale: float, window: int | None, value_width: int | None = None
) -> str | None:
    """Why no kernel can attend, or None when one can: that of decode steps up to MOST_DECODED queries, or of prefills.

    q (B, S, M, G, D), k (B, M, L, D), v (B, M, L, V): arrays, or their shapes and dtypes. v is None where values are
    the first ``value_width`` elements of the keys.
    """
    batch, num_queries, kv_heads, group, width = q.shape
    if MOST_DECODED < num_queries < LEAST_QUERIES:
        return f"{num_queries} queries; up to {MOST_DECODED}, or from {LEAST_QUERIES} on"
    values = k if v is None else v
    if not q.dtype == k.dtype == values.dtype:
        return f"q is {q.dtype}, k {k.dtype}, v {values.dtype}; one dtype"
    if not scale > 0:
        return f"scale={scale}; above 0"
    sizes: Any = dict(
        batch=batch,
        num_queries=num_queries,
        num_slots=k.shape[2],
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        width=width,
        value_width=value_width or values.shape[-1],
        dtype=jnp.dtype(q.dtype).name,
        scale=scale,
        window=window,
    )
    try:
        sms = hopper_sms()
        if num_queries > MOST_DECODED:
            desc = PrefillDesc(**sizes)
            return config_error(desc, choose_config(desc, sms))
        step = DecodeDesc(is_latent=v is None, **sizes)
        return decode_config_error(step, choose_decode_config(step, sms))
    except NotImplementedError as error:
        return str(error)


def attend_hopper(
    scale: float,
    window: int | None,
    partition: Partition | None,
    q: Array,
    k: Array,
    v: Array | None,
    places: dict[str, Array],
    sinks: Array | None,
    value_width: int | None = None,
) -> Array:
    """(B, S, M, G, V), where ``refusal`` is None. places: starts, lengths, first_slots, (B,) int32 each.

    Over a mesh each device attends with its share of the query heads, and with all of them where they do not divide.
    """
    kv_heads, group = q.shape[2:4]
    heads = q.reshape(*q.shape[:2], kv_heads * group, q.shape[-1])
    run = functools.partial(_attend, scale, window, value_width)
    run = run if partition is None else functools.partial(_over_mesh, run, partition)
    return run(heads, k, v, places, sinks).reshape(*q.shape[:4], -1)


def _attend(
    scale: float,
    window: int | None,
    value_width: int | None,
    q: Array,
    k: Array,
    v: Array | None,
    places: dict[str, Array],
    sinks: Array | None,
) -> Array:
    settings: Any = dict(places, scale=scale, window=window, sinks=sinks, implementation="hopper")
    if q.shape[1] <= MOST_DECODED:
        return decode_attention(q, k, v, value_width=value_width, **settings)
    return prefill(q, k, k[..., :value_width] if v is None else v, **settings)


def _over_mesh(
    run: Callable[..., Array],
    partition: Partition,
    q: Array,
    k: Array,
    v: Array | None,
    places: dict[str, Array],
    sinks: Array | None,
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

    def of_device(q, k, v, places, sinks):
        if shares_key:
            first = jax.lax.axis_index(axis) * own_heads // group
            k, v = jax.tree.map(lambda cached: jax.lax.dynamic_slice_in_dim(cached, first, 1, axis=1), (k, v))
        return run(q, k, v, places, sinks)

    of_queries, of_keys = axis if splits_keys or shares_key else None, axis if splits_keys else None
    by_head, by_key_head = PartitionSpec(rows, None, of_queries), PartitionSpec(rows, of_keys)
    mapped = jax.shard_map(
        of_device,
        mesh=mesh if jax.sharding.get_abstract_mesh().empty else None,
        in_specs=(by_head, by_key_head, by_key_head, PartitionSpec(rows), PartitionSpec(of_queries)),
        out_specs=by_head,
        check_vma=False,  # Pallas kernels do not say how their results vary
    )
    return jax.jit(mapped)(q, k, v, places, sinks)
