"""Random experts, made one after another: in float32 there is only the one that is being made.

An expert depends on the key and on its number. It is the same in a trace or outside, and on every mesh.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec, Sharding

from moe_jax._config import MoEConfig
from moe_jax._typing import Array, ArrayArg, Leaf
from moe_jax.experts._backend import Backend
from moe_jax.experts._choice import preferred_layout
from moe_jax.parallel import ParallelConfig, Placement
from moe_jax.parallel._sharding import kernel_share, share_layout
from moe_jax.parallel._weights import cut_expert, partition_specs, placed_config, shardings, share_config
from moe_jax.quantization import ExpertShape, ExpertWeights, Scheme, method_for


def random_experts(config: MoEConfig, key: jax.Array) -> ExpertWeights:
    """All experts of a layer without a mesh, as this device reads them best; in a trace in layout "plain".

    Values are normal with variance 1/K and quantized by the scheme; biases are zero.
    """
    backend = None
    if not isinstance(key, Tracer) and len(key.sharding.device_set) == 1:
        plain = method_for(config.scheme).abstract_weights(config)
        backend = preferred_layout(config, plain, jax.default_backend())
    shape = dataclasses.replace(config.shape, name="")  # layers that differ in other things share a program
    return _experts(key, shape, config.scheme, None if backend is None else (backend, _unnamed(config)))


def random_shares(config: MoEConfig, key: jax.Array, placement: Placement, parallel: ParallelConfig) -> ExpertWeights:
    """``random_experts`` of a layer over a mesh, as ``lay_out`` leaves them; each device makes those of its slots."""
    own, placed = (_unnamed(of(config, placement, parallel)) for of in (share_config, placed_config))
    backend = share_layout(own, parallel)
    arguments = (placement.physical_to_logical, _unnamed(config), own, placed, parallel, backend)
    if isinstance(key, Tracer):
        return _shares(key, *arguments)
    # By way of the host: the key may lie on devices that are not the mesh's.
    own_key = jax.random.wrap_key_data(jnp.asarray(np.asarray(jax.random.key_data(key))), impl=jax.random.key_impl(key))
    weights = _shares(own_key, *arguments)
    return jax.tree.map(_respelled, weights, shardings(weights, parallel))


def _respelled(leaf: Array, sharding: Sharding) -> Array:
    """The same memory: jax.jit spells equal shardings otherwise than ``lay_out``, and a reload would compile again.
    ``jax.device_put`` copies what several processes hold.
    """
    parts = [shard.data for shard in leaf.addressable_shards]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, parts)


def _unnamed(config: MoEConfig) -> MoEConfig:
    return dataclasses.replace(config, name="")


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _experts(key: Array, shape: ExpertShape, scheme: Scheme, layout: tuple[Backend, MoEConfig] | None) -> ExpertWeights:
    def lay_out(weights: ExpertWeights) -> ExpertWeights:
        return weights if layout is None else layout[0].kernel_layout(weights, layout[1])

    like = jax.eval_shape(lay_out, method_for(scheme).abstract_weights(shape))

    def make(expert: Array) -> ExpertWeights:
        return lay_out(_expert(key, expert, shape, scheme))

    return jax.tree.structure(like).unflatten(_in_turn(make, jnp.arange(shape.num_experts), like))


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5, 6))
def _shares(
    key: Array,
    slots: ArrayArg,
    config: MoEConfig,
    own: MoEConfig,
    placed: MoEConfig,
    parallel: ParallelConfig,
    backend: Backend | None,
) -> ExpertWeights:
    """own, placed: the configs of a share and of all of them."""
    like = method_for(config.scheme).abstract_weights(placed) if backend is None else kernel_share(backend, own)

    def share(key: Array, slots: Array) -> list[Leaf]:
        expert_rank, tensor_rank = (
            0 if axis is None else jax.lax.axis_index(axis) for axis in (parallel.expert_axis, parallel.tensor_axis)
        )
        slots = jax.lax.dynamic_slice_in_dim(slots, expert_rank * own.num_experts, own.num_experts)

        def make(expert: Array) -> ExpertWeights:
            whole = _expert(key, expert, config.shape, config.scheme)
            part = cut_expert(whole, expert >= 0, tensor_rank, own, parallel)
            return part if backend is None else backend.kernel_layout(part, own)

        return _in_turn(make, slots, like)

    leaves = jax.shard_map(
        share,
        mesh=parallel.mesh,
        in_specs=PartitionSpec(),
        out_specs=jax.tree.leaves(partition_specs(like, parallel)),
        check_vma=False,
    )(key, jnp.asarray(slots))
    return jax.tree.structure(like).unflatten(leaves)


def _expert(key: Array, expert: Array, shape: ExpertShape, scheme: Scheme) -> ExpertWeights:
    """One expert, (1, ...), in layout "plain". expert: () int."""
    one, method = dataclasses.replace(shape, num_experts=1), method_for(scheme)
    sizes = [math.prod((*lead, n, k)) for _, lead, n, k in one.products]

    def draw() -> Array:
        return jax.random.normal(jax.random.fold_in(key, expert), (sum(sizes),), jnp.float32)

    # Nothing for an empty slot. And a branch is a program of its own: outside, XLA would draw again for each use of
    # the values, with other last bits.
    drawn = jax.lax.cond(expert >= 0, draw, lambda: jnp.zeros((sum(sizes),), jnp.float32))
    w13, w2 = (
        part.reshape(*lead, n, k) * k**-0.5
        for part, (_, lead, n, k) in zip(jnp.split(drawn, sizes[:1]), one.products, strict=True)
    )
    biases = None
    if one.has_bias:
        b13, b2 = (jnp.zeros((*lead, n), one.param_dtype) for _, lead, n, _ in one.products)
        biases = (b13, b2)
    return method.process_weights_after_loading(method.quantize_leaves(w13, w2, biases, one), one)


def _in_turn(make: Callable[[Array], ExpertWeights], experts: Array, like: ExpertWeights) -> list[Leaf]:
    """The leaves of ``make(expert)``, stacked. like: of the same dtypes.

    FP8 is written as integers: XLA for CPUs would widen all of an array to write a part of it. Calling them FP8 again
    copies them on a CPU, on a GPU it does not.
    """

    def one(expert: Array) -> list[Leaf]:
        leaves = [leaf[0] for leaf in jax.tree.leaves(make(expert))]
        return [leaf.view(jnp.uint8) if is_fp8(leaf.dtype) else leaf for leaf in leaves]

    def is_fp8(dtype: Any) -> bool:
        return dtype.itemsize == 1 and jnp.issubdtype(dtype, jnp.floating)

    stacked = jax.lax.map(one, experts)
    return [leaf.view(wanted.dtype) for leaf, wanted in zip(stacked, jax.tree.leaves(like), strict=True)]
