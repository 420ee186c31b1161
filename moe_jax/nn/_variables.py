"""The Variables of ``FusedMoE``: their types, how they are made from arguments, and how new values get into them."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import PartitionSpec

from moe_jax._arguments import shown
from moe_jax._config import MoEConfig
from moe_jax._typing import ArrayArg
from moe_jax.parallel import ParallelConfig
from moe_jax.parallel._logical import EMBED, EXPERT, MLP, TreeVariable, name_axes, state_axes
from moe_jax.parallel._weights import leaf_specs, logical_spec
from moe_jax.quantization import ExpertWeights, QuantizedMatrix, QuantizedTensor

CORRECTION_BIAS = "e_score_correction_bias"
AXES = (EXPERT, EMBED, MLP)  # of the experts of a layer


class QuantizedParam(TreeVariable):
    """Variable of quantized weights, which have no gradient: an ``ExpertWeights`` or a ``QuantizedMatrix``.

    It is no ``nnx.Param``, so optimizers and gradients over ``nnx.Param`` pass it over.
    """

    def leaf_specs(self, value: Any, spec: PartitionSpec) -> Any:
        return value.leaf_specs(spec) if isinstance(value, QuantizedMatrix) else leaf_specs(value, spec)

    def name_axes(self, parallel: ParallelConfig | None) -> None:
        """Say how a layer's experts are split: by axes of its mesh, or by logical ones where it has none."""
        if parallel is None:
            name_axes(self, AXES)
        else:
            state_axes(self, tuple(logical_spec(parallel)))


class ExpertParams(nnx.Module):
    """Unquantized experts, one ``nnx.Param`` an array, used like a Variable whose value is an ``ExpertWeights``.

    They are several since ``nnx.Optimizer`` loses its state for a Variable whose value is more than one array.
    """

    def __init__(self, weights: ExpertWeights):
        self.w13, self.w2 = nnx.Param(weights.w13.data), nnx.Param(weights.w2.data)
        self.w13_bias = None if weights.w13_bias is None else nnx.Param(weights.w13_bias)
        self.w2_bias = None if weights.w2_bias is None else nnx.Param(weights.w2_bias)
        self.scheme, self.layouts = weights.scheme, (weights.w13.layout, weights.w2.layout)

    def get_value(self) -> ExpertWeights:
        w13, w2 = (
            QuantizedTensor(variable.get_value(), layout=layout)
            for variable, layout in zip((self.w13, self.w2), self.layouts, strict=True)
        )
        return ExpertWeights(w13, w2, value_of(self.w13_bias), value_of(self.w2_bias), self.scheme)

    def set_value(self, weights: ExpertWeights) -> None:
        vars(self).update(vars(self.copy(weights)))

    def copy(self, weights: ExpertWeights) -> "ExpertParams":
        """The same with other values, whose biases must be there where these are."""
        arrays = dict(w13=weights.w13.data, w2=weights.w2.data, w13_bias=weights.w13_bias, w2_bias=weights.w2_bias)
        copied = ExpertParams(weights)
        for name, array in arrays.items():
            if (variable := getattr(self, name)) is not None:
                setattr(copied, name, variable.copy(array))
        return copied

    def name_axes(self, parallel: ParallelConfig | None) -> None:
        """As of ``QuantizedParam``, by array."""
        specs = leaf_specs(self.get_value(), PartitionSpec(*AXES) if parallel is None else logical_spec(parallel))
        own = dict(w13=specs.w13.data, w2=specs.w2.data, w13_bias=specs.w13_bias, w2_bias=specs.w2_bias)
        for name, spec in own.items():
            if (variable := getattr(self, name)) is not None:
                (name_axes if parallel is None else state_axes)(variable, tuple(cast(PartitionSpec, spec)))


def weights_variable(weights: ExpertWeights) -> QuantizedParam | ExpertParams:
    """What holds the experts of a layer, by their scheme."""
    return ExpertParams(weights) if weights.scheme.weights is None else QuantizedParam(weights)


def value_of(variable: nnx.Variable[Any] | None) -> Any:
    return None if variable is None else variable.get_value()


class RoutingParam(nnx.Variable[Any]):
    """Variable for what routing reads besides logits: correction bias and scale (E,), hash table (vocab, top_k)."""


class WeightsVersion(nnx.Variable[Any]):
    """() int32, raised by each reload. A leaf and not an attribute, so a reload never changes the jit cache key."""


def routing_bias(value: ArrayArg | bool | None, config: MoEConfig, *, is_abstract: bool) -> RoutingParam | None:
    num_experts = config.num_experts
    if value is None:
        return None
    if value is True:
        return RoutingParam(
            jax.ShapeDtypeStruct((num_experts,), jnp.float32) if is_abstract else jnp.zeros((num_experts,), jnp.float32)
        )
    return RoutingParam(checked_bias(value, config))


def checked_bias(value: ArrayArg | bool, config: MoEConfig) -> jax.Array:
    num_experts, has_zero_experts = config.num_experts, config.zero_expert_type is not None
    bias = _array(CORRECTION_BIAS, value).astype(jnp.float32)
    if bias.ndim != 1 or bias.shape[0] < num_experts or (bias.shape[0] > num_experts and not has_zero_experts):
        raise ValueError(f"{CORRECTION_BIAS} has shape {bias.shape}, expected ({num_experts},)")
    if not isinstance(bias, Tracer) and not np.isfinite(np.asarray(bias)).all():
        raise ValueError(f"{CORRECTION_BIAS} holds NaN or infinity; the checkpoint is damaged")
    return bias


def routing_table(value: ArrayArg | None, top_k: int, num_experts: int) -> RoutingParam | None:
    if value is None:
        return None
    table = _array("hash_indices_table", value)
    is_table = table.ndim == 2 and table.shape[0] > 0 and table.shape[1] == top_k
    if not is_table or not jnp.issubdtype(table.dtype, jnp.integer):
        raise ValueError(
            f"hash_indices_table is {table.dtype} {table.shape}, expected integers of shape (vocab, {top_k}) with a row"
        )
    if not isinstance(table, Tracer):
        bad = (wrong := np.asarray(table))[(wrong < 0) | (wrong >= num_experts)]
        if bad.size:
            raise ValueError(f"hash_indices_table holds {bad[0]}, expected ids of experts from 0 to {num_experts - 1}")
    return RoutingParam(table)


def routing_scale(value: ArrayArg | None, num_experts: int) -> RoutingParam | None:
    if value is None:
        return None
    scale = _array("per_expert_scale", value).astype(jnp.float32)
    if scale.shape != (num_experts,):
        raise ValueError(f"per_expert_scale has shape {scale.shape}, expected ({num_experts},)")
    if not isinstance(scale, Tracer) and not np.isfinite(np.asarray(scale)).all():
        raise ValueError("per_expert_scale holds NaN or infinity, expected finite numbers; the checkpoint is damaged")
    return RoutingParam(scale)


def _array(name: str, value: Any) -> jax.Array:
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name}={shown(value)}, expected an array of numbers") from None
