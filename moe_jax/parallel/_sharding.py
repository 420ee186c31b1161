"""Placed weights in the layout that each device's backend reads, and back: every device converts its own share."""

import dataclasses
import functools
from collections.abc import Callable

import jax

from moe_jax._config import MoEConfig
from moe_jax.experts._backend import Backend
from moe_jax.experts._choice import plain_layout, preferred_layout
from moe_jax.parallel._config import ParallelConfig
from moe_jax.parallel._placement import Placement
from moe_jax.parallel._weights import (
    abstract_placed_weights,
    is_placed,
    partition_specs,
    place_weights,
    shardings,
    share_config,
)
from moe_jax.quantization import ExpertWeights, method_for


def lay_out(weights: ExpertWeights, config: MoEConfig, placement: Placement, parallel: ParallelConfig) -> ExpertWeights:
    """A layer's experts, placed or all in their order, as the layer holds them: placed, and in ``share_layout``."""
    if not is_placed(weights, parallel):
        weights = place_weights(weights, config, placement, parallel)
    if not weights.w13.layout.is_plain:
        return weights
    backend = share_layout(share_config(config, placement, parallel), parallel)
    return weights if backend is None else kernel_shares(backend, weights, config, placement, parallel)


def share_layout(own: MoEConfig, parallel: ParallelConfig) -> Backend | None:
    """The backend in whose layout a share is held: the one that is tried first, where it takes the share so.

    Act-order columns stay plain: an empty slot and a device's part of I have groups of other sizes than the kernel's.
    own: the config of a share.
    """
    fmt = own.scheme.weights
    if fmt is not None and fmt.actorder:
        return None
    return preferred_layout(own, method_for(own.scheme).abstract_weights(own), parallel.platform)


def kernel_shares(
    backend: Backend, weights: ExpertWeights, config: MoEConfig, placement: Placement, parallel: ParallelConfig
) -> ExpertWeights:
    """Every device's share through ``backend.kernel_layout``; the layout's shape is that of one share. Exact."""
    own = share_config(config, placement, parallel)

    def convert(share: ExpertWeights) -> ExpertWeights:
        return backend.kernel_layout(_with_columns(share, own.intermediate_size), own)

    return _on_every_device(convert, weights, kernel_share(backend, own), parallel)


def kernel_share(backend: Backend, own: MoEConfig) -> ExpertWeights:
    """One device's share in the backend's layout, as shapes. own: the config of a share."""
    plain = method_for(own.scheme).abstract_weights(own)
    return jax.eval_shape(functools.partial(backend.kernel_layout, config=own), plain)


def plain_shares(
    weights: ExpertWeights, config: MoEConfig, placement: Placement, parallel: ParallelConfig
) -> ExpertWeights:
    """Inverse of ``kernel_shares``; plain weights are returned as they are."""
    if weights.w13.layout.is_plain:
        return weights
    plain = abstract_placed_weights(config, placement, parallel)
    columns = plain.w2.shape[-1]
    return _on_every_device(lambda share: _with_columns(plain_layout(share), columns), weights, plain, parallel)


def _with_columns(weights: ExpertWeights, columns: int) -> ExpertWeights:
    if weights.w2.num_columns is None:
        return weights
    return dataclasses.replace(weights, w2=dataclasses.replace(weights.w2, num_columns=columns))


def _on_every_device(
    function: Callable[[ExpertWeights], ExpertWeights],
    weights: ExpertWeights,
    like: ExpertWeights,
    parallel: ParallelConfig,
) -> ExpertWeights:
    """function: of one share. like: what it returns, in its static metadata and the number of axes of its leaves."""
    mapped = jax.shard_map(
        function,
        mesh=parallel.mesh,
        in_specs=(partition_specs(weights, parallel),),
        out_specs=partition_specs(like, parallel),
        check_vma=False,
    )
    # Else jax.jit spells shardings as it likes: a program that takes the weights would compile again after a reload.
    return jax.jit(mapped, out_shardings=shardings(like, parallel))(weights)
