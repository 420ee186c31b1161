"""Placed weights in the layout that each device's kernels read, and back: every device packs its own share."""

import dataclasses
import functools
from typing import Any

import jax

from moe_jax._config import MoEConfig
from moe_jax.experts._backend import order_of
from moe_jax.experts.hopper import _experts as _experts_mosaic
from moe_jax.experts.hopper._kernel_layout import is_packed, pack_experts, packed_format, unpack_experts
from moe_jax.parallel._config import ParallelConfig
from moe_jax.parallel._placement import Placement
from moe_jax.parallel._weights import abstract_placed_weights, is_placed, local_config, partition_specs, place_weights
from moe_jax.quantization import ExpertWeights, method_for


def lay_out(weights: ExpertWeights, config: MoEConfig, placement: Placement, parallel: ParallelConfig) -> ExpertWeights:
    """A layer's experts, placed or all in their order, as the layer holds them: placed, and packed where the Hopper
    kernels are tried first and take one device's share.

    Act-order columns stay plain: an empty slot and a device's part of I have groups of other sizes than the kernel's.
    """
    if not is_placed(weights, parallel):
        weights = place_weights(weights, config, placement, parallel)
    fmt = config.scheme.weights
    if order_of(config, parallel.platform)[0] != "mosaic" or not weights.w13.layout.is_plain:
        return weights
    if fmt is None or fmt.actorder or packed_format(config.scheme, config.dtype) is None:
        return weights
    own, packed = packed_share(config, placement, parallel)
    if _experts_mosaic.why_not(own, packed, 1) is not None:
        return weights
    return pack_shares(weights, config, placement, parallel)


def pack_shares(
    weights: ExpertWeights, config: MoEConfig, placement: Placement, parallel: ParallelConfig
) -> ExpertWeights:
    """Every device's share through ``pack_experts``; the layout's shape is that of one share. Exact."""
    own, packed = packed_share(config, placement, parallel)

    def pack(share: ExpertWeights) -> ExpertWeights:
        return pack_experts(_with_columns(share, own.intermediate_size), own)

    return _on_every_device(pack, weights, packed, parallel)


def unpack_shares(
    weights: ExpertWeights, config: MoEConfig, placement: Placement, parallel: ParallelConfig
) -> ExpertWeights:
    """Inverse of ``pack_shares``; plain weights are returned as they are."""
    if not is_packed(weights.w13):
        return weights
    plain = abstract_placed_weights(config, placement, parallel)
    columns = plain.w2.shape[-1]
    return _on_every_device(lambda share: _with_columns(unpack_experts(share), columns), weights, plain, parallel)


def packed_share(config: MoEConfig, placement: Placement, parallel: ParallelConfig) -> tuple[MoEConfig, ExpertWeights]:
    """(config of one device's share, its packed weights as shapes)."""
    own = local_config(config, placement, parallel)
    plain = method_for(config.scheme).abstract_weights(own)
    return own, jax.eval_shape(functools.partial(pack_experts, config=own), plain)


def _with_columns(weights: ExpertWeights, columns: int) -> ExpertWeights:
    if weights.w2.num_columns is None:
        return weights
    return dataclasses.replace(weights, w2=dataclasses.replace(weights.w2, num_columns=columns))


def _on_every_device(
    function: Any, weights: ExpertWeights, like: ExpertWeights, parallel: ParallelConfig
) -> ExpertWeights:
    """function: of one share. like: what it returns, in its static metadata and the number of axes of its leaves."""
    mapped = jax.shard_map(
        function,
        mesh=parallel.mesh,
        in_specs=(partition_specs(weights, parallel),),
        out_specs=partition_specs(like, parallel),
        check_vma=False,
    )
    return jax.jit(mapped)(weights)
