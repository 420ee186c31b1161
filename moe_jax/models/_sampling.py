"""Choosing the next token from logits, each row by its own settings: penalties, temperature, min_p, top-k, top-p, draw.

Nothing is sorted. The k-th largest logit, and the one at which probabilities reach p, are thresholds. They are found
bit by bit over the ordered bits of float32: a candidate stays when enough lies at or above it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax._pytrees import pytree
from moe_jax._typing import Array, Bool, Float, Int, Leaf
from moe_jax.models._sampling_params import SamplingParams

_BITS_AT_ONCE = 2  # of a threshold: each pass over the vocabulary tries three candidates


@pytree
@dataclasses.dataclass(frozen=True, repr=False)
class History:
    """Tokens that a row has seen: in_prompt (B, V) bool, in_answer (B, V) int32 counts."""

    in_prompt: Leaf
    in_answer: Leaf

    @classmethod
    def create(cls, ids: Int[Array, "B S"], mask: Bool[Array, "B S"], vocab_size: int) -> "History":
        """Of prompts, and answers without a token."""
        rows = jnp.arange(ids.shape[0])[:, None]
        in_prompt = jnp.zeros((ids.shape[0], vocab_size), jnp.bool)
        in_prompt = in_prompt.at[rows, jnp.where(mask, ids, vocab_size)].set(True, mode="drop")
        return cls(in_prompt, jnp.zeros(in_prompt.shape, jnp.int32))

    def added(self, token: Int[Array, " B"], is_done: Bool[Array, " B"]) -> "History":
        """With the token of each row that has not ended."""
        rows, count = jnp.arange(token.shape[0]), jnp.where(is_done, 0, 1)
        return dataclasses.replace(self, in_answer=self.in_answer.at[rows, token].add(count, mode="drop"))


@pytree
@dataclasses.dataclass(frozen=True, repr=False)
class Sampler:
    """``SamplingParams`` of B rows as arrays. The numbers are leaves, so changing them does not recompile; which steps
    run is static.

    temperature, top_p, min_p, repetition, presence, frequency: (B,) f32. top_k: (B,) int32, 0 for all. bias_ids,
    biases: (B, n) int32 and f32, filled up with zeros. rng: a key. streams: (B,) uint32, a row's seed, or its index
    where has_seed (B,) is False. limits, at_least: (B,) int32, tokens at most, and before an end token. stop: (B, m)
    int32 end tokens, filled up with -1. is_greedy: no row draws. is_filtered: some row has top_k, top_p or
    min_p. is_penalized: some row has a penalty. has_least: some row has ``at_least``. num_logprobs: most tokens whose
    log-probabilities a row wants; None where none does.
    """

    temperature: Leaf
    top_p: Leaf
    min_p: Leaf
    repetition: Leaf
    presence: Leaf
    frequency: Leaf
    top_k: Leaf
    bias_ids: Leaf
    biases: Leaf
    rng: Leaf
    streams: Leaf
    has_seed: Leaf
    limits: Leaf
    at_least: Leaf
    stop: Leaf
    is_greedy: bool = dataclasses.field(metadata=dict(static=True))
    is_filtered: bool = dataclasses.field(metadata=dict(static=True))
    is_penalized: bool = dataclasses.field(metadata=dict(static=True))
    has_least: bool = dataclasses.field(metadata=dict(static=True))
    num_logprobs: int | None = dataclasses.field(metadata=dict(static=True))

    @classmethod
    def create(
        cls,
        params: Sequence[SamplingParams],
        rng: Any,
        *,
        vocab_size: int,
        max_new_tokens: int,
        eos_token_ids: Sequence[int] = (),
    ) -> "Sampler":
        """Arrays in host memory. eos_token_ids: end every row that does not ignore them.

        Raises:
            ValueError: a token outside the vocabulary, a row that draws without a seed or ``rng``, or one with
                min_tokens for which every token is an end token.
        """
        check_key(rng)
        for row, each in enumerate(params):
            if each.temperature > 0 and each.seed is None and rng is None:
                where = f" of row {row}" if len(params) > 1 else ""
                raise ValueError(
                    f"temperature={each.temperature}{where} samples and needs rng=jax.random.key(seed); "
                    "temperature=0 is greedy"
                )
            outside = [t for t in (*(each.logit_bias or ()), *(each.stop_token_ids or ())) if t >= vocab_size]
            if outside:
                expected = f"expected 0 to {vocab_size - 1}"
                raise ValueError(f"sampling_params of row {row} name token {outside[0]}, {expected}")
        # Beyond what float32 holds nothing changes: the coldest is greedy with ties drawn, the hottest uniform.
        # Infinite biases and penalties would make NaN of logits.
        info, most = np.finfo(np.float32), np.iinfo(np.int32).max
        biases = [dict(p.logit_bias or {}) for p in params]
        floats = {
            name: np.asarray([getattr(p, name) for p in params], np.float64)
            for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        }
        # Greedy rows keep 0, which no positive temperature becomes.
        temperature = floats["temperature"]
        floats["temperature"] = np.where(temperature > 0, np.clip(temperature, info.tiny, info.max), 0)
        floats["repetition_penalty"] = np.clip(floats["repetition_penalty"], info.tiny, info.max)
        ends = [() if p.ignore_eos else tuple(eos_token_ids) for p in params]
        stops = [list(dict.fromkeys((*end, *(p.stop_token_ids or ())))) for end, p in zip(ends, params, strict=True)]
        for row, (stop, each) in enumerate(zip(stops, params, strict=True)):
            if each.min_tokens > 0 and len(stop) >= vocab_size:
                raise ValueError(
                    f"sampling_params of row {row}: min_tokens={each.min_tokens} leaves no token to choose, since all "
                    f"{vocab_size} of the vocabulary end the row; leave some out of stop_token_ids, or min_tokens=0"
                )
        wanted = [
            min(p.max_tokens, max_new_tokens) if isinstance(p.max_tokens, int) else max_new_tokens for p in params
        ]
        streams = [row if p.seed is None else p.seed for row, p in enumerate(params)]
        arrays: dict[str, Any] = dict(
            top_k=np.asarray([min(p.top_k, most) for p in params], np.int32),
            bias_ids=_filled([list(b) for b in biases], 0, np.int32),
            biases=_filled([np.clip([*b.values()], info.min, info.max).tolist() for b in biases], 0, np.float32),
            rng=np.zeros(2, np.uint32) if rng is None else rng,
            streams=np.asarray(streams, np.uint32),
            has_seed=np.asarray([p.seed is not None for p in params]),
            limits=np.minimum(wanted, max_new_tokens).astype(np.int32),
            at_least=np.asarray([min(p.min_tokens, most) for p in params], np.int32),
            stop=_filled(stops, -1, np.int32, at_least=1),
        )
        arrays |= {name.removesuffix("_penalty"): array.astype(np.float32) for name, array in floats.items()}
        return cls(
            **arrays,
            is_greedy=not temperature.any(),
            is_filtered=any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params if p.temperature > 0),
            is_penalized=any(p.is_penalized for p in params),
            has_least=any(p.min_tokens > 0 for p in params),
            num_logprobs=_most([p.logprobs for p in params], vocab_size),
        )

    def rows(self, index: Any) -> "Sampler":
        """The same settings for rows ``index``, (n,) int, of these."""
        return jax.tree.map(lambda leaf: leaf if leaf is self.rng else leaf[index], self)

    def __call__(
        self, logits: Float[Array, "B V"], steps: Int[Array, " B"], history: History | None = None
    ) -> Int[Array, " B"]:
        """Token ids (B,) int32.

        steps: tokens that each row has made so far; with its seed they decide its draw. history: needed where some row
        has a penalty.
        """
        logits = self._changed(logits.astype(jnp.float32), steps, history)
        greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        if self.is_greedy:
            return greedy
        temperature = jnp.asarray(self.temperature)
        # Relative to the largest: a cold temperature then sends the others to -inf instead of all to infinity.
        logits = (logits - logits.max(axis=-1, keepdims=True)) / jnp.where(temperature > 0, temperature, 1)[:, None]
        if self.is_filtered:
            logits = jnp.where(kept(logits, self.min_p, self.top_k, self.top_p), logits, -jnp.inf)
        drawn = jax.vmap(jax.random.categorical)(self._keys(steps), logits).astype(jnp.int32)
        return jnp.where(temperature > 0, drawn, greedy)

    def _changed(
        self, logits: Float[Array, "B V"], steps: Int[Array, " B"], history: History | None
    ) -> Float[Array, "B V"]:
        """With bias and penalties, and without end tokens that come too early."""
        if self.has_least:
            rows, stop = jnp.arange(logits.shape[0])[:, None], jnp.asarray(self.stop)
            is_early = (steps < jnp.asarray(self.at_least))[:, None] & (stop >= 0)
            logits = logits.at[rows, jnp.where(is_early, stop, logits.shape[1])].set(-jnp.inf, mode="drop")
        if self.bias_ids.shape[1]:
            rows = jnp.arange(logits.shape[0])[:, None]
            logits = logits.at[rows, self.bias_ids].add(self.biases)
        if not self.is_penalized:
            return logits
        assert history is not None
        is_made = history.in_answer > 0
        repetition = jnp.where(history.in_prompt | is_made, jnp.asarray(self.repetition)[:, None], 1)
        logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
        logits = logits - jnp.asarray(self.frequency)[:, None] * history.in_answer.astype(jnp.float32)
        return logits - jnp.asarray(self.presence)[:, None] * is_made.astype(jnp.float32)

    def _keys(self, steps: Int[Array, " B"]) -> Any:
        rng: Any = self.rng
        if not jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
            rng = jax.random.wrap_key_data(rng, impl="threefry2x32")

        def key(stream: Array, has_seed: Array, step: Array) -> Any:
            own = jax.random.key(stream, impl=jax.random.key_impl(rng))
            return jax.random.fold_in(jnp.where(has_seed, own, jax.random.fold_in(rng, stream)), step)

        return jax.vmap(key)(jnp.asarray(self.streams), jnp.asarray(self.has_seed), steps)


def kept(
    logits: Float[Array, "B V"], min_p: Float[Array, " B"], top_k: Int[Array, " B"], top_p: Float[Array, " B"]
) -> Bool[Array, "B V"]:
    """Which tokens min_p, top_k and top_p leave, in this order, each on what the one before left.

    The sets are those of a stable descending sort: exactly k tokens, and those before which less than p has been summed
    in float32. logits: the largest of a row is 0.
    """
    min_p, top_k, top_p = (jnp.asarray(a)[:, None] for a in (min_p, top_k, top_p))
    weights = jnp.exp(logits)
    is_kept = weights >= min_p
    order = _ordered(jnp.where(is_kept, logits, -jnp.inf))
    k = jnp.where(top_k == 0, logits.shape[1], jnp.minimum(top_k, logits.shape[1]))
    threshold = _largest(lambda t: jnp.sum(order[:, None] >= t[..., None], axis=-1) >= k, order, jnp.any(top_k > 0))
    is_above, is_tie = order > threshold, order == threshold
    num_ties = k - jnp.sum(is_above, axis=-1, keepdims=True)
    is_first = is_above | (is_tie & (jnp.cumsum(is_tie, axis=-1) <= num_ties))
    is_kept = is_kept & (is_first | (top_k == 0))

    weights = jnp.where(is_kept, weights, 0)
    target = top_p * jnp.sum(weights, axis=-1, keepdims=True)

    def reaches(t: Array) -> Array:
        return jnp.sum(jnp.where(order[:, None] >= t[..., None], weights[:, None], 0), axis=-1) >= target

    threshold = _largest(reaches, order, jnp.any(top_p < 1))
    is_above, is_tie = order > threshold, (order == threshold) & is_kept
    before = jnp.sum(jnp.where(is_above, weights, 0), axis=-1, keepdims=True)
    ties_before = (jnp.cumsum(is_tie, axis=-1) - 1).astype(jnp.float32)
    before = before + ties_before * weights
    return is_kept & (is_above | (is_tie & (before < target)) | (top_p == 1))


def _ordered(x: Float[Array, "B V"]) -> Array:
    """(B, V) uint32 in the order of the float32 x, with one zero."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _largest(holds: Callable[[Array], Array], order: Array, is_needed: Array) -> Array:
    """(B, 1) uint32, the largest t of each row for which ``holds``; it holds for 0, and up to one t for all below.

    holds: candidates (B, n) uint32 -> (B, n) bool. is_needed: () bool; False gives 0 at once.
    """
    digits = jnp.arange(1, 1 << _BITS_AT_ONCE, dtype=jnp.uint32)
    passes = 32 // _BITS_AT_ONCE

    def one(turn: Array, t: Array) -> Array:
        shift = (_BITS_AT_ONCE * (passes - 1 - turn)).astype(jnp.uint32)
        digit = jnp.sum(holds(t | (digits << shift)), axis=-1, keepdims=True, dtype=jnp.uint32)
        return t | (digit << shift)

    return jax.lax.fori_loop(0, jnp.where(is_needed, passes, 0), one, jnp.zeros_like(order[:, :1]))


def _filled(rows: Sequence[Sequence[Any]], fill: int, dtype: Any, at_least: int = 0) -> np.ndarray:
    """(rows, n) with n a multiple of 4, so that their number rarely matters."""
    width = 4 * -(-max(at_least, max(map(len, rows), default=0)) // 4)
    return np.asarray([[*row, *[fill] * (width - len(row))] for row in rows], dtype).reshape(len(rows), width)


def _most(wanted: Sequence[int | None], vocab_size: int) -> int | None:
    """The largest number of log-probabilities, up to a power of two, so that it rarely matters."""
    numbers = [vocab_size if n == -1 else n for n in wanted if n is not None]
    return (
        min(vocab_size, 1 << (max(numbers) - 1).bit_length() if max(numbers) > 1 else max(numbers)) if numbers else None
    )


def check_key(rng: Any) -> None:
    """TypeError unless ``rng`` is None or one key of ``jax.random``, typed or of the old kind."""
    if rng is None:
        return
    found = f"type {type(rng).__name__}"
    if isinstance(rng, jax.Array | np.ndarray):
        is_typed = jnp.issubdtype(rng.dtype, jax.dtypes.prng_key)
        if (is_typed and rng.shape == ()) or (rng.dtype == jnp.uint32 and rng.shape == (2,)):
            return
        found = f"dtype {rng.dtype} and shape {rng.shape}"
    raise TypeError(f"rng has {found}, expected one key, as jax.random.key(seed) makes it")
