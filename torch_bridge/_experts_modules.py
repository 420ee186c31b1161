"""The modules in which transformers keeps a block's experts, read by the flags that its own implementations go by.

transformers marks such a class with ``use_experts_implementation``: instances have ``has_gate``, ``has_bias``,
``is_transposed`` (matrices are (in, out)) and ``is_concatenated`` (rows of gate, then rows of up; else they alternate).
Newer ones have ``has_post_expert_norm`` too. What they do between their two products is found by doing it.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import jax.numpy as jnp
import numpy as np
import torch

from moe_jax.activations import ACTIVATIONS, ActivationConfig, apply_activation
from moe_jax.quantization import Scheme, SchemeLike
from torch_bridge._layer import FusedMoE
from torch_bridge._tensors import refuse_foreign

_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
# Leaf of the layer -> names of transformers.
_NAMES = {
    "w13_weight": ("gate_up_proj", "up_proj"),
    "w2_weight": ("down_proj",),
    "w13_bias": ("gate_up_proj_bias", "up_proj_bias"),
    "w2_bias": ("down_proj_bias",),
}
_REACH, _POINTS = 30.0, 61  # where gates and ups are tried: past every clamp that a model has


if TYPE_CHECKING:

    class Layout(Protocol):
        """What turns leaves."""

        is_transposed: bool

    class ExpertsModule(Layout, Protocol):
        """What transformers marks, as far as it is read here."""

        has_gate: bool
        has_bias: bool
        is_concatenated: bool
        config: Any
        down_proj: torch.nn.Parameter
        act_fn: torch.nn.Module

        def _apply_gate(self, gate_up_out: torch.Tensor, /) -> torch.Tensor: ...

        def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]: ...

        def register_state_dict_pre_hook(self, hook: Callable[..., None], /) -> object: ...

        def register_forward_pre_hook(self, hook: Callable[..., None], /) -> object: ...

else:
    Layout = ExpertsModule = Any


def is_experts_module(module: object) -> bool:
    """Whether transformers runs this module by way of its table of implementations."""
    return all(hasattr(module, name) for name in (*_FLAGS, "down_proj"))


def names_of(experts: ExpertsModule) -> dict[str, str]:
    """Leaf of the layer -> the module's name of it."""
    return {leaf: name for leaf, names in _NAMES.items() for name in names if hasattr(experts, name)}


def parameters_of(experts: ExpertsModule) -> dict[str, torch.nn.Parameter]:
    """Leaf of the layer -> the module's parameter, as it lies there."""
    return {leaf: getattr(experts, name) for leaf, name in names_of(experts).items()}


def turned(experts: Layout, tensor: torch.Tensor) -> torch.Tensor:
    """A view of a leaf between the module's layout and the layer's."""
    return tensor.transpose(1, 2) if experts.is_transposed and tensor.ndim == 3 else tensor


def layer_of(
    experts: ExpertsModule,
    top_k: int,
    *,
    quantize: SchemeLike = None,
    prefix: str = "",
    implementation: Any = None,
    torch_kernels: bool | None = None,
    **routing: Any,
) -> FusedMoE:
    """A processed layer with a copy of the module's weights. routing: more arguments of ``FusedMoE``.

    Raises NotImplementedError for what the layer cannot do, ValueError for weights on the meta device.
    """
    activation, leaves = check_experts(experts), parameters_of(experts)
    weight = turned(experts, leaves["w2_weight"])
    layer = FusedMoE(
        weight.shape[0],
        top_k,
        weight.shape[1],
        weight.shape[2],
        weight.dtype,
        quant_config=quantize,
        online=Scheme.parse(quantize).is_quantized,
        prefix=prefix,
        has_bias=experts.has_bias,
        implementation=implementation,
        torch_kernels=torch_kernels,
        device=weight.device,
        **activation,
        **routing,
    )
    loader = layer.new_loader(fused_layout="out_in")
    for leaf, name in names_of(experts).items():
        for parsed in layer.parse_name(f"experts.{name}"):
            layer.accept_into(loader, parsed, turned(experts, leaves[leaf].detach()))
    layer.install(layer.finished(loader))
    return layer


def check_experts(experts: ExpertsModule) -> dict[str, Any]:
    """The activation of a module that a layer can stand for; raises as ``layer_of`` for another."""
    name = type(experts).__name__
    if getattr(experts, "has_post_expert_norm", False):
        raise NotImplementedError(
            f"{name} normalises what each expert gives (has_post_expert_norm), which is not built"
        )
    refuse_foreign(dict(experts.named_parameters()))
    if experts.down_proj.is_meta:
        raise ValueError(f"{name} is on the meta device; load the model's weights before converting")
    return activation_of(experts)


def activation_of(experts: ExpertsModule) -> dict[str, Any]:
    """Arguments of ``FusedMoE`` for what the module does between its products, by its values on a grid.

    Raises NotImplementedError where it is none of moe_jax's activations.
    """
    values = torch.linspace(-_REACH, _REACH, _POINTS, dtype=torch.float32)
    device = experts.down_proj.device
    if experts.has_gate:
        h = torch.stack([part.flatten() for part in torch.meshgrid(values, values, indexing="ij")])
        joined = h.flatten() if experts.is_concatenated else h.T.flatten()
        with torch.no_grad():
            found = experts._apply_gate(joined.to(device)[None])[0]
    else:
        h = values[None]
        with torch.no_grad():
            found = experts.act_fn(values.to(device))
    found = found.float().cpu().numpy()
    for options in _candidates(experts):
        own = np.asarray(apply_activation(jnp.asarray(h.numpy()), ActivationConfig(**options)))
        if np.allclose(found, own, rtol=1e-5, atol=1e-5):
            return options
    raise NotImplementedError(
        f"{type(experts).__name__}: its activation ({type(getattr(experts, 'act_fn', None)).__name__}) is none of "
        f"{', '.join(ACTIVATIONS)}"
    )


def _candidates(experts: ExpertsModule) -> Iterator[dict[str, Any]]:
    if not experts.has_gate:
        for name in ("silu", "gelu", "gelu_tanh", "relu2"):
            yield dict(activation=name, is_act_and_mul=False)
        return
    limits, alphas = (_numbers(experts, *names) for names in (("limit", "swiglu_limit"), ("alpha", "swiglu_alpha")))
    if experts.is_concatenated:
        for name in ("silu", "gelu", "gelu_tanh", "swiglustep"):
            yield dict(activation=name)
        for limit in limits:
            yield dict(activation="silu", swiglu_limit=limit)
    name = "swigluoai_uninterleave" if experts.is_concatenated else "swigluoai"
    for limit in limits:
        for alpha in alphas:
            beta: dict[str, Any] = dict(swiglu_beta=1.0) if experts.is_concatenated else {}
            yield dict(activation=name, swiglu_limit=limit, swiglu_alpha=alpha, **beta)


def _numbers(experts: ExpertsModule, *names: str) -> list[float]:
    values = (getattr(experts, name, None) for name in names)
    return [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
