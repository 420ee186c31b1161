"""The xla backend: rows grouped by expert, tile after tile through both products. Any platform, fast on a CPU.

    align -> quantize x once per token -> for each tile in use: gather its rows, GEMM 1 + bias, activation, requantize,
    GEMM 2 + bias -> combine over k in float32

On a GPU many experts take these steps at once (``_batches``), since every launch of a tile would wait for the last one.

Nothing in the trace is repeated per expert, and memory grows with the rows; hidden activations exist for one tile, or
one batch, at a time. The exception is a dynamic per-tensor activation scale, the maximum over all rows of the call:
there the loop runs twice, and the hidden rows are kept in between.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from moe_jax._config import MoEConfig
from moe_jax._typing import Array, Float, Int, Size
from moe_jax.activations import apply_activation
from moe_jax.experts._backend import Backend, MatrixProblem, Problem
from moe_jax.experts._gradient import vary_together
from moe_jax.experts._low_rank import adapter_dtype, low_rank_product, with_rows_chosen
from moe_jax.experts.xla._align import Alignment, align
from moe_jax.experts.xla._batches import Batches, in_batches, plan_batches
from moe_jax.experts.xla._grouped_gemm import (
    Product,
    for_each_tile,
    plan_gpu_product,
    plan_product,
    quantize_rows,
    slice_rows,
    store_rows,
    tile_gemm,
    without_dot,
)
from moe_jax.quantization import (
    ExpertWeights,
    LowRank,
    QuantizedMatrix,
    Scheme,
    Strategy,
    dequantize_tensor,
    fake_quantize,
)

MAX_TILE = 192  # of 64, 128, 192 and 256 the fastest at 512 rows per expert (H=512, I=256, two Zen 5 cores)
SYMBOLIC_TILE = 32


class Xla(Backend):
    """Experts in plain JAX, the default everywhere; after the kernels where there are some."""

    name = "xla"
    takes_adapters = True

    def is_default(self, platform: str) -> bool:
        return True

    def refusal(self, problem: Problem) -> str | None:
        return None

    def describe(self, problem: Problem) -> list[str]:
        config = problem.config
        plan = plan_call(config, problem.weights.scheme, problem.num_tokens, config.top_k, problem.platform)
        passes = "two passes over the rows" if plan.has_shared_scale else "one pass over the rows"
        return [f"{plan.batches or f'tiles of {plan.tile} rows'}, {passes}", f"products: {plan.product}"]

    def run(
        self,
        x: Float[Array, "T H"],
        topk_weights: Float[Array, "T top_k"],
        topk_ids: Int[Array, "T top_k"],
        weights: ExpertWeights,
        config: MoEConfig,
        out_dtype: DTypeLike = jnp.float32,
    ) -> Float[Array, "T H"]:
        x, topk_weights, topk_ids, weights = vary_together((x, topk_weights, topk_ids, weights))
        num_tokens, top_k = topk_ids.shape
        plan = plan_call(config, weights.scheme, num_tokens, top_k, jax.default_backend())
        y: Any = _weighted_sum(plan, x, topk_weights, weights, topk_ids)
        return y.astype(out_dtype)

    def matrix_refusal(self, problem: MatrixProblem) -> str | None:
        return None

    def multiply(self, x: Array, matrix: QuantizedMatrix, bias: Array | None, out_dtype: DTypeLike) -> Array:
        fmt, tensor = matrix.scheme.activations, matrix.tensor
        plan = plan_gpu_product if jax.default_backend() == "gpu" else plan_product
        product = plan(matrix.scheme.weights, fmt, x.dtype)
        if (
            fmt is None and not product.scales_after and x.dtype.itemsize == 2
        ):  # like a weight that is held in x's dtype
            product = dataclasses.replace(product, operand_dtype=x.dtype)
        rows, scale = quantize_rows(x, product, fmt, tensor.input_scale)
        own = jax.tree.map(lambda leaf: leaf[0], dataclasses.replace(tensor, input_scale=None))
        return tile_gemm(rows, scale, own, bias, product).astype(out_dtype)


@dataclasses.dataclass(frozen=True)
class CallPlan:
    """What is static about one call.

    tile: rows of a tile; of the backward pass, and of the forward pass without ``batches``.
    product: of both GEMMs.
    batches: how the forward pass runs many experts at once, or None.
    """

    config: MoEConfig
    scheme: Scheme
    tile: int
    product: Product
    batches: Batches | None

    @property
    def has_shared_scale(self) -> bool:
        """Whether all rows of the call share one activation scale computed from them."""
        fmt = self.scheme.activations
        return fmt is not None and fmt.dynamic and fmt.strategy is Strategy.TENSOR

    @property
    def scales_need_others(self) -> bool:
        """Whether hidden values have scales that follow from other tiles' rows, or from other devices' columns."""
        return self.has_shared_scale or bool(self.config.scale_axes(self.scheme.activations, is_hidden=True))


def plan_call(config: MoEConfig, scheme: Scheme, num_tokens: Size, top_k: int, platform: str) -> CallPlan:
    """platform: "cpu" or "gpu", as ``Problem`` has it."""
    tile = choose_tile(config.planned_tokens(num_tokens), top_k, config.num_experts)
    exact = plan_product(scheme.weights, scheme.activations, config.dtype)
    if platform != "gpu":
        return CallPlan(config, scheme, tile, exact, None)
    product = plan_gpu_product(scheme.weights, scheme.activations, config.dtype)
    batches = plan_batches(config, scheme, num_tokens, top_k, jnp.dtype(product.operand_dtype).itemsize)
    if batches is not None and batches.kind == "pairs":
        product = without_dot(exact)
    return CallPlan(config, scheme, tile, product, batches)


def choose_tile(num_tokens: Size, top_k: int, num_experts: int) -> int:
    """Rows of a tile: a multiple of 8 somewhat above the mean rows per expert, so that most experts need one tile.

    A second tile reads the expert's weights again, and rows above the mean are padding. A number of tokens that is not
    known (``jax.export`` with symbolic shapes) takes ``SYMBOLIC_TILE``.
    """
    if not isinstance(num_tokens, int):
        return SYMBOLIC_TILE
    rows = math.ceil(1.25 * num_tokens * top_k / num_experts)
    return max(1, min(-(-rows // 8) * 8, MAX_TILE, num_tokens))


# Compiled by itself outside ``jax.jit``, where the loop would otherwise be compiled anew by every call and kept.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def _forward(plan: CallPlan, x: Array, weights: ExpertWeights, topk_ids: Array) -> Array:
    """Both products for every pair of a token and an expert: x (T, H) -> (T, top_k, H) float32, zeros for a pair that
    is not routed.
    """
    fmt = plan.scheme.activations
    hidden_axes = plan.config.scale_axes(fmt, is_hidden=True)
    operand, row_scale = quantize_rows(
        x, plan.product, fmt, weights.w13.input_scale, plan.config.scale_axes(fmt, is_hidden=False)
    )
    traverse = _in_tiles if plan.batches is None else _in_batches

    def hidden_rows(tokens, expert_weights):
        rows = operand.at[tokens].get(mode="promise_in_bounds")
        scale = row_scale
        if row_scale is not None and row_scale.ndim:
            scale = row_scale.at[tokens].get(mode="promise_in_bounds")
        h = tile_gemm(rows, scale, expert_weights.w13, expert_weights.w13_bias, plan.product)
        if expert_weights.w13_lora is not None:
            own = x.at[tokens].get(mode="promise_in_bounds")
            h = h + low_rank_product(
                own, _of_rows(expert_weights.w13_lora, weights.w13_lora, tokens), adapter_dtype(plan.config.dtype)
            )
        return apply_activation(h, plan.config)

    def output_rows(h, operand, scale, expert_weights, tokens):
        y = tile_gemm(operand, scale, expert_weights.w2, expert_weights.w2_bias, plan.product)
        if expert_weights.w2_lora is None:
            return y
        lora = _of_rows(expert_weights.w2_lora, weights.w2_lora, tokens)
        return y + low_rank_product(h, lora, adapter_dtype(plan.config.dtype))

    def through_both(tokens, take, expert_weights):
        h = hidden_rows(tokens, expert_weights)
        codes, scale = quantize_rows(h, plan.product, fmt, weights.w2.input_scale, hidden_axes)
        return output_rows(h, codes, scale, expert_weights, tokens)

    def through_first(tokens, take, expert_weights):
        return hidden_rows(tokens, expert_weights)

    def through_second(tokens, take, expert_weights):
        return output_rows(take(hidden), take(hidden_codes), hidden_scale, expert_weights, tokens)

    def run(body, width, of_pairs):
        return traverse(plan, body, x, _without_input_scales(weights), topk_ids, width, of_pairs)

    if not plan.has_shared_scale:
        return run(through_both, x.shape[1], True)
    hidden = run(through_first, weights.intermediate_size, False)
    hidden_codes, hidden_scale = quantize_rows(hidden, plan.product, fmt, None, hidden_axes)
    return run(through_second, x.shape[1], True)


# (tokens (R,) of one expert, take, its weights) -> (R, width) float32. take: of an earlier result of the same traversal
# (rows, width) those of these tokens.
_Body = Callable[[Array, Callable[[Array], Array], Any], Array]


def _in_tiles(
    plan: CallPlan, body: _Body, x: Array, stacked: Any, topk_ids: Array, width: int, of_pairs: bool
) -> Array:
    """``body`` for one tile after another. Returns (T, top_k, width) where ``of_pairs``, else the grouped rows
    (Mp, width), whose gaps are zeros: they must not raise a common scale.
    """
    alignment = align(topk_ids, stacked.num_experts, plan.tile)
    # Gaps read the last token: what they hold is never looked at, and plain indices keep the gather cheap.
    row_token = jnp.minimum(alignment.row_token, x.shape[0] - 1)

    def step(out, start, expert, expert_weights):
        take = functools.partial(slice_rows, start=start, size=plan.tile)
        rows = body(take(row_token), take, expert_weights)
        if not of_pairs:
            rows = jnp.where((take(alignment.row_token) == x.shape[0])[:, None], 0.0, rows)
        return store_rows(out, rows, start)

    out = jnp.zeros_like(x, jnp.float32, shape=(alignment.row_token.shape[0], width))
    rows = for_each_tile(step, out, alignment, plan.tile, stacked)
    return _rows_of_tokens(rows, alignment) if of_pairs else rows


def _in_batches(
    plan: CallPlan, body: _Body, x: Array, stacked: Any, topk_ids: Array, width: int, of_pairs: bool
) -> Array:
    """``body`` for many experts at once. Returns (T, top_k, width) where ``of_pairs``, else (T * top_k, width)."""
    assert plan.batches is not None
    top_k = topk_ids.shape[1]

    def of_indices(pairs, expert_weights):
        take = functools.partial(lambda pairs, values: values.at[pairs].get(mode="promise_in_bounds"), pairs)
        return body(pairs // top_k, take, expert_weights)

    out = jnp.zeros_like(x, jnp.float32, shape=(topk_ids.size, width))
    rows = in_batches(plan.batches, of_indices, out, topk_ids, stacked)
    return rows.reshape(*topk_ids.shape, width) if of_pairs else rows


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weighted_sum(plan: CallPlan, x: Array, topk_weights: Array, weights: ExpertWeights, topk_ids: Array) -> Array:
    """The sum over the experts of each token, (T, H) float32."""
    return jnp.sum(_forward(plan, x, weights, topk_ids) * topk_weights[..., None], axis=1)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Wanted:
    """Which leaves of the stacked weights need a gradient, by position; and whether router weights do."""

    leaves: tuple[int, ...]
    topk_weights: bool


def _save_for_backward(plan, x, topk_weights, weights, topk_ids):
    perturbed = [leaf.perturbed for leaf in jax.tree.leaves(_without_input_scales(weights))]
    leaves = tuple(i for i, is_perturbed in enumerate(perturbed) if is_perturbed)
    wanted = _Wanted(leaves, topk_weights.perturbed)
    arguments = jax.tree.map(lambda leaf: leaf.value, (x, topk_weights, weights, topk_ids))
    x, topk_weights, weights, topk_ids = arguments
    rows = _forward(plan, x, weights, topk_ids)
    kept = rows if wanted.topk_weights and plan.scales_need_others else None
    return jnp.sum(rows * topk_weights[..., None], axis=1), (*arguments, kept, wanted)


def _backward(plan, residuals, out_bar):
    """Differentiate the plain float32 form of each tile again, tile by tile. Nothing here has a row for each pair of a
    token and an expert: cotangents of x are added up token by token. The forward pass keeps such rows for the gradient
    of router weights alone, and only where a tile cannot make them again (``scales_need_others``).

    Rounding of activations passes gradients straight through, as ``fake_quantize`` defines it.
    """
    x, topk_weights, weights, topk_ids, kept, wanted = residuals
    remakes_rows = wanted.topk_weights and kept is None
    alignment = align(topk_ids, weights.num_experts, plan.tile)
    stacked = _without_input_scales(weights)
    leaves, treedef = jax.tree.flatten(stacked)
    fmt = plan.scheme.activations
    if isinstance(out_bar, SymbolicZero):
        out_bar = jnp.zeros_like(x, jnp.float32)
    num_rows = alignment.row_token.shape[0]
    row_of = jnp.where(alignment.row_of < 0, num_rows, alignment.row_of)
    row_weight = jnp.zeros_like(topk_weights, shape=(num_rows,)).at[row_of].set(topk_weights, mode="drop")

    def quantized(values, input_scale):
        axes = plan.config.scale_axes(fmt, is_hidden=False)
        return values.astype(jnp.float32) if fmt is None else fake_quantize(values, fmt, input_scale, axes)

    # Adapters take x as it is, beside what was quantized of it.
    def sources(x):
        rows = (quantized(x, weights.w13.input_scale),)
        return rows if fmt is None or weights.w13_lora is None else (*rows, x.astype(jnp.float32))

    values, pull_x = jax.vjp(sources, x)

    def tile_value(rows, expert_weights, tokens):
        h = _float32_product(rows[0], expert_weights.w13, expert_weights.w13_bias)
        if expert_weights.w13_lora is not None:
            h = h + low_rank_product(rows[-1], _of_rows(expert_weights.w13_lora, weights.w13_lora, tokens))
        h = apply_activation(h, plan.config)
        # Clipped values pass no gradient; a dynamic scale clips nothing, so there rounding is the identity. Where a
        # scale is that of other rows, too, nobody looks at the values.
        operand = h if fmt is None or plan.scales_need_others else fake_quantize(h, fmt, weights.w2.input_scale)
        y = _float32_product(operand, expert_weights.w2, expert_weights.w2_bias)
        if expert_weights.w2_lora is None:
            return y
        return y + low_rank_product(h, _of_rows(expert_weights.w2_lora, weights.w2_lora, tokens))

    def body(carry, start, expert, expert_weights):
        values_bar, weight_bar, leaves_bar = carry
        expert_leaves = jax.tree.leaves(expert_weights)

        def of_wanted(rows, chosen):
            replaced = list(expert_leaves)
            for i, leaf in zip(wanted.leaves, chosen, strict=True):
                replaced[i] = leaf
            return tile_value(rows, treedef.unflatten(replaced), jnp.minimum(tokens, x.shape[0] - 1))

        tokens = slice_rows(alignment.row_token, start, plan.tile)
        chosen = [expert_leaves[i].astype(jnp.float32) for i in wanted.leaves]
        y, pull = jax.vjp(of_wanted, tuple(_take(part, tokens) for part in values), chosen)
        y_bar = _take(out_bar, tokens)
        tile_bar, chosen_bar = pull(y_bar * slice_rows(row_weight, start, plan.tile)[:, None])
        values_bar = tuple(
            total.at[tokens].add(bar, mode="drop") for total, bar in zip(values_bar, tile_bar, strict=True)
        )
        if remakes_rows:
            weight_bar = store_rows(weight_bar, jnp.sum(y * y_bar, axis=1), start)
        return (
            values_bar,
            weight_bar,
            [total.at[expert].add(bar) for total, bar in zip(leaves_bar, chosen_bar, strict=True)],
        )

    carry = (
        tuple(jnp.zeros_like(out_bar) for _ in values),
        jnp.zeros_like(row_weight) if remakes_rows else None,
        [jnp.zeros_like(leaves[i], jnp.float32) for i in wanted.leaves],
    )
    values_bar, weight_bar, leaves_bar = for_each_tile(body, carry, alignment, plan.tile, stacked)
    (x_bar,) = pull_x(values_bar)
    weights_bar: list[Any] = [None] * len(leaves)
    for i, bar in zip(wanted.leaves, leaves_bar, strict=True):
        weights_bar[i] = bar.astype(leaves[i].dtype)
    topk_bar = None if kept is None else jnp.sum(kept * out_bar[:, None], axis=2)
    if remakes_rows:
        topk_bar = _take(weight_bar, row_of)
    return x_bar, topk_bar, treedef.unflatten(weights_bar), None


_weighted_sum.defvjp(_save_for_backward, _backward, symbolic_zeros=True)


def _float32_product(rows, tensor, bias):
    out = jnp.einsum("rk,...nk->r...n", rows, dequantize_tensor(tensor), precision=lax.Precision.HIGHEST)
    return out if bias is None else out + bias.astype(jnp.float32)


def _of_rows(own: LowRank, whole: LowRank, tokens: Array) -> LowRank:
    """One expert's addend with the choices of these tokens."""
    if whole.chosen is None:
        return own
    return dataclasses.replace(own, chosen=whole.chosen.at[tokens].get(mode="promise_in_bounds"))


def _without_input_scales(weights: ExpertWeights) -> ExpertWeights:
    """The leaves that have an expert axis."""
    return dataclasses.replace(
        with_rows_chosen(weights, None),
        w13=dataclasses.replace(weights.w13, input_scale=None),
        w2=dataclasses.replace(weights.w2, input_scale=None),
    )


def _take(values: Array, tokens: Array) -> Array:
    return jnp.take(values, tokens, axis=0, mode="fill", fill_value=0)


def _rows_of_tokens(rows: Array, alignment: Alignment) -> Array:
    """(Mp, H) -> (T, top_k, H); zeros for a pair that is not routed."""
    return _take(rows, jnp.where(alignment.row_of < 0, rows.shape[0], alignment.row_of))
