"""The low-rank addend of a product, ``B (scale * A x)``, for rows of one expert or one matrix."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from moe_jax._typing import Array, DTypeLike
from moe_jax.quantization import ExpertWeights, LowRank

Choices = dict[tuple[str, ...], Array]  # (T, R) of the addends of these fields of ``AdaptedWeights``


def low_rank_product(rows: Array, addend: LowRank, operand_dtype: DTypeLike = jnp.float32) -> Array:
    """rows (R, K) by an addend without its expert axis -> (R,) + lead + (N,) float32.

    operand_dtype: what the operands of both products are rounded to; sums are float32. ``addend.chosen`` is that of the
    rows.
    """
    inner = _product("rk,...nk->r...n", rows, addend.a, operand_dtype) * addend.scale
    if addend.chosen is not None:
        inner = inner * addend.chosen.reshape(rows.shape[0], *(1,) * (inner.ndim - 2), -1)
    return _product("r...n,...mn->r...m", inner, addend.b, operand_dtype)


def with_rows_chosen(weights: ExpertWeights, take: Callable[[Array], Array] | None) -> ExpertWeights:
    """The weights with ``chosen`` of their addends, by token, through ``take``; without where that is None."""

    def of(lora: LowRank | None) -> LowRank | None:
        if lora is None or lora.chosen is None:
            return lora
        return dataclasses.replace(lora, chosen=None if take is None else take(lora.chosen))

    return weights.adapted(of(weights.w13_lora), of(weights.w2_lora))


def choices_of(weights: ExpertWeights) -> Choices:
    """What tokens have chosen among adapters, each array once, by the fields of the addends that have it."""
    fields: dict[int, list[str]] = {}
    arrays: dict[int, Array] = {}
    for name in ("w13_lora", "w2_lora"):
        lora = getattr(weights, name)
        if lora is not None and lora.chosen is not None:
            fields.setdefault(id(lora.chosen), []).append(name)
            arrays[id(lora.chosen)] = lora.chosen
    return {tuple(names): arrays[key] for key, names in fields.items()}


def with_choices(weights: ExpertWeights, choices: Choices) -> ExpertWeights:
    """Inverse of ``choices_of``, for weights whose addends have no ``chosen``."""
    loras = dict(w13_lora=weights.w13_lora, w2_lora=weights.w2_lora)
    for names, chosen in choices.items():
        loras |= {name: dataclasses.replace(loras[name], chosen=chosen) for name in names}
    return weights.adapted(**loras)


def adapter_dtype(dtype: DTypeLike) -> DTypeLike:
    """What operands of adapters are rounded to in a layer that computes in ``dtype``."""
    return jnp.bfloat16 if jnp.dtype(dtype) == jnp.bfloat16 else jnp.float32


def _product(subscripts: str, rows: Array, matrix: Array, operand_dtype: DTypeLike) -> Array:
    is_wide = jnp.dtype(operand_dtype) == jnp.float32
    return jnp.einsum(
        subscripts,
        rows.astype(operand_dtype),
        matrix.astype(operand_dtype),
        precision=lax.Precision.HIGHEST if is_wide else None,
        preferred_element_type=jnp.float32,
    )
