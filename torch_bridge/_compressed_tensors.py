"""vLLM's methods for compressed-tensors checkpoints by their names: which schemes each takes, and nothing else."""

from collections.abc import Mapping
from typing import Any

import torch

from moe_jax import Scheme
from moe_jax.quantization import Packing
from torch_bridge._leaf_layout import LeafLayout
from torch_bridge._methods import SchemeMoEMethod
from torch_bridge._moe_config import FusedMoEConfig


class _CompressedTensorsMoEMethod(SchemeMoEMethod):
    """Built from the arguments of one group: objects of compressed-tensors, or dicts; None for unquantized."""

    stored_as: str | None = None

    def __init__(
        self, weight_quant: Any, input_quant: Any, moe: FusedMoEConfig | None = None, layer_name: str | None = None
    ):
        """weight_quant, input_quant: QuantizationArgs or dicts. Raises ValueError for a scheme of another method."""
        group: dict[str, Any] = {
            "weights": quantization_arguments(weight_quant),
            "input_activations": quantization_arguments(input_quant),
        }
        if self.stored_as is not None:
            group["format"] = self.stored_as
        super().__init__(Scheme.parse(group), moe)
        self.weight_quant: Any = weight_quant
        self.input_quant: Any = input_quant
        self.layer_name: str | None = layer_name
        reason = self.refusal(self.scheme)
        if reason is not None:
            raise ValueError(f"{type(self).__name__}: {reason}, found scheme {self.scheme.name!r}")

    @property
    def use_global_sf(self) -> bool:
        """No: vLLM's loader compares input scales of these methods by the experts of the rank."""
        return False

    def refusal(self, scheme: Scheme) -> str | None:
        """Why this method does not serve a scheme, None where it does."""
        raise NotImplementedError


class CompressedTensorsW8A8Fp8MoEMethod(_CompressedTensorsMoEMethod):
    """FP8 weights per tensor, channel or block, with FP8 activations, static per tensor or dynamic."""

    def refusal(self, scheme: Scheme) -> str | None:
        weights, activations = scheme.weights, scheme.activations
        is_fp8 = weights is not None and weights.element == "e4m3" and weights.scale == "float32"
        if not is_fp8 or activations is None or activations.element != "e4m3":
            return "weights and activations have to be 8-bit floats with float scales"
        return None

    @property
    def block_quant(self) -> bool:
        return self.scheme.weight_format.block_shape is not None

    @property
    def weight_block_size(self) -> tuple[int, int] | None:
        return self.scheme.weight_format.block_shape

    @property
    def static_input_scales(self) -> bool:
        return not self.scheme.activation_format.dynamic


class CompressedTensorsW4A8Int8MoEMethod(_CompressedTensorsMoEMethod):
    """int4 weights in int8 containers per channel or group, with dynamic int8 activations per token."""

    stored_as: str | None = "int-quantized"

    def __init__(
        self, weight_quant: Any, input_quant: Any, moe: FusedMoEConfig | None = None, layer_name: str | None = None
    ):
        inputs, weights = quantization_arguments(input_quant) or {}, quantization_arguments(weight_quant) or {}
        if inputs.get("strategy") != "token" or not inputs.get("dynamic"):
            raise ValueError(
                f"{type(self).__name__}: activations have to be dynamic per token, found strategy "
                f"{inputs.get('strategy')!r} with dynamic={inputs.get('dynamic')!r}"
            )
        if weights.get("num_bits") != 4:
            raise ValueError(f"{type(self).__name__}: weights have to be 4 bits, found {weights.get('num_bits')!r}")
        super().__init__(weight_quant, input_quant, moe, layer_name)

    def refusal(self, scheme: Scheme) -> str | None:
        elements = [None if fmt is None else fmt.element for fmt in (scheme.weights, scheme.activations)]
        return None if elements == ["int4", "int8"] else "int4 weights with int8 activations only"

    @property
    def static_input_scales(self) -> bool:
        return False

    @property
    def has_bias(self) -> bool:
        return self.moe is not None and self.moe.has_bias

    @property
    def group_size(self) -> int:
        """-1 for one scale per channel."""
        return self.scheme.weight_format.group_size or -1

    def layout(self, leaf: str, params_dtype: torch.dtype | None = None) -> LeafLayout:
        """Scales of groups are bfloat16, as in vLLM."""
        is_group_scale = leaf.endswith("_weight_scale") and self.group_size != -1
        return LeafLayout(leaf, dtype=torch.bfloat16 if is_group_scale else None)


class CompressedTensorsWNA16MarlinMoEMethod(_CompressedTensorsMoEMethod):
    """Integer weights of 2 to 8 bits in int32 words, per channel or group, with zero points or without."""

    stored_as: str | None = "pack-quantized"

    def refusal(self, scheme: Scheme) -> str | None:
        is_packed = scheme.weights is not None and scheme.weights.packing is Packing.WORDS
        return (
            None if is_packed and scheme.activations is None else "packed integers without quantized activations only"
        )

    def layout(self, leaf: str, params_dtype: torch.dtype | None = None) -> LeafLayout:
        """Words, scales and zero points are (E, in, out); scales have the dtype of the layer's activations."""
        is_matrix = leaf.endswith(("_weight_packed", "_weight_scale", "_weight_zero_point"))
        return LeafLayout(leaf, is_matrix, dtype=params_dtype if leaf.endswith("_weight_scale") else None)

    def unread_parameters(self, sizes: tuple[int, int, int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Orders of columns exist for every checkpoint, as in vLLM."""
        experts, *columns = sizes
        orders = {
            f"{prefix}_{what}": ((experts, size), torch.int32)
            for prefix, size in zip(("w13", "w2"), columns, strict=True)
            for what in ("weight_g_idx", "g_idx_sort_indices")
        }
        return super().unread_parameters(sizes) | orders

    def get_weight_shape(
        self,
        weight_name: str,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        num_groups_w2: int | None = None,
        num_groups_w13: int | None = None,
    ) -> tuple[int, int, int]:
        """The shape of "w13_weight", "w13_scale" or "w13_zp", or of the same of w2: (experts, in, out).

        num_groups_w2, num_groups_w13: groups along the input, needed for scales and zero points (ValueError).
        """
        prefix, _, what = weight_name.partition("_")
        is_w2, is_gated = prefix == "w2", self.moe is None or self.moe.is_act_and_mul
        rows, columns, projections = hidden_size, intermediate_size_per_partition, 2 if is_gated else 1
        if is_w2:
            rows, columns, projections = columns, rows, 1
        words = self.scheme.weight_format.stored_length
        if what == "weight":
            return num_experts, words(rows), projections * columns
        groups = num_groups_w2 if is_w2 else num_groups_w13
        if groups is None:
            raise ValueError(f"{weight_name}: num_groups_{prefix} is missing, which its shape depends on")
        return num_experts, groups, projections * (words(columns) if what == "zp" else columns)

    @property
    def symmetric(self) -> bool:
        """Whether there are no zero points."""
        return self.scheme.weight_format.symmetric

    @property
    def num_bits(self) -> int:
        return self.scheme.weight_format.element_type.bits

    @property
    def packed_factor(self) -> int:
        """Elements in a word of 32 bits; 3-bit codes straddle words."""
        return 32 // self.num_bits

    @property
    def strategy(self) -> str:
        return self.scheme.weight_format.strategy.value

    @property
    def group_size(self) -> int:
        return self.scheme.weight_format.group_size or -1

    @property
    def actorder(self) -> bool:
        return self.scheme.weight_format.actorder


class CompressedTensorsW4A4Nvfp4MoEMethod(SchemeMoEMethod):
    """NVFP4 weights in groups of 16 with global scales; activations NVFP4 too, or left alone with ``use_a16``."""

    group_size = 16

    def __init__(self, moe: FusedMoEConfig | None = None, layer_name: str | None = None, use_a16: bool = False):
        super().__init__("nvfp4_a16" if use_a16 else "nvfp4", moe)
        self.layer_name: str | None = layer_name
        self.use_a16: bool = use_a16


def quantization_arguments(quant: Any) -> dict[str, Any] | None:
    """A QuantizationArgs object of compressed-tensors, or a dict, as a plain dict."""
    if quant is None or isinstance(quant, Mapping):
        return None if quant is None else dict(quant)
    if not hasattr(quant, "model_dump"):
        raise TypeError(
            f"quantization arguments are a {type(quant).__name__}, expected QuantizationArgs, a dict or None"
        )
    dumped = quant.model_dump(mode="json")
    known = "num_bits type symmetric strategy group_size block_structure dynamic actorder scale_dtype zp_dtype".split()
    return {key: dumped[key] for key in known if dumped.get(key) is not None}
