"""Log-probabilities of tokens: of answers while they are made, and of prompts."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax._pytrees import pytree
from moe_jax._typing import Array, Bool, Float, Int, Leaf
from moe_jax.models._compiled import merge_model, padded_prompt, split_model
from moe_jax.models._programs import program
from moe_jax.models._tiles import in_tiles

_POSITIONS_AT_ONCE = 64  # whose logits are held at a time


@pytree
@dataclasses.dataclass(frozen=True, repr=False)
class TokenLogprobs:
    """Of tokens with any leading shape. chosen: (...) f32, of the token itself. rank: (...) int32, 1 for the likeliest
    token. top_ids, top: (..., K) int32 and f32, the K likeliest tokens, from the likeliest on."""

    chosen: Leaf
    rank: Leaf
    top_ids: Leaf
    top: Leaf

    @classmethod
    def create(cls, logits: Float[Array, "B V"], tokens: Int[Array, " B"], k: int) -> "TokenLogprobs":
        """By the logits as the model gives them, before bias, penalties and temperature."""
        found = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
        chosen = jnp.take_along_axis(found, tokens[:, None], axis=1)
        rank = 1 + jnp.sum(found > chosen, axis=1, dtype=jnp.int32)
        top, top_ids = jax.lax.top_k(found, k)
        return cls(chosen[:, 0], rank, top_ids.astype(jnp.int32), top)

    @classmethod
    def zeros(cls, batch: int, room: int, k: int) -> "TokenLogprobs":
        """Of answers without a token."""
        shape = (batch, room)
        tops = jnp.zeros((*shape, k), jnp.int32), jnp.zeros((*shape, k))
        return cls(jnp.zeros(shape), jnp.zeros(shape, jnp.int32), *tops)

    def added(self, new: "TokenLogprobs", is_new: Bool[Array, "B R"]) -> "TokenLogprobs":
        """With one token a row where ``is_new``."""

        def put(old: Array, fresh: Array) -> Array:
            where = is_new.reshape(*is_new.shape, *(1,) * (old.ndim - 2))
            return jnp.where(where, fresh[:, None], old)

        return jax.tree.map(put, self, new)

    def part(self, *index: Any) -> "TokenLogprobs":
        """At an index of the leading axes, in host memory."""
        return jax.tree.map(lambda leaf: np.array(leaf[index]), self)


def prompt_logprobs(model: Any, ids: list[int], k: int) -> TokenLogprobs:
    """Of every token of a prompt but the first, each after those before it: leading shape (len(ids) - 1,). The prompt
    is read once more, in one piece."""
    padded, mask = padded_prompt([ids], None, model.config.vocab_size)
    return _of_prompt(k, *split_model(model), padded, mask).part(slice(len(ids) - 1))


@program(num_static=2)
def _of_prompt(k: int, structure: Any, leaves: list[Array], ids: Array, mask: Array) -> TokenLogprobs:
    model = merge_model(structure, leaves)
    hidden = model.hidden_states(ids, attention_mask=mask)[0][0]
    following = jnp.pad(ids[0, 1:], (0, 1))

    def some(hidden: Array, following: Array) -> TokenLogprobs:
        return TokenLogprobs.create(model.next_logits(hidden), following, k)

    size = model.config.pinned_tokens or _POSITIONS_AT_ONCE
    return in_tiles(size, hidden, lambda index: (hidden[index], following[index]), some)
