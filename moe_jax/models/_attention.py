"""Grouped-query attention over a static key-value cache.

A cache has a fixed number of slots. A call with S tokens fills the next S slots of every row, so slots are aligned over
the batch while positions are not: padding (left, right or in between) occupies slots that are marked empty and never
seen. Slot order decides causality; positions decide the rotation and the reach of a sliding window.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moe_jax._typing import Array, Bool, Float, Int
from moe_jax.models._config import DecoderConfig
from moe_jax.models._layers import Linear, RMSNorm, precision_of
from moe_jax.models._rope import rotate

# Queries handled at once in a long prefill. Scores are (B, heads, queries, slots) in float32: 32 heads, 1024 queries
# and 32768 slots make 4 GiB, while all queries at once would need 137 GiB.
QUERY_BLOCK = 1024


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of the tokens seen so far; a pytree that the caller threads through calls.

    keys, values: one (B, kv_heads, slots, head_dim) per layer, keys already rotated. is_filled: (B, slots) bool, True
    where a real token lies. positions: (B, slots) int32. length: () int32, slots used so far, the same for all rows.
    num_tokens: (B,) int32, real tokens per row. is_damaged: (B,) bool, rows whose logits are NaN from now on, see
    ``CausalLM``.
    """

    keys: tuple[Any, ...]
    values: tuple[Any, ...]
    is_filled: Any
    positions: Any
    length: Any
    num_tokens: Any
    is_damaged: Any

    @classmethod
    def zeros(cls, config: DecoderConfig, batch: int, num_slots: int, dtype: Any) -> "KVCache":
        """An empty cache: nothing filled."""
        shape = (batch, config.num_kv_heads, num_slots, config.head_dim)
        return cls(
            keys=tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers)),
            values=tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers)),
            is_filled=jnp.zeros((batch, num_slots), jnp.bool),
            positions=jnp.zeros((batch, num_slots), jnp.int32),
            length=jnp.zeros((), jnp.int32),
            num_tokens=jnp.zeros((batch,), jnp.int32),
            is_damaged=jnp.zeros((batch,), jnp.bool),
        )

    @property
    def num_slots(self) -> int:
        return self.is_filled.shape[1]


@dataclasses.dataclass(frozen=True)
class AttentionInputs:
    """What all layers of one call share.

    cos, sin: (B, S, D/2) f32. query_slots: (S,) slot of each query. query_positions: (B, S). key_filled, key_positions:
    (B, L) over all slots that can be seen, this call's own included. window: see ``DecoderConfig.sliding_window``.
    """

    cos: Any
    sin: Any
    query_slots: Any
    query_positions: Any
    key_filled: Any
    key_positions: Any
    window: int | None

    def visible(self, slots: Int[Array, " S"], positions: Int[Array, "B S"]) -> Bool[Array, "B S L"]:
        """True where a query at (slot, position) sees a key slot."""
        seen = jnp.arange(self.key_filled.shape[1])[None, None, :] <= slots[None, :, None]
        seen = seen & self.key_filled[:, None, :]
        if self.window is not None:
            seen = seen & (self.key_positions[:, None, :] > positions[:, :, None] - self.window)
        return seen


class Attention(nnx.Module):
    """Causal attention with grouped key-value heads, rotary positions, and optional RMSNorm on query and key heads."""

    def __init__(self, config: DecoderConfig, *, dtype: Any = jnp.bfloat16, rngs: nnx.Rngs | None = None):
        self.config = config
        h, d = config.hidden_size, config.head_dim
        options: dict[str, Any] = dict(use_bias=config.use_attention_bias, dtype=dtype, rngs=rngs)
        self.q_proj = Linear(h, config.num_heads * d, **options)
        self.k_proj = Linear(h, config.num_kv_heads * d, **options)
        self.v_proj = Linear(h, config.num_kv_heads * d, **options)
        self.o_proj = Linear(config.num_heads * d, h, **options)
        norm: dict[str, Any] = dict(eps=config.rms_norm_eps, dtype=dtype, rngs=rngs)
        self.q_norm = RMSNorm(d, **norm) if config.use_qk_norm else None
        self.k_norm = RMSNorm(d, **norm) if config.use_qk_norm else None

    def __call__(
        self, x: Float[Array, "B S H"], inputs: AttentionInputs, cached: tuple[Any, Any] | None, slot: Any
    ) -> tuple[Float[Array, "B S H"], tuple[Any, Any]]:
        """Attend and return the output with this layer's keys and values.

        cached: keys and values (B, kv_heads, slots, D) to be extended from ``slot`` on; None keeps this call's tokens
        alone.
        """
        q, k, v = self._heads(x, inputs)
        if cached is not None:
            k, v = (
                jax.lax.dynamic_update_slice_in_dim(old, new, slot, axis=2)
                for old, new in zip(cached, (k, v), strict=True)
            )
        y = _attend_in_blocks(q, k, v, inputs)
        return self.o_proj(y.reshape(*x.shape[:2], -1)), (k, v)

    def _heads(self, x: Float[Array, "B S H"], inputs: AttentionInputs) -> tuple[Any, Any, Any]:
        """Rotated q (B, S, kv_heads, group, D), and rotated k and v as the cache keeps them, (B, kv_heads, S, D)."""
        lead, d = x.shape[:2], self.config.head_dim
        q, k, v = (layer(x).reshape(*lead, -1, d) for layer in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, inputs.cos, inputs.sin), rotate(k, inputs.cos, inputs.sin)
        return q.reshape(*lead, self.config.num_kv_heads, -1, d), k.swapaxes(1, 2), v.swapaxes(1, 2)


def _attend_in_blocks(q: Any, k: Any, v: Any, inputs: AttentionInputs) -> Any:
    """q (B, S, N, G, D), k and v (B, N, L, D) -> (B, S, N, G, D), at most QUERY_BLOCK queries at a time."""
    batch, num_queries = q.shape[:2]
    slots, positions = inputs.query_slots, inputs.query_positions
    if num_queries <= QUERY_BLOCK:
        return _attend(q, k, v, inputs.visible(slots, positions))
    num_blocks = -(-num_queries // QUERY_BLOCK)
    tail = num_blocks * QUERY_BLOCK - num_queries

    def blocks(a, axis):
        padded = jnp.pad(a, [(0, tail if i == axis else 0) for i in range(a.ndim)])
        split = padded.reshape(*a.shape[:axis], num_blocks, QUERY_BLOCK, *a.shape[axis + 1 :])
        return jnp.moveaxis(split, axis, 0)

    y = jax.lax.map(
        lambda block: _attend(block[0], k, v, inputs.visible(block[1], block[2])),
        (blocks(q, 1), blocks(slots, 0), blocks(positions, 1)),
    )
    return jnp.moveaxis(y, 0, 1).reshape(batch, -1, *q.shape[2:])[:, :num_queries]


def _attend(q: Any, k: Any, v: Any, visible: Bool[Array, "B S L"]) -> Any:
    """Softmax attention, scores and sums in float32. A query that sees nothing gets a finite, meaningless row."""
    wide: dict[str, Any] = dict(precision=precision_of(q.dtype), preferred_element_type=jnp.float32)
    scores = jnp.einsum("bsngd,bnld->bngsl", q, k, **wide) * (q.shape[-1] ** -0.5)
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bngsl,bnld->bsngd", weights, v, **wide).astype(q.dtype)
