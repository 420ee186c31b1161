"""``KVCache``: what attention keeps of the tokens seen so far, in a fixed number of slots.

A call with S tokens fills the next S slots of every row, so slots are aligned over the batch while positions are not:
padding (left, right or in between) occupies slots that are marked empty and never seen. Slot order decides causality;
positions decide the rotation and the reach of a sliding window.
"""

import dataclasses

import jax
import jax.numpy as jnp

from moe_jax._typing import Array, DTypeLike, Leaf
from moe_jax.models._config import DecoderConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """A pytree that the caller threads through calls.

    layers: per layer its arrays, each (B, heads, slots, width) with heads and width as ``DecoderConfig.cache_widths``
    has them: keys, rotated, and values; under MLA one array, the normalised latent and then the rotated key that all
    heads share. is_filled: (B, slots) bool, True where a real token lies. positions: (B, slots) int32. length: ()
    int32, slots used so far, the same for all rows. num_tokens: (B,) int32, real tokens per row. is_damaged: (B,) bool,
    rows whose logits are NaN from now on, see ``CausalLM``.
    """

    layers: tuple[tuple[Leaf, ...], ...]
    is_filled: Leaf
    positions: Leaf
    length: Leaf
    num_tokens: Leaf
    is_damaged: Leaf

    @classmethod
    def zeros(cls, config: DecoderConfig, batch: int, num_slots: int, dtype: DTypeLike) -> "KVCache":
        """An empty cache: nothing filled."""
        shapes = [(batch, heads, num_slots, width) for heads, width in config.cache_widths]
        return cls(
            layers=tuple(tuple(jnp.zeros(shape, dtype) for shape in shapes) for _ in range(config.num_layers)),
            is_filled=jnp.zeros((batch, num_slots), jnp.bool),
            positions=jnp.zeros((batch, num_slots), jnp.int32),
            length=jnp.zeros((), jnp.int32),
            num_tokens=jnp.zeros((batch,), jnp.int32),
            is_damaged=jnp.zeros((batch,), jnp.bool),
        )

    @property
    def num_slots(self) -> int:
        return self.is_filled.shape[1]


def extended(cached: tuple[Array, ...] | None, new: tuple[Array, ...], slot: Array) -> tuple[Array, ...]:
    """A layer's arrays with this call's tokens written from ``slot`` on; these alone without a cache."""
    if cached is None:
        return new
    return tuple(
        jax.lax.dynamic_update_slice_in_dim(old, fresh, slot, axis=2) for old, fresh in zip(cached, new, strict=True)
    )
