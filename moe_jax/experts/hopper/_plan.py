"""How a call of the mosaic implementation runs: rows of a tile, and a configuration for both of its products."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from moe_jax._config import MoEConfig
from moe_jax.activations import resolve_activation
from moe_jax.experts.hopper import _packed_experts
from moe_jax.experts.hopper._kernel_layout import is_packed
from moe_jax.quantization import ExpertWeights, Scheme, Strategy
from pallas_kernels.common.device import device_kind, hopper_sms
from pallas_kernels.common.rows import unpermuted_rows_error
from pallas_kernels.grouped_gemm import choose_block_m, choose_config
from pallas_kernels.quantize_and_permute.config import PermuteDesc
from pallas_kernels.route.config import fused_tokens, quantizes_beside
from pallas_kernels.tuning import Entry, LayerKey, table_for

# Whether few tokens are left where they are; False, for measurements, moves all to rows.
PLACES_BY_TOKEN = True
_LHS_SCALES = {"none": "none", "e4m3_tensor": "tensor", "e4m3_group": "group", "e4m3_group_ue8m0": "group"}


@dataclasses.dataclass(frozen=True)
class Plan:
    """products: what both are asked, GemmDesc or PackedDesc. configs: GemmConfig or PackedConfig, None for the kernel's
    own choice. source: where they come from. by_token: row t of every expert's tile is token t, so that GEMM 1 takes
    the tokens themselves. quantization: how they are quantized for it where they are, a kind of
    ``quantize_and_permute``; "none" where they are not, or are moved.
    """

    block_m: int
    products: tuple[Any, ...]
    configs: tuple[Any, ...]
    source: str
    by_token: bool = False
    quantization: str = "none"

    @property
    def scale_rows(self) -> int | None:
        """Of tokens that are quantized where they are: for how many rows GEMM 1 takes scales."""
        return None if self.quantization == "none" else self.block_m


def make_plan(
    config: MoEConfig,
    weights: ExpertWeights,
    num_tokens: int,
    kernels: str = "mosaic",
    *,
    are_quantized: bool = False,
) -> Plan:
    """A measured configuration where the device's table has one for this layer, else the heuristic's. are_quantized:
    tokens come as codes and scales.
    """
    planned = config.planned_tokens(num_tokens)
    if is_packed(weights.w13):
        key: Any = _packed_experts.layer_key(config, weights)
        products = lambda tokens, block_m: _packed_experts.products(tokens, config, weights, block_m)  # noqa: E731
    else:
        key = layer_key(config, weights)
        extra: dict[str, Any] = dict(
            activation=resolve_activation(config),
            bias_dtype=None if weights.w13_bias is None else jnp.dtype(weights.w13_bias.dtype).name,
            out_dtype=config.dtype.name,
        )
        products = lambda tokens, block_m: key.products(tokens, block_m, **extra)  # noqa: E731

    def plan(block_m: int, configs: tuple[Any, ...], source: str) -> Plan:
        kind = _kind_by_token(config, weights, num_tokens, block_m)
        if are_quantized or not PLACES_BY_TOKEN:
            kind = None
        first, second = products(num_tokens, block_m)
        first = dataclasses.replace(first, unpermuted_rows=0 if kind is None else num_tokens)
        return Plan(block_m, (first, second), configs, source, kind is not None, kind or "none")

    entry = table_for(device_kind()).lookup(key, planned) if kernels == "mosaic" else None
    source = "by the heuristic"
    if entry is not None and not entry.reaches(planned):
        source += f", since the nearest measurement is for {entry.tokens} tokens"
    elif entry is not None:
        measured = (entry.config.gemm1, entry.config.gemm2)
        descs = products(num_tokens, entry.config.block_m)
        found = [_fitting(key, desc, one) for desc, one in zip(descs, measured, strict=True)]
        if not (refusals := [one for one in found if isinstance(one, str)]):
            fewer = ""
            if tuple(found) != measured:
                fewer = ", with fewer stages, since this layer keeps more in shared memory"
            return plan(entry.config.block_m, tuple(found), _in_words(entry) + fewer)
        source += f", since what was measured for {entry.tokens} tokens cannot run it: {'; '.join(refusals)}"
    choose: Any
    if is_packed(weights.w13):
        block_m, choose = _packed_experts.block_m(planned, config, weights), _packed_experts.choose_config
    else:
        # Expected rows of an expert that is hit at all when routing is uniform.
        hit = key.num_experts * (1 - (1 - min(key.top_k / key.num_experts, 1.0)) ** max(planned, 1))
        rows = planned * key.top_k / hit
        may_swap = key.may_swap and (key.requantize == "none" or config.dtype.name != "float16")
        block_m, choose = choose_block_m(rows, may_swap=may_swap, may_be_large_m=key.may_be_large_m), choose_config
    configs = (None, None)
    if config.pinned_tokens is not None and kernels == "mosaic":
        configs = tuple(choose(desc, block_m, hopper_sms()) for desc in products(planned, block_m))
        source += f", pinned to {planned} tokens"
    return plan(block_m, configs, source)


def _kind_by_token(config: MoEConfig, weights: ExpertWeights, num_tokens: int, block_m: int) -> str | None:
    """How tokens are quantized where they stay, "none" for not at all; None where they are moved: a tile does not hold
    all of them, columns have an order of each expert, or their quantization is more than a part of routing's launch.
    """
    if weights.w13.g_idx is not None or num_tokens < 1 or unpermuted_rows_error(num_tokens, block_m):
        return None
    activations = weights.scheme.activations
    if activations is None:
        return "none"
    if is_packed(weights.w13):
        kind = _packed_experts.row_quantization(weights)
    else:
        kind = row_kind(weights.scheme) or "none"
    if kind == "none" or (kind == "e4m3_tensor" and activations.dynamic):
        return None
    rows = PermuteDesc(num_tokens, weights.hidden_size, 0, num_tokens, config.dtype.name, kind)
    return kind if num_tokens <= fused_tokens(config.num_experts) and quantizes_beside(rows) else None


def _fitting(key: Any, desc: Any, config: Any) -> Any:
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
    return f"measured for {entry.tokens} tokens" + ("" if entry.source is None else f" {entry.source}")


def row_kind(scheme: Scheme) -> str | None:
    """The kind of ``quantize_and_permute`` for a scheme's activations; None where no kernel fits the scheme."""
    weights, activations = scheme.weights, scheme.activations
    if weights is None:
        return "none"
    if activations is None:
        return None
    is_plain = weights.symmetric and weights.packing is None and weights.scale == "float32"
    if (
        not is_plain
        or not activations.symmetric
        or activations.scale not in ("float32", "ue8m0")
        or activations.amax_bound is not None
    ):
        return None
    kinds = {
        ("e4m3", Strategy.TENSOR, "e4m3", Strategy.TENSOR): "e4m3_tensor",
        ("e4m3", Strategy.TENSOR, "e4m3", Strategy.TOKEN): "e4m3_row",
        ("e4m3", Strategy.CHANNEL, "e4m3", Strategy.TOKEN): "e4m3_row",
        ("e4m3", Strategy.BLOCK, "e4m3", Strategy.GROUP): "e4m3_group",
        ("int8", Strategy.CHANNEL, "int8", Strategy.TOKEN): "int8_row",
    }
    kind = kinds.get((weights.element, weights.strategy, activations.element, activations.strategy))
    if kind == "e4m3_group" and (weights.block_shape, activations.group_size) != ((128, 128), 128):
        return None
    return "e4m3_group_ue8m0" if kind == "e4m3_group" and activations.scale == "ue8m0" else kind


def layer_key(config: MoEConfig, weights: ExpertWeights) -> LayerKey:
    """The layer as tuning tables know it."""
    kind = row_kind(weights.scheme)
    if kind is None:
        raise NotImplementedError(f"there is no kernel for scheme {weights.scheme.name!r} yet")
    fmt, activations = weights.scheme.weights, weights.scheme.activations
    requantize = "none"
    if kind.startswith("e4m3_group"):
        requantize = "group"
    elif kind == "e4m3_tensor" and not activations.dynamic:
        requantize = "tensor"
    return LayerKey(
        num_experts=weights.num_experts,
        top_k=config.top_k,
        hidden_size=weights.hidden_size,
        intermediate_size=weights.intermediate_size,
        dtype=jnp.dtype(weights.w13.data.dtype).name,
        lhs_scale=_LHS_SCALES.get(kind, "row"),
        rhs_scale="none" if fmt is None else fmt.strategy.value,
        requantize=requantize,
        projections=config.num_halves,
    )
