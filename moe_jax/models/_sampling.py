"""Choosing the next token from logits: greedy, or by temperature with optional top-k and top-p."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax._arguments import integer, number
from moe_jax._typing import Array, Float, Int, Leaf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampler:
    """How to choose. The numbers are leaves, so changing them does not recompile; which steps run is static.

    temperature, top_p: () f32. top_k: () int32, 0 for all. is_greedy: take the largest logit, the lower index on ties.
    is_filtered: top-k or top-p is on; without them the sort over the vocabulary is left out.
    """

    temperature: Leaf
    top_p: Leaf
    top_k: Leaf
    is_greedy: bool = dataclasses.field(metadata=dict(static=True))
    is_filtered: bool = dataclasses.field(metadata=dict(static=True))

    @classmethod
    def create(cls, temperature: float, top_p: float, top_k: int, rng: Array | None) -> "Sampler":
        """Checked as ``generate`` promises."""
        temperature = number("temperature", temperature, ">= 0 (0 is greedy)")
        top_p = number("top_p", top_p, "above 0 and up to 1")
        top_k = integer("top_k", top_k, minimum=0, why=" (0 keeps all)")
        if not 0 <= temperature < float("inf"):
            raise ValueError(f"temperature={temperature}, expected a number >= 0 (0 is greedy)")
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p={top_p}, expected 0 < top_p <= 1")
        if temperature > 0 and rng is None:
            raise ValueError(
                f"temperature={temperature} samples and needs rng=jax.random.key(seed); temperature=0 is greedy"
            )
        _check_key(rng)
        # Beyond what float32 holds nothing changes: the coldest is greedy with ties drawn, the hottest uniform.
        limits, most = np.finfo(np.float32), np.iinfo(np.int32).max
        return cls(
            temperature=jnp.float32(np.clip(temperature, limits.tiny, limits.max)),
            top_p=jnp.float32(top_p),
            top_k=jnp.int32(min(top_k, most)),
            is_greedy=temperature == 0,
            is_filtered=top_k > 0 or top_p < 1,
        )

    def __call__(self, logits: Float[Array, "B V"], key: Any) -> Int[Array, " B"]:
        """Token ids (B,) int32. Order of the steps: temperature, top-k, then top-p on what top-k left.

        top-p keeps the fewest most likely tokens whose probabilities reach p; the most likely one always stays.
        """
        if self.is_greedy:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        # Relative to the largest: a cold temperature then sends the others to -inf instead of all to infinity.
        logits = (logits - logits.max(axis=-1, keepdims=True)) / self.temperature
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


def _check_key(rng: Any) -> None:
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
