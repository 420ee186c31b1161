"""``generate`` and ``generate_stream``: the token loop as a compiled program over a static key-value cache."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax._arguments import integer
from moe_jax.models._cache import KVCache
from moe_jax.models._compiled import bucket, merge_model, padded_prompt, split_model
from moe_jax.models._decoder import CausalLM
from moe_jax.models._partition import on_mesh
from moe_jax.models._sampling import Sampler


def generate(
    model: CausalLM,
    input_ids: Any,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    eos_token_id: int | Sequence[int] | None = None,
    rng: Any = None,
    attention_mask: Any = None,
    return_load: bool = False,
) -> Any:
    """Continue prompts. Programs are compiled per batch size and bucket of lengths, one for the prompt and one for the
    loop; later calls reuse them.

    Args:
        model: a loaded model.
        input_ids: (B, S) int prompts, an array or nested lists.
        max_new_tokens: tokens to add at most, >= 0.
        temperature: 0 takes the most likely token; above 0 samples and needs ``rng``.
        top_p: keep the most likely tokens that together reach this probability.
        top_k: keep the k most likely tokens; 0 keeps all.
        eos_token_id: token or tokens that end a row; None never ends early. A row that has ended is filled with the
            first one.
        rng: a key of ``jax.random.key``, used only when sampling.
        attention_mask: (B, S) bool or 0/1, False for padding, on the left or on the right; what stands in padding is
            ignored.
        return_load: also return the rows that each slot of each layer served, ``MoEStats.load``, for ``EplbState``.

    Returns:
        (B, S + max_new_tokens) int32: the prompt as given, then the new tokens. The answer to a padded prompt is the
        one it gets alone. With ``return_load`` the pair of that and (layers, slots) int32.

    Raises:
        ValueError: a value out of range, an id or end token outside the vocabulary, or prompt and new tokens exceed
            ``max_seq_len``. TypeError: an argument of another kind than said here; nothing is rounded or parsed.
    """
    sampling = (temperature, top_p, top_k, eos_token_id, rng)
    run = _Run(model, input_ids, max_new_tokens, *sampling, attention_mask, has_load=return_load)
    prompt = jnp.asarray(input_ids).astype(jnp.int32)
    if run.max_new_tokens == 0:
        return (prompt, run.no_load) if return_load else prompt
    state = run.until(run.start(), run.max_new_tokens)
    tokens = jnp.concatenate([prompt, state[3][:, : run.max_new_tokens]], axis=1)
    return (tokens, state[4]) if return_load else tokens


def generate_stream(
    model: CausalLM,
    input_ids: Any,
    *,
    max_new_tokens: int,
    tokens_at_once: int = 4,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    eos_token_id: int | Sequence[int] | None = None,
    rng: Any = None,
    attention_mask: Any = None,
    return_load: bool = False,
) -> Iterator[Any]:
    """What ``generate`` adds, while it is made: arrays (B, n) int32, the first of one token, later ones of up to
    ``tokens_at_once``. It ends after ``max_new_tokens``, or when every row has ended. Arguments and errors are those of
    ``generate``, and so are the tokens. With ``return_load`` pairs of tokens and the load so far.
    """
    sampling = (temperature, top_p, top_k, eos_token_id, rng)
    run = _Run(model, input_ids, max_new_tokens, *sampling, attention_mask, has_load=return_load)
    at_once = integer("tokens_at_once", tokens_at_once, minimum=1)

    def tokens() -> Iterator[Any]:
        made, state = 0, run.start() if run.max_new_tokens else None
        while state is not None:
            step = int(state[0])
            new = np.asarray(state[3][:, made:step])
            yield (new, np.array(state[4])) if return_load else new  # a copy: the state is donated
            is_over = step == run.max_new_tokens or bool(state[2].all())
            made, state = step, None if is_over else run.until(state, min(step + at_once, run.max_new_tokens))

    return tokens()


class _Run:
    """One call's checked arguments. A state is (tokens made so far, latest token, rows that have ended, tokens
    (B, room), rows that each slot served (layers, S) or (0, 0) where nobody asks, cache)."""

    def __init__(
        self,
        model,
        input_ids,
        max_new_tokens,
        temperature,
        top_p,
        top_k,
        eos_token_id,
        rng,
        attention_mask,
        *,
        has_load,
    ):
        if not isinstance(model, CausalLM):
            raise TypeError(f"model has type {type(model).__name__}, expected what moe_jax.load_pretrained returns")
        self.max_new_tokens = integer("max_new_tokens", max_new_tokens, minimum=0)
        self._sampler = Sampler.create(temperature, top_p, top_k, rng)
        self._stop = _end_tokens(eos_token_id, model.config.vocab_size)
        self._ids, self._mask = padded_prompt(input_ids, attention_mask, model.config.vocab_size)
        longest = int(self._mask.sum(axis=1).max()) + self.max_new_tokens
        if longest > model.max_seq_len:
            raise ValueError(
                f"the prompt and max_new_tokens={max_new_tokens} make {longest} tokens, "
                f"the model takes max_seq_len={model.max_seq_len}"
            )
        self._key = jax.random.key(0) if rng is None else rng
        layers = [block.experts for block in model.moe_blocks()] if has_load else []
        slots = [e.config.num_experts if e.placement is None else e.placement.get_value().num_slots for e in layers]
        self.no_load = jnp.zeros((len(slots), max(slots, default=0)), jnp.int32)
        self._structure, self._leaves = split_model(model) if self.max_new_tokens else (None, [])

    def start(self) -> Any:
        """The state after the prompt, with the first new token."""
        room = bucket(self.max_new_tokens)
        tokens = (self._ids, self._mask, self.no_load)
        return _start(self._structure, room, self._leaves, tokens, self._sampler, self._stop, self._key)

    def until(self, state: Any, limit: int) -> Any:
        """The state, which is used up, after ``limit`` new tokens, or fewer when all rows have ended."""
        return _continue(self._structure, self._leaves, state, np.int32(limit), self._sampler, self._stop, self._key)


def _end_tokens(eos_token_id: Any, vocab_size: int) -> np.ndarray:
    """(n,) int32, filled up to a multiple of 4 with -1, which is no token, so that their number rarely matters."""
    is_list = isinstance(eos_token_id, list | tuple | np.ndarray | jax.Array) and getattr(eos_token_id, "ndim", 1)
    given = [] if eos_token_id is None else list(eos_token_id) if is_list else [eos_token_id]
    why = ", a token of the vocabulary"
    tokens = [integer("eos_token_id", token, minimum=0, maximum=vocab_size - 1, why=why) for token in given]
    tokens = np.asarray(tokens, np.int32)
    return np.pad(tokens, (0, 4 * max(1, -(-tokens.size // 4)) - tokens.size), constant_values=-1)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _start(structure, room, leaves, tokens, sampler, stop, key):
    model, (ids, mask, load) = merge_model(structure, leaves), tokens
    batch, length = ids.shape
    cache = KVCache.zeros(model.config, batch, length + room, model.dtype)
    hidden, cache, load = _with_load(model, ids, mask, cache, load)
    last = jnp.max(jnp.where(mask, jnp.arange(length), 0), axis=1)
    logits = model.next_logits(jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0])
    is_done, tokens = jnp.zeros((batch,), jnp.bool), jnp.broadcast_to(stop[:1], (batch, room))
    is_done, tokens = on_mesh((is_done, tokens), model.parallel)
    return jnp.int32(1), *_choose(jnp.int32(0), logits, is_done, tokens, sampler, stop, key), load, cache


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _continue(structure, leaves, state, limit, sampler, stop, key):
    """One token per turn of a while loop."""
    model = merge_model(structure, leaves)

    def turn(state):
        step, token, is_done, tokens, load, cache = state
        # Rows that have ended are masked: they reach no expert and cost nothing there.
        hidden, cache, load = _with_load(model, token[:, None], ~is_done[:, None], cache, load)
        logits = model.next_logits(hidden[:, 0])
        return step + 1, *_choose(step, logits, is_done, tokens, sampler, stop, key), load, cache

    return jax.lax.while_loop(lambda s: (s[0] < limit) & ~jnp.all(s[2]), turn, state)


def _with_load(model, ids, mask, cache, load):
    """(hidden states, cache, load with this call's); no load is counted where it has no layers."""
    if not load.size:
        return *model.hidden_states(ids, attention_mask=mask, cache=cache), load
    hidden, cache, stats = model.hidden_states(ids, attention_mask=mask, cache=cache, return_stats=True)
    return hidden, cache, on_mesh(load, model.parallel) + stats.load


def _choose(step, logits, is_done, tokens, sampler, stop, key):
    """The next token of each row, (B,), which rows have ended now, and the tokens with it."""
    token = jnp.where(is_done, stop[0], sampler(logits, jax.random.fold_in(key, step)))
    tokens = jax.lax.dynamic_update_slice_in_dim(tokens, token[:, None], step, axis=1)
    return token, is_done | jnp.isin(token, stop), tokens
