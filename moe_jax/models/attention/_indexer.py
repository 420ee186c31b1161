"""The indexer of sparse attention (DeepSeek-V3.2): it scores the tokens that a query sees, and the best are attended.

A token t keeps one index key k_t beside its latent. A query s has index queries q_sj of some heads j, made of its
compressed query, and a weight w_sj for each. Its score of t is the sum over j of w_sj relu(q_sj . k_t / sqrt(D)), in
float32. Attention then sees the ``topk`` tokens with the highest scores, of equal ones the earliest.

DeepSeek's kernels multiply index queries and keys by a Hadamard matrix and round both to FP8. The matrix is orthogonal
and leaves every product as it is: it only spreads values so that rounding loses less. Nothing is rounded to FP8 here,
so there is nothing to spread, and scores are those that the kernels approximate.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moe_jax._typing import Array, DTypeLike, Float, Int
from moe_jax.models._config import DecoderConfig, IndexerConfig
from moe_jax.models._layers import LayerNorm, Linear, precision_of
from moe_jax.models.attention._attention import AttentionInputs, in_query_blocks
from moe_jax.models.attention._rope import rotate
from moe_jax.parallel._logical import EMBED, name_axes

_EPS = 1e-6  # of the norm over index keys, whatever rms_norm_eps is


class Indexer(nnx.Module):
    """Index keys of tokens, and the tokens that queries select. Its weights are whole on every device of a mesh."""

    def __init__(self, config: DecoderConfig, *, dtype: DTypeLike = jnp.bfloat16, rngs: nnx.Rngs | None = None):
        mla = config.mla
        assert mla is not None and mla.indexer is not None and mla.q_lora_rank is not None
        self.config: IndexerConfig = mla.indexer
        heads, width = self.config.num_heads, self.config.head_dim
        options: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        # Scores only order tokens: what is small and decides the order is held in float32, as DeepSeek's code has it.
        wide: dict[str, Any] = dict(dtype=jnp.float32, rngs=rngs)
        self.wq_b = Linear(mla.q_lora_rank, heads * width, **options)
        self.wk = Linear(config.hidden_size, width, **options)
        self.k_norm = LayerNorm(width, eps=_EPS, **wide)
        self.weights_proj = Linear(config.hidden_size, heads, is_dequantized=True, **wide)
        for linear in (self.wk, self.weights_proj):
            name_axes(linear.weight, (None, EMBED))

    def dense_modules(self) -> dict[str, nnx.Module]:
        """Checkpoint name below the layer's attention -> module."""
        names = ("wq_b", "wk", "k_norm", "weights_proj")
        return {f"indexer.{name}": getattr(self, name) for name in names}

    def keys(self, x: Float[Array, "B S H"], inputs: AttentionInputs) -> Float[Array, "B N S D"]:
        """The index keys of this call's tokens as the cache keeps them, N = 1."""
        return self._rotated(self.k_norm(self.wk(x))[:, :, None], inputs).swapaxes(1, 2)

    def select(
        self,
        x: Float[Array, "B S H"],
        compressed: Float[Array, "B S R"],
        keys: Float[Array, "B N L D"],
        inputs: AttentionInputs,
    ) -> Int[Array, "B S K"]:
        """The slots that each query attends to, best first; those that it does not see come last. K = topk < L.

        compressed: the queries before their up-projection. keys: of all slots, N = 1.
        """
        heads, width = self.config.num_heads, self.config.head_dim
        q = self._rotated(self.wq_b(compressed).reshape(*x.shape[:2], heads, width), inputs)
        weights = self.weights_proj(x.astype(jnp.float32)) * (width * heads) ** -0.5
        precision = precision_of(q.dtype)

        def some(q: Array, weights: Array, columns: Array, positions: Array) -> Array:
            scores = jnp.einsum(
                "bshd,bld->bshl", q, keys[:, 0], precision=precision, preferred_element_type=jnp.float32
            )
            scores = jnp.sum(jax.nn.relu(scores) * weights[..., None], axis=2)
            visible = inputs.visible(columns[0], positions, keys.shape[2], None)
            return jax.lax.top_k(jnp.where(visible, scores, -jnp.inf), self.config.topk)[1]

        columns = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
        return in_query_blocks(some, q, weights, columns, inputs.query_positions)

    def _rotated(self, x: Float[Array, "B S N D"], inputs: AttentionInputs) -> Float[Array, "B S N D"]:
        """The first columns are rotated, in another order of pairs than the rest of attention may have."""
        return rotate(x, inputs.cos, inputs.sin, is_interleaved=self.config.is_interleaved)
