"""Which dispatch a call takes where the caller named none, and what ``explain`` says about it."""

import math

from moe_jax._config import MoEConfig
from moe_jax.parallel._config import ParallelConfig
from moe_jax.parallel._dispatch import ROOM, why_no_push, why_not
from pallas_kernels.nvlink_dispatch import ExchangeConfig, ExchangeDesc, config_error

# Tokens of the devices that share experts up to which one psum of everything is as cheap as sending tokens to their
# experts: on four H200s 33 us at 64 tokens, where all_gather and psum_scatter take 62 and push 23; layers of 64 tokens
# take the same with psum and with push. From 1024 tokens on push is ahead (benchmarks/results/ep_x4_h200.txt).
FEW_TOKENS = 512


def choose_dispatch(parallel: ParallelConfig, config: MoEConfig, num_tokens: int) -> str:
    """The dispatch of a call with ``num_tokens`` tokens. Raises NotImplementedError for a named one that cannot run."""
    if parallel.dispatch is not None:
        reason = why_not(parallel.dispatch, parallel.mesh)
        if reason is not None:
            raise NotImplementedError(reason)
        return parallel.dispatch
    return _rule(parallel, config, num_tokens)[0]


def describe(parallel: ParallelConfig, config: MoEConfig, num_tokens: int) -> str:
    """The dispatch of a call and the reason for it, and what becomes of push, in one line."""
    if parallel.dispatch is not None:
        refusal = why_not(parallel.dispatch, parallel.mesh)
        return f"dispatch: {parallel.dispatch}, as the layer was told" if not refusal else f"dispatch: none, {refusal}"
    name, reason = _rule(parallel, config, num_tokens)
    if parallel.expert_size == 1:
        return f"dispatch: {name}, {reason}"
    refusal = _push_refusal(parallel, config, num_tokens)
    return f"dispatch: {name}, {reason}" + ("" if refusal is None else f"; not push, which {refusal}")


def _push_refusal(parallel: ParallelConfig, config: MoEConfig, num_tokens: int) -> str | None:
    """What push does or needs that this call cannot give, whatever its experts run in; or None."""
    reason = why_no_push(list(parallel.mesh.devices.flat))
    if reason is not None:
        return reason
    num_tokens = -(-num_tokens // math.prod(map(parallel.size, parallel.token_axes("push"))))
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
    if _push_refusal(parallel, config, num_tokens) is None:
        without, _ = without_push(parallel, config)
        return "push", f"since rows go over NVLink ({without} where the experts are not in the Hopper kernels)"
    return without_push(parallel, config)


def without_push(parallel: ParallelConfig, config: MoEConfig) -> tuple[str, str]:
    """The dispatch of many tokens by XLA's collectives, and the reason for it."""
    if parallel.expert_size - 1 > ROOM * config.top_k:
        return "all_to_all", f"since {config.top_k} rows a token are fewer than {parallel.expert_size - 1} copies of it"
    return (
        "all_gather",
        f"since {parallel.expert_size - 1} copies of a token are about its {config.top_k} rows or fewer",
    )
