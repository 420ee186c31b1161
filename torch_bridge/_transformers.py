"""transformers' own switch: ``from_pretrained(..., experts_implementation="moe_jax")``."""

import inspect
import warnings
from typing import Any

import torch

from moe_jax.quantization import Scheme, SchemeLike
from torch_bridge._experts_modules import ExpertsModule, layer_of, names_of, turned
from torch_bridge._layer import FusedMoE

_OWN_NAMES: set[str] = set()  # that transformers' table has from here
_NEWER = "install transformers 5.7 or newer, or use patch(model)"


def register_experts(
    name: str = "moe_jax",
    *,
    quantize: SchemeLike = None,
    implementation: Any = None,
    torch_kernels: bool | None = None,
) -> None:
    """Add a name to transformers' table of experts implementations, which ``experts_implementation=`` chooses from.

    A module of experts gets its layer at its first call. Unquantized weights have one memory with the module's
    parameters, so that state dicts, ``save_pretrained`` and loading go on as before; where rows of gate and up
    alternate (gpt-oss), those of the first product are kept twice, and copied again after a change that torch counts.
    With ``quantize`` the parameters are let go: their state dict raises NotImplementedError, and so does a later call
    of another implementation ("eager"). Experts get no gradients; inputs and routing weights do.

    Args:
        name: what ``experts_implementation`` says; a second registration replaces the first for modules not yet called.
        quantize: what to quantize the experts to at the first call; None keeps them.
        implementation, torch_kernels: as in ``FusedMoE``.

    Raises ImportError for a transformers without that table, or whose table does not say how weights lie (before 5.7),
    ValueError for an unknown scheme.
    """
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation
    except ImportError as error:
        raise ImportError(f"transformers has no table of experts implementations; {_NEWER}") from error
    if "is_concatenated" not in inspect.signature(use_experts_implementation).parameters:
        raise ImportError(f"transformers does not say whether rows of gate and up alternate; {_NEWER}")
    Scheme.parse(quantize)
    made: Any = torch.compiler.disable(_layer_for)
    options: dict[str, Any] = dict(quantize=quantize, implementation=implementation, torch_kernels=torch_kernels)

    def forward(
        experts: ExpertsModule, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states (T, H), top_k_index and top_k_weights (T, top_k) -> (T, H)."""
        layer: FusedMoE = made(experts, top_k_index.shape[-1], options)
        dtype = hidden_states.dtype
        if dtype == layer.params_dtype:
            return layer.quant_method.apply(layer, hidden_states, top_k_weights, top_k_index)
        x = hidden_states.to(layer.params_dtype)
        return layer.quant_method.apply(layer, x, top_k_weights, top_k_index).to(dtype)

    ALL_EXPERTS_FUNCTIONS.register(name, forward)
    _OWN_NAMES.add(name)


def _layer_for(experts: ExpertsModule, top_k: int, options: dict[str, Any]) -> FusedMoE:
    """The module's layer; made anew where its parameters are not what they were."""
    layer, names, places, _ = vars(experts).get("_moe_jax", (None, {}, None, None))
    if layer is not None and (places is None or places == _places(experts, names)):
        return layer
    names = names_of(experts)
    leaves = {leaf: getattr(experts, name) for leaf, name in names.items()}
    if torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves.values()):
        warnings.warn(
            f"{type(experts).__name__}: moe_jax gives experts no gradients; call requires_grad_(False) on them, or "
            "train them with another experts_implementation",
            stacklevel=3,
        )
    layer = layer_of(experts, top_k, **options)
    is_quantized = layer.config.scheme.is_quantized
    for name, leaf in leaves.items():
        if is_quantized:
            leaf.data = leaf.data.new_empty(0)
        elif not _is_copied(experts, name):
            leaf.data = turned(experts, getattr(layer, name).data)
    if is_quantized:
        experts.register_state_dict_pre_hook(_refuse_state)
        experts.register_forward_pre_hook(_refuse_others)
    # Past torch's registration of submodules: the layer's parameters are the module's own.
    # Copied ones are held, so that no other tensor gets their address while it stands for them.
    held = [] if is_quantized else [leaf.data for name, leaf in leaves.items() if _is_copied(experts, name)]
    vars(experts)["_moe_jax"] = layer, names, None if is_quantized else _places(experts, names), held
    return layer


def _is_copied(experts: ExpertsModule, name: str) -> bool:
    """Whether the layer's leaf is no view of the module's."""
    return not experts.is_concatenated and name.startswith("w13")


def _places(experts: ExpertsModule, names: dict[str, str]) -> list[tuple[int, int]]:
    """Where the parameters lie, and of copied ones how often they were written. names: of ``names_of``."""
    parameters, places = vars(experts)["_parameters"], []
    for leaf, name in names.items():
        tensor = parameters[name] if name in parameters else getattr(experts, name)  # by torch's lookup it takes 1 us
        is_counted = _is_copied(experts, leaf) and not tensor.is_inference()
        places.append((tensor.data_ptr(), tensor._version if is_counted else 0))
    return places


def _refuse_others(experts: ExpertsModule, _: Any) -> None:
    name = experts.config._experts_implementation
    if name not in _OWN_NAMES:
        raise NotImplementedError(
            f"{type(experts).__name__}: experts_implementation={name!r}, but moe_jax quantized these experts at their "
            f"first call and let their weights go; expected one of {', '.join(sorted(_OWN_NAMES))}, or load the model "
            "again"
        )


def _refuse_state(experts: ExpertsModule, *_: Any) -> None:
    raise NotImplementedError(
        f"{type(experts).__name__} was quantized by moe_jax at its first call and keeps no weights that transformers "
        "can read; save the model before, or write a quantized checkpoint with moe_jax's quantize_checkpoint"
    )
