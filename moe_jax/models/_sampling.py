"""Choosing the next token from logits: greedy, or by temperature with optional top-k and top-p."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from moe_jax._typing import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampler:
    """How to choose. The numbers are leaves, so changing them does not recompile; which steps run is static.

    temperature, top_p: () f32. top_k: () int32, 0 for all. is_greedy: take the largest logit, the lower index on ties.
    is_filtered: top-k or top-p is on; without them the sort over the vocabulary is left out.
    """

    temperature: Any
    top_p: Any
    top_k: Any
    is_greedy: bool = dataclasses.field(metadata=dict(static=True))
    is_filtered: bool = dataclasses.field(metadata=dict(static=True))

    @classmethod
    def create(cls, temperature: float, top_p: float, top_k: int, rng: Any) -> "Sampler":
        """Checked as ``generate`` promises."""
        if not 0 <= temperature < float("inf"):
            raise ValueError(f"temperature={temperature}, expected a number >= 0 (0 is greedy)")
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p={top_p}, expected 0 < top_p <= 1")
        if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 0:
            raise ValueError(f"top_k={top_k!r}, expected an integer >= 0 (0 keeps all)")
        if temperature > 0 and rng is None:
            raise ValueError(
                f"temperature={temperature} samples and needs rng=jax.random.key(seed); temperature=0 is greedy"
            )
        return cls(
            temperature=jnp.float32(temperature),
            top_p=jnp.float32(top_p),
            top_k=jnp.int32(top_k),
            is_greedy=temperature == 0,
            is_filtered=top_k > 0 or top_p < 1,
        )

    def __call__(self, logits: Float[Array, "B V"], key: Any) -> Int[Array, " B"]:
        """Token ids (B,) int32. Order of the steps: temperature, top-k, then top-p on what top-k left.

        top-p keeps the fewest most likely tokens whose probabilities reach p; the most likely one always stays.
        """
        if self.is_greedy:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        logits = logits / self.temperature
        if not self.is_filtered:
            return jax.random.categorical(key, logits).astype(jnp.int32)
        order = jnp.argsort(logits, axis=-1, descending=True)
        ranked = jnp.take_along_axis(logits, order, axis=-1)
        rank = jnp.arange(logits.shape[-1])
        ranked = jnp.where((rank < self.top_k) | (self.top_k == 0), ranked, -jnp.inf)
        probability = jax.nn.softmax(ranked, axis=-1)
        mass_before = jnp.cumsum(probability, axis=-1) - probability
        ranked = jnp.where((mass_before < self.top_p) | (rank == 0), ranked, -jnp.inf)
        choice = jax.random.categorical(key, ranked)
        return jnp.take_along_axis(order, choice[:, None], axis=-1)[:, 0].astype(jnp.int32)
