"""Attention over a static key-value cache: what its kinds share, and grouped-query attention. MLA lies in _mla.py."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_jax._pytrees import pytree
from moe_jax._typing import Array, Bool, DTypeLike, Float, Int, Leaf
from moe_jax._versions import Place
from moe_jax.experts._gradient import with_gradient_of
from moe_jax.experts._matrix import padded_product, parts_of_product, products_of_rows, quantized_rows
from moe_jax.models import _fused
from moe_jax.models._config import DecoderConfig
from moe_jax.models._kv_cache_dtype import CacheScale, quantized, times
from moe_jax.models._layer_cache import PAGE_SLOTS, SlotCache, by_rows, extended
from moe_jax.models._layers import (
    MANY_ROWS,
    Addend,
    LayerNorm,
    Linear,
    PartialSums,
    RMSNorm,
    ZeroCenteredRMSNorm,
    biases_of,
    parameter,
    partial_sums,
    precision_of,
    scaled_to_unit,
    side_by_side,
    split_product,
)
from moe_jax.models._partition import WHOLE, Partition, Partitioned, partitioned
from moe_jax.models.attention._choice import (
    AttentionImplementation,
    attend_and_quantize,
    attend_by,
    choose,
    in_words,
    quantizes,
)
from moe_jax.models.attention._rope import rotate
from moe_jax.nn import QuantizedParam
from moe_jax.parallel._logical import EMBED, HEADS, KV_HEADS
from moe_jax.quantization import QuantizedMatrix
from pallas_kernels.common.numerics import widen

# Queries handled at once in a long prefill. Scores are (B, heads, queries, slots) in float32: 32 heads, 1024 queries
# and 32768 slots make 4 GiB, while all queries at once would need 137 GiB.
QUERY_BLOCK = 1024


@pytree
@dataclasses.dataclass(frozen=True, repr=False)
class AttentionInputs:
    """What all layers of one call share.

    cos, sin: (B, S, D/2) f32. starts, lengths: (B,) int32, row b has its keys in slots [starts[b], lengths[b]), those
    of this call included. first_slots: (B,) int32, query j of row b sits at slot first_slots[b] + j; queries of padding
    sit outside of the row's keys. query_positions: (B, S) int32. key_positions: (B, L) int32, or None where every slot
    has the position slot - start; then a sliding window reaches equally far in slots. segment_starts: (B, S) int32, the
    slot where the sequence of query j begins, or None where a row is one sequence. shared: (B,) int32, slots at the
    beginning of a row that its sequences see besides their own, or None for none. selected: (B, S, K) int32, slots that
    the layer before selected for each query; None without an indexer, or where all fit into its selection. is_counted:
    with segment_starts, whether the positions of a sequence count its slots. page_table: of ``KVCache``. is_pinned: the
    bits of a token must not depend on how many slots the cache has; then S = 1.
    """

    cos: Leaf
    sin: Leaf
    starts: Leaf
    lengths: Leaf
    first_slots: Leaf
    query_positions: Leaf
    key_positions: Leaf | None
    segment_starts: Leaf | None = None
    shared: Leaf | None = None
    selected: Leaf | None = None
    page_table: Leaf | None = None
    is_counted: bool = dataclasses.field(default=False, metadata=dict(static=True))
    is_pinned: bool = dataclasses.field(default=False, metadata=dict(static=True))

    def apart(self, tree: Any) -> Any:
        """What a call computed, where bits must not depend on the cache that it goes into: XLA is to do one without the
        other."""
        return jax.lax.optimization_barrier(tree) if self.is_pinned else tree

    def visible(
        self,
        columns: Int[Array, " S"],
        positions: Int[Array, "B S"],
        num_slots: int,
        window: int | None,
        chunk: int | None = None,
    ) -> Bool[Array, "B S L"]:
        """True where the query of a column, at this position, sees a key slot, in a layer of this sliding window."""
        slots = jnp.arange(num_slots, dtype=jnp.int32)[None, None, :]
        seen = slots <= (self.first_slots[:, None] + columns)[:, :, None]
        seen = seen & (slots >= self.starts[:, None, None]) & (slots < self.lengths[:, None, None])
        if self.segment_starts is not None:
            is_own = slots >= jnp.take(self.segment_starts, columns, axis=1)[:, :, None]
            seen = seen & (is_own if self.shared is None else is_own | (slots < self.shared[:, None, None]))
        if window is None and chunk is None:
            return seen
        if self.key_positions is None:
            keys = slots - self.starts[:, None, None]
        else:
            keys = self.key_positions[:, None, :]
        if window is not None:
            seen = seen & (keys > positions[:, :, None] - window)
        if chunk is not None:
            seen = seen & (keys // chunk == positions[:, :, None] // chunk)
        return seen


@dataclasses.dataclass(frozen=True)
class Projected:
    """Tokens whose queries, keys and values are known. shape, dtype: of the tokens, (B, S, H)."""

    products: tuple[PartialSums, ...]
    shape: tuple[int, ...]
    dtype: DTypeLike


def projected_with_norm(
    norm: RMSNorm | LayerNorm,
    x: Float[Array, "B S H"],
    addend: Addend,
    modules: tuple[Linear, ...],
    sms: int | None,
) -> tuple[Array, Projected] | None:
    """(x + addend, what the modules make of its norm) where a kernel makes both, else None. sms: of ``num_sms``."""
    found = _fused.added_and_projected(norm, x, addend, modules, sms)
    return None if found is None else (found[0], Projected(found[1], x.shape, x.dtype))


def joined_product(
    modules: tuple[Linear, ...], x: Float[Array, "B S H"] | Projected, partition: Partition | None
) -> PartialSums | None:
    """What all modules make of x side by side, where one launch makes it. partition: of the module that calls; over a
    mesh each has a product of its own."""
    if isinstance(x, Projected):
        return x.products[0] if len(x.products) == 1 else None
    return side_by_side(modules, x, x.dtype) if partition is None else None


def outputs_of(
    modules: tuple[Linear, ...], x: Float[Array, "B S H"] | Projected, joined: PartialSums | None
) -> list[Float[Array, "B S _"]]:
    """What each module makes of x. joined: of ``joined_product``."""
    if joined is not None:
        ends = np.cumsum([module.weight.shape[0] for module in modules])[:-1]
        return jnp.split(joined.whole(x.dtype), ends, axis=-1)
    if isinstance(x, Projected):
        return [product.whole(x.dtype) for product in x.products]
    return [module(x) for module in modules]


class Attention(Partitioned):
    """Causal attention with grouped key-value heads, rotary positions, and what else ``DecoderConfig`` lists."""

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
        self.config = config
        self.implementation: AttentionImplementation = implementation
        self.window = config.window_of(layer)
        self.chunk = config.attention_chunk if layer in config.chunked_layers else None
        self.is_rotated = layer not in config.unrotated_layers
        multiplier = config.attention_multiplier
        self.scale = config.head_dim**-0.5 if multiplier is None else multiplier
        h, d = config.hidden_size, config.head_dim
        options: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        queries, keys = config.num_heads * d, config.num_kv_heads * d
        self.q_proj = Linear(
            h, queries * (2 if config.has_output_gate else 1), use_bias=config.use_attention_bias, **options
        )
        self.k_proj = Linear(h, keys, use_bias=config.use_attention_bias, **options)
        self.v_proj = Linear(h, keys, use_bias=config.use_attention_bias, **options)
        self.o_proj = Linear(queries, h, use_bias=config.use_output_bias, **options)
        widths = {None: (), "rotated_unit": (), "head": (d, d), "rotated_head": (d, d), "projection": (queries, keys)}[
            config.qk_norm
        ]
        norm = ZeroCenteredRMSNorm if config.norm == "zero_centered_rms" else RMSNorm
        norms = [norm(width, eps=config.rms_norm_eps, **options) for width in widths]
        self.q_norm, self.k_norm = norms or (None, None)
        sinks = nnx.initializers.normal(0.02)
        self.sinks = parameter((config.num_heads,), dtype, rngs, sinks) if config.has_sinks else None
        has_scales = config.kv_cache_dtype is not None
        self.k_scale, self.v_scale = (
            CacheScale.one(is_abstract=rngs is None) if has_scales else None for _ in range(2)
        )
        self.name_parameters()

    def dense_modules(self) -> dict[str, nnx.Module | Place]:
        """Checkpoint name below the layer's attention -> module, or place of a parameter."""
        names = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
        modules = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return modules if self.sinks is None else modules | {"sinks": Place(self, "sinks")}

    def logical_axes(self) -> Mapping[str, tuple[str | None, ...]]:
        own = {"q_proj": (HEADS, EMBED), "k_proj": (KV_HEADS, EMBED), "v_proj": (KV_HEADS, EMBED)}
        return own | {"o_proj": (EMBED, HEADS)} | ({} if self.sinks is None else {"sinks": (HEADS,)})

    def split_names(self, parts: int) -> Collection[str]:
        counts = {HEADS: self.config.num_heads, KV_HEADS: self.config.num_kv_heads}
        return [name for name, count in counts.items() if count % parts == 0]

    def __call__(
        self, x: Float[Array, "B S H"] | Projected, inputs: AttentionInputs, cached: SlotCache | None
    ) -> tuple[Float[Array, "B S H"] | PartialSums, SlotCache, None]:
        """Attend and return the output with this layer's keys and values, (B, kv_heads, slots, D) each, and None: it
        selects nothing. Where ``_fused`` kernels run, the output may be in parts.

        cached: those of earlier calls; None keeps this call's tokens alone. Where they are e4m3 codes, tokens attend to
        what the codes say, to their own too, so that chunks of a prompt make no difference; without a cache nothing is
        quantized.
        """
        return (*partitioned(Attention._forward, self, (WHOLE, self.cache_splits()), x, inputs, cached), None)

    def cache_splits(self) -> Any:
        """A tree like the layer's cache, with the axis of each array that is split over devices."""
        is_split = self.partition is not None and "k_proj" in self.splits(self.partition.parts)
        split: Any = 1 if is_split else WHOLE
        return SlotCache((split, split))

    def _forward(
        self, x: Float[Array, "B S H"] | Projected, inputs: AttentionInputs, cached: SlotCache | None
    ) -> tuple[Float[Array, "B S H"] | PartialSums, SlotCache]:
        scales = None
        if cached is not None and self.k_scale is not None and self.v_scale is not None:
            scales = self.k_scale[...], self.v_scale[...]
        found, gate = None if cached is None else self._in_one_launch(x, inputs, cached, scales), None
        if found is None:
            q, k, v, gate = self._heads(x, inputs)
            if scales is not None:
                k, v = (quantized(part, scale) for part, scale in zip((k, v), scales, strict=True))
            places = inputs.starts, inputs.lengths, inputs.first_slots
            kept = extended(cached, inputs.apart((k, v)), *places, inputs.page_table)
            k, v = kept.arrays
        else:
            q, k, v = found
            kept = SlotCache((k, v))
        sinks = None if self.sinks is None else self.sinks[...]
        kind: Any = dict(window=self.window, chunk=self.chunk, sinks=sinks, scales=scales)
        if cached is not None and gate is None and self.num_sms() is not None:
            options: Any = dict(scale=self.scale, implementation=self.implementation, **kind)
            projected = attended_and_projected(q, k, v, inputs, self.o_proj, **options)
            if projected is not None:
                return projected, kept
        y = attend(
            q, k, v, inputs, scale=self.scale, implementation=self.implementation, partition=self.partition, **kind
        )
        y = y.reshape(*x.shape[:2], -1)
        y = y if gate is None else (y.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(y.dtype)
        if self.num_sms() is None or 0 in y.shape:
            return self.o_proj(y), kept
        alone = _fused.product_by_kernel((self.o_proj,), y, self.num_sms())
        return partial_sums(self.o_proj, y, splits_quantized=True) if alone is None else alone, kept

    def explain(self, batch: int, num_tokens: int, num_slots: int, dtype: DTypeLike) -> str:
        """Which kernel attends in a call with a cache, or XLA, and why; in words. Each row is one sequence, and counts
        its positions where a window slides."""
        if self.chunk is not None:
            return "XLA; no kernel attends in chunks"
        config, kv_heads = self.config, self.config.num_kv_heads
        q = (batch, num_tokens, kv_heads, config.num_heads // kv_heads, config.head_dim)
        k = (batch, kv_heads, num_slots, config.head_dim)
        q = jax.ShapeDtypeStruct(q, dtype)
        k = jax.ShapeDtypeStruct(k, dtype if self.k_scale is None else jnp.float8_e4m3fn)
        kind: Any = dict(scale=self.scale, window=self.window, value_width=None, has_sinks=config.has_sinks)
        kind |= dict(has_sequences=False)
        return in_words(*choose(self.implementation, q, k, k, **kind))

    def num_sms(self) -> int | None:
        """Of the GPU that runs ``_fused`` kernels for this layer, None where none does."""
        return None if self.partition is not None else _fused.num_sms(self.implementation)

    def added_and_projected(
        self, norm: RMSNorm | LayerNorm, x: Float[Array, "B S H"], addend: Addend
    ) -> tuple[Array, Projected] | None:
        """(x + addend, what the attention of its norm begins with) where a kernel makes both, else None."""
        return projected_with_norm(norm, x, addend, (self.q_proj, self.k_proj, self.v_proj), self.num_sms())

    def _in_one_launch(
        self,
        x: Float[Array, "B S H"] | Projected,
        inputs: AttentionInputs,
        cached: SlotCache,
        scales: tuple[Array, Array] | None,
    ) -> tuple[Array, Array, Array] | None:
        """Rotated q as of ``_heads``, and the cache with the keys and values of these tokens; None where no kernel does
        that."""
        config, sms = self.config, self.num_sms()
        is_plain = self.is_rotated and config.clip_qkv is None and not config.is_rope_interleaved
        is_plain &= not config.has_output_gate and not isinstance(self.q_norm, ZeroCenteredRMSNorm)
        if sms is None or not is_plain or config.qk_norm not in (None, "head") or 0 in x.shape:
            return None
        found = _fused.rotated_and_stored(
            self._projected(x),
            (cached.arrays[0], cached.arrays[1]),
            inputs.cos,
            inputs.sin,
            (inputs.starts, inputs.lengths, inputs.first_slots),
            tuple(norm for norm in (self.q_norm, self.k_norm) if norm is not None),
            dtype=x.dtype,
            scales=scales,
            page_table=inputs.page_table,
            sms=sms,
        )
        if found is None:
            return None
        q, k, v = found
        return q.reshape(*q.shape[:2], config.num_kv_heads, -1, config.head_dim), k, v

    def _projected(self, x: Float[Array, "B S H"] | Projected) -> tuple[PartialSums, ...]:
        """Queries, keys and values of all heads; side by side in one array where one product can make them."""
        if isinstance(x, Projected):
            return x.products
        modules = (self.q_proj, self.k_proj, self.v_proj)
        if (joined := side_by_side(modules, x, x.dtype)) is not None:
            return (joined,)
        if (joined := _fused.product_by_kernel(modules, x, self.num_sms())) is not None:
            return (joined,)
        biases = tuple(biases_of(modules))
        is_plain = all(not isinstance(m.weight, QuantizedParam) and m.lora is None for m in modules)
        if not is_plain or len(biases) not in (0, len(modules)):
            return tuple(partial_sums(module, x) for module in modules)
        if x.size // x.shape[-1] >= MANY_ROWS:
            # cuBLAS takes one weight. XLA would merge products of the same rows, copy their weights together for it in
            # each call, and slice what comes out.
            others = jax.lax.optimization_barrier((x, x))
            return tuple(partial_sums(module, rows) for module, rows in zip(modules, (x, *others), strict=True))
        # XLA's own kernels for few rows read the three weights where they lie.
        merged = jnp.concatenate([module.weight[...] for module in modules])
        parts = split_product(x.reshape(-1, x.shape[-1]), merged, is_rounded=not biases)
        return (PartialSums(parts, x.shape[:-1], biases),)

    def _heads(
        self, x: Float[Array, "B S H"] | Projected, inputs: AttentionInputs
    ) -> tuple[Array, Array, Array, Array | None]:
        """Rotated q (B, S, kv_heads, group, D), rotated k and v as the cache keeps them, (B, kv_heads, S, D), and the
        logits of the output's gate (B, S, heads * D) or None."""
        config, gate = self.config, None
        modules = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = outputs_of(modules, x, joined_product(modules, x, self.partition))
        if config.has_output_gate:  # of each head its query, then its gate
            q, gate = jnp.split(q.reshape(*x.shape[:2], -1, 2 * config.head_dim), 2, axis=-1)
            q, gate = q.reshape(*x.shape[:2], -1), gate.reshape(*x.shape[:2], -1)
        if config.qk_norm == "projection":
            q, k = self._normed(q, k)
        if config.clip_qkv is not None:
            q, k, v = (jnp.clip(part, -config.clip_qkv, config.clip_qkv) for part in (q, k, v))
        q, k, v = (part.reshape(*x.shape[:2], -1, config.head_dim) for part in (q, k, v))
        if config.qk_norm == "head":
            q, k = self._normed(q, k)
        if self.is_rotated:
            q, k = (rotate(a, inputs.cos, inputs.sin, is_interleaved=config.is_rope_interleaved) for a in (q, k))
        elif config.temperature is not None:
            q = (q.astype(jnp.float32) * _temperatures(inputs.query_positions, *config.temperature)).astype(q.dtype)
        if config.qk_norm == "rotated_head":
            q, k = self._normed(q, k)
        elif config.qk_norm == "rotated_unit" and self.is_rotated:
            q, k = (scaled_to_unit(a, config.rms_norm_eps).astype(a.dtype) for a in (q, k))
        q = q.reshape(*x.shape[:2], config.num_kv_heads, -1, config.head_dim)
        return q, k.swapaxes(1, 2), v.swapaxes(1, 2), gate

    def _normed(
        self, q: Float[Array, "..."], k: Float[Array, "..."]
    ) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        assert self.q_norm is not None and self.k_norm is not None
        return self.q_norm(q), self.k_norm(k)


def _temperatures(positions: Int[Array, "B S"], floor: float, scale: float) -> Float[Array, "B S 1 1"]:
    """Of ``DecoderConfig.temperature``, f32."""
    steps = jnp.floor((positions.astype(jnp.float32) + 1) / floor)
    return (1 + scale * jnp.log1p(steps))[:, :, None, None]


def attend(
    q: Float[Array, "B S N G D"],
    k: Float[Array, "_ N L D"],
    v: Float[Array, "_ N L V"] | None,
    inputs: AttentionInputs,
    *,
    scale: float,
    value_width: int | None = None,
    window: int | None = None,
    chunk: int | None = None,
    sinks: Array | None = None,
    selected: Int[Array, "B S K"] | None = None,
    scales: tuple[Array, Array] | None = None,
    implementation: AttentionImplementation = "xla",
    partition: Partition | None = None,
) -> Float[Array, "B S N G V"]:
    """Softmax attention of N key-value heads, each with G query heads.

    v: None where values are the first ``value_width`` elements of the keys, as those of MLA's latents are.

    With ``inputs.page_table`` k and v are pages, (P, N, 64, D) and (P, N, 64, V), but latents are rows.

    implementation: as for ``load_pretrained``. Kernels run where they take the call (``_choice.choose``) and a window
    reaches equally far in slots. All else is done as with "xla", and so is what ``jax.grad`` differentiates.

    sinks: (N * G,), a logit per query head that takes its part of the softmax and gives nothing. selected: slots that
    each query sees at most, None for all. scales: () f32 each, of keys and of values that are e4m3 codes; None where
    they are the numbers themselves. partition: of the module that calls, whose devices share the heads where
    these divide.
    """
    is_by_slots = window is None or inputs.key_positions is None or inputs.is_counted
    is_by_slots = is_by_slots and chunk is None and selected is None

    kind: Any = dict(scale=scale, window=window, value_width=value_width, has_sinks=sinks is not None)
    kind |= dict(has_sequences=inputs.segment_starts is not None)
    name, in_pages = None, {}
    if inputs.page_table is not None and v is not None:
        # Rows of several sequences are copied anyway: a value that is not finite must not reach the others.
        takes_pages = is_by_slots and inputs.segment_starts is None
        rows = [_rows_of_pages(pool, inputs.page_table) for pool in (k, v)]
        name = choose(implementation, q, *rows, num_pages=k.shape[0], **kind)[0] if takes_pages else None
        if name is None and not inputs.is_pinned:
            k, v = by_rows(SlotCache((k, v)), inputs.starts, inputs.lengths, inputs.page_table)
        else:
            in_pages = dict(page_table=inputs.page_table)

    def by_xla(q, k, v, inputs, sinks, scales):
        if inputs.is_pinned:
            kind: Any = dict(window=window, chunk=chunk, sinks=sinks, scales=scales, value_width=value_width)
            return attend_in_steps(q, k, v, inputs, scale=scale, **kind)
        if in_pages:
            k, v = by_rows(SlotCache((k, v)), inputs.starts, inputs.lengths, inputs.page_table)
        values = k[..., :value_width] if v is None else v
        kind = dict(window=window, chunk=chunk, selected=selected, scales=scales)
        return attend_xla(q, k, values, inputs, scale=scale, sinks=sinks, **kind)

    damaged = None
    if inputs.segment_starts is not None and not in_pages:
        damaged = _sees_damage(k, v, inputs.segment_starts, inputs)
        k, v = _finite(k), None if v is None else _finite(v)
    if name is None and is_by_slots and not in_pages:
        name = choose(implementation, q, k, v, **kind)[0]

    def by_kernel(q, k, v, inputs, sinks, scales):
        assert name is not None
        places: dict[str, Array | None] = dict(starts=inputs.starts, lengths=inputs.lengths)
        places |= dict(first_slots=inputs.first_slots, **in_pages)
        places |= dict(first_keys=inputs.segment_starts, shared=inputs.shared)
        return attend_by(name, scale, window, partition, q, k, v, places, sinks, scales, value_width)

    arguments: Any = q, k, v, inputs, sinks, scales
    y: Any = by_xla(*arguments) if name is None else with_gradient_of(by_kernel, by_xla, *arguments)
    return y if damaged is None else jnp.where(damaged[:, :, None, None, None], jnp.nan, y)


def attended_and_projected(
    q: Float[Array, "B S N G D"],
    k: Float[Array, "_ N L D"],
    v: Float[Array, "_ N L V"],
    inputs: AttentionInputs,
    module: Linear,
    *,
    scale: float,
    window: int | None,
    chunk: int | None,
    sinks: Array | None,
    scales: tuple[Array, Array] | None,
    implementation: AttentionImplementation,
) -> PartialSums | None:
    """``module`` of what ``attend`` gives, its rows quantized in its last launch; None where no kernel does that.

    Other arguments are those of ``attend``.
    """
    matrix, num_rows = module.weight.get_value(), q.shape[0]
    is_step = q.shape[1] == 1 and 0 not in q.shape and chunk is None and inputs.segment_starts is None
    if not is_step or not isinstance(matrix, QuantizedMatrix) or module.lora is not None:
        return None
    table = inputs.page_table
    kv = (k, v) if table is None else tuple(_rows_of_pages(pool, table) for pool in (k, v))
    by = module.implementation
    parts = parts_of_product(matrix, num_rows, q.dtype, by)
    rows = quantized_rows([matrix], num_rows, q.dtype, by, parts)
    kind: Any = dict(scale=scale, window=window, has_sinks=sinks is not None, value_width=None, has_sequences=False)
    kind |= {} if table is None else dict(num_pages=k.shape[0])
    is_by_slots = window is None or inputs.key_positions is None or inputs.is_counted
    name = choose(implementation, q, *kv, **kind)[0] if rows is not None and is_by_slots else None
    if name is None or rows is None or not quantizes(name, rows, q, *kv):
        return None

    def by_kernel(q, k, v, inputs, sinks, scales, matrix, bias):
        places = dict(starts=inputs.starts, lengths=inputs.lengths, first_slots=inputs.first_slots)
        places |= {} if table is None else dict(page_table=inputs.page_table)
        heads = q.reshape(*q.shape[:2], -1, q.shape[-1])
        codes, factors = attend_and_quantize(name, scale, window, rows, heads, k, v, places, sinks, scales)
        biases = None if bias is None else [bias]
        return products_of_rows(codes, factors, num_rows, [matrix], biases, q.dtype, by, parts)[0]

    biases = tuple(biases_of([module]))
    left, own = (biases, None) if parts > 1 else ((), *(biases or [None]))
    arguments: Any = q, k, v, inputs, sinks, scales, matrix, own
    shape = jax.eval_shape(by_kernel, *arguments)

    def by_xla(q, k, v, inputs, sinks, scales, matrix, bias):
        if table is not None:
            k, v = by_rows(SlotCache((k, v)), inputs.starts, inputs.lengths, inputs.page_table)
        y = attend_xla(q, k, v, inputs, scale=scale, window=window, sinks=sinks, scales=scales)
        by_reference: Any = dict(out_dtype=shape.dtype, implementation=("reference",))
        y = padded_product(y.reshape(num_rows, -1), matrix, bias, **by_reference)
        return jnp.pad(y, ((0, shape.shape[0] - y.shape[0]), (0, 0)))

    y: Any = with_gradient_of(by_kernel, by_xla, *arguments)
    return PartialSums(y.reshape(parts, -1, y.shape[-1]), q.shape[:2], left)


def _finite(x: Array) -> Array:
    """Zeros in place of NaN and infinity: a weight of 0 times either is NaN in every row of a product."""
    return jnp.where(jnp.isfinite(x.astype(jnp.float32)), x, jnp.zeros((), x.dtype))


def _sees_damage(k: Array, v: Array | None, starts: Int[Array, "B S"], inputs: AttentionInputs) -> Bool[Array, "B S"]:
    """Queries of whose sequence a key or value up to their own is not finite, or one that their row shares."""
    is_bad = jnp.zeros((k.shape[0], k.shape[2]), bool)
    for x in (k, v):
        if x is not None:
            is_bad |= ~jnp.isfinite(x.astype(jnp.float32)).all(axis=(1, 3))
    counts = jnp.pad(jnp.cumsum(is_bad, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
    ends = inputs.first_slots[:, None] + jnp.arange(starts.shape[1], dtype=jnp.int32) + 1

    def before(slots):
        return jnp.take_along_axis(counts, jnp.clip(slots, 0, is_bad.shape[1]), axis=1)

    found = before(ends) - before(starts)
    if inputs.shared is not None:
        found += before(inputs.shared[:, None])
    return found > 0


def _rows_of_pages(pool: Array, page_table: Array) -> jax.ShapeDtypeStruct:
    """Shape and dtype of the rows that ``by_rows`` makes."""
    slots = page_table.shape[1] * pool.shape[2]
    return jax.ShapeDtypeStruct((page_table.shape[0], pool.shape[1], slots, pool.shape[3]), pool.dtype)


def attend_xla(
    q: Float[Array, "B S N G D"],
    k: Float[Array, "B N L D"],
    v: Float[Array, "B N L V"],
    inputs: AttentionInputs,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    sinks: Array | None = None,
    selected: Int[Array, "B S K"] | None = None,
    scales: tuple[Array, Array] | None = None,
) -> Float[Array, "B S N G V"]:
    """``attend`` on any device, at most QUERY_BLOCK queries at a time."""
    of_scores: Any = scale
    if scales is not None:
        k, v, of_scores = widen(k, q.dtype), widen(v, q.dtype), scale * scales[0]
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(1, *q.shape[2:4], 1, 1)

    def some(q, columns, positions, selected):
        visible = inputs.visible(columns[0], positions, k.shape[2], window, chunk)
        if selected is not None:
            chosen = jnp.zeros(visible.shape, jnp.bool)
            visible &= jnp.put_along_axis(chosen, selected, True, axis=-1, inplace=False)
        return _attend(q, k, v, visible, of_scores, sinks)

    columns = jnp.arange(q.shape[1], dtype=jnp.int32)[None]
    y = in_query_blocks(some, q, columns, inputs.query_positions, selected)
    return y if scales is None else times(y, scales[1])


def attend_in_steps(
    q: Float[Array, "B 1 N G D"],
    k: Float[Array, "_ N L D"],
    v: Float[Array, "_ N L V"] | None,
    inputs: AttentionInputs,
    *,
    scale: float,
    value_width: int | None,
    window: int | None,
    chunk: int | None,
    sinks: Array | None,
    scales: tuple[Array, Array] | None,
) -> Float[Array, "B 1 N G V"]:
    """``attend`` of one query a row on any device, PAGE_SLOTS slots at a time up to the longest row's last, so that a
    row's bits are the same in a cache of any length. Scores, weights and sums are in float32. k and v are pages where
    ``inputs`` have a table, else rows."""
    table, sinks_of = inputs.page_table, None if sinks is None else sinks.astype(jnp.float32).reshape(q.shape[2:4])
    num_slots = k.shape[2] if table is None else table.shape[1] * PAGE_SLOTS
    # To whole steps, and two at least: what one alone multiplies XLA would take out of the loop, and round otherwise.
    tail = max(-num_slots % PAGE_SLOTS, 2 * PAGE_SLOTS - num_slots)
    visible = inputs.visible(jnp.zeros(1, jnp.int32), inputs.query_positions, num_slots, window, chunk)[:, 0]
    visible = jnp.pad(visible, ((0, 0), (0, tail)))
    if table is None:
        k, v = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, tail), (0, 0))), (k, v))
    else:
        table = jnp.pad(table, ((0, 0), (0, tail // PAGE_SLOTS)))
    of_scores: Any = scale if scales is None else scale * scales[0]
    highest: Any = dict(precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    queries = q[:, 0].astype(jnp.float32)

    def of_step(x: Array, step: Array) -> Array:
        if table is not None:
            return jnp.take(x, table[:, step], axis=0, mode="clip")
        return jax.lax.dynamic_slice_in_dim(x, step * PAGE_SLOTS, PAGE_SLOTS, axis=2)

    def one(step: Array, held: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, sums = held
        seen = jax.lax.dynamic_slice_in_dim(visible, step * PAGE_SLOTS, PAGE_SLOTS, axis=1)
        keys, values = of_step(k, step), None if v is None else of_step(v, step)
        seen, keys, values = inputs.apart((seen[:, None, None], keys, values))
        values = keys[..., :value_width] if values is None else values
        values = jnp.where(seen[:, 0, 0, None, :, None], values.astype(jnp.float32), 0)  # pages hold what others left
        scores = jnp.einsum("bngd,bnld->bngl", queries, keys.astype(jnp.float32), **highest) * of_scores
        new = jnp.maximum(top, jnp.where(seen, scores, top[..., None]).max(axis=-1))
        weights = jnp.where(seen, jnp.exp(scores - new[..., None]), 0)
        keep = jnp.exp(top - new)
        sums = sums * keep[..., None] + jnp.einsum("bngl,bnlv->bngv", weights, values, **highest)
        return new, total * keep + weights.sum(axis=-1), sums

    width = value_width if v is None else v.shape[-1]
    heads = (q.shape[0], *q.shape[2:4])
    top = jnp.full(heads, jnp.finfo(jnp.float32).min) if sinks_of is None else jnp.broadcast_to(sinks_of, heads)
    held = top, jnp.full(heads, 0.0 if sinks_of is None else 1.0), jnp.zeros((*heads, width))
    steps = -(-jnp.max(inputs.lengths, initial=0) // PAGE_SLOTS)
    _, total, sums = jax.lax.fori_loop(0, steps, one, held)
    y = (sums / jnp.where(total == 0, 1, total)[..., None]).astype(q.dtype)[:, None]
    return y if scales is None else times(y, scales[1])


def in_query_blocks(function: Callable[..., Array], *arrays: Array | None) -> Array:
    """``function(*arrays)``, (B, S, ...), computed for at most QUERY_BLOCK of S at a time. arrays: (B or 1, S, ...)."""
    count = jax.tree.leaves(arrays)[0].shape[1]
    if count <= QUERY_BLOCK:
        return function(*arrays)
    num_blocks = -(-count // QUERY_BLOCK)

    def blocks(a: Array) -> Array:
        padded = jnp.pad(a, [(0, num_blocks * QUERY_BLOCK - count if i == 1 else 0) for i in range(a.ndim)])
        return jnp.moveaxis(padded.reshape(a.shape[0], num_blocks, QUERY_BLOCK, *a.shape[2:]), 1, 0)

    y = jax.lax.map(lambda block: function(*block), jax.tree.map(blocks, arrays))
    y = jnp.moveaxis(y, 0, 1)
    return y.reshape(y.shape[0], -1, *y.shape[3:])[:, :count]


def _attend(
    q: Array, k: Array, v: Array, visible: Bool[Array, "B S L"], scale: float | Array, sinks: Array | None
) -> Array:
    """Scores and sums in float32. A query that sees nothing gets a finite, meaningless row."""
    precision = precision_of(q.dtype)
    scores = jnp.einsum("bsngd,bnld->bngsl", q, k, precision=precision, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
    if sinks is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        top = jnp.maximum(scores.max(axis=-1, keepdims=True), sinks)
        exponentials = jnp.exp(scores - top)
        weights = exponentials / (exponentials.sum(axis=-1, keepdims=True) + jnp.exp(sinks - top))
    # Summed in float32 and rounded once; XLA's CPU client cannot return these products of 16-bit values as float32.
    return jnp.einsum("bngsl,bnld->bsngd", weights.astype(v.dtype), v, precision=precision)
