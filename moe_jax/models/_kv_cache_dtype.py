"""The key-value cache in FP8 e4m3: who asks for it, and the scales that a checkpoint gives its layers.

Codes times scale are keys or values: one scale for the keys of a layer and one for its values, 1 where a checkpoint has
none, as in vLLM.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_jax._typing import Array, DTypeLike
from moe_jax._versions import Place
from moe_jax.loading import CheckpointError
from moe_jax.loading._errors import listed, shown
from moe_jax.parallel import ParallelConfig
from moe_jax.parallel._logical import name_axes
from pallas_kernels.common.numerics import cast_e4m3, divide, widen

E4M3 = "float8_e4m3fn"
_NAMES = {"fp8": E4M3, "fp8_e4m3": E4M3, E4M3: E4M3}
_OTHER_NAMES = ("fp8_e5m2", "float8_e5m2", "fp8_inc", "fp8_ds_mla", "nvfp4", "int8", "int8_per_token_head")
_MISSING = "the cache is held in the model's dtype, or in FP8 e4m3 with one scale a tensor"
# Below a layer's attention: compressed-tensors of today and before, ModelOpt, AutoFP8's one scale for both.
_SPELLINGS = {
    "k_scale": ("k_scale", "attn.k_scale", "k_proj.k_scale", "k_proj.output_scale", "kv_scale"),
    "v_scale": ("v_scale", "attn.v_scale", "v_proj.v_scale", "v_proj.output_scale", "kv_scale"),
}


class CacheScale(nnx.Variable[Any]):
    """() float32: what codes of keys or values in the cache are multiplied with."""

    @classmethod
    def one(cls, *, is_abstract: bool) -> "CacheScale":
        variable = cls(jax.ShapeDtypeStruct((), jnp.float32) if is_abstract else jnp.float32(1))
        name_axes(variable, ())
        return variable


def quantized(x: Array, scale: Array) -> Array:
    """Codes of x, of x's shape: x / scale rounded to e4m3, saturating at +-448; NaN stays NaN."""
    return cast_e4m3(divide(x.astype(jnp.float32), scale))


def widened(q: Array, k: Array, v: Array, scales: tuple[Array, Array]) -> tuple[Array, Array, Array]:
    """Operands in q's dtype for attention that knows no codes: q times the scale of the keys, and bare codes, which
    every dtype of a model holds. What it gives is to be multiplied with the scale of the values (``times``)."""
    return times(q, scales[0]), widen(k, q.dtype), widen(v, q.dtype)


def times(x: Array, scale: Array) -> Array:
    """The product, rounded once to x's dtype."""
    return (x.astype(jnp.float32) * scale).astype(x.dtype)


def resolve(checkpoint: Any, asked: DTypeLike | None, dtype: np.dtype[Any]) -> str | None:
    """E4M3, or None for a cache of ``dtype``, that of the model.

    checkpoint: an opened ``Checkpoint``; it decides where ``asked`` is None or "auto". Raises NotImplementedError for
    another cache, and ValueError for what names no dtype.
    """
    if asked is None or (isinstance(asked, str) and asked == "auto"):
        return _stated(checkpoint, dtype)
    if isinstance(asked, str) and asked in _OTHER_NAMES:
        raise NotImplementedError(f"kv_cache_dtype={asked!r}: {_MISSING}, 'fp8_e4m3'")
    if isinstance(asked, str) and asked in _NAMES:
        return _NAMES[asked]
    try:
        found = jnp.dtype(asked)
    except TypeError:
        raise ValueError(f"kv_cache_dtype={asked!r}, expected 'auto', 'fp8', 'fp8_e4m3' or {str(dtype)!r}") from None
    if found == jnp.float8_e4m3fn:
        return E4M3
    if found != dtype:
        raise NotImplementedError(f"kv_cache_dtype={found}: {_MISSING}; the model's is {dtype}")
    return None


def _stated(checkpoint: Any, dtype: np.dtype[Any]) -> str | None:
    """What config.json or ModelOpt's hf_quant_config.json says of the cache."""
    config = checkpoint.quantization_config
    nested = config.get("quantization") if isinstance(config, Mapping) else None  # ModelOpt's older files
    found = None
    for part in (config, nested):
        for key, is_e4m3 in (("kv_cache_scheme", _is_e4m3_scheme), ("kv_cache_quant_algo", _is_e4m3_word)):
            value = part.get(key) if isinstance(part, Mapping) else None
            if not value:
                continue
            if not is_e4m3(value):
                raise NotImplementedError(
                    f"{checkpoint.config_path}: {key} is {shown(value)}: {_MISSING}; "
                    f"kv_cache_dtype={str(dtype)!r} keeps keys and values unquantized"
                )
            found = E4M3
    return found


def _is_e4m3_word(algorithm: Any) -> bool:
    return algorithm == "FP8"


def _is_e4m3_scheme(scheme: Any) -> bool:
    """Of compressed-tensors' ``QuantizationArgs``, whose defaults these are, and of ModelOpt, which leaves most out."""
    wanted = dict(num_bits=8, type="float", strategy="tensor", symmetric=True, dynamic=False)
    assumed = dict(strategy="tensor", symmetric=True, dynamic=False)
    if not isinstance(scheme, Mapping):
        return False
    return {key: assumed.get(key) if scheme.get(key) is None else scheme[key] for key in wanted} == wanted


def read_scales(
    layers: Iterable[tuple[str, Any]], source: Any, where: str, parallel: ParallelConfig | None
) -> list[tuple[Place, Array]]:
    """New values for the scales of layers with a cache in FP8.

    layers: (checkpoint name, attention module). source: ``Checkpoint`` or ``ArraySource``; where: for errors. Where it
    has no scale of any layer, new models get 1, and those that are loaded keep theirs.

    Raises:
        CheckpointError: scales of some layers alone, or one that is no number above 0.
    """
    attentions = [(name, module) for name, module in layers if getattr(module, "k_scale", None) is not None]
    places = [(name, Place(module, word)) for name, module in attentions for word in _SPELLINGS]
    names = [_found(name, place.name, source) for name, place in places]
    missing = [f"{name}.{place.name}" for (name, place), found in zip(places, names, strict=True) if found is None]
    if missing and len(missing) < len(places):
        raise CheckpointError(f"{where}: scales of the cache are missing: {listed(missing)}; other layers have theirs")
    values = []
    for (_, place), name in zip(places, names, strict=True):
        if name is None and not isinstance(place.variable.get_value(), jax.ShapeDtypeStruct):
            continue
        number = 1.0 if name is None else _number(name, source, where)
        values.append((place, _placed(np.float32(number), parallel)))
    return values


def _found(attention: str, scale: str, source: Any) -> str | None:
    names = (f"{attention}.{word}" for word in _SPELLINGS[scale])
    return next((name for name in names if name in source), None)


def _number(name: str, source: Any, where: str) -> float:
    array = np.asarray(source.read(name))
    number = float(array.astype(np.float32).reshape(-1)[0]) if array.size == 1 else float("nan")
    if not 0 < number < float("inf"):
        found = f"{number}" if array.size == 1 else f"shape {array.shape}"
        raise CheckpointError(f"{where}: tensor {name}: {found}, expected one number above 0: the scale of a cache")
    return number


def _placed(value: np.float32, parallel: ParallelConfig | None) -> Array:
    """On the default device, or whole on every one of a mesh."""
    if parallel is None:
        return jnp.asarray(value)
    sharding = jax.sharding.NamedSharding(parallel.mesh, jax.sharding.PartitionSpec())
    return jax.make_array_from_callback((), sharding, lambda index: np.asarray(value))
