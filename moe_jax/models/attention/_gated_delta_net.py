"""Gated DeltaNet, the linear attention of Qwen3-Next: a causal convolution, the gated delta rule, a gated norm.

A layer keeps a state of one size per row instead of keys and values of every token. Padding leaves it as it is.
"""

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from moe_jax._typing import Array, DTypeLike, Float
from moe_jax._versions import Place
from moe_jax.models._config import DecoderConfig, LinearAttentionConfig
from moe_jax.models._layer_cache import RecurrentCache
from moe_jax.models._layers import Linear, RMSNorm, parameter, scaled_to_unit
from moe_jax.models._partition import WHOLE, Partitioned, partitioned
from moe_jax.models.attention._attention import AttentionInputs
from moe_jax.models.attention._choice import AttentionImplementation
from moe_jax.models.attention._delta_rule import delta_rule
from moe_jax.parallel._logical import EMBED, HEADS

_EPS = 1e-6  # of the lengths that queries and keys are divided by, whatever rms_norm_eps is


class GatedRMSNorm(RMSNorm):
    """``RMSNorm`` times silu(gate), float32 as it comes out."""

    def __call__(self, x: Float[Array, "... V"], gate: Float[Array, "... V"]) -> Float[Array, "... V"]:  # pyright: ignore[reportIncompatibleMethodOverride]
        normal = scaled_to_unit(x, self.eps) * self.weight[...].astype(jnp.float32)
        return normal * jax.nn.silu(gate.astype(jnp.float32))


class GatedDeltaNet(Partitioned):
    """Linear attention by the gated delta rule, see ``LinearAttentionConfig``.

    conv_weight: (channels, 1, steps), channels are those of all queries, all keys, all values. A_log, dt_bias: (value
    heads,) float32, the speed of forgetting.
    """

    module_name: ClassVar[str] = "linear_attn"  # in a layer of a checkpoint

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        *,
        implementation: AttentionImplementation = "xla",
        dtype: DTypeLike = jnp.bfloat16,
        rngs: nnx.Rngs | None = None,
    ):
        """layer, implementation: as of ``Attention``; all layers of this kind are alike and run without kernels."""
        self.config = config
        linear, h = self.linear, config.hidden_size
        options: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        keys, values = linear.num_key_heads * linear.key_head_dim, linear.num_value_heads * linear.value_head_dim
        if linear.is_fused:
            self.in_proj_qkvz = Linear(h, 2 * keys + 2 * values, **options)
            self.in_proj_ba = Linear(h, 2 * linear.num_value_heads, out_dtype=jnp.float32, **options)
        else:
            self.in_proj_qkv = Linear(h, 2 * keys + values, **options)
            self.in_proj_z = Linear(h, values, **options)
            self.in_proj_b = Linear(h, linear.num_value_heads, out_dtype=jnp.float32, **options)
            self.in_proj_a = Linear(h, linear.num_value_heads, out_dtype=jnp.float32, **options)
        taps = nnx.initializers.normal(linear.conv_steps**-0.5)
        self.conv_weight = parameter((2 * keys + values, 1, linear.conv_steps), dtype, rngs, taps)
        heads = (linear.num_value_heads,)
        self.A_log = parameter(heads, jnp.float32, rngs, nnx.initializers.normal(1.0))
        self.dt_bias = parameter(heads, jnp.float32, rngs, nnx.initializers.ones)
        self.norm = GatedRMSNorm(linear.value_head_dim, eps=config.rms_norm_eps, **options)
        self.out_proj = Linear(values, h, **options)
        self.name_parameters()

    @property
    def linear(self) -> LinearAttentionConfig:
        """The sizes of linear attention; a model without them has no layer of this class."""
        assert self.config.linear_attention is not None
        return self.config.linear_attention

    def dense_modules(self) -> dict[str, nnx.Module | Place]:
        """Checkpoint name below the layer's attention -> module, or place of a parameter."""
        modules: dict[str, nnx.Module | Place] = {name: getattr(self, name) for name in (*self._inputs(), "out_proj")}
        modules |= {"norm": self.norm, "conv1d.weight": Place(self, "conv_weight")}
        return modules | {name: Place(self, name) for name in ("A_log", "dt_bias")}

    def _inputs(self) -> tuple[str, ...]:
        return (
            ("in_proj_qkvz", "in_proj_ba")
            if self.linear.is_fused
            else ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        )

    def logical_axes(self) -> Mapping[str, tuple[str | None, ...]]:
        own: dict[str, tuple[str | None, ...]] = dict.fromkeys(self._inputs(), (HEADS, EMBED))
        return own | {"out_proj": (EMBED, HEADS), "A_log": (HEADS,), "dt_bias": (HEADS,)}

    def split_names(self, parts: int) -> Collection[str]:
        return () if self.linear.num_key_heads % parts else (HEADS,)

    def explain(self, batch: int, num_tokens: int, num_slots: int, dtype: DTypeLike) -> str:
        """As of ``Attention``."""
        return "linear attention, XLA"

    def num_sms(self) -> int | None:
        """As of ``Attention``: no kernel runs for a layer of this kind."""
        return None

    def cache_splits(self) -> Any:
        """As of ``Attention``."""
        is_split = self.partition is not None and bool(self.split_names(self.partition.parts))
        split: Any = 1 if is_split else WHOLE
        return RecurrentCache(split, split)

    def __call__(
        self, x: Float[Array, "B S H"], inputs: AttentionInputs, cached: RecurrentCache | None
    ) -> tuple[Float[Array, "B S H"], RecurrentCache, None]:
        """Go on behind the tokens of the cache; None starts anew. Returns the output, the new cache, and None: it
        selects nothing."""
        return (*partitioned(GatedDeltaNet._forward, self, (WHOLE, self.cache_splits()), x, inputs, cached), None)

    def _forward(
        self, x: Float[Array, "B S H"], inputs: AttentionInputs, cached: RecurrentCache | None
    ) -> tuple[Float[Array, "B S H"], RecurrentCache]:
        linear, (batch, length) = self.linear, x.shape[:2]
        if cached is None:
            cached = linear.cache.zeros(batch, 0, x.dtype)
        slots = inputs.first_slots[:, None] + jnp.arange(length, dtype=jnp.int32)
        is_real = (slots >= inputs.starts[:, None]) & (slots < inputs.lengths[:, None])
        mixed, z, rates, steps = self._projected(jnp.where(is_real[..., None], x, 0))
        # Columns up to the row's last token; padding in front of its first one gives zeros, as no token does.
        end = jnp.clip(inputs.lengths - inputs.first_slots, 0, length)
        mixed, conv = self._convolved(mixed, cached.conv, end)
        q, k, v = self._heads(mixed)
        speed = jnp.exp(self.A_log[...]) * jax.nn.softplus(steps + self.dt_bias[...])
        g, beta = (jnp.where(is_real[..., None], a, 0).reshape(*v.shape[:-1]) for a in (-speed, jax.nn.sigmoid(rates)))
        shape = (batch, linear.num_key_heads, -1, linear.key_head_dim, linear.value_head_dim)
        y, state = delta_rule(q, k, v, g, beta, cached.state.reshape(shape))
        y = self.norm(y, z.reshape(y.shape)).astype(x.dtype).reshape(batch, length, -1)
        return self.out_proj(y), RecurrentCache(conv, state.reshape(cached.state.shape))

    def _projected(self, x: Float[Array, "B S H"]) -> tuple[Array, Array, Array, Array]:
        """Inputs of the convolution (B, S, key heads, channels), of each key head its query, key and values; the gate
        (B, S, values); rates and time steps (B, S, value heads) f32."""
        linear, lead = self.linear, x.shape[:2]
        heads = (*lead, linear.num_key_heads, -1)
        if linear.is_fused:  # by key heads
            both, ba = self.in_proj_qkvz(x).reshape(heads), self.in_proj_ba(x).reshape(heads)
            mixed, z = both[..., : linear.channels], both[..., linear.channels :]
            rates, steps = jnp.split(ba, 2, axis=-1)
            return mixed, z.reshape(*lead, -1), rates.reshape(*lead, -1), steps.reshape(*lead, -1)
        mixed = self._by_heads(self.in_proj_qkv(x), axis=2)
        return mixed, self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)

    def _by_heads(self, a: Array, axis: int) -> Array:
        """An axis of all queries, all keys, all values as two, (key heads, channels)."""
        linear = self.linear
        keys = linear.num_key_heads * linear.key_head_dim
        parts = jnp.split(a, (keys, 2 * keys), axis=axis)
        shape = (*a.shape[:axis], linear.num_key_heads, -1, *a.shape[axis + 1 :])
        return jnp.concatenate([part.reshape(shape) for part in parts], axis=axis + 1)

    def _convolved(
        self, mixed: Float[Array, "B S N C"], before: Float[Array, "B N T C"], end: Array
    ) -> tuple[Float[Array, "B S N C"], Float[Array, "B N T C"]]:
        """(silu of the convolution, its latest inputs up to column ``end``). before: those of earlier calls."""
        steps, length = self.linear.conv_steps, mixed.shape[1]
        joined = jnp.concatenate([before.astype(mixed.dtype), mixed.swapaxes(1, 2)], axis=2)
        taps = self._by_heads(self.conv_weight[...][:, 0].astype(jnp.float32), axis=0)  # (N, C, steps)
        y = sum(joined[:, :, i : i + length].astype(jnp.float32) * taps[:, None, :, i] for i in range(steps))
        latest = jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, steps - 1, axis=1))(joined, end)
        return jax.nn.silu(y).astype(mixed.dtype).swapaxes(1, 2), latest

    def _heads(self, mixed: Float[Array, "B S N C"]) -> tuple[Array, Array, Array]:
        """q and k (B, S, N, Dk) of length 1, v (B, S, N, R, Dv), all f32."""
        width = self.linear.key_head_dim
        wide = mixed.astype(jnp.float32)
        q, k = (
            a * jax.lax.rsqrt(jnp.sum(a * a, axis=-1, keepdims=True) + _EPS)
            for a in (wide[..., :width], wide[..., width : 2 * width])
        )
        return q, k, wide[..., 2 * width :].reshape(*mixed.shape[:3], -1, self.linear.value_head_dim)
