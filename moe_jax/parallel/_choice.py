"""Which dispatch a call takes where the caller named none, and what ``explain`` says about it."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from moe_jax._config import MoEConfig
from moe_jax.parallel._config import ParallelConfig
from moe_jax.parallel._dispatch import ROOM
from pallas_kernels.nvlink_dispatch import ExchangeConfig, ExchangeDesc, config_error
from pallas_kernels.nvlink_dispatch.config import MAX_DEVICES

# Tokens of the devices that share experts up to which one psum of everything is as cheap as sending tokens to their
# experts: on four H200s 33 us at 64 tokens, where all_gather and psum_scatter take 62 and nvlink_dispatch 23. Layers of
# 64 tokens take the same with psum and nvlink_dispatch, which is ahead from 1024 tokens on
# (benchmarks/results/ep_x4_h200.txt).
FEW_TOKENS = 512


def choose_dispatch(parallel: ParallelConfig, config: MoEConfig, num_tokens: int) -> str:
    """The dispatch of a call with ``num_tokens`` tokens. Raises NotImplementedError for a named one that cannot run."""
    if parallel.dispatch is not None:
        reason = dispatch_refusal(parallel.dispatch, parallel.mesh)
        if reason is not None:
            raise NotImplementedError(reason)
        return parallel.dispatch
    return _rule(parallel, config, num_tokens)[0]


def describe_dispatch(parallel: ParallelConfig, config: MoEConfig, num_tokens: int) -> str:
    """The dispatch of a call and the reason for it, and what becomes of nvlink_dispatch, in one line."""
    if parallel.dispatch is not None:
        refusal = dispatch_refusal(parallel.dispatch, parallel.mesh)
        return f"dispatch: {parallel.dispatch}, as the layer was told" if not refusal else f"dispatch: none, {refusal}"
    name, reason = _rule(parallel, config, num_tokens)
    if parallel.expert_size == 1:
        return f"dispatch: {name}, {reason}"
    refusal = _nvlink_refusal(parallel, config, num_tokens)
    return f"dispatch: {name}, {reason}" + ("" if refusal is None else f"; not nvlink_dispatch, which {refusal}")


def _nvlink_refusal(parallel: ParallelConfig, config: MoEConfig, num_tokens: int) -> str | None:
    """What the exchange over NVLink does or needs that this call cannot give, whatever its experts run in; or None."""
    reason = nvlink_refusal(list(parallel.mesh.devices.flat))
    if reason is not None:
        return reason
    num_tokens = -(-num_tokens // math.prod(map(parallel.size, parallel.token_axes("nvlink_dispatch"))))
    desc = ExchangeDesc(
        mesh=tuple(parallel.mesh.shape.items()),
        axis=str(parallel.expert_axis),
        num_tokens=num_tokens * (parallel.tensor_size if parallel.gathers_tokens else 1),
        width=config.hidden_size,
        top_k=config.top_k,
        slots_per_device=1,
        dtype=config.dtype.name,
        row_dtype=config.dtype.name,
        sum_dtype=None if parallel.reduce_dtype == "float32" else parallel.reduce_dtype,
    )
    reason = config_error(desc, ExchangeConfig(1), 1)
    return None if reason is None else f"cannot run {reason}"


def _rule(parallel: ParallelConfig, config: MoEConfig, num_tokens: int) -> tuple[str, str]:
    if parallel.expert_size == 1:
        return "replicate", "since no axis splits the experts"
    if not parallel.reduce_results:
        return "replicate", "since sums are left to the caller"
    groups = 1
    for axis in (parallel.data_axis, parallel.sequence_axis):
        if axis not in (None, parallel.expert_axis, parallel.tensor_axis):
            groups *= parallel.size(axis)
    sharing = -(-num_tokens // groups)
    if sharing <= FEW_TOKENS:
        return "replicate", f"since {sharing} tokens on the devices that share experts are at most {FEW_TOKENS}"
    if _nvlink_refusal(parallel, config, num_tokens) is None:
        other, _ = by_collectives(parallel, config)
        otherwise = f"{other} where experts have adapters or are not in the Hopper kernels"
        return "nvlink_dispatch", f"since rows go over NVLink ({otherwise})"
    return by_collectives(parallel, config)


def by_collectives(parallel: ParallelConfig, config: MoEConfig) -> tuple[str, str]:
    """The dispatch of many tokens by XLA's collectives, and the reason for it."""
    if parallel.expert_size - 1 > ROOM * config.top_k:
        return "all_to_all", f"since {config.top_k} rows a token are fewer than {parallel.expert_size - 1} copies of it"
    return (
        "all_gather",
        f"since {parallel.expert_size - 1} copies of a token are about its {config.top_k} rows or fewer",
    )


def dispatch_refusal(name: str, mesh: Mesh) -> str | None:
    """The reason for which a dispatch cannot run on the devices of a mesh, or None."""
    if name == "nvlink_dispatch" and (reason := nvlink_refusal(list(mesh.devices.flat))) is not None:
        return f"dispatch='nvlink_dispatch' {reason}; use 'all_gather' or 'all_to_all'"
    if name == "ragged_all_to_all" and mesh.devices.flat[0].platform == "cpu":
        return "dispatch='ragged_all_to_all': XLA has none on the CPU; use 'all_to_all', which sends the same rows"
    return None


def nvlink_refusal(devices: Sequence[Any]) -> str | None:
    """What the exchange over NVLink does or needs that the devices of a mesh, in its order, cannot give, or None.

    It stores from one device into another's memory, at addresses that this process knows. Mosaic takes a device's place
    in the mesh for its number.
    """
    kind = devices[0].device_kind
    if devices[0].platform != "gpu":
        return f"stores over NVLink from Hopper GPUs, the mesh is of {kind!r}"
    if any(getattr(device, "compute_capability", None) != "9.0" for device in devices):
        return f"is built for compute capability 9.0, the mesh is of {kind!r}"
    if len({device.process_index for device in devices}) > 1 or jax.process_count() > 1:
        return f"needs one process that drives all devices of one host, there are {jax.process_count()}"
    if [device.id for device in devices] != list(range(len(devices))):
        return f"needs a mesh of devices 0, 1, ... in this order, found {[device.id for device in devices]}"
    if not 2 <= len(devices) <= MAX_DEVICES:
        return f"joins 2 to {MAX_DEVICES} devices, the mesh has {len(devices)}"
    return None
