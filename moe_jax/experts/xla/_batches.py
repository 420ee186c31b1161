"""Many experts in each product: how the rows of a call run on a GPU, where a launch for each tile would cost most.

Two ways, by the number of (token, slot) pairs:

    pairs:    every pair gathers its expert; XLA fuses gather, dequantization, multiplication and sum into one launch
              that reads the stored weights once.
    experts:  all experts at once, each with up to ``rows`` of its rows, as batched products; where their temporaries
              would be too large, some experts at a time. What an expert has beyond ``rows`` follows in batches of
              gathered experts, whose number is data on the device.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax._config import MoEConfig
from moe_jax._typing import Array, Size
from moe_jax.experts._sort import sort_by_expert
from moe_jax.quantization import Scheme

TEMPORARY_BYTES = 1 << 30  # of dequantized weights and rows, at a time
_ROW_UNIT = 16
_FREE_ROWS = 64  # Up to so many rows an expert's product takes as long as reading its weights.

# (pairs (R,) of one expert, its weights) -> (R, width) float32
Body = Callable[[Array, Any], Array]


@dataclasses.dataclass(frozen=True)
class Batches:
    """How a call runs in batches.

    kind: "pairs" or "experts".
    rows: of an expert in a batch; 1 for pairs.
    experts: in a batch, a divisor of their number; 1 for pairs.
    """

    kind: Literal["pairs", "experts"]
    rows: int = 1
    experts: int = 1

    def __str__(self) -> str:
        if self.kind == "pairs":
            return "every pair of a token and an expert in one launch"
        return f"batches of {self.experts} experts with up to {self.rows} rows each"


def plan_batches(config: MoEConfig, scheme: Scheme, num_tokens: Size, top_k: int, operand_bytes: int) -> Batches | None:
    """How a call runs on a GPU; None for tile after tile.

    That is how calls run whose number of tokens is not known, and calls with ``pinned_tokens``: products of a batch may
    be summed in another order than those of a batch of another size.
    operand_bytes: of a dequantized weight.
    """
    pairs = num_tokens * top_k
    if not isinstance(pairs, int) or pairs == 0 or config.pinned_tokens is not None:
        return None
    # Unquantized weights are read by batched products as they lie, faster than by gathers.
    most = config.num_experts // (2 if scheme.weights is None else 1)
    return Batches("pairs") if pairs <= max(most, top_k) else plan_experts(config, scheme, pairs, operand_bytes)


def plan_experts(config: MoEConfig, scheme: Scheme, pairs: int, operand_bytes: int) -> Batches:
    """Batches of experts for so many pairs. Under uniform routing nearly every expert has all its rows in one."""
    mean = pairs / config.num_experts
    enough = max(mean + 4 * math.sqrt(mean), min(4 * mean, _FREE_ROWS))
    rows = min(-(-math.ceil(enough) // _ROW_UNIT) * _ROW_UNIT, pairs)
    hidden, wide = config.hidden_size, config.num_projections * config.intermediate_size
    weights = 0 if scheme.weights is None else operand_bytes * hidden * wide  # of GEMM 1, before those of GEMM 2
    own = weights + rows * (6 * hidden + 4 * wide + 6 * config.intermediate_size)
    fitting = max(1, TEMPORARY_BYTES // own)
    experts = max(d for d in range(1, config.num_experts + 1) if config.num_experts % d == 0 and d <= fitting)
    return Batches("experts", rows, experts)


def in_batches(batches: Batches, body: Body, out: Array, topk_ids: Array, stacked: Any) -> Array:
    """``body`` for every pair that is routed, by the experts of ``stacked``.

    out: (P, width) float32 zeros, P = T * top_k, which a pair that is not routed keeps. stacked: a pytree of (E, ...)
    arrays. body: is called with indices below P; for rows that nobody has, with any of them, and its result is dropped.
    """
    ids = topk_ids.reshape(-1).astype(jnp.int32)
    num_pairs, num_experts = ids.size, jax.tree.leaves(stacked)[0].shape[0]
    is_routed = (ids >= 0) & (ids < num_experts)
    if batches.kind == "pairs":
        own = _gathered(stacked, jnp.clip(ids, 0, num_experts - 1))
        rows = jax.vmap(body)(lax.iota(jnp.int32, num_pairs)[:, None], own)[:, 0]
        return jnp.where(is_routed[:, None], rows, out)

    expert = jnp.where(is_routed, ids, num_experts)
    sizes = jnp.zeros(num_experts, jnp.int32).at[expert].add(1, mode="drop")
    _, pair_at = sort_by_expert(expert, num_experts)
    first = jnp.cumsum(sizes) - sizes

    def store(out: Array, start: Array, size: Array, own: Any) -> Array:
        """The rows from ``start`` (B,) on of experts ``own``; those from ``size`` (B,) on are nobody's."""
        place = lax.iota(jnp.int32, batches.rows)
        pairs = pair_at.at[jnp.minimum(start[:, None] + place, num_pairs - 1)].get(mode="promise_in_bounds")
        rows = jax.vmap(body)(pairs, own)
        to = jnp.where(place < size[:, None], pairs, num_pairs + place + batches.rows * _counted(start)[:, None])
        return out.at[to].set(rows, mode="drop", unique_indices=True)

    if batches.experts == num_experts:
        out = store(out, first, sizes, stacked)
    else:

        def some(i: Array, out: Array) -> Array:
            held, _ = lax.optimization_barrier((stacked, i))  # as in for_each_tile
            first_of, sizes_of, own = (
                jax.tree.map(lambda leaf: _some(leaf, i * batches.experts, batches.experts), tree)
                for tree in (first, sizes, held)
            )
            return store(out, first_of, sizes_of, own)

        out = lax.fori_loop(0, num_experts // batches.experts, some, out)
    if batches.rows >= num_pairs:
        return out

    more = jnp.maximum(-(-sizes // batches.rows) - 1, 0)  # further parts of each expert's rows
    ends = jnp.cumsum(more)
    at_a_time = min(batches.experts, -(-num_pairs // batches.rows))

    def further(i: Array, out: Array) -> Array:
        held, _ = lax.optimization_barrier((stacked, i))
        part = i * at_a_time + lax.iota(jnp.int32, at_a_time)
        expert = jnp.minimum(jnp.sum(ends <= part[:, None], axis=1, dtype=jnp.int32), num_experts - 1)
        done = batches.rows * (1 + part - (ends - more)[expert])
        left = jnp.where(part < ends[-1], sizes[expert] - done, 0)
        return store(out, first[expert] + done, left, _gathered(held, expert))

    return lax.fori_loop(0, -(-ends[-1] // at_a_time), further, out)


def _counted(values: Array) -> Array:
    return lax.iota(jnp.int32, values.shape[0])


def _gathered(stacked: Any, experts: Array) -> Any:
    return jax.tree.map(lambda leaf: leaf.at[experts].get(mode="promise_in_bounds"), stacked)


def _some(leaf: Array, start: Array, size: int) -> Array:
    return lax.dynamic_slice_in_dim(leaf, start, size, allow_negative_indices=False)
