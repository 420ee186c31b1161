"""Experts kept in the parameter dtype (float32, float16 or bfloat16)."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from moe_jax.quantization._methods import MoEMethod


@dataclasses.dataclass(frozen=True)
class UnquantizedMoEMethod(MoEMethod):
    """Weights as loaded; "quantizing" is a cast to the parameter dtype."""

    def quantize_stack(self, w: Any, param_dtype: Any) -> dict[str, Any]:
        return {"weight": jnp.asarray(w).astype(param_dtype)}
