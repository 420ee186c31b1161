"""``FusedMoEQuantConfig``: dtypes, granularity and scales of a processed layer, as vLLM's kernels are told them."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch

from moe_jax import MoEConfig
from moe_jax.quantization import Packing, QuantFormat, Strategy


class _Extent(NamedTuple):
    row: int
    col: int


class GroupShape(_Extent):
    """Rows and columns under one scale; -1 is all of them."""

    PER_TENSOR: ClassVar["GroupShape"]
    PER_TOKEN: ClassVar["GroupShape"]
    PER_CHANNEL: ClassVar["GroupShape"]

    def is_per_tensor(self) -> bool:
        return self == GroupShape.PER_TENSOR

    def is_per_token(self) -> bool:
        return self == GroupShape.PER_TOKEN

    def is_per_channel(self) -> bool:
        return self == GroupShape.PER_CHANNEL

    def is_per_group(self) -> bool:
        return self.row == 1 and self.col >= 1


GroupShape.PER_TENSOR = GroupShape(-1, -1)
GroupShape.PER_TOKEN = GroupShape(1, -1)
GroupShape.PER_CHANNEL = GroupShape(-1, 1)


@dataclasses.dataclass
class FusedMoEQuantDesc:
    """Of the activations before a product, or of its weights.

    dtype: quantized type, None where unquantized. shape: what one scale covers. scale: the scales. alpha_or_gscale: a
    global scale of activations, or a factor for each expert. zp: zero points. bias: of the product.
    """

    dtype: torch.dtype | str | None = None
    shape: GroupShape | None = None
    scale: torch.Tensor | None = None
    alpha_or_gscale: torch.Tensor | None = None
    zp: torch.Tensor | None = None
    bias: torch.Tensor | None = None


def _of(desc: str, field: str) -> Any:
    return property(lambda self: getattr(getattr(self, desc), field))


@dataclasses.dataclass
class FusedMoEQuantConfig:
    """What a processed layer is quantized to. w1 is w13, a1 and a2 are the activations before w13 and w2.

    a1_scale, a2_scale: static scales. a1_gscale, a2_gscale: what activations of NVFP4 are multiplied by before they are
    rounded. g1_alphas, g2_alphas: what products of NVFP4 are multiplied by, weight_scale_2 times the input's scale;
    weight_scale_2 alone where activations have no static scale.
    """

    _a1: FusedMoEQuantDesc
    _a2: FusedMoEQuantDesc
    _w1: FusedMoEQuantDesc
    _w2: FusedMoEQuantDesc
    is_scale_swizzled: bool = True
    gemm1_alpha: float | None = None
    gemm1_beta: float | None = None
    gemm1_clamp_limit: float | None = None
    mx_alignment: int = 0

    quant_dtype = _of("_a1", "dtype")
    weight_quant_dtype = _of("_w1", "dtype")
    a1_scale = _of("_a1", "scale")
    a2_scale = _of("_a2", "scale")
    a1_gscale = _of("_a1", "alpha_or_gscale")
    a2_gscale = _of("_a2", "alpha_or_gscale")
    w1_scale = _of("_w1", "scale")
    w2_scale = _of("_w2", "scale")
    w1_zp = _of("_w1", "zp")
    w2_zp = _of("_w2", "zp")
    w1_bias = _of("_w1", "bias")
    w2_bias = _of("_w2", "bias")
    g1_alphas = _of("_w1", "alpha_or_gscale")
    g2_alphas = _of("_w2", "alpha_or_gscale")

    @property
    def is_quantized(self) -> bool:
        """Whether activations are."""
        return self.quant_dtype is not None

    @property
    def is_per_act_token(self) -> bool:
        return self._a1.shape == GroupShape.PER_TOKEN

    @property
    def per_act_token_quant(self) -> bool:
        return self._a1.shape == GroupShape.PER_TOKEN

    @property
    def per_out_ch_quant(self) -> bool:
        return self._w1.shape == GroupShape.PER_TOKEN

    @property
    def is_per_tensor(self) -> bool:
        return self._a1.shape == GroupShape.PER_TENSOR

    @property
    def block_shape(self) -> list[int] | None:
        """[rows, columns] under one scale, None per tensor and per token."""
        shape = self._a1.shape
        return None if shape in (None, GroupShape.PER_TENSOR, GroupShape.PER_TOKEN) else [shape.row, shape.col]

    @property
    def is_block_quantized(self) -> bool:
        return self.block_shape is not None

    def scale_shape(self, max_tokens: int, hidden_dim: int) -> tuple[int, int] | None:
        """Of the scales of activations (max_tokens, hidden_dim); None where they are not quantized."""
        if not self.is_quantized:
            return None
        if self.block_shape is not None:
            return max_tokens, -(-hidden_dim // self.block_shape[1])
        return (max_tokens, 1) if self.is_per_act_token else (1, 1)

    def batched_scale_shape(self, num_experts: int, max_tokens: int, hidden_dim: int) -> tuple[int, int, int] | None:
        """``scale_shape`` for each expert."""
        shape = self.scale_shape(max_tokens, hidden_dim)
        return None if shape is None else (num_experts, *shape)

    @property
    def use_fp8_w8a8(self) -> bool:
        return self.quant_dtype == torch.float8_e4m3fn

    @property
    def use_int8_w8a8(self) -> bool:
        return self.quant_dtype == torch.int8

    @property
    def use_int8_w8a16(self) -> bool:
        return self._weight_only(torch.int8)

    @property
    def use_fp8_w8a16(self) -> bool:
        return self._weight_only(torch.float8_e4m3fn)

    @property
    def use_int4_w4a16(self) -> bool:
        return self._weight_only("int4")

    @property
    def use_nvfp4_w4a16(self) -> bool:
        return self._weight_only("nvfp4")

    @property
    def use_mxfp4_w4a16(self) -> bool:
        return self._weight_only("mxfp4")

    @property
    def use_nvfp4_w4a4(self) -> bool:
        return self.quant_dtype == "nvfp4"

    @property
    def use_mxfp4_w4a4(self) -> bool:
        return self.quant_dtype == self.weight_quant_dtype == "mxfp4"

    @property
    def use_mxfp4_w4a8(self) -> bool:
        return (self.quant_dtype, self.weight_quant_dtype) == ("fp8", "mxfp4")

    def _weight_only(self, dtype: torch.dtype | str) -> bool:
        return self.quant_dtype is None and self.weight_quant_dtype == dtype

    @staticmethod
    def make(
        quant_dtype: torch.dtype | str | None = None,
        per_act_token_quant: bool = False,
        per_out_ch_quant: bool = False,
        block_shape: list[int] | None = None,
        w1_scale: torch.Tensor | None = None,
        w2_scale: torch.Tensor | None = None,
        a1_scale: torch.Tensor | None = None,
        a2_scale: torch.Tensor | None = None,
        g1_alphas: torch.Tensor | None = None,
        g2_alphas: torch.Tensor | None = None,
        a1_gscale: torch.Tensor | None = None,
        a2_gscale: torch.Tensor | None = None,
        w1_bias: torch.Tensor | None = None,
        w2_bias: torch.Tensor | None = None,
        w1_zp: torch.Tensor | None = None,
        w2_zp: torch.Tensor | None = None,
        weight_dtype: torch.dtype | str | None = None,
        is_scale_swizzled: bool = True,
        gemm1_alpha: float | None = None,
        gemm1_beta: float | None = None,
        gemm1_clamp_limit: float | None = None,
    ) -> "FusedMoEQuantConfig":
        """One from flags: what methods of one's own return.

        quant_dtype, weight_dtype: of activations and of weights, the former's where the latter is None. block_shape
        excludes both per_act_token_quant and per_out_ch_quant (ValueError).
        """
        if block_shape is not None and (per_act_token_quant or per_out_ch_quant):
            raise ValueError(f"block_shape={block_shape} excludes per_act_token_quant and per_out_ch_quant")
        inputs = None if quant_dtype is None else GroupShape.PER_TENSOR
        inputs = GroupShape.PER_TOKEN if per_act_token_quant else inputs
        weights = GroupShape.PER_TOKEN if per_out_ch_quant else None
        if block_shape is not None:
            inputs = weights = GroupShape(*block_shape)
        dtype = quant_dtype if weight_dtype is None else weight_dtype
        return FusedMoEQuantConfig(
            _a1=FusedMoEQuantDesc(quant_dtype, inputs, a1_scale, a1_gscale),
            _a2=FusedMoEQuantDesc(quant_dtype, inputs, a2_scale, a2_gscale),
            _w1=FusedMoEQuantDesc(dtype, weights, w1_scale, g1_alphas, w1_zp, w1_bias),
            _w2=FusedMoEQuantDesc(dtype, weights, w2_scale, g2_alphas, w2_zp, w2_bias),
            is_scale_swizzled=is_scale_swizzled,
            gemm1_alpha=gemm1_alpha,
            gemm1_beta=gemm1_beta,
            gemm1_clamp_limit=gemm1_clamp_limit,
        )


def quant_config_of(config: MoEConfig, parameters: Mapping[str, torch.Tensor]) -> FusedMoEQuantConfig:
    """What vLLM's method for the scheme of ``config`` would say.

    parameters: of the processed layer by the names of moe_jax's leaves, in the axes of vLLM's parameters.
    """
    weights, inputs = config.scheme.weights, config.scheme.activations
    shapes = _shapes(weights, inputs)
    dtypes = _dtype(weights), _dtype(inputs)
    if weights is not None and weights.element == "int4" and inputs is not None and inputs.element == "int8":
        dtypes = None, None  # vLLM's kernel of this format takes both as 16-bit numbers and packs by itself
    descs = {}
    for number, prefix in ((1, "w13"), (2, "w2")):
        own = {name.removeprefix(f"{prefix}_"): leaf for name, leaf in parameters.items() if name.startswith(prefix)}
        scale_2, input_scale, gscale = _factors(own, inputs)
        if weights is not None and weights.global_scale is not None:
            input_scale, factor = None, input_scale
            scale_2 = scale_2 if factor is None or scale_2 is None else scale_2 * factor
        else:
            gscale = None
        descs[f"_a{number}"] = FusedMoEQuantDesc(dtypes[1], shapes[1], input_scale, gscale)
        descs[f"_w{number}"] = FusedMoEQuantDesc(
            dtypes[0], shapes[0], _one_scale(own.get("weight_scale"), weights), scale_2, own.get("weight_zero_point")
        )
        descs[f"_w{number}"].bias = own.get("bias")
    return FusedMoEQuantConfig(
        **descs,
        is_scale_swizzled=weights is None or weights.scale == "float32",  # block scales are in rows and columns here
        gemm1_alpha=config.swiglu_alpha,
        gemm1_beta=config.swiglu_beta,
        gemm1_clamp_limit=config.swiglu_limit,
    )


def _factors(
    own: Mapping[str, torch.Tensor], inputs: QuantFormat | None
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """weight_scale_2, the input's scale and its reciprocal of one product; both scales multiply."""
    divides, scale_2 = own.get("weight_global_scale"), own.get("weight_scale_2")
    if divides is not None:
        scale_2 = divides.reciprocal()
    scale, gscale = own.get("input_scale"), own.get("input_global_scale")
    stored = scale if gscale is None else gscale
    if inputs is None or stored is None:
        return _common(scale_2), None, None
    stored = stored.reshape(-1)[0]  # processing keeps one for all experts
    pair = (stored, stored.reciprocal()) if gscale is None else (stored.reciprocal(), stored)
    return _common(scale_2), *pair


def _common(scale: torch.Tensor | None) -> torch.Tensor | None:
    """(E,) where gate and up share their scales, as vLLM has it; (E, 2) where they do not, which vLLM cannot keep."""
    if scale is None or scale.ndim == 1 or not torch.equal(scale, scale[:, :1].expand_as(scale)):
        return scale
    return scale[:, 0]


def _one_scale(scale: torch.Tensor | None, weights: QuantFormat | None) -> torch.Tensor | None:
    return _common(scale) if weights is not None and weights.strategy is Strategy.TENSOR else scale


def _dtype(fmt: QuantFormat | None) -> torch.dtype | str | None:
    if fmt is None:
        return None
    if fmt.scale == "e8m0":
        return {"e2m1": "mxfp4", "e4m3": "mxfp8"}[fmt.element]
    if fmt.element == "e2m1":
        return "nvfp4"
    return {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}.get(fmt.element, fmt.element)


def _shapes(weights: QuantFormat | None, inputs: QuantFormat | None) -> tuple[GroupShape | None, GroupShape | None]:
    """Of weights and of activations, as vLLM's builders of configs set them."""
    if weights is None:
        return None, None
    if weights.packing is Packing.WORDS and inputs is None:
        group = GroupShape(0, weights.group_size or -1)
        return group, group
    if weights.element == "int4":
        group = GroupShape.PER_CHANNEL if weights.group_size is None else GroupShape(1, weights.group_size)
        return group, group if inputs is None or inputs.element == "int8" else GroupShape.PER_TOKEN
    block = None if weights.block_shape is None else GroupShape(*weights.block_shape)
    if weights.scale == "e8m0" and weights.element == "e4m3":
        block = GroupShape(1, weights.group_size or 32)
    if inputs is None:
        return block, None
    if block is not None:
        return block, block
    is_token = inputs.strategy is Strategy.TOKEN
    is_channel = is_token and weights.strategy is Strategy.CHANNEL and weights.element == "e4m3"
    return GroupShape.PER_TOKEN if is_channel else None, GroupShape.PER_TOKEN if is_token else GroupShape.PER_TENSOR
