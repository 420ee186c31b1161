"""How a call of the hopper backend runs: rows of a tile, and a configuration for both of its products."""

import dataclasses
import functools
import math
from types import ModuleType
from typing import Any

import jax.numpy as jnp

from moe_jax._config import MoEConfig
from moe_jax.activations import resolve_activation
from moe_jax.experts.hopper._kernel_layout import in_kernel_layout, kernel_operand
from moe_jax.experts.hopper._rows import kind_of_tokens, row_kind
from moe_jax.quantization import ExpertWeights
from pallas_kernels import grouped_gemm as plain_gemm
from pallas_kernels.align import row_capacity
from pallas_kernels.common.device import hopper_gpu, hopper_sms, portable_target
from pallas_kernels.common.rows import unpermuted_rows_error
from pallas_kernels.grouped_gemm import FEW_ROWS, FewRowsConfig, GemmDesc, VectorConfig
from pallas_kernels.grouped_gemm import packed as packed_gemm
from pallas_kernels.grouped_gemm import portable as portable_gemm
from pallas_kernels.grouped_gemm.packed import BLOCK_N, PackedDesc, PackedVectorConfig
from pallas_kernels.quantize_and_permute.config import PermuteDesc
from pallas_kernels.route.config import fused_tokens, quantizes_beside
from pallas_kernels.tuning import Entry, LayerKey, PackedLayerKey, table_for
from pallas_kernels.tuning.layer import AnyConfig, AnyDesc

_LOW = 96  # rows of an expert up to which tiles of 64 rows waste less than tiles of 128
# Columns of a hidden row up to which every warp quantizes it for itself: with 768 a layer takes 1 to 5% less time than
# with a launch for that, with 2048 and 2880 2 to 9% more (H100).
_SHORT = 1024
_LHS_SCALES = {"none": "none", "e4m3_tensor": "tensor", "e4m3_group": "group", "e4m3_group_ue8m0": "group"}


@dataclasses.dataclass(frozen=True)
class Plan:
    """How both products of a call run.

    block_m: rows of a tile.
    products: what each is asked.
    configs: how each does it; None for the kernel's own choice.
    source: where the configurations come from, in words.
    requantize: what GEMM 1 does with its result, as ``grouped_gemm`` takes it.
    unpermuted: row t of every expert's tile is token t, so that GEMM 1 takes the tokens themselves.
    quantization: how tokens are quantized where they are, for an unpermuted call; a kind of ``quantize_and_permute``.
    hidden_dtype: of hidden values that GEMM 1 does not requantize; None for the layer's.
    """

    block_m: int
    products: tuple[AnyDesc, AnyDesc]
    configs: tuple[AnyConfig | PackedVectorConfig | None, AnyConfig | PackedVectorConfig | None]
    source: str
    requantize: str = "none"
    unpermuted: bool = False
    quantization: str = "none"
    hidden_dtype: str | None = None

    @property
    def adds_up(self) -> bool:
        """Whether GEMM 2 adds up the rows of a token."""
        return bool(getattr(self.products[1], "top_k", 0))

    @property
    def hidden_quantization(self) -> str:
        """How GEMM 2 quantizes the hidden rows that it takes; "none" where somebody else has."""
        return getattr(self.products[1], "quantization", "none")

    @property
    def scale_rows(self) -> int | None:
        """Of tokens that are quantized where they are: for how many rows GEMM 1 takes scales."""
        return None if self.quantization == "none" else self.block_m


def make_plan(
    config: MoEConfig,
    weights: ExpertWeights,
    num_tokens: int,
    kernels: str = "hopper",
    *,
    are_quantized: bool = False,
    may_stay: bool = True,
) -> Plan:
    """A measured configuration where the device's table has one for this layer, else the heuristic's.

    Args:
        kernels: the implementation of every kernel, by name.
        are_quantized: tokens come as codes and scales.
        may_stay: few tokens are left where they are; False moves them to rows whatever their number.
    """
    if kernels == "portable":
        return _portable_plan(config, weights, num_tokens, are_quantized=are_quantized)
    planned = config.planned_tokens(num_tokens)
    key = layer_key(config, weights)
    if weights.has_adapters:
        return _adapted_plan(config, weights, key, num_tokens)
    products = functools.partial(_products, config, weights, key)
    may_be_few = not are_quantized and config.pinned_tokens is None
    may_be_vector = num_tokens == 1 and may_be_few
    if may_be_few and isinstance(key, LayerKey) and (num_tokens == 1 or _are_few(key, num_tokens)):
        found = _plan_without_wgmma(config, weights, key, num_tokens, may_stay=may_stay)
        if found is not None:
            return found

    def plan(block_m: int, configs: tuple[AnyConfig | None, AnyConfig | None], source: str) -> Plan:
        kind = None
        if may_stay and not are_quantized:
            kind = _unpermuted_kind(config, weights, num_tokens, block_m)
        first, second = products(num_tokens, block_m)
        first = dataclasses.replace(first, unpermuted_rows=0 if kind is None else num_tokens)
        if kernels == "hopper" and isinstance(key, LayerKey) and isinstance(first, GemmDesc):
            first, configs = _requantizing(key, first, configs, block_m)
        requantize = getattr(first, "requantize", "none")
        if requantize == "group":  # whose scales the scheme may round
            requantize = str(row_kind(weights.scheme)).removeprefix("e4m3_")
        return Plan(block_m, (first, second), configs, source, requantize, kind is not None, kind or "none")

    if may_be_vector and isinstance(key, PackedLayerKey):
        found = plan(VectorConfig.block_m, (None, None), "by the heuristic")
        first, second = found.products
        assert isinstance(second, PackedDesc), "of packed weights"
        adding = dataclasses.replace(second, num_tokens=1, top_k=config.top_k)
        is_whole, configs = weights.num_experts >= config.num_experts, (None, None)
        if kernels == "hopper" and is_whole and key.config_error(adding, PackedVectorConfig(4)) is None:
            second = adding if packed_gemm.adds_up_at_once(adding, hopper_sms()) else second
        if not any(key.config_error(desc, PackedVectorConfig(4)) for desc in (first, second)):
            if kernels == "hopper" and not is_whole:
                configs = _vectors_of_shard(config, weights, first), _vectors_of_shard(config, weights, second)
            return dataclasses.replace(found, products=(first, second), configs=configs)

    if may_be_few and isinstance(key, PackedLayerKey) and _are_few(key, num_tokens):
        found = plan(FEW_ROWS, (None, None), "by the heuristic")
        of_few = PackedVectorConfig(4, block_m=FEW_ROWS)
        if not any(key.config_error(desc, of_few) for desc in found.products):
            return found

    entry = table_for(hopper_gpu()).lookup(key, planned) if kernels == "hopper" else None
    source = "by the heuristic"
    if entry is not None and not entry.reaches(planned):
        source += f", since the nearest measurement is for {entry.tokens} tokens"
    elif entry is not None:
        measured = (entry.config.gemm1, entry.config.gemm2)
        descs = products(num_tokens, entry.config.block_m)
        first, second = (_fitting(key, desc, one) for desc, one in zip(descs, measured, strict=True))
        if not isinstance(first, str) and not isinstance(second, str):
            fewer = ""
            if (first, second) != measured:
                fewer = ", with fewer stages, since this layer keeps more in shared memory"
            return plan(entry.config.block_m, (first, second), _in_words(entry) + fewer)
        reasons = "; ".join(one for one in (first, second) if isinstance(one, str))
        source += f", since what was measured for {entry.tokens} tokens cannot run it: {reasons}"
    block_m = _choose_block_m(config, weights, key, planned)
    configs = (None, None)
    if config.pinned_tokens is not None and kernels == "hopper":
        first, second = products(planned, block_m)
        choose, num_sms = gemm_of(weights).choose_config, hopper_sms()
        configs = (choose(first, block_m, num_sms), choose(second, block_m, num_sms))
        source += f", pinned to {planned} tokens"
    return plan(block_m, configs, source)


def _are_few(key: LayerKey | PackedLayerKey, num_tokens: int) -> bool:
    """Whether tiles of ``FEW_ROWS``, which are multiplied without wgmma, are faster than the table's.

    Whole layers take 0.62 to 1.04 of the time where this says so, of packed weights up to 1.59 elsewhere, of plain ones
    1.35 (H200, few_rows_h200.txt).
    """
    if num_tokens <= FEW_ROWS:
        return num_tokens > 1
    rows = _rows_of_hit(num_tokens, key)
    if isinstance(key, LayerKey):
        # Small-M tiles requantize in groups themselves, which takes as little time.
        return num_tokens <= 16 and rows <= 1.4 and key.requantize != "group"
    if key.operand == "int8":
        return (num_tokens <= 8 and rows <= 2.3) or (num_tokens <= 16 and rows <= 1.6)
    is_small = max(key.hidden_size, key.intermediate_size) <= 2048
    return is_small and num_tokens <= 8 and rows <= 1.6 and key.operand != "float8_e4m3fn"


def _vectors_of_shard(config: MoEConfig, weights: ExpertWeights, desc: Any) -> PackedVectorConfig:
    """How a shard of the experts multiplies a token by itself: chosen for its share of the rows, since the other tiles
    are out of use."""
    own = math.ceil(config.top_k * weights.num_experts / config.num_experts)
    few = dataclasses.replace(desc, rows=min(own, desc.rows))
    chosen = packed_gemm.choose_config(few, VectorConfig.block_m, hopper_sms())
    assert isinstance(chosen, PackedVectorConfig), "tiles of one row"
    return chosen


def _requantizing(
    key: LayerKey, first: GemmDesc, configs: tuple[AnyConfig | None, AnyConfig | None], block_m: int
) -> tuple[GemmDesc, tuple[AnyConfig | None, AnyConfig | None]]:
    """GEMM 1 that requantizes its rows, and its configuration, where the one it runs with anyway can do so as it is."""
    if first.requantize == key.requantize:
        return first, configs
    chosen: Any = configs[0] or plain_gemm.choose_config(first, block_m, hopper_sms())
    together = key.as_it_runs(first, chosen)
    return (first, configs) if together == first else (together, (chosen, configs[1]))


def _plan_without_wgmma(
    config: MoEConfig, weights: ExpertWeights, key: LayerKey, num_tokens: int, *, may_stay: bool
) -> Plan | None:
    """Plain weights in tiles of one row for one token, of ``FEW_ROWS`` for more; None where no kernel multiplies so. No
    table holds such calls.

    Of one token GEMM 2 quantizes hidden rows itself where their scales are their own and they are short. Else it adds
    up the rows of the experts: with both, a warp would quantize every row for the few columns that it has. On a shard
    it adds up nothing, since it would read weights for the experts that others have.
    """
    block_m, narrowest = (1, VectorConfig(1)) if num_tokens == 1 else (FEW_ROWS, FewRowsConfig(4))
    first, second = _products(config, weights, key, num_tokens, block_m)
    assert isinstance(first, GemmDesc) and isinstance(second, GemmDesc), "of plain weights"
    kind = _unpermuted_kind(config, weights, num_tokens, block_m) if may_stay else None
    requantize = "tensor" if key.requantize == "tensor" else "none"
    first = dataclasses.replace(first, unpermuted_rows=0 if kind is None else num_tokens, requantize=requantize)
    is_short = key.lhs_scale in ("row", "group") and second.k <= _SHORT
    quantizing = dataclasses.replace(second, quantization=str(row_kind(weights.scheme)))
    adding = dataclasses.replace(second, num_tokens=1, top_k=config.top_k)
    if is_short and plain_gemm.config_error(quantizing, narrowest) is None:
        second = quantizing
    elif weights.num_experts >= config.num_experts and plain_gemm.config_error(adding, narrowest) is None:
        second = adding
    # In tiles GEMM 1 requantizes float16 rows by groups before they might overflow.
    hidden_dtype = "float32" if key.lhs_scale == "group" and config.dtype.name == "float16" else None
    if hidden_dtype:
        first = dataclasses.replace(first, out_dtype=hidden_dtype)
    if any(plain_gemm.config_error(desc, narrowest) for desc in (first, second)):
        return None
    return Plan(
        block_m,
        (first, second),
        (None, None),
        "by the heuristic",
        requantize,
        kind is not None,
        kind or "none",
        hidden_dtype,
    )


def _adapted_plan(config: MoEConfig, weights: ExpertWeights, key: LayerKey | PackedLayerKey, num_tokens: int) -> Plan:
    """GEMM 1 without its activation, before which adapters are added: one projection with the rows of all.

    Tiles are those of the adapters' own products, of 64 rows where packed weights have no tile of 128. No table holds
    such calls.
    """

    def products(block_m: int) -> tuple[AnyDesc, AnyDesc]:
        first, second = _products(config, weights, key, num_tokens, block_m)
        stacked: dict[str, Any] = dict(projections=1, activation=None, bias_dtype=None)
        if isinstance(first, PackedDesc):
            stacked["n"] = first.channel_blocks * BLOCK_N * first.projections
        else:
            stacked |= dict(n=first.n * first.projections, requantize="none")
            if first.rhs_scale == "tensor":  # one for each projection
                stacked["rhs_scale"] = "channel"
        return dataclasses.replace(first, **stacked), second

    block_m = tile_of_any_product(config.planned_tokens(num_tokens) * config.top_k, weights.num_experts)
    if isinstance(key, PackedLayerKey) and not all(key.candidates(desc, block_m, 1) for desc in products(block_m)):
        block_m = 64
    return Plan(block_m, products(block_m), (None, None), "by the heuristic")


def tile_of_any_product(num_pairs: int, num_experts: int) -> int:
    """Rows of a tile that every product takes, whatever it reads and writes: 64 where 128 would waste more."""
    return 64 if num_pairs <= _LOW * num_experts else 128


def _portable_plan(config: MoEConfig, weights: ExpertWeights, num_tokens: int, *, are_quantized: bool) -> Plan:
    """Tiles of the portable kernels: as high as the expected rows of an expert, as far as both products have them."""
    target, key = portable_target(), layer_key(config, weights)
    requantize = getattr(key, "requantize", "none")

    def products(block_m: int) -> tuple[AnyDesc, AnyDesc]:
        descs = _products(config, weights, key, num_tokens, block_m)
        if isinstance(key, LayerKey):
            first, second = (dataclasses.replace(desc, requantize="none") for desc in descs)
            return first, second
        return descs

    most = min(portable_gemm.largest_block_m(desc, target) for desc in products(128))
    block_m = portable_gemm.choose_block_m(_rows_of_hit(config.planned_tokens(num_tokens), key), most)
    first, second = products(block_m)
    kind = None
    if not are_quantized and weights.w13.g_idx is None and 1 <= num_tokens <= block_m:
        kind = _kind_where_they_are(weights)
    first = dataclasses.replace(first, unpermuted_rows=0 if kind is None else num_tokens)
    # float16 rows might overflow before they are requantized by a scale of their own or the checkpoint's.
    hidden_dtype = "float32" if requantize != "none" and config.dtype.name == "float16" else None
    return Plan(
        block_m,
        (first, second),
        (None, None),
        "by the heuristic",
        "none",
        kind is not None,
        kind or "none",
        hidden_dtype,
    )


def describe_portable(plan: Plan) -> list[str]:
    """The configuration of both products of a portable call, one line each."""
    target, lines = portable_target(), []
    for number, desc in enumerate(plan.products, 1):
        chosen = portable_gemm.choose_config(desc, plan.block_m, target)
        lines.append(f"GEMM {number}: {portable_gemm.describe(desc, chosen)}, {plan.source}")
    return lines


def describe_products(plan: Plan, weights: ExpertWeights) -> list[str]:
    """The configuration of both products and where it comes from, one line each."""
    gemm, lines = gemm_of(weights), []
    for number, (desc, config) in enumerate(zip(plan.products, plan.configs, strict=True), 1):
        chosen = config or gemm.choose_config(desc, plan.block_m, hopper_sms())
        lines.append(f"GEMM {number}: {gemm.describe(desc, chosen)}, {plan.source}")
    return lines


def gemm_of(weights: ExpertWeights) -> ModuleType:
    """The grouped GEMM that reads the weights: a package with ``choose_config``, ``describe`` and so on."""
    return packed_gemm if in_kernel_layout(weights) else plain_gemm


def layer_key(config: MoEConfig, weights: ExpertWeights) -> LayerKey | PackedLayerKey:
    """The layer as tuning tables know it."""
    sizes = dict(
        num_experts=weights.num_experts,
        top_k=config.top_k,
        hidden_size=weights.hidden_size,
        intermediate_size=weights.intermediate_size,
        projections=config.num_projections,
    )
    if in_kernel_layout(weights):
        operand = kernel_operand(weights.w13)
        return PackedLayerKey(
            element=operand.fmt.element,
            operand=operand.fmt.operand,
            scale=operand.fmt.scale,
            group_size=operand.fmt.group_size,
            has_zero_point=operand.fmt.has_zero_point,
            scale_dtype="float32" if operand.scale is None else jnp.dtype(operand.scale.dtype).name,
            **sizes,
        )
    kind = row_kind(weights.scheme)
    if kind is None:
        raise NotImplementedError(f"there is no kernel for scheme {weights.scheme.name!r} yet")
    fmt, activations = weights.scheme.weights, weights.scheme.activations
    requantize = "none"
    if kind.startswith("e4m3_group"):
        requantize = "group"
    elif kind == "e4m3_tensor" and activations is not None and not activations.dynamic:
        requantize = "tensor"
    return LayerKey(
        dtype=jnp.dtype(weights.w13.data.dtype).name,
        lhs_scale=_LHS_SCALES.get(kind, "row"),
        rhs_scale="none" if fmt is None else fmt.strategy.value,
        requantize=requantize,
        **sizes,
    )


def _products(
    config: MoEConfig, weights: ExpertWeights, key: LayerKey | PackedLayerKey, num_tokens: int, block_m: int
) -> tuple[AnyDesc, AnyDesc]:
    """What both products are asked for a number of tokens in tiles of ``block_m`` rows."""
    activation = resolve_activation(config)
    if isinstance(key, LayerKey):
        bias_dtype = None if weights.w13_bias is None else jnp.dtype(weights.w13_bias.dtype).name
        return key.products(
            num_tokens, block_m, activation=activation, bias_dtype=bias_dtype, out_dtype=config.dtype.name
        )
    rows = row_capacity(max(num_tokens, 1) * config.top_k, weights.num_experts, block_m)
    fmt = weights.scheme.activations
    lhs = "none" if fmt is None or fmt.scale == "e8m0" else "tensor"
    if fmt is not None and (fmt.scale == "float32" or fmt.global_scale == "token"):
        lhs = "row"
    describe = packed_gemm.describe_call
    return (
        describe(rows, kernel_operand(weights.w13), config.dtype, lhs, weights.w13_bias, activation),
        describe(rows, kernel_operand(weights.w2), config.dtype, lhs, weights.w2_bias, None),
    )


def _choose_block_m(config: MoEConfig, weights: ExpertWeights, key: LayerKey | PackedLayerKey, num_tokens: int) -> int:
    """Rows of a tile: by the expected rows of an expert that is hit at all when routing is uniform."""
    rows = _rows_of_hit(num_tokens, key)
    if isinstance(key, LayerKey):
        may_swap = key.may_swap and (key.requantize == "none" or config.dtype.name != "float16")
        return plain_gemm.choose_block_m(rows, may_swap=may_swap, may_be_large_m=key.may_be_large_m)
    # Fewer rows where no kernel takes so many.
    heights, wanted = packed_gemm.BLOCK_MS, packed_gemm.choose_block_m(rows)
    for block_m in reversed([height for height in heights if height <= wanted]):
        descs = _products(config, weights, key, num_tokens, block_m)
        if all(key.candidates(desc, block_m, 1) for desc in descs):
            return block_m
    return heights[0]


def _rows_of_hit(num_tokens: int, key: LayerKey | PackedLayerKey) -> float:
    """Expected rows of an expert that is hit at all when routing is uniform."""
    hit = key.num_experts * (1 - (1 - min(key.top_k / key.num_experts, 1.0)) ** max(num_tokens, 1))
    return num_tokens * key.top_k / hit


def _unpermuted_kind(config: MoEConfig, weights: ExpertWeights, num_tokens: int, block_m: int) -> str | None:
    """How tokens are quantized where they stay, "none" for not at all.

    None where they are moved: a tile does not hold all of them, columns have an order of each expert, or their
    quantization is more than a part of routing's launch.
    """
    if weights.w13.g_idx is not None or num_tokens < 1 or unpermuted_rows_error(num_tokens, block_m):
        return None
    kind = _kind_where_they_are(weights)
    if kind is None and num_tokens == 1 and kind_of_tokens(weights) == "e4m3_tensor" and not config.call_axes:
        kind = "e4m3_tensor_row"  # a token by itself is the whole tensor
    if kind in (None, "none"):
        return kind
    rows = PermuteDesc(num_tokens, weights.hidden_size, 0, num_tokens, config.dtype.name, kind)
    return kind if num_tokens <= fused_tokens(config.num_experts) and quantizes_beside(rows) else None


def _kind_where_they_are(weights: ExpertWeights) -> str | None:
    """How tokens can be quantized before anybody knows their rows, "none" for not at all; None where they cannot."""
    activations = weights.scheme.activations
    if activations is None:
        return "none"
    kind = kind_of_tokens(weights)
    return None if kind == "none" or (kind == "e4m3_tensor" and activations.dynamic) else kind


def _fitting(key: LayerKey | PackedLayerKey, desc: AnyDesc, config: AnyConfig) -> AnyConfig | str:
    """``config`` with as many of its stages as fit ``desc``, or why it cannot run it. Measured layers have no biases,
    which take shared memory from the ring; the bits do not depend on its length.
    """
    reason = key.config_error(desc, config)
    for stages in range(config.num_stages - 1, 1, -1) if reason else ():
        fewer = dataclasses.replace(config, num_stages=stages)
        if key.config_error(desc, fewer) is None:
            return fewer
    return reason or config


def _in_words(entry: Entry) -> str:
    return " ".join(filter(None, (f"measured for {entry.tokens} tokens", entry.source, entry.where)))
