"""Rotary position embedding with the scaling variants that checkpoints of our families carry.

Frequencies follow transformers' ``ROPE_INIT_FUNCTIONS``, in float32 and in the same order of operations: at position
30000 a difference in the last bit of a frequency is a visible angle. The sources are: linear (position interpolation),
dynamic (NTK-aware, recomputed as the sequence grows), yarn (arXiv 2309.00071), llama3 (Llama 3.1), longrope (arXiv
2402.13753).
"""

import dataclasses
import math
from collections.abc import Mapping
from reprlib import repr as brief
from typing import Any

import jax.numpy as jnp
import numpy as np

from moe_jax._typing import Array, Float, Int, Json

# Keys each type needs beyond rope_theta, and those it may carry.
_KEYS = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ("original_max_position_embeddings",)),
    "yarn": (
        (),
        (
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    ),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ("original_max_position_embeddings",)),
    "longrope": (
        ("short_factor", "long_factor"),
        ("factor", "original_max_position_embeddings", "attention_factor", "short_mscale", "long_mscale"),
    ),
}
_ALIASES = {"su": "longrope"}
# Beside alpha, which stretches theta once and for all, Hunyuan's files state these without a use for them.
_BESIDE_ALPHA = {"alpha", "beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim"}
# The product of two such numbers is still a float32.
_LEAST, _MOST = 1e-18, 1e18


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """How positions become rotation angles; hashable.

    dim: rotated width of a head, even. theta: base of the geometric series. max_position_embeddings: of the model's
    config; original_max_position_embeddings: before any extension. The remaining fields belong to the type that reads
    them.
    """

    dim: int
    theta: float
    max_position_embeddings: int
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    short_mscale: float | None = None
    long_mscale: float | None = None

    @classmethod
    def from_config(
        cls, config: Json, *, head_dim: int, max_position_embeddings: int, partial_rotary_factor: float | None = None
    ) -> "RopeConfig":
        """From a config.json of either dialect.

        partial_rotary_factor: the rotated part of a head where the config states none; None in families that know only
        whole heads.

        Raises:
            ValueError: an unknown type or key, a missing key, a value out of range; one line, without the file's name.
        """
        found = dict(_scaling_dict(config))
        stated = found.pop("partial_rotary_factor", None)
        if partial_rotary_factor is not None:
            head_dim = _rotated_width(head_dim, partial_rotary_factor if stated is None else stated)
        elif stated not in (None, 1, 1.0):
            raise ValueError(
                f"partial_rotary_factor={brief(stated)} is not supported for this architecture; expected 1"
            )
        if head_dim % 2:
            raise ValueError(f"head_dim={head_dim} is odd, the rotary embedding needs an even one")
        rope_type = found.pop("rope_type", None) or "default"
        rope_type = _ALIASES.get(rope_type, rope_type) if isinstance(rope_type, str) else rope_type
        if not isinstance(rope_type, str) or rope_type not in _KEYS:
            raise ValueError(f"rope type {rope_type!r} is not supported; supported: {', '.join(_KEYS)}")
        theta = _number("rope_theta", found.pop("rope_theta", None))
        found = {key: value for key, value in found.items() if value is not None}
        if rope_type == "dynamic" and "alpha" in found and found.keys() <= _BESIDE_ALPHA and head_dim > 2:
            theta *= _number("alpha", found["alpha"]) ** (head_dim / (head_dim - 2))
            rope_type, found = "default", {}
        required, optional = _KEYS[rope_type]
        if missing := [key for key in required if key not in found]:
            raise ValueError(f"rope type {rope_type!r} needs {', '.join(missing)}")
        if unknown := sorted(found.keys() - {*required, *optional}):
            raise ValueError(
                f"rope type {rope_type!r} has no {', '.join(unknown)}; known: {', '.join((*required, *optional))}"
            )
        fields = {key: _field(key, value, head_dim) for key, value in found.items()}
        if rope_type in ("yarn", "llama3", "longrope"):
            # The top-level key has priority, as in files of the Phi-3 kind.
            key = "original_max_position_embeddings"
            original = next((c[key] for c in (config, found) if c.get(key) is not None), max_position_embeddings)
            if _number(key, original) != int(original) or not 1 <= original < 2**31:
                raise ValueError(f"{key} is {original!r}, expected an integer from 1 to {2**31 - 1}")
            fields[key] = int(original)
        if rope_type in ("yarn", "longrope"):
            fields.setdefault("factor", max_position_embeddings / fields["original_max_position_embeddings"])
        if rope_type == "dynamic" and head_dim < 4:
            raise ValueError(f"rope type 'dynamic' needs head_dim >= 4, found {head_dim}")
        if rope_type == "llama3" and fields["high_freq_factor"] <= fields["low_freq_factor"]:
            raise ValueError(
                f"high_freq_factor={found['high_freq_factor']} must exceed low_freq_factor={found['low_freq_factor']}"
            )
        if rope_type == "yarn" and theta <= 1:
            raise ValueError(f"rope_theta={theta} must exceed 1 for rope type 'yarn'")
        rope = cls(head_dim, theta, max_position_embeddings, rope_type, **fields)
        if rope_type == "longrope" and rope.attention_factor is None and rope.original_max_position_embeddings == 1:
            raise ValueError("original_max_position_embeddings=1 must exceed 1 for rope type 'longrope'")
        if rope.max_seq_len < 1:
            raise ValueError(
                f"factor={rope.factor} of max_position_embeddings={max_position_embeddings} leaves no position"
            )
        return rope

    @property
    def max_seq_len(self) -> int:
        """Longest sequence the embedding was made for: scaling types that stretch the context count their factor."""
        if self.rope_type in ("linear", "dynamic"):
            return int(self.max_position_embeddings * self.factor)
        if self.rope_type == "yarn":
            return max(self.max_position_embeddings, int(self.original_max_position_embeddings * self.factor))
        return self.max_position_embeddings

    @property
    def depends_on_length(self) -> bool:
        """Whether the angle of a position changes with the length of its row."""
        return self.rope_type in ("dynamic", "longrope")

    @property
    def amplitude(self) -> float:
        """Factor on cos and sin (transformers calls it attention scaling)."""
        if self.rope_type == "yarn":
            return self._yarn_amplitude() if self.attention_factor is None else self.attention_factor
        if self.rope_type == "longrope":
            if self.attention_factor is not None:
                return self.attention_factor
            return math.sqrt(1 + max(0.0, math.log(self.factor)) / math.log(self.original_max_position_embeddings))
        return 1.0

    def amplitudes(self, seq_len: Int[Array, " B"]) -> Any:
        """``amplitude`` of rows whose longest position + 1 is ``seq_len``: a number, or (B, 1, 1) f32 where the config
        states one for short and one for long rows (Phi-3.5-MoE)."""
        if self.short_mscale is None or self.long_mscale is None:
            return self.amplitude
        is_long = seq_len > self.original_max_position_embeddings
        return jnp.where(is_long, self.long_mscale, self.short_mscale)[:, None, None]

    @property
    def score_scale(self) -> float:
        """Factor on attention scores that DeepSeek's models apply besides, for all columns of a head alike."""
        return self._mscale(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _yarn_amplitude(self) -> float:
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    def _mscale(self, weight: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * weight * math.log(self.factor) + 1.0

    def frequencies(self, seq_len: Int[Array, " B"]) -> Float[Array, "B F"]:
        """Angle per position of each column pair, (B, dim/2) f32, for rows whose longest position + 1 is ``seq_len``.

        Only dynamic and longrope depend on ``seq_len``; a row's frequencies never depend on its neighbours in the
        batch.
        """
        batch = (*seq_len.shape, self.dim // 2)
        if self.rope_type == "dynamic":
            return self._dynamic(seq_len)
        if self.rope_type == "longrope":
            powers = np.float32(self.theta) ** _exponents(self.dim)
            short, long = (1 / (np.asarray(f, np.float32) * powers) for f in (self.short_factor, self.long_factor))
            return jnp.where(seq_len[:, None] > self.original_max_position_embeddings, long, short)
        static = {"default": self._default, "linear": self._linear, "yarn": self._yarn, "llama3": self._llama3}
        return jnp.broadcast_to(jnp.asarray(static[self.rope_type]()), batch)

    def _default(self) -> np.ndarray:
        return (1 / np.float32(self.theta) ** _exponents(self.dim)).astype(np.float32)

    def _dynamic(self, seq_len: Int[Array, " B"]) -> Float[Array, "B F"]:
        length = jnp.maximum(seq_len, self.max_position_embeddings).astype(jnp.float32)
        stretch = self.factor * length / self.max_position_embeddings - (self.factor - 1)
        base = self.theta * stretch ** (self.dim / (self.dim - 2))
        return 1.0 / base[:, None] ** jnp.asarray(_exponents(self.dim))

    def _linear(self) -> np.ndarray:
        return self._default() / np.float32(self.factor)

    def _yarn(self) -> np.ndarray:
        """Blend of extrapolation (fast columns) and interpolation (slow columns) along a linear ramp."""

        def column(rotations: float) -> float:
            turns = self.original_max_position_embeddings / (rotations * 2 * math.pi)
            return self.dim * math.log(turns) / (2 * math.log(self.theta))

        low, high = column(self.beta_fast), column(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        high = high + 0.001 if low == high else high
        ramp = np.clip((np.arange(self.dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
        extrapolated = self._default()
        interpolated = 1 / (np.float32(self.factor) * np.float32(self.theta) ** _exponents(self.dim))
        return interpolated * ramp + extrapolated * (1 - ramp)

    def _llama3(self) -> np.ndarray:
        inverse = self._default()
        wavelength = 2 * np.float32(math.pi) / inverse
        original, low, high = self.original_max_position_embeddings, self.low_freq_factor, self.high_freq_factor
        smooth = (np.float32(original) / wavelength - np.float32(low)) / np.float32(high - low)
        blended = (1 - smooth) * inverse / np.float32(self.factor) + smooth * inverse
        scaled = np.where(wavelength > original / low, inverse / np.float32(self.factor), blended)
        return np.where(wavelength < original / high, inverse, scaled)


def rotary_angles(
    config: RopeConfig, positions: Int[Array, "B S"], seq_len: Int[Array, " B"]
) -> tuple[Float[Array, "B S F"], Float[Array, "B S F"]]:
    """cos and sin, (B, S, dim/2) f32, amplitude included. seq_len: (B,) longest real position of each row, plus one."""
    angles = positions[..., None].astype(jnp.float32) * config.frequencies(seq_len)[:, None, :]
    amplitude = config.amplitudes(seq_len)
    return jnp.cos(angles) * amplitude, jnp.sin(angles) * amplitude


def rotate(
    x: Float[Array, "B S N D"], cos: Float[Array, "B S F"], sin: Float[Array, "B S F"], *, is_interleaved: bool = False
) -> Float[Array, "B S N D"]:
    """Rotate column pairs (i, i + F) of each head, i < F, by the angle of its position; columns from 2F on stay as they
    are. float32 inside, x's dtype outside.

    is_interleaved: the pairs are (2i, 2i + 1). They leave as (i, i + F): queries and keys have their columns in the
    same order then, which is all that their product needs.
    """
    half = cos.shape[-1]
    pairs = (
        (x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]) if is_interleaved else jnp.split(x[..., : 2 * half], 2, -1)
    )
    first, second = (part.astype(jnp.float32) for part in pairs)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    rotated = [(first * cos - second * sin).astype(x.dtype), (second * cos + first * sin).astype(x.dtype)]
    return jnp.concatenate([*rotated, x[..., 2 * half :]], axis=-1)


def _rotated_width(head_dim: int, factor: Any) -> int:
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor <= 1:
        raise ValueError(f"partial_rotary_factor is {brief(factor)}, expected a number above 0, at most 1")
    return int(head_dim * factor)


def _exponents(dim: int) -> np.ndarray:
    """2i/dim for each pair of columns, (dim/2,) f32."""
    return np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)


def _scaling_dict(config: Json) -> dict[str, Any]:
    """One flat dict from either dialect; ``type`` becomes ``rope_type``."""
    parameters, scaling = config.get("rope_parameters"), config.get("rope_scaling")
    if parameters is not None and scaling is not None:
        raise ValueError("rope_parameters and rope_scaling are both given; keep one of them")
    flat = parameters if parameters is not None else scaling if scaling is not None else {}
    if not isinstance(flat, Mapping):
        raise ValueError(f"rope parameters are {flat!r}, expected an object")
    flat = dict(flat)
    if any(isinstance(value, Mapping) for value in flat.values()):
        raise ValueError("rope_parameters per layer type are not supported for this architecture")
    old_name = flat.pop("type", None)
    flat.setdefault("rope_type", old_name)
    for key in ("rope_theta", "partial_rotary_factor"):
        value = config.get(key)
        if value is not None and flat.setdefault(key, value) != value:
            raise ValueError(f"{key}={value!r} and rope_parameters.{key}={flat[key]!r} disagree; keep one of them")
    return flat


def _number(key: str, value: Any) -> float:
    if value is None:
        raise ValueError(f"{key} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not _LEAST <= value <= _MOST:
        raise ValueError(f"{key} is {brief(value)}, expected a number from {_LEAST:g} to {_MOST:g}")
    return float(value)


def _field(key: str, value: Any, head_dim: int) -> Any:
    if key in ("short_factor", "long_factor"):
        if not isinstance(value, list) or len(value) != head_dim // 2:
            found = f"{len(value)} values" if isinstance(value, list) else repr(value)
            raise ValueError(f"{key} has {found}, expected a list of {head_dim // 2}, half of head_dim")
        return tuple(_number(key, v) for v in value)
    if key == "truncate":
        if not isinstance(value, bool):
            raise ValueError(f"truncate is {value!r}, expected true or false")
        return value
    return _number(key, value)
