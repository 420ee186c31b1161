"""What a mesh adds to ``FusedMoE``: checks of arguments, the placement, and a part of ``explain``."""

import dataclasses
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from moe_jax._arguments import boolean, integer
from moe_jax._config import MoEConfig
from moe_jax.experts._choice import layout_owner
from moe_jax.experts._explain import explain
from moe_jax.parallel._choice import describe_dispatch
from moe_jax.parallel._config import ParallelConfig
from moe_jax.parallel._expert_map import STRATEGIES
from moe_jax.parallel._logical import TreeVariable
from moe_jax.parallel._placement import Placement
from moe_jax.parallel._sharding import kernel_share
from moe_jax.parallel._weights import abstract_placed_weights, placed_config, share_config
from moe_jax.quantization import ExpertWeights, method_for


class PlacementParam(TreeVariable):
    """Variable whose value is a ``Placement``: its arrays are leaves, so that another placement compiles nothing."""

    def leaf_specs(self, value: Placement, spec: PartitionSpec) -> Any:
        return jax.tree.map(lambda leaf: PartitionSpec(), value)  # every device has all of it


def make_parallel(mesh: Any, **options: Any) -> ParallelConfig | None:
    """The ``ParallelConfig`` of a layer's arguments, None without a mesh; ``mesh`` may be one, which says it all.

    Raises ValueError for axes without a mesh, or beside a ``ParallelConfig``; TypeError where ``reduce_results`` is no
    bool.
    """
    boolean("reduce_results", options["reduce_results"])
    if mesh is not None and not isinstance(mesh, ParallelConfig):
        return ParallelConfig(mesh, **options)
    given = [f"{name}={value!r}" for name, value in options.items() if value is not None and name != "reduce_results"]
    if mesh is not None and mesh.reduce_results and not options["reduce_results"]:
        given = ["reduce_results=False"]
    if given and mesh is not None:
        raise ValueError(f"{', '.join(given)} beside mesh={mesh}; say it there")
    if given:
        raise ValueError(f"{', '.join(given)} without a mesh; pass mesh=jax.make_mesh(...) with axes of these names")
    return mesh


def make_placement(
    parallel: ParallelConfig | None, num_experts: int, strategy: str, *, enable_eplb: bool, num_redundant_experts: int
) -> PlacementParam | None:
    """The initial placement of a layer over a mesh.

    Raises ValueError: an unknown strategy, redundant experts without load balancing, load balancing without an expert
    axis or with round-robin placement, which balancing would undo.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"placement={strategy!r}, expected {' or '.join(map(repr, STRATEGIES))}")
    enable_eplb = boolean("enable_eplb", enable_eplb)
    num_redundant_experts = integer("num_redundant_experts", num_redundant_experts, minimum=0)
    if num_redundant_experts and not enable_eplb:
        raise ValueError(f"num_redundant_experts={num_redundant_experts} needs enable_eplb=True")
    has_axis = parallel is not None and parallel.expert_axis is not None
    if enable_eplb and not has_axis:
        raise ValueError("enable_eplb=True balances the devices of an expert axis; pass mesh= and expert_axis=")
    if strategy != "linear" and (enable_eplb or not has_axis):
        why = "load balancing sets places itself" if enable_eplb else "there is no expert axis to spread experts over"
        raise ValueError(f"placement={strategy!r}, but {why}; leave it 'linear'")
    if parallel is None:
        return None
    if enable_eplb:  # what would be empty slots, since devices hold equally many, takes copies too
        num_redundant_experts += -(num_experts + num_redundant_experts) % parallel.expert_size
    placement = Placement.create(
        num_experts, parallel.expert_size, strategy, num_redundant_experts=num_redundant_experts
    )
    return PlacementParam(placement)


def parallel_of(mesh: Any) -> ParallelConfig | None:
    """What ``mesh=`` of ``load_moe`` and ``load_pretrained`` means: axes named "expert", "tensor", "data" and
    "sequence" are what they say; a ``ParallelConfig`` has other names. Raises ValueError for a mesh without any.
    """
    if mesh is None or isinstance(mesh, ParallelConfig):
        return mesh
    names = getattr(mesh, "axis_names", ())
    axes: dict[str, Any] = {f"{name}_axis": name for name in ("expert", "tensor", "data", "sequence") if name in names}
    if not axes and isinstance(mesh, Mesh):
        raise ValueError(
            f"mesh has axes {tuple(mesh.shape.items())}, expected some of 'expert', 'tensor', 'data' and 'sequence'; "
            "pass mesh=ParallelConfig(mesh, expert_axis=...) for other names"
        )
    return ParallelConfig(mesh, **axes)


def spread(layer: Any, parallel: ParallelConfig | None, **balancing: Any) -> None:
    """Give an abstract ``FusedMoE`` a mesh, with linear placement; None leaves it on one device.

    balancing: enable_eplb and num_redundant_experts; raises as ``make_placement``.
    """
    placement = make_placement(parallel, layer.config.num_experts, "linear", **balancing)
    if parallel is None or placement is None:
        return
    layer.parallel = parallel
    layer.placement = nnx.data(placement)  # None was there, which nnx takes for static
    layer.weights.set_value(abstract_placed_weights(layer.config, placement.get_value(), parallel))
    layer.weights.name_axes(parallel)


def explain_parallel(
    config: MoEConfig, parallel: ParallelConfig, placement: Placement, weights: ExpertWeights, num_tokens: int
) -> str:
    """``explain`` of one device's share, and what is around it: mesh, dispatch, padding."""
    own = share_config(config, placement, parallel)
    share = method_for(config.scheme).abstract_weights(own)
    if not weights.w13.layout.is_plain:
        share = kernel_share(layout_owner(weights.w13.layout), own)
    share = share.adapted(weights.w13_lora, weights.w2_lora)
    placed = placed_config(config, placement, parallel)
    lines = [
        f"mesh: {parallel}, {parallel.platform}",
        describe_dispatch(parallel, config, num_tokens),
        f"placement: {placement.num_experts} experts, {placement.slots_per_device} slots on each device",
    ]
    if placed.intermediate_size != config.intermediate_size:
        lines.append(
            f"padding: intermediate {config.intermediate_size} to {placed.intermediate_size}, for "
            f"{parallel.tensor_size} equal shares of whole groups, blocks, packed words and rows of the kernels"
        )
    own = dataclasses.replace(own, num_experts=config.num_experts)  # tiles are chosen by the whole layer
    return "\n".join(["on one device:", explain(own, share, num_tokens, parallel.platform), *lines])
