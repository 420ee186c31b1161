"""``CausalLM``: the decoder that the families of this package share. A family is a subclass in a file of its own."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_jax._arguments import boolean, check_not_traced, check_rngs, integer
from moe_jax._typing import Array, ArrayArg, Bool, DTypeLike, Float, Int
from moe_jax._versions import Versioned, one_version
from moe_jax.experts import MoEStats
from moe_jax.loading import LoadReport
from moe_jax.models._cache import KVCache, are_pages_missing, key_positions, slot_order, slots_of, starts_of_runs
from moe_jax.models._compiled import merge_model, padded_prompt, split_model
from moe_jax.models._config import DecoderConfig
from moe_jax.models._fused import added, added_and_normed, added_normed_and_routed, seen_by_router
from moe_jax.models._inputs import check_cache, check_ids, check_page_table, check_positions
from moe_jax.models._layer_cache import PAGE_SLOTS
from moe_jax.models._layers import NORMS, Addend, Embedding, GatedMLP, Head, LayerNorm, Linear, PartialSums, RMSNorm
from moe_jax.models._pages import check_mesh
from moe_jax.models._partition import WHOLE, on_mesh, whole
from moe_jax.models._prefill import MAX_NUM_BATCHED_TOKENS
from moe_jax.models._reader import ranges, reload_weights
from moe_jax.models._tiles import check_schemes, in_tiles, through_layers, without_gradients
from moe_jax.models.attention._attention import Attention, AttentionInputs
from moe_jax.models.attention._choice import AttentionImplementation, check_implementation, segments_refusal
from moe_jax.models.attention._gated_delta_net import GatedDeltaNet
from moe_jax.models.attention._mla import LatentAttention
from moe_jax.models.attention._rope import rotary_angles
from moe_jax.models.families._moe_family import MoEFamily
from moe_jax.nn import FusedMoE, MoEBlock
from moe_jax.nn._lora import with_token_choices
from moe_jax.nn._moe_block import without_padding_in_gradients
from moe_jax.parallel import ParallelConfig
from moe_jax.parallel._explicit import gathered, in_auto_axes, lies_on_explicit_axes
from moe_jax.quantization import Scheme
from pallas_kernels.add_and_norm import most_routed
from pallas_kernels.combine import RoutedRows


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)); the feed-forward part is dense or has experts. See
    ``DecoderConfig`` for what ``is_post_norm`` and ``residual_multiplier`` change."""

    def __init__(
        self,
        config: DecoderConfig,
        index: int,
        mlp: GatedMLP | MoEBlock,
        *,
        attention: AttentionImplementation,
        dtype: DTypeLike,
        rngs: nnx.Rngs | None,
    ):
        norm: dict[str, Any] = dict(eps=config.rms_norm_eps, dtype=dtype, rngs=rngs)
        kind = _attention_kind(config, index)
        self.is_post_norm, self.residual_multiplier = config.is_post_norm, config.residual_multiplier
        self.attention_norm: RMSNorm | LayerNorm = NORMS[config.norm](config.hidden_size, **norm)
        self.self_attn: Attention | LatentAttention | GatedDeltaNet = kind(
            config, index, implementation=attention, dtype=dtype, rngs=rngs
        )
        self.mlp_norm: RMSNorm | LayerNorm = NORMS[config.norm](config.hidden_size, **norm)
        self.mlp = mlp

    def __call__(
        self,
        x: Array,
        addend: Addend,
        inputs: AttentionInputs,
        cached: Any,
        token_mask: Array | None,
    ) -> tuple[Array, Addend, Any, Array | None, MoEStats | None]:
        """(x, addend, the layer's new cache, ``AttentionInputs.selected`` of the next layer, where tokens went; None
        without experts). The output is x + addend, as the input is, whose addend may be None: who comes next adds and
        normalises in one step. cached: the old cache, or None."""
        x, normal = self._into_attention(x, addend)
        y, kept, selected = self.self_attn(normal, inputs, cached)
        x, normal, logits = self._into_mlp(x, self._given(self.attention_norm, y), token_mask)
        if (alone := self._experts_alone(normal, logits, token_mask)) is not None:
            y, stats = alone
        elif isinstance(self.mlp, MoEBlock):
            seen = None if logits is None else seen_by_router(self.mlp.router, logits, token_mask)
            of_router = {} if seen is None else dict(router_logits=seen)
            y, stats = self.mlp(normal, token_mask=token_mask, **of_router, return_stats=True)
        else:
            y, stats = self.mlp(normal), None
        return x, self._given(self.mlp_norm, y), kept, selected, stats

    def _into_attention(self, x: Array, addend: Addend) -> tuple[Array, Any]:
        """(the sum, what attention takes of it)."""
        found = None
        if isinstance(self.self_attn, Attention | LatentAttention) and not self.is_post_norm:
            found = self.self_attn.added_and_projected(self.attention_norm, x, addend)
        return self._next(x, addend, self.attention_norm) if found is None else found

    def _into_mlp(self, x: Array, addend: Addend, token_mask: Array | None) -> tuple[Array, Array, Array | None]:
        """(the sum, what the feed-forward layer takes of it, router logits where the same launch makes them)."""
        found = None
        if type(self.mlp) is MoEBlock and not self.is_post_norm:
            sms = self.self_attn.num_sms()
            found = added_normed_and_routed(self.mlp_norm, x, addend, self.mlp.router, token_mask, sms)
        return (*self._next(x, addend, self.mlp_norm), None) if found is None else found

    def _experts_alone(
        self, normal: Array, logits: Array | None, token_mask: Array | None
    ) -> tuple[RoutedRows | Array, MoEStats] | None:
        """What the experts add, where a backend runs the whole layer and nothing but experts follows the router.

        logits: of a norm's launch that multiplied with the router. Rows of few tokens are left for the next norm to add
        up. Masked tokens the kernels pass over: zeroed for gradients and statistics alone.
        """
        block, parts = self.mlp, None
        if type(block) is not MoEBlock or type(block.experts) is not FusedMoE or block.shared_experts is not None:
            return None
        hidden = normal.shape[-1]
        is_few = normal.size <= most_routed(block.experts.config.top_k, hidden) * hidden
        is_combined = not is_few or self.is_post_norm or self.residual_multiplier != 1
        router: Any = block.router
        of_router: Any = logits
        if of_router is None:
            is_plain = type(router) is Linear and router.lora is None and normal.size > 0
            is_asked_for = token_mask is not None or not is_combined
            if not is_asked_for or not is_plain or self.self_attn.num_sms() is None:
                return None
            of_router = jax.ShapeDtypeStruct((*normal.shape[:-1], router.weight.shape[0]), jnp.float32)
            asked = functools.partial(block.experts.routed_rows, token_mask=token_mask, is_combined=is_combined)
            if jax.eval_shape(asked, normal, of_router) is None:  # before the router multiplies for nobody
                return None
            tokens = normal if token_mask is None else without_padding_in_gradients(normal, token_mask)
            of_router, parts = block.logits_and_parts(tokens)
        found = block.experts.routed_rows(normal, of_router, token_mask, router_parts=parts, is_combined=is_combined)
        if found is None:
            return None
        y, stats = found
        seen = seen_by_router(router, of_router, token_mask)
        if token_mask is not None and not isinstance(y, RoutedRows):
            y = without_padding_in_gradients(y, token_mask)
        return y, dataclasses.replace(stats, router_logits=seen.reshape(-1, seen.shape[-1]))

    def _next(self, x: Array, addend: Addend, norm: RMSNorm | LayerNorm) -> tuple[Array, Array]:
        """(the sum, what attention or feed-forward layer takes of it)."""
        if self.is_post_norm:
            x = added(x, addend)
            return x, x
        return added_and_normed(norm, x, addend, self.self_attn.num_sms())

    def _given(self, norm: RMSNorm | LayerNorm, y: Array | PartialSums | RoutedRows) -> Any:
        """What an attention or feed-forward layer adds. Rows of experts are left where nothing follows alone."""
        if isinstance(y, RoutedRows):
            return y
        if isinstance(y, PartialSums):
            if not self.is_post_norm and self.residual_multiplier == 1:
                return y
            y = y.whole(norm.weight.dtype)
        y = norm(y) if self.is_post_norm else y
        return y if self.residual_multiplier == 1 else y * self.residual_multiplier


def _attention_kind(config: DecoderConfig, index: int) -> type[Attention | LatentAttention | GatedDeltaNet]:
    if index in config.linear_layers:
        return GatedDeltaNet
    return Attention if config.mla is None else LatentAttention


class CausalLM(MoEFamily, Versioned):
    """A decoder-only language model with Mixture-of-Experts layers.

    Pass the model as an *argument* of a jitted function: a closure over it freezes its weights into the program.

    Args:
        config: static description, from ``read_config`` of the family.
        schemes: scheme of the experts of each layer in ``config.moe_layers``; None for unquantized experts.
        max_seq_len: longest sequence; None takes what the config's rotary embedding was made for.
        max_num_batched_tokens: as for ``load_pretrained``.
        implementation: as for ``FusedMoE``.
        attention: as for ``load_pretrained``.
        dtype: dtype of dense weights, of computation and of the cache.
        rngs: random state to initialise from; None builds an abstract model to be loaded.

    A family sets the words of ``MoEFamily`` and ``read_config``. norm_modules: names of a layer's norms, that of
    attention first. attention_names: those of its parts that differ from ours. dense_module: a dense feed-forward
    layer.
    """

    norm_modules: ClassVar[tuple[str, str]] = ("input_layernorm", "post_attention_layernorm")
    attention_names: ClassVar[Mapping[str, str]] = {}
    dense_module: ClassVar[str] = "mlp"

    def __init__(
        self,
        config: DecoderConfig,
        *,
        schemes: Mapping[int, Scheme | None] | None = None,
        max_seq_len: int | None = None,
        max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS,
        implementation: Any = None,
        attention: AttentionImplementation = "auto",
        dtype: DTypeLike = jnp.bfloat16,
        rngs: nnx.Rngs | None = None,
    ):
        check_rngs(rngs)
        check_implementation(attention, config, dtype)
        self.config = config
        longest = config.rope.max_seq_len
        self.max_seq_len: int = longest
        if max_seq_len is not None:
            why = (
                ", the length this model's rotary embedding was made for; a longer one needs a rope scaling in "
                "config.json"
            )
            self.max_seq_len = integer("max_seq_len", max_seq_len, minimum=1, maximum=longest, why=why)
        self.max_num_batched_tokens: int = integer("max_num_batched_tokens", max_num_batched_tokens, minimum=1)
        self.dtype: np.dtype[Any] = jnp.dtype(dtype)
        self.eos_token_id = config.eos_token_id  # generation_config.json has precedence in load_pretrained
        self.quantization_config = "null"  # JSON of the checkpoint's; reload_weights reads arrays by it
        options: dict[str, Any] = dict(dtype=self.dtype, rngs=rngs)
        self.embed_tokens: Embedding = Embedding(config.vocab_size, config.hidden_size, **options)
        layers = []
        for index in range(config.num_layers):
            if index in config.moe_layers:
                scheme = None if schemes is None else schemes[index]
                mlp = self.make_moe_block(config, index, scheme=scheme, implementation=implementation, **options)
            else:
                mlp = GatedMLP(config.hidden_size, config.intermediate_size, **options)
            layers.append(DecoderLayer(config, index, mlp, attention=attention, **options))
        self.layers: Any = nnx.List(layers)  # of DecoderLayer
        if config.pinned_tokens is not None:
            check_schemes(self)
        self.norm: RMSNorm | LayerNorm = NORMS[config.norm](config.hidden_size, eps=config.rms_norm_eps, **options)
        self.lm_head: Head | None = (
            None
            if config.tie_word_embeddings
            else Head(config.hidden_size, config.vocab_size, use_bias=config.has_head_bias, **options)
        )

    def dense_modules(self) -> dict[str, Any]:
        """Checkpoint name -> module for everything but the experts; parameters are named ``<name>.<attribute>``."""
        root = self.model_module
        modules: dict[str, Any] = {f"{root}.embed_tokens": self.embed_tokens, f"{root}.norm": self.norm}
        if self.lm_head is not None:
            modules[self.head_module] = self.lm_head
        for index, layer in enumerate(self.layers):
            prefix = f"{self.layers_module()}.{index}"
            parts = dict(zip(self.norm_modules, (layer.attention_norm, layer.mlp_norm), strict=True))
            for name, module in layer.self_attn.dense_modules().items():
                parts[f"{layer.self_attn.module_name}.{self.attention_names.get(name, name)}"] = module
            if isinstance(layer.mlp, MoEBlock):
                modules |= self.moe_dense_modules(layer.mlp, index)
            else:
                parts |= {
                    f"{self.dense_module}.{name}": getattr(layer.mlp, name)
                    for name in ("gate_proj", "up_proj", "down_proj")
                }
            modules |= {f"{prefix}.{name}": module for name, module in parts.items()}
        return modules

    # -- forward ------------------------------------------------------------------------------------------------------

    @overload
    def __call__(
        self,
        input_ids: Int[Array | np.ndarray, "B S"],
        *,
        positions: ArrayArg | None = None,
        attention_mask: ArrayArg | None = None,
        segment_ids: ArrayArg | None = None,
        cache: None = None,
        remat: bool = False,
        return_stats: Literal[False] = False,
    ) -> Array: ...

    @overload
    def __call__(
        self,
        input_ids: Int[Array | np.ndarray, "B S"],
        *,
        positions: ArrayArg | None = None,
        attention_mask: ArrayArg | None = None,
        cache: KVCache,
        remat: bool = False,
        return_stats: Literal[False] = False,
    ) -> tuple[Array, KVCache]: ...

    @overload
    def __call__(
        self,
        input_ids: Int[Array | np.ndarray, "B S"],
        *,
        positions: ArrayArg | None = None,
        attention_mask: ArrayArg | None = None,
        segment_ids: ArrayArg | None = None,
        cache: None = None,
        remat: bool = False,
        return_stats: Literal[True],
    ) -> tuple[Array, MoEStats]: ...

    @overload
    def __call__(
        self,
        input_ids: Int[Array | np.ndarray, "B S"],
        *,
        positions: ArrayArg | None = None,
        attention_mask: ArrayArg | None = None,
        cache: KVCache,
        remat: bool = False,
        return_stats: Literal[True],
    ) -> tuple[Array, KVCache, MoEStats]: ...

    @overload
    def __call__(
        self,
        input_ids: Int[Array | np.ndarray, "B S"],
        *,
        positions: ArrayArg | None = None,
        attention_mask: ArrayArg | None = None,
        segment_ids: ArrayArg | None = None,
        cache: KVCache | None = None,
        remat: bool = False,
        return_stats: bool = False,
    ) -> Array | tuple[Array, KVCache] | tuple[Array, MoEStats] | tuple[Array, KVCache, MoEStats]: ...

    def __call__(
        self,
        input_ids: Int[Array | np.ndarray, "B S"],
        *,
        positions: ArrayArg | None = None,
        attention_mask: ArrayArg | None = None,
        segment_ids: ArrayArg | None = None,
        cache: KVCache | None = None,
        remat: bool = False,
        return_stats: bool = False,
    ) -> Array | tuple[Array, KVCache] | tuple[Array, MoEStats] | tuple[Array, KVCache, MoEStats]:
        """Logits of the next token at every position.

        Under ``jax.jit`` values are not known and cannot raise. There an id outside the vocabulary, or more tokens than
        the cache has slots for, make all logits of their row NaN, in this call and in later ones with its cache: a
        wrong answer never looks like one.

        Args:
            input_ids: (B, S) int.
            positions: (B, S) int; None counts the real tokens of each row, those in the cache included, and of each
                sequence where rows hold several.
            attention_mask: (B, S) bool or 0/1, False for padding anywhere in a row; None means that every token is
                real. It speaks of this call's tokens. A row whose mask is False throughout stays as it is.
            segment_ids: (B, S) int, for rows that hold several sequences one after another, as in training: a run of
                equal ids is a sequence, 0 is padding, which does not end a sequence of one id. Tokens attend within
                their sequence, and every sequence begins at position 0. None where a row is one sequence.
            cache: from ``init_cache`` or an earlier call. Every row goes on behind its own last token.
            remat: for gradients: compute what is inside a layer again instead of keeping it, so that between layers
                (B, S, H) is all that is kept. Values are the same.
            return_stats: also return ``MoEStats`` of all layers with experts, in the order of ``moe_blocks``.

        Returns:
            (B, S, vocab) float32; with a cache, a pair of that and the new cache. Rows of padding mean nothing. With
            ``return_stats`` the last of a tuple is ``MoEStats`` of load (layers, S) int32, topk_ids (layers, B * S,
            top_k) int32 and router_logits (layers, B * S, E) float32.

        Raises:
            ValueError: shapes do not fit, an id is outside the vocabulary, or the sequence exceeds ``max_seq_len`` or
                the cache; segment_ids with a cache. TypeError: input_ids, positions or segment_ids are not integers,
                attention_mask is neither that nor bool. NotImplementedError: segment_ids in a model with linear
                attention, or whose rotary embedding changes with the length of a row.
        """
        return_stats, remat = boolean("return_stats", return_stats), boolean("remat", remat)
        self._check_call(input_ids, attention_mask, positions, segment_ids, cache)
        self = one_version(self)
        hidden, cache_out, stats = self.hidden_states(
            input_ids,
            positions=positions,
            attention_mask=attention_mask,
            segment_ids=segment_ids,
            cache=cache,
            remat=remat,
            return_stats=True,
        )
        found = (self.logits(hidden), *(() if cache is None else (cache_out,)), *((stats,) if return_stats else ()))
        return found if len(found) > 1 else found[0]

    def hidden_states(
        self,
        input_ids: Int[Array | np.ndarray, "B S"],
        *,
        positions: ArrayArg | None = None,
        attention_mask: ArrayArg | None = None,
        segment_ids: ArrayArg | None = None,
        cache: KVCache | None = None,
        remat: bool = False,
        return_stats: bool = False,
        seq_lens: Int[Array, " B"] | None = None,
        shared: Int[Array, " B"] | Int[Array, ""] | Literal[0] | None = None,
    ) -> tuple[Any, ...]:
        """Like a call under ``jax.jit``, up to the last norm: for callers that need logits at few positions.

        seq_lens: tokens in each row once calls that follow have brought the rest of its prompt; rotary embeddings that
        change with the length are those of this length then. None for those of the cache and this call.

        shared: with segment_ids and a cache, whose rows then hold several sequences: slots at the beginning of a row
        that all its sequences go on from. A token in one of these slots sees those before it; another one sees these
        slots and its own sequence, which begins at position ``shared``. 0 where sequences share nothing.

        Returns (hidden states (B, S, H), the new cache or None), and with ``return_stats`` ``MoEStats``, None where no
        layer has experts.

        Errors about ``segment_ids`` are those of a call.
        """
        self, pinned = one_version(self), self.config.pinned_tokens
        if remat and pinned is not None:
            raise NotImplementedError(f"remat=True: a model with pinned_tokens={pinned} has no gradients")
        if segment_ids is not None:
            self._check_takes_segments(None if shared is not None else cache)
        if self.parallel is None and lies_on_explicit_axes((self, input_ids, cache)):
            options = dict(positions=positions, attention_mask=attention_mask, segment_ids=segment_ids, cache=cache)
            options |= dict(seq_lens=seq_lens, shared=shared)
            found = in_auto_axes(
                _hidden_states_by_remat if remat else _hidden_states,
                jnp.asarray(input_ids),
                dict(model=self, **options),
            )
            return found if return_stats else found[:2]
        batch, length = input_ids.shape
        ids = jnp.asarray(input_ids).astype(jnp.int32)
        mask = (
            jnp.ones((batch, length), jnp.bool)
            if attention_mask is None
            else jnp.asarray(attention_mask).astype(jnp.bool)
        )
        segments = None if segment_ids is None else jnp.asarray(segment_ids).astype(jnp.int32)
        mask = mask if segments is None else mask & (segments != 0)
        prefix = None if shared is None or isinstance(shared, int) else jnp.broadcast_to(shared, input_ids.shape[:1])
        arguments = (ids, mask, positions, segments, cache, seq_lens, prefix)
        ids, mask, positions, segments, cache, seq_lens, prefix = on_mesh(arguments, self.parallel)
        has_cache = cache is not None
        if pinned is not None and cache is None:
            cache = KVCache.zeros(self.config, batch, length, self.dtype)
        is_masked, back = attention_mask is not None or segments is not None, None
        if is_masked and length > 1:
            order, back = slot_order(mask, None if cache is None else cache.lengths, is_left_kept=pinned is None)
            self = with_token_choices(self, ids.shape, lambda choice: jnp.take_along_axis(choice, order, axis=1))
            ids, mask = (jnp.take_along_axis(a, order, axis=1) for a in (ids, mask))
            positions = None if positions is None else jnp.take_along_axis(jnp.asarray(positions), order, axis=1)
            segments = None if segments is None else jnp.take_along_axis(segments, order, axis=1)
        is_token = (ids >= 0) & (ids < self.config.vocab_size)
        is_damaged = jnp.any(mask & ~is_token, axis=1)
        first_slots, starts, lengths = slots_of(mask, cache)
        if cache is not None:
            is_whole = cache.page_table is None or segments is not None  # pages may hold more than the model takes
            num_slots = cache.num_slots if is_whole else min(cache.num_slots, self.max_seq_len)
            is_damaged |= cache.is_damaged | (lengths > num_slots) | are_pages_missing(cache, lengths)
            lengths = jnp.minimum(lengths, cache.num_slots)
        is_counted = segments is not None and positions is None and prefix is None
        segment_starts = None if segments is None else first_slots[:, None] + starts_of_runs(segments)
        if segment_starts is not None:
            slots = first_slots[:, None] + jnp.arange(length, dtype=jnp.int32)
            counted = slots - segment_starts
            if prefix is not None:
                is_shared = slots < prefix[:, None]
                counted = jnp.where(is_shared, slots, prefix[:, None] + counted)
                segment_starts = jnp.where(is_shared, 0, segment_starts)
            positions = counted if positions is None else positions
        given = None if positions is None else jnp.asarray(positions)
        keys = key_positions(given, cache, starts, lengths, first_slots)
        if positions is None:
            slots = first_slots[:, None] + jnp.arange(length, dtype=jnp.int32)
            positions = jnp.maximum(slots - starts[:, None], 0)
        positions = jnp.asarray(positions).astype(jnp.int32)
        longest = lengths - starts
        if keys is not None:
            slots = jnp.arange(keys.shape[1], dtype=jnp.int32)
            is_filled = (slots >= starts[:, None]) & (slots < lengths[:, None])
            longest = jnp.max(jnp.where(is_filled, keys, -1), axis=1) + 1
        longest = longest if seq_lens is None else jnp.maximum(longest, seq_lens)
        ids = jnp.where(mask & is_token, ids, 0)  # what stands in padding is not looked at
        if pinned is not None:
            assert cache is not None
            x, kept, stats = through_layers(self, ids, mask, cache, starts, first_slots, positions, keys, longest)
        else:
            cos, sin = rotary_angles(self.config.rope, positions, longest)
            of_sequences: dict[str, Any] = dict(segment_starts=segment_starts, shared=prefix, is_counted=is_counted)
            inputs = AttentionInputs(cos, sin, starts, lengths, first_slots, positions, keys, **of_sequences)
            if cache is not None:
                inputs = dataclasses.replace(inputs, page_table=cache.page_table)
            caches = (None,) * len(self.layers) if cache is None else cache.layers
            x, kept, stats = self.through_layers(ids, inputs, caches, mask if is_masked else None, remat=remat)
        x = jnp.where(is_damaged[:, None, None], jnp.nan, x)
        if cache is not None:
            places: dict[str, Any] = dict(starts=starts, lengths=lengths, positions=keys, is_damaged=is_damaged)
            cache = dataclasses.replace(cache, layers=kept, **places) if has_cache else None
        if back is not None:
            x = jnp.take_along_axis(x, back[:, :, None], axis=1)
        if not return_stats:
            return x, cache
        return x, cache, stats if stats is None or back is None else _in_order_of_call(stats, back)

    def through_layers(
        self,
        ids: Int[Array, "B S"],
        inputs: AttentionInputs,
        caches: tuple[Any, ...],
        token_mask: Bool[Array, "B S"] | None,
        *,
        remat: bool = False,
    ) -> tuple[Float[Array, "B S H"], tuple[Any, ...], MoEStats | None]:
        """(hidden states behind the last norm, the layers' new caches, what ``MoEStats`` of all layers says; None where
        none has experts). caches: of each layer the old one, or None."""
        x = self.embed_tokens(ids)
        x = x if self.config.embedding_multiplier == 1 else x * self.config.embedding_multiplier
        run_layer = _by_remat if remat else DecoderLayer.__call__
        addend, kept, stats = None, [], []
        for layer, cached in zip(self.layers, caches, strict=True):
            if remat and addend is not None:
                x, addend = added(x, addend), None  # one array to keep for the backward pass, not two
            x, addend, arrays, selected, where = run_layer(layer, x, addend, inputs, cached, token_mask)
            inputs = dataclasses.replace(inputs, selected=selected)
            kept.append(arrays)
            stats += [] if where is None else [where]
        _, x = added_and_normed(self.norm, x, addend, self.layers[-1].self_attn.num_sms())
        return x, tuple(kept), jax.tree.map(lambda *leaves: jnp.stack(leaves), *stats) if stats else None

    def logits(self, hidden: Float[Array, "... H"]) -> Float[Array, "... V"]:
        """Output of the head, float32; over a mesh split by the vocabulary where that divides."""
        if self.parallel is None and lies_on_explicit_axes((self, hidden)):
            return in_auto_axes(_logits, hidden, dict(model=self))
        head, pinned = self.embed_tokens if self.lm_head is None else self.lm_head, self.config.pinned_tokens
        if pinned is not None:
            head, hidden = without_gradients(head), without_gradients(hidden)

        def scaled(hidden: Array) -> Array:
            logits = head.logits(hidden)
            return logits if self.config.logits_scaling == 1 else logits / self.config.logits_scaling

        if pinned is None or hidden.size == 0:
            return scaled(hidden)
        rows = hidden.reshape(-1, hidden.shape[-1])
        return in_tiles(pinned, rows, lambda index: (rows[index],), scaled).reshape(*hidden.shape[:-1], -1)

    def next_logits(self, hidden: Float[Array, "... H"]) -> Float[Array, "... V"]:
        """``logits`` under ``jax.jit``, whole on every device, to choose tokens by."""
        return whole(self.logits(hidden), self.parallel)

    def score(self, input_ids: ArrayArg, attention_mask: ArrayArg | None = None) -> Float[Array, "B S V"]:
        """Logits (B, S, vocab) f32 of prompts, compiled once per batch size and bucket of lengths.

        Arguments and errors are those of ``generate``; a plain call inside your own ``jax.jit`` is the flexible form.
        """
        ids, mask = padded_prompt(input_ids, attention_mask, self.config.vocab_size)
        longest = int(mask.sum(axis=1).max())
        if longest > self.max_seq_len:
            raise ValueError(f"input_ids has {longest} tokens in a row, the model takes max_seq_len={self.max_seq_len}")
        shape = np.shape(input_ids)
        padding = ((0, 0), (0, ids.shape[1] - shape[1]))
        model = with_token_choices(self, shape, lambda choice: jnp.pad(choice, padding, constant_values=-1))
        return _score(*split_model(model), ids, mask)[:, : shape[1]]

    def reload_weights(self, source: Any) -> LoadReport:
        """Replace all weights by others of the same shapes: atomic, and programs compiled for the model stay in use.

        While it runs, old and new weights are both held. Experts that were quantized while loading are quantized again.

        Args:
            source: a checkpoint directory, or an iterable of (checkpoint name, NumPy or JAX array) with every tensor,
                in any order. Arrays are stored as in the checkpoint that was loaded, or all in full precision: then the
                experts are quantized by the model's own scheme.

        Returns:
            What was held on the host meanwhile.

        Raises:
            ValueError: as ``load_pretrained``, or another model's config; the old weights are then untouched.
            TypeError: inside ``jax.jit``, where only a copy would change.
        """
        check_not_traced("reload_weights", self)
        return reload_weights(self, type(self), source)

    def moe_blocks(self) -> list[MoEBlock]:
        """The blocks with experts, in the order of ``config.moe_layers``."""
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, MoEBlock)]

    def explain(self, num_tokens: Any, *, batch: Any = 1, num_slots: Any = None) -> str:
        """What would run for a call, and why: attention of each kind of layer, and the experts of each scheme.

        Args:
            num_tokens: of each row: 1 for a decode step, the length of a prompt for a prefill.
            batch: rows.
            num_slots: of each row of the cache; None for as many as ``max_seq_len``.
        """
        check_not_traced("explain", self)
        num_tokens, batch = integer("num_tokens", num_tokens, minimum=1), integer("batch", batch, minimum=1)
        num_slots = self.max_seq_len if num_slots is None else integer("num_slots", num_slots, minimum=num_tokens)
        lines = [f"attention of {num_tokens} tokens in each of {batch} rows, over {num_slots} slots"]
        if (pinned := self.config.pinned_tokens) is not None:
            lines[0] += f", in tiles of {pinned} tokens that are rows of their own"
            batch, num_tokens = pinned, 1
        attention: dict[str, list[int]] = {}
        for index, layer in enumerate(self.layers):
            text = layer.self_attn.explain(batch, num_tokens, num_slots, self.dtype)
            attention.setdefault(text, []).append(index)
        lines += [f"  layers {ranges(tuple(layers))}: {text}" for text, layers in attention.items()]
        experts = {block.experts.config.scheme: block.experts for block in reversed(self.moe_blocks())}
        return "\n".join([*lines, *(one.explain(batch * num_tokens) for one in reversed(experts.values()))])

    @property
    def parallel(self) -> ParallelConfig | None:
        """The mesh that the model was loaded onto."""
        return next((block.experts.parallel for block in self.moe_blocks()), None)

    def init_cache(
        self, batch: int, max_len: int, *, page_table: ArrayArg | None = None, num_pages: int | None = None
    ) -> KVCache:
        """An empty cache.

        Args:
            batch: rows.
            max_len: slots of each row, at most the model's ``max_seq_len``; padding occupies slots too. With a
                page_table, or ``pinned_tokens``, up to whole pages.
            page_table: (batch, ceil(max_len / 64)) int32, for a cache in pages of 64 slots: which page holds a row's
                slots 0 to 63, which the next 64 and so on, see ``KVCache``. None gives each row slots of its own.
            num_pages: that there are; None for those up to the last in the table.

        Raises:
            ValueError, TypeError: bad sizes, or a table that names no page. NotImplementedError: pages over a mesh with
                Explicit axes.
        """
        batch = integer("batch", batch, minimum=1)
        max_len = integer("max_len", max_len, minimum=1, maximum=self.max_seq_len, why=", the model's max_seq_len")
        make = functools.partial(KVCache.zeros, self.config, batch, max_len, self.dtype)
        if page_table is None:
            if num_pages is not None:
                raise ValueError(f"num_pages={num_pages} without a page_table; give both, or neither")
            return self.laid_out(make)
        check_mesh("page_table", self)
        columns = -(-max_len // PAGE_SLOTS)
        check_page_table(page_table, (batch, columns), num_pages)
        count = int(np.max(page_table)) + 1 if num_pages is None else num_pages
        table = jnp.asarray(np.asarray(page_table), jnp.int32)
        make = functools.partial(KVCache.zeros, self.config, batch, columns * PAGE_SLOTS, self.dtype)
        return self.laid_out(lambda: make(table, count))

    def laid_out(self, make: Callable[[], Any]) -> Any:
        """What ``make`` returns, with caches in it laid out over the mesh as attention splits them."""
        partition = self.layers[0].self_attn.partition
        if partition is None:
            return make()
        place = partition.sharding
        splits = tuple(layer.self_attn.cache_splits() for layer in self.layers)

        def sharding(node: Any) -> Any:
            if not isinstance(node, KVCache):
                return place(node.ndim, WHOLE)
            whole_ones = jax.tree.map(lambda leaf: place(leaf.ndim, WHOLE), node)
            layers = jax.tree.map(lambda leaf, split: place(leaf.ndim, split), node.layers, splits)
            return dataclasses.replace(whole_ones, layers=layers)

        shapes = jax.eval_shape(make)
        shardings = jax.tree.map(sharding, shapes, is_leaf=lambda node: isinstance(node, KVCache))
        return jax.jit(make, out_shardings=shardings)()

    def _check_call(
        self,
        input_ids: Any,
        attention_mask: ArrayArg | None,
        positions: ArrayArg | None,
        segment_ids: ArrayArg | None,
        cache: Any,
    ) -> None:
        check_ids(input_ids, attention_mask, self.config.vocab_size, segment_ids)
        batch, length = input_ids.shape
        if positions is not None:
            check_positions(positions, attention_mask, input_ids.shape)
        if segment_ids is not None:
            self._check_takes_segments(cache)
        if cache is not None:
            num_slots = getattr(cache, "num_slots", 0)
            table = getattr(cache, "page_table", None)
            num_pages = 0 if table is None else cache.num_pages
            empty = jax.eval_shape(
                lambda: KVCache.zeros(self.config, batch, num_slots, self.dtype, table, num_pages),
            )
            is_left_kept = self.config.pinned_tokens is None
            limits: dict[str, Any] = dict(max_seq_len=self.max_seq_len, is_left_kept=is_left_kept)
            check_cache(cache, empty, length, attention_mask, **limits)
        elif length > self.max_seq_len:
            raise ValueError(f"input_ids has {length} tokens per row, the model takes max_seq_len={self.max_seq_len}")

    def _check_takes_segments(self, cache: Any) -> None:
        if cache is not None:
            raise ValueError("segment_ids is given with a cache, whose rows hold one sequence; drop one of them")
        if (reason := self.segments_refusal()) is not None:
            raise NotImplementedError(f"segment_ids: {reason}")

    def segments_refusal(self) -> str | None:
        """Why rows cannot hold several sequences, or None when they can."""
        return segments_refusal(self.config)


def _hidden_states(x: Array, model: CausalLM, **options: Any) -> tuple[Any, ...]:
    return model.hidden_states(x, **options, return_stats=True)


def _hidden_states_by_remat(x: Array, model: CausalLM, **options: Any) -> tuple[Any, ...]:
    return model.hidden_states(x, **options, remat=True, return_stats=True)


def _logits(x: Array, model: CausalLM) -> Array:
    return model.logits(x)


def _by_remat(layer: DecoderLayer, *args: Any) -> tuple[Any, ...]:
    """``layer(*args)``, whose insides the backward pass computes again. ``nnx.remat`` would write to the layer, which
    it must not where the caller made the model outside of the function that is differentiated."""
    structure, leaves = split_model(layer)
    return jax.checkpoint(lambda leaves, args: merge_model(structure, leaves)(*args))(leaves, args)


def _in_order_of_call(stats: MoEStats, back: Int[Array, "B S"]) -> MoEStats:
    """Of all layers. back: for each token of the call the column where the layers had it."""

    def moved(array: Array) -> Array:
        rows = gathered(array).reshape(array.shape[0], *back.shape, -1)
        return jnp.take_along_axis(rows, back[None, :, :, None], axis=2).reshape(array.shape)

    return dataclasses.replace(stats, **{name: moved(getattr(stats, name)) for name in ("topk_ids", "router_logits")})


@functools.partial(jax.jit, static_argnums=0)
def _score(structure: Any, leaves: list[Array], ids: Array, mask: Array) -> Array:
    model = merge_model(structure, leaves)
    return model.logits(model.hidden_states(ids, attention_mask=mask)[0])
