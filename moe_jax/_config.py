"""``MoEConfig``: everything static about one routed-experts layer, as a hashable pytree node without leaves."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax._arguments import shown
from moe_jax._typing import Size
from moe_jax.activations import ActivationConfig
from moe_jax.quantization import ExpertShape, QuantFormat, Scheme, Strategy
from moe_jax.routing import RoutingConfig

COMPUTE_DTYPES = tuple(jnp.dtype(d) for d in (jnp.bfloat16, jnp.float16, jnp.float32))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class MoEConfig(ActivationConfig, RoutingConfig):
    """Static description of one layer: the settings of its router, of its activation and of its experts.

    Arguments mean what they mean for ``FusedMoE``; those after ``scheme`` are given by name. A config is registered as
    static: it needs no ``static_argnames`` under ``jax.jit``.

    Args:
        num_experts: E.
        top_k: experts per token. For the other settings of routing see ``RoutingConfig``.
        hidden_size: H.
        intermediate_size: I of one expert.
        scheme: what is quantized.
        activation, is_act_and_mul, swiglu_limit, swiglu_alpha, swiglu_beta: see ``ActivationConfig``.
        has_bias: the experts have biases.
        implementation: ordered names of backends to try; None for the platform's own order.
        pinned_tokens: choose tiles and kernel configurations as for this many tokens in every call. A token's output
            then has the same bits beside any number of other tokens. None chooses by the tokens of the call.
        keep_hidden: the forward pass of a differentiated call keeps gate and up of each row, (Mp, G * I) in ``dtype``,
            so that the backward pass does not compute them again: memory for time, by the hopper backend alone. Its
            output differs from that of other calls, as gate and up are rounded to ``dtype`` before the activation, and
            tiles are those of the gradient, not those of ``pinned_tokens``. Calls that nobody differentiates stay as
            they are. Not for schemes with quantized activations. ``explain`` says what is kept.
        dtype: of computation; with "float32" no weight is rounded to bfloat16 on the way.
        param_dtype: of unquantized weights and biases.
        name: shown in errors.
        intermediate_size_full: see ``ExpertShape``; ``Shard.local`` sets it.
        split_axes: mesh axes over which I is split. ``moe_jax.parallel`` sets it inside ``jax.shard_map``, so that
            dynamic activation scales are those of the whole row.
        call_axes: all mesh axes over whose devices a call is spread. ``moe_jax.parallel`` sets it likewise, so that
            dynamic activation scales per tensor are those of the whole call.
    """

    hidden_size: int
    intermediate_size: int
    scheme: Scheme = Scheme("bf16")
    _: dataclasses.KW_ONLY
    has_bias: bool = False
    implementation: tuple[str, ...] | None = None
    pinned_tokens: int | None = None
    keep_hidden: bool = False
    dtype: Any = jnp.bfloat16  # a NumPy dtype from __post_init__ on
    param_dtype: Any = jnp.bfloat16
    name: str = ""
    intermediate_size_full: int | None = None
    split_axes: tuple[str, ...] = ()
    call_axes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        RoutingConfig.__post_init__(self)
        ActivationConfig.__post_init__(self)
        for field in ("num_experts", "top_k", "hidden_size", "intermediate_size"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
                raise ValueError(f"{field} is {shown(value)}, expected an integer of at least 1")
        if not isinstance(self.name, str):
            raise TypeError(f"name={shown(self.name)}, expected a string")
        if self.pinned_tokens is not None and (type(self.pinned_tokens) is not int or self.pinned_tokens < 1):
            raise ValueError(f"pinned_tokens is {shown(self.pinned_tokens)}, expected None or an integer of at least 1")
        if self.keep_hidden and self.scheme.activations is not None:
            label = f"{self.name}: " if self.name else ""
            raise ValueError(
                f"{label}keep_hidden=True with scheme {self.scheme.name!r}: its forward pass multiplies quantized rows "
                "and its gradient takes unquantized ones; expected a scheme that leaves activations unquantized, or "
                "keep_hidden=False"
            )
        for field in ("dtype", "param_dtype"):
            dtype = jnp.dtype(getattr(self, field))
            if dtype not in COMPUTE_DTYPES:
                raise ValueError(f"{field} is {dtype.name}, expected one of {[d.name for d in COMPUTE_DTYPES]}")
            object.__setattr__(self, field, dtype)  # one spelling, so that equal configs hash equal

    def planned_tokens(self, num_tokens: Size) -> Size:
        """The number of tokens that tiles are chosen for."""
        return num_tokens if self.pinned_tokens is None else self.pinned_tokens

    @property
    def has_call_scale(self) -> bool:
        """Whether all rows of a call share one activation scale that is computed from them."""
        fmt = self.scheme.activations
        return fmt is not None and fmt.dynamic and fmt.strategy is Strategy.TENSOR

    def scale_axes(self, fmt: QuantFormat | None, *, is_hidden: bool) -> tuple[str, ...]:
        """Mesh axes over which a dynamic scale of activations is taken: of the layer's input, or of hidden ones."""
        if fmt is None or not fmt.dynamic:
            return ()
        if fmt.strategy is Strategy.TENSOR:
            return self.call_axes
        return self.split_axes if is_hidden else ()

    @property
    def shape(self) -> ExpertShape:
        """What quantization has to know of the layer."""
        return ExpertShape(
            num_experts=self.num_experts,
            num_projections=self.num_projections,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            param_dtype=self.param_dtype,
            has_bias=self.has_bias,
            name=self.name,
            intermediate_size_full=self.intermediate_size_full,
        )
