"""Multi-head latent attention (MLA, DeepSeek-V2): the cache holds one compressed row per token, not its heads.

A token's hidden state becomes a latent c and one rotated key r that all heads share; both are cached, nothing else.
Head n has the key (U_n c, r) and the value V_n c, where U_n and V_n are rows of ``kv_b_proj``. There are two ways to
attend, equal but for rounding:

- expand: compute keys and values of all heads for all slots, then attend as usual;
- absorb: since q . U_n c = (U_n^T q) . c, take queries into the space of latents, attend there with the latents as the
  one key-value head, and apply V_n to the result. Nothing is computed per slot, but every score is wider.

The shapes of a call decide which one costs less: expanding for a prefill, absorbing for a decode step.

With an indexer a query attends to the tokens that it selects alone. A step of one token gathers their rows and attends
to these; longer calls attend to all rows under a mask.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from moe_jax._typing import Array, DTypeLike, Float, Int
from moe_jax.models import _fused
from moe_jax.models._config import DecoderConfig, MLAConfig
from moe_jax.models._layer_cache import PAGE_SLOTS, SlotCache, by_rows, extended
from moe_jax.models._layers import Addend, LayerNorm, Linear, PartialSums, RMSNorm
from moe_jax.models._partition import WHOLE, Partitioned, partitioned
from moe_jax.models.attention._attention import (
    AttentionInputs,
    Projected,
    attend,
    joined_product,
    outputs_of,
    projected_with_norm,
)
from moe_jax.models.attention._choice import AttentionImplementation, choose, in_words
from moe_jax.models.attention._indexer import Indexer
from moe_jax.models.attention._rope import rotate
from moe_jax.parallel._logical import EMBED, HEADS

_EPS = 1e-6  # of the norms over compressed rows, whatever rms_norm_eps is: DeepSeek's own code leaves the default


class LatentAttention(Partitioned):
    """Causal multi-head latent attention with rotary positions on a part of every head."""

    module_name: ClassVar[str] = "self_attn"  # in a layer of a checkpoint

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        *,
        implementation: AttentionImplementation = "xla",
        dtype: DTypeLike = jnp.bfloat16,
        rngs: nnx.Rngs | None = None,
    ):
        self.config, self.window = config, config.window_of(layer)
        self.implementation: AttentionImplementation = implementation
        mla, heads, h = self.mla, config.num_heads, config.hidden_size
        options: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        biased: dict[str, Any] = dict(use_bias=config.use_attention_bias, **options)
        rank, queries = mla.q_lora_rank, heads * config.head_dim
        self.q_proj = Linear(h, queries, **options) if rank is None else None
        self.q_a_proj = None if rank is None else Linear(h, rank, **biased)
        self.q_a_layernorm = None if rank is None else RMSNorm(rank, eps=_EPS, **options)
        self.q_b_proj = None if rank is None else Linear(rank, queries, **options)
        self.kv_a_proj_with_mqa = Linear(h, mla.kv_lora_rank + mla.qk_rope_head_dim, **biased)
        self.kv_a_layernorm = RMSNorm(mla.kv_lora_rank, eps=_EPS, **options)
        up = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        self.kv_b_proj = Linear(mla.kv_lora_rank, up, is_dequantized=True, **options)  # absorbing reads its parts
        self.o_proj = Linear(heads * mla.v_head_dim, h, use_bias=config.use_output_bias, **options)
        self.indexer = Indexer(config, **options) if config.has_indexer(layer) else None
        self.name_parameters()

    @property
    def mla(self) -> MLAConfig:
        """The sizes of the compressed rows; a model without them has no layer of this class."""
        assert self.config.mla is not None
        return self.config.mla

    def dense_modules(self) -> dict[str, nnx.Module]:
        """Checkpoint name below the layer's attention -> module."""
        names = ("q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm")
        names += ("kv_b_proj", "o_proj")
        modules = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return modules if self.indexer is None else modules | self.indexer.dense_modules()

    def logical_axes(self) -> Mapping[str, tuple[str | None, ...]]:
        queries = {"q_proj": (HEADS, EMBED)}
        if self.q_proj is None:
            queries = {"q_a_proj": (None, EMBED), "q_b_proj": (HEADS, None)}
        keys = {"kv_a_proj_with_mqa": (None, EMBED), "kv_b_proj": (HEADS, None)}
        return queries | keys | {"o_proj": (EMBED, HEADS)}

    def split_names(self, parts: int) -> Collection[str]:
        return () if self.config.num_heads % parts else (HEADS,)

    def __call__(
        self, x: Float[Array, "B S H"] | Projected, inputs: AttentionInputs, cached: SlotCache | None
    ) -> tuple[Float[Array, "B S H"], SlotCache, Int[Array, "B S K"] | None]:
        """Attend and return the output, this layer's rows, and the slots that queries selected, None for all.

        The rows are one array (B, 1, slots, kv_lora_rank + rope), and one of index keys behind it in layers with an
        indexer. cached: these of earlier calls; None keeps this call's tokens alone.
        """
        num_slots = x.shape[1] if cached is None else cached.arrays[0].shape[2]
        if inputs.page_table is not None:
            num_slots = inputs.page_table.shape[1] * PAGE_SLOTS
        selected = WHOLE if self._selects(num_slots) else None
        outputs = (WHOLE, self.cache_splits(), selected)
        return partitioned(LatentAttention._forward, self, outputs, x, inputs, cached)

    def cache_splits(self) -> Any:
        """As of ``Attention``: the latent belongs to all heads, and so do index keys."""
        split: Any = WHOLE
        return SlotCache((split,) * (1 if self.indexer is None else 2))

    def _selects(self, num_slots: int) -> bool:
        """Whether there are more slots than a query may attend to."""
        return self.mla.indexer is not None and num_slots > self.mla.indexer.topk

    def _into(self) -> tuple[Linear, Linear]:
        """The projections of what a layer's norm gives: to queries, or what they are made of, and to latents."""
        queries = self.q_a_proj if self.q_proj is None else self.q_proj
        assert queries is not None
        return queries, self.kv_a_proj_with_mqa

    def added_and_projected(
        self, norm: RMSNorm | LayerNorm, x: Float[Array, "B S H"], addend: Addend
    ) -> tuple[Array, Projected] | None:
        """As of ``Attention``. An indexer reads the norm itself."""
        if self.indexer is not None:
            return None
        return projected_with_norm(norm, x, addend, self._into(), self.num_sms())

    def _forward(
        self, x: Float[Array, "B S H"] | Projected, inputs: AttentionInputs, cached: SlotCache | None
    ) -> tuple[Float[Array, "B S H"], SlotCache, Int[Array, "B S K"] | None]:
        mla, places = self.mla, (inputs.starts, inputs.lengths, inputs.first_slots)
        joined, compressed = joined_product(self._into(), x, self.partition), None
        found = None if joined is None or cached is None else self._in_one_launch(joined, inputs, cached)
        if found is None:
            q, compressed, new = self._queries_and_latents(x, joined, inputs)
            kept = extended(cached, inputs.apart(new), *places, inputs.page_table)
        else:
            q, kept = found
        q = q.reshape(*x.shape[:2], self.config.num_heads, -1)
        rotated = self._rotated(q[..., mla.qk_nope_head_dim :], inputs)
        rows, *index_keys = by_rows(kept, inputs.starts, inputs.lengths, inputs.page_table)
        inputs = dataclasses.replace(inputs, page_table=None)
        if not self._selects(rows.shape[2]):
            inputs = dataclasses.replace(inputs, selected=None)
        elif self.indexer is not None:
            assert not isinstance(x, Projected) and compressed is not None, "as above"
            inputs = dataclasses.replace(inputs, selected=self.indexer.select(x, compressed, index_keys[0], inputs))
        selected = inputs.selected
        if selected is not None and x.shape[1] == 1:
            rows, inputs = _gathered(rows, inputs)
        absorbs = is_cheaper_absorbed(mla, x.shape[1], rows.shape[2])
        y = (self._absorbed if absorbs else self._expanded)(q, rotated, rows, inputs)
        return self.o_proj(y.reshape(*x.shape[:2], -1)), kept, selected

    def _queries_and_latents(
        self, x: Float[Array, "B S H"] | Projected, joined: PartialSums | None, inputs: AttentionInputs
    ) -> tuple[Array, Array | None, tuple[Array, ...]]:
        """Queries of all heads, the compressed row that they are made of, and this call's rows of the cache."""
        rank, compressed = self.mla.kv_lora_rank, None
        q, row = outputs_of(self._into(), x, joined)
        if self.q_proj is None:
            assert self.q_a_layernorm is not None and self.q_b_proj is not None
            compressed = self.q_a_layernorm(q)
            q = self.q_b_proj(compressed)
        key = self._rotated(row[:, :, None, rank:], inputs)[:, :, 0]
        row = jnp.concatenate([self.kv_a_layernorm(row[..., :rank]), key], axis=-1)
        new: tuple[Array, ...] = (row[:, None],)
        if self.indexer is not None:
            assert not isinstance(x, Projected), "added_and_projected has made none"
            new += (self.indexer.keys(x, inputs),)
        return q, compressed, new

    def _in_one_launch(
        self, joined: PartialSums, inputs: AttentionInputs, cached: SlotCache
    ) -> tuple[Array, SlotCache] | None:
        """Queries of all heads, and the cache with the rows of these tokens; None where no kernel writes them. An
        indexer has keys of its own to write."""
        if self.indexer is not None:
            return None
        norms = tuple(norm for norm in (self.q_a_layernorm, self.kv_a_layernorm) if norm is not None)
        found = _fused.latents_stored(
            joined,
            cached.arrays[0],
            inputs.cos,
            inputs.sin,
            (inputs.starts, inputs.lengths, inputs.first_slots),
            norms,
            self.q_b_proj,
            is_interleaved=self.mla.is_interleaved,
            page_table=inputs.page_table,
            sms=self.num_sms(),
        )
        if found is None:
            return None
        q, rows = found
        if q is None:
            q = joined.whole(rows.dtype)[..., : self._into()[0].weight.shape[0]]
        return q, SlotCache((rows,))

    def explain(self, batch: int, num_tokens: int, num_slots: int, dtype: DTypeLike) -> str:
        """As of ``Attention``."""
        mla, heads = self.mla, self.config.num_heads
        of_selection = ""
        if self._selects(num_slots) and mla.indexer is not None:
            of_selection = f" over {mla.indexer.topk} selected slots"
            if num_tokens > 1:
                return "XLA; no kernel attends to slots that differ by query"
            num_slots = mla.indexer.topk
        absorbs, latent = is_cheaper_absorbed(mla, num_tokens, num_slots), mla.kv_lora_rank + mla.qk_rope_head_dim
        width = self.config.head_dim
        q = (batch, num_tokens, 1, heads, latent) if absorbs else (batch, num_tokens, heads, 1, width)
        k = (batch, 1, num_slots, latent) if absorbs else (batch, heads, num_slots, width)
        q, k, v = (jax.ShapeDtypeStruct(shape, dtype) for shape in (q, k, (*k[:-1], mla.v_head_dim)))
        kind: Any = dict(scale=self.scale, window=self.window, value_width=mla.kv_lora_rank if absorbs else None)
        kind |= dict(has_sinks=False, has_sequences=False)
        chosen = in_words(*choose(self.implementation, q, k, None if absorbs else v, **kind))
        return f"{'latents' if absorbs else 'keys and values of all heads'}{of_selection}: {chosen}"

    @property
    def scale(self) -> float:
        """On scores."""
        return self.config.head_dim**-0.5 * self.config.rope.score_scale

    def num_sms(self) -> int | None:
        """As of ``Attention``."""
        return None if self.partition is not None else _fused.num_sms(self.implementation)

    def _expanded(self, q: Array, rotated: Array, rows: Array, inputs: AttentionInputs) -> Array:
        """q (B, S, N, nope + rope), of which ``rotated`` (B, S, N, rope) takes the place of the last; rows (B, 1, L,
        rank + rope) -> (B, S, N, 1, V)."""
        mla, heads = self.mla, self.config.num_heads
        q = jnp.concatenate([q[..., : mla.qk_nope_head_dim], rotated], axis=-1)
        latent, key = rows[:, 0, :, : mla.kv_lora_rank], rows[:, :, :, mla.kv_lora_rank :]
        both = self.kv_b_proj(latent).reshape(*latent.shape[:2], heads, -1).swapaxes(1, 2)
        shared = jnp.broadcast_to(key, (*both.shape[:3], key.shape[-1]))
        k = jnp.concatenate([both[..., : mla.qk_nope_head_dim], shared], axis=-1)
        return self._attend(q[:, :, :, None], k, both[..., mla.qk_nope_head_dim :], inputs)

    def _absorbed(self, q: Array, rotated: Array, rows: Array, inputs: AttentionInputs) -> Array:
        """The same, with (B, S, N, V) as result."""
        mla, sms, nope = self.mla, self.num_sms(), self.mla.qk_nope_head_dim
        weight = self.kv_b_proj.weight[...].reshape(self.config.num_heads, -1, mla.kv_lora_rank)
        inner = _fused.multiplied_by_head(q, weight, (0, nope), False, sms)
        inner = jnp.concatenate([inner, rotated], axis=-1)
        context = self._attend(inner[:, :, None], rows, None, inputs)[:, :, 0]
        return _fused.multiplied_by_head(context, weight, (nope, weight.shape[1]), True, sms)

    def _attend(self, q: Array, k: Array, v: Array | None, inputs: AttentionInputs) -> Array:
        """v: None for the latents in k."""
        latents = self.mla.kv_lora_rank if v is None else None
        options: Any = dict(value_width=latents, implementation=self.implementation, partition=self.partition)
        return attend(q, k, v, inputs, scale=self.scale, window=self.window, selected=inputs.selected, **options)

    def _rotated(self, x: Float[Array, "B S N D"], inputs: AttentionInputs) -> Float[Array, "B S N D"]:
        return rotate(x, inputs.cos, inputs.sin, is_interleaved=self.mla.is_interleaved)


def _gathered(rows: Float[Array, "B N L W"], inputs: AttentionInputs) -> tuple[Array, AttentionInputs]:
    """The rows that the one query of each row of the batch selected, and inputs that speak of these alone.

    What a query sees comes first among the slots that it selected, so the rows that count are the first ones.
    """
    slots: Any = inputs.selected
    found = jnp.take_along_axis(rows, slots[:, :, :, None], axis=2)
    seen = jnp.minimum(inputs.lengths, inputs.first_slots + 1) - inputs.starts
    count = jnp.clip(seen, 0, slots.shape[-1])
    places = dict(starts=jnp.zeros_like(count), lengths=count, first_slots=count - 1)
    return found, dataclasses.replace(inputs, **places, key_positions=None, selected=None)


def is_cheaper_absorbed(mla: MLAConfig, num_queries: int, num_slots: int) -> bool:
    """Whether absorbing takes fewer multiplications per head and row of the batch; see the top of this file."""
    up = mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim)
    expanded = num_slots * up + num_queries * num_slots * (mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim)
    absorbed = num_queries * up + num_queries * num_slots * (2 * mla.kv_lora_rank + mla.qk_rope_head_dim)
    return absorbed < expanded
