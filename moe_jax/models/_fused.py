"""Steps between the products of a layer that Hopper kernels do in one launch, and XLA in several.

They run for models with ``attention="auto"`` or "hopper", on one device. Everything else is XLA's, and so is what
``jax.grad`` differentiates.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from moe_jax._typing import Array, Bool, DTypeLike, Float
from moe_jax.experts._gradient import with_gradient_of
from moe_jax.experts._matrix import padded_product, products_of_rows, quantized_rows
from moe_jax.models._layers import MANY_ROWS, Addend, LayerNorm, Linear, PartialSums, RMSNorm, biases_of, project
from moe_jax.models.attention import _hopper
from moe_jax.models.attention._choice import FUSES
from moe_jax.quantization import QuantizedMatrix
from pallas_kernels import add_and_norm as norm_kernel
from pallas_kernels import multiply_heads as heads_kernel
from pallas_kernels import norm_and_multiply as product_kernel
from pallas_kernels import rotate_and_store as rotate_kernel
from pallas_kernels import store_latents as latents_kernel
from pallas_kernels.combine import RoutedRows
from pallas_kernels.common.device import hopper_sms
from pallas_kernels.grouped_gemm import grouped_gemm
from pallas_kernels.grouped_gemm.api import describe_one_expert, of_one_expert
from pallas_kernels.grouped_gemm.config import BLOCK_MS
from pallas_kernels.grouped_gemm.heuristics import candidates

_MOST_BY_HEAD = 256  # tokens whose products by head a kernel makes
_MOST_JOINED = 1024  # rows whose products with several 16-bit weights are made in one launch


def num_sms(attention: str) -> int | None:
    """SMs of the one Hopper GPU that runs a model of this ``attention=``; None where the kernels here do not run."""
    is_asked_for = FUSES[attention] and jax.__version_info__ >= _hopper.OLDEST_JAX
    if not is_asked_for or jax.sharding.get_abstract_mesh().axis_names:
        return None
    try:
        return hopper_sms()
    except NotImplementedError:
        return None


def added_and_normed(
    norm: RMSNorm | LayerNorm, x: Float[Array, "... H"], addend: Addend, sms: int | None
) -> tuple[Array, Array]:
    """(x + addend, its norm). addend: None for zeros. sms: of ``num_sms``."""
    parts, bias = _parts(addend, x)
    if not _takes_norm(norm, x, parts, bias, sms):
        total = added(x, addend)
        return total, norm(total)
    run, judge = (functools.partial(_added_and_normed, norm.eps, name, "none", 0) for name in ("hopper", "reference"))
    return with_gradient_of(run, judge, x, norm.weight[...], parts, bias)


def added_normed_and_routed(
    norm: RMSNorm | LayerNorm,
    x: Float[Array, "... H"],
    addend: Addend,
    router: Any,
    token_mask: Bool[Array, "..."] | None,
    sms: int | None,
) -> tuple[Array, Array, Array] | None:
    """(x + addend, its norm, ``router`` of that): float32 logits (..., E) of few tokens, those of masked ones anything.

    None where the router is more than a product with a plain weight and its bias, or no kernel makes all three.
    """
    if type(router) is not Linear or router.lora is not None or router.out_dtype != jnp.float32:
        return None
    weight, router_bias = router.weight.get_value(), None if router.bias is None else router.bias[...]
    parts, bias = _parts(addend, x)
    if isinstance(weight, QuantizedMatrix) or weight.dtype != x.dtype:
        return None
    of_router = dict(num_experts=weight.shape[0], has_router_bias=router_bias is not None)
    if not _takes_norm(norm, x, parts, bias, sms, **of_router):
        return None

    def run(token_mask, *arguments):
        del token_mask
        return _added_and_normed(norm.eps, "hopper", "none", 0, *arguments)

    def judge(token_mask, *arguments):
        """Masked tokens are zeros to the router: a NaN there would reach its gradient as 0 * NaN."""
        *rest, weight, router_bias = arguments
        total, normal = _added_and_normed(norm.eps, "reference", "none", 0, *rest)
        seen = normal if token_mask is None else jnp.where(token_mask[..., None], normal, jnp.zeros_like(normal))
        logits = project(seen, weight)
        return total, normal, logits if router_bias is None else logits + router_bias.astype(jnp.float32)

    arguments: Any = x, norm.weight[...], parts, bias, weight, router_bias
    found: Any = with_gradient_of(run, judge, token_mask, *arguments)
    return found


def seen_by_router(
    router: Any, logits: Float[Array, "... E"], token_mask: Bool[Array, "..."] | None
) -> Float[Array, "... E"]:
    """Logits of ``added_normed_and_routed`` as ``router`` gives them, which sees zeros in place of masked tokens."""
    if token_mask is None:
        return logits
    of_zeros = jnp.float32(0) if router.bias is None else router.bias[...].astype(jnp.float32)
    return jnp.where(token_mask[..., None], logits, of_zeros)


def added_and_projected(
    norm: RMSNorm | LayerNorm,
    x: Float[Array, "... H"],
    addend: Addend,
    modules: tuple[Linear, ...],
    sms: int | None,
) -> tuple[Array, tuple[PartialSums, ...]] | None:
    """(x + addend, the products of its norm with the modules' weights), the products in one array where one launch
    makes them. Of quantized weights the launch of the norm quantizes it; with others of one token, the launch of the
    products makes sum and norm.

    None where no kernel does either.
    """
    biases, names = biases_of(modules), {module.implementation for module in modules}
    is_alike = len(names) == 1 and len(biases) in (0, len(modules)) and all(m.lora is None for m in modules)
    if sms is None or 0 in x.shape or not is_alike:
        return None
    (parts, bias), weights = _parts(addend, x), [module.weight.get_value() for module in modules]
    arguments: Any = x, norm.weight[...], parts, bias, weights, biases
    run = _of_one_token(norm, sms, x, parts, bias, weights, biases)
    run = run or _with_rows_quantized(norm, names.pop(), sms, x, parts, bias, weights)
    if run is None:
        return None
    shapes: Any = jax.eval_shape(run, *arguments)
    products = shapes[1]

    def judge(x, weight, parts, bias, weights, biases):
        total, normal = _added_and_normed(norm.eps, "reference", "none", 0, x, weight, parts, bias)
        rows = normal.reshape(-1, normal.shape[-1])
        each = zip(weights, biases or [None] * len(weights), strict=True)
        found = [_product_by_xla(rows, *one) for one in each]
        found = [jnp.concatenate(found, axis=-1)] if len(products) == 1 else found
        missing = [one.shape[0] - y.shape[0] for one, y in zip(products, found, strict=True)]
        return total, [jnp.pad(y, ((0, count), (0, 0))) for y, count in zip(found, missing, strict=True)]

    both: Any = with_gradient_of(run, judge, *arguments)
    return both[0], tuple(PartialSums(y[None], x.shape[:-1]) for y in both[1])


_Run: TypeAlias = Callable[..., tuple[Array, list[Array]]]


def _with_rows_quantized(
    norm: RMSNorm | LayerNorm,
    implementation: tuple[str, ...] | None,
    sms: int,
    x: Array,
    parts: Array | RoutedRows | None,
    bias: Array | None,
    matrices: list[Any],
) -> _Run | None:
    """Of quantized weights that agree in how rows are quantized for them: the launch of the norm does that."""
    if not all(isinstance(matrix, QuantizedMatrix) for matrix in matrices):
        return None
    num_tokens = x.size // x.shape[-1]
    rows = quantized_rows(matrices, num_tokens, x.dtype, implementation)
    if rows is None or not _takes_norm(norm, x, parts, bias, sms, *rows):
        return None

    def run(x, weight, parts, bias, matrices, biases):
        total, codes, scales = _added_and_normed(norm.eps, "hopper", *rows, x, weight, parts, bias)
        return total, products_of_rows(codes, scales, num_tokens, matrices, biases or None, x.dtype, implementation)

    return run


def _of_one_token(
    norm: RMSNorm | LayerNorm,
    sms: int,
    x: Array,
    parts: Array | RoutedRows | None,
    bias: Array | None,
    weights: list[Any],
    biases: list[Array],
) -> _Run | None:
    """Of weights in 16 bits: one launch for sum, norm and products. Rows of experts are left to a launch of the norm,
    since every CTA would read and add up all of them."""
    if x.size != x.shape[-1] or not _are_plain(x, weights, biases) or isinstance(parts, RoutedRows):
        return None
    if not _takes_norm(norm, x, parts, bias, sms):
        return None
    w, w_bias = _of_one_expert(weights, biases)
    options: Any = dict(eps=norm.eps, bias=bias, w_bias=w_bias, out_dtype=x.dtype)
    desc, *_ = product_kernel.describe(x.reshape(1, -1), norm.weight[...], parts, w, **options)
    if product_kernel.config_error(desc, product_kernel.choose_config(desc, sms)) is not None:
        return None

    def run(*arguments):
        total, y = _normed_and_multiplied(norm.eps, *arguments)
        return total, [y]

    return run


def _are_plain(x: Array, weights: list[Any], biases: list[Array]) -> bool:
    """Whether weights are plain ones of x's dtype, with biases of one dtype."""
    is_plain = not any(isinstance(one, QuantizedMatrix) or one.dtype != x.dtype for one in weights)
    return is_plain and len({bias.dtype for bias in biases}) < 2


def _of_one_expert(weights: list[Array], biases: list[Array]) -> tuple[tuple[Array, ...], tuple[Array, ...] | None]:
    """Weights side by side and their biases as a grouped GEMM with E = 1 takes them."""
    return tuple(one[None] for one in weights), tuple(one[None] for one in biases) or None


def product_by_kernel(modules: tuple[Linear, ...], x: Float[Array, "... K"], sms: int | None) -> PartialSums | None:
    """x W^T + b of 16-bit weights side by side: of one token as matrix times vector, of MANY_ROWS to _MOST_JOINED rows
    and several weights in one launch. None where no kernel does that, or XLA's products are faster."""
    biases, weights = biases_of(modules), [module.weight.get_value() for module in modules]
    is_whole = len(biases) in (0, len(modules)) and all(module.lora is None for module in modules)
    block_m = _block_m(x.size // x.shape[-1], len(modules))
    if sms is None or block_m is None or not is_whole or not _are_plain(x, weights, biases) or x.dtype.itemsize != 2:
        return None
    tokens = x.reshape(-1, x.shape[-1])
    tokens = jnp.pad(tokens, ((0, -tokens.shape[0] % block_m), (0, 0)))
    desc, _ = describe_one_expert(tokens, block_m, *_of_one_expert(weights, biases), x.dtype)
    if not candidates(desc, block_m, sms):
        return None

    def judge(tokens, weights, biases):
        each = zip(weights, biases or [None] * len(weights), strict=True)
        return jnp.concatenate([_product_by_xla(tokens, *one) for one in each], axis=-1)

    y: Any = with_gradient_of(functools.partial(_multiplied_alone, block_m), judge, tokens, weights, biases)
    return PartialSums(y[None], x.shape[:-1])


def multiplied_by_head(
    x: Float[Array, "B S N K"], w: Float[Array, "N R C"], rows: tuple[int, int], transposes_w: bool, sms: int | None
) -> Float[Array, "B S N W"]:
    """As ``pallas_kernels.multiply_heads``. sms: of ``num_sms``; without a kernel XLA multiplies."""
    tokens = x.reshape(-1, *x.shape[2:])
    desc = heads_kernel.describe(tokens, w, rows=rows, transposes_w=transposes_w)
    is_taken = sms is not None and heads_kernel.config_error(desc, heads_kernel.choose_config(desc)) is None
    run = functools.partial(_multiplied_by_head, rows, transposes_w)
    judge = functools.partial(heads_kernel.multiply_heads_ref, desc)
    is_few = desc.num_tokens <= _MOST_BY_HEAD
    y: Any = with_gradient_of(run, judge, tokens, w) if is_taken and is_few else judge(tokens, w)
    return y.reshape(*x.shape[:3], -1)


def _block_m(num_tokens: int, num_weights: int) -> int | None:
    """Rows of a tile of ``product_by_kernel``.

    Queries, keys and values of 256 rows take 0.59 to 0.68 of the time of three XLA products in one launch, of 512 rows
    0.75 to 0.94, of 1024 rows 0.90 to 1.01, of 2048 rows 1.03 (H100, three models).
    """
    if num_tokens == 1:
        return 1
    return BLOCK_MS[-1] if num_weights > 1 and MANY_ROWS <= num_tokens <= _MOST_JOINED else None


def _product_by_xla(rows: Array, weight: Any, bias: Array | None) -> Array:
    if isinstance(weight, QuantizedMatrix):
        return padded_product(rows, weight, bias, out_dtype=rows.dtype, implementation=("reference",))
    y = project(rows, weight)
    return (y if bias is None else y + bias.astype(jnp.float32)).astype(rows.dtype)


def added(x: Float[Array, "... H"], addend: Addend) -> Float[Array, "... H"]:
    """x + addend, each rounded."""
    if isinstance(addend, PartialSums | RoutedRows):
        addend = addend.whole(x.dtype).reshape(x.shape)
    return x if addend is None else x + addend


def _parts(addend: Addend, x: Array) -> tuple[Array | RoutedRows | None, Array | None]:
    """(P, R, H) of the tokens of x or the rows of their experts, and the bias (H,) of their product."""
    if isinstance(addend, RoutedRows):
        return addend, None
    if isinstance(addend, PartialSums):
        return addend.parts, addend.biases[0] if addend.biases else None
    return None if addend is None else addend.reshape(1, -1, x.shape[-1]), None


def _takes_norm(
    norm: RMSNorm | LayerNorm,
    x: Array,
    parts: Array | RoutedRows | None,
    bias: Array | None,
    sms: int | None,
    quantization: str = "none",
    scale_rows: int = 0,
    **others: Any,
) -> bool:
    if sms is None or type(norm) is not RMSNorm or 0 in x.shape or norm.weight.dtype != x.dtype:
        return False
    name, rows = jnp.dtype(x.dtype).name, x.size // x.shape[-1]
    count, kind = 0, None
    if isinstance(parts, RoutedRows):
        kind, shared = jnp.dtype(parts.rows.dtype).name, parts.shared
        others |= dict(top_k=parts.row_of.shape[1])
        others |= dict(shared_dtype=None if shared is None else jnp.dtype(shared.dtype).name)
    elif parts is not None:
        count, kind = parts.shape[0], jnp.dtype(parts.dtype).name
    sizes = rows, x.shape[-1], name, count, norm.eps, kind, quantization, scale_rows, bias is not None
    desc = norm_kernel.AddNormDesc(*sizes, **others)
    return norm_kernel.config_error(desc, norm_kernel.choose_config(desc, sms)) is None


# Compiled parts of their own, so that equal layers of a model lower each kernel once.
@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _added_and_normed(
    eps: float,
    name: str,
    quantization: str,
    scale_rows: int,
    x: Array,
    weight: Array,
    parts: Array | RoutedRows | None,
    bias: Array | None,
    router: Array | None = None,
    router_bias: Array | None = None,
) -> tuple[Array, ...]:
    """(sum, norm) of x's shape, with a router its logits (..., E); or (sum, codes (T, H), scales)."""
    options: Any = dict(bias=bias, quantization=quantization, scale_rows=scale_rows or None, implementation=name)
    options |= dict(router=router, router_bias=router_bias)
    total, *normal = norm_kernel.add_and_norm(x.reshape(-1, x.shape[-1]), weight, parts, eps=eps, **options)
    if quantization == "none":
        normal = [found.reshape(*x.shape[:-1], -1) for found in normal]
    return total.reshape(x.shape), *normal


@functools.partial(jax.jit, static_argnums=0)
def _normed_and_multiplied(
    eps: float,
    x: Array,
    weight: Array,
    parts: Array | None,
    bias: Array | None,
    weights: list[Array],
    biases: list[Array],
) -> tuple[Array, Array]:
    """(sum of x's shape, product (1, N)) of one token."""
    w, w_bias = _of_one_expert(weights, biases)
    options: Any = dict(eps=eps, bias=bias, w_bias=w_bias, implementation="hopper")
    total, y = product_kernel.norm_and_multiply(x.reshape(1, -1), weight, parts, w, **options)
    return total.reshape(x.shape), y


@functools.partial(jax.jit, static_argnums=0)
def _multiplied_alone(block_m: int, x: Array, weights: list[Array], biases: list[Array]) -> Array:
    """(R, K), rows of whole tiles, times weights side by side: (R, N)."""
    w, w_bias = _of_one_expert(weights, biases)
    options: Any = dict(out_dtype=x.dtype, implementation="hopper", **of_one_expert(x.shape[0], block_m))
    return grouped_gemm(x, w, bias=w_bias, **options)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _multiplied_by_head(rows: tuple[int, int], transposes_w: bool, x: Array, w: Array) -> Array:
    return heads_kernel.multiply_heads(x, w, rows=rows, transposes_w=transposes_w, implementation="hopper")


def rotated_and_stored(
    products: tuple[PartialSums, ...],
    cached: tuple[Array, Array],
    cos: Array,
    sin: Array,
    places: tuple[Array, Array, Array],
    norms: tuple[RMSNorm, ...],
    *,
    dtype: DTypeLike,
    scales: tuple[Array, Array] | None = None,
    page_table: Array | None = None,
    sms: int | None,
) -> tuple[Array, Array, Array] | None:
    """As ``pallas_kernels.rotate_and_store``, or None where its kernel does not take the call.

    products: queries, keys and values, or one product of all. places: starts, lengths, first_slots. dtype: of the
    queries. scales: of a cache of e4m3 codes. page_table: of a cache in pages.
    """
    biases = tuple(bias for product in products for bias in product.biases)
    is_alike = len({(product.parts.shape[:2], product.parts.dtype) for product in products}) == 1
    is_alike &= len(biases) in (0, 3)
    if not is_alike or (scales is not None and not norms):  # a cache of codes does not say what the queries are
        projected = tuple(product.whole(dtype).reshape(1, -1, product.parts.shape[2]) for product in products)
        biases = ()
    else:
        projected = tuple(product.parts for product in products)
    if sms is None or 0 in projected[0].shape or 2 * cos.shape[-1] != cached[0].shape[-1]:
        return None
    weights, eps = tuple(norm.weight[...] for norm in norms), norms[0].eps if norms else 0.0
    kinds = {jnp.dtype(dtype), *(jnp.dtype(a.dtype) for a in weights)}
    if len(kinds | (set() if scales is not None else {jnp.dtype(a.dtype) for a in cached})) > 1:
        return None
    if projected[0].dtype not in (dtype, jnp.float32):
        return None
    sizes: Any = dict(num_tokens=cos.shape[1], biases=biases)
    desc = rotate_kernel.describe(projected, cached, weights, eps, scales, page_table, **sizes)
    if rotate_kernel.config_error(desc, rotate_kernel.choose_config(desc, sms)) is not None:
        return None
    run, judge = (functools.partial(_rotated_and_stored, eps, name) for name in ("hopper", "reference"))
    return with_gradient_of(run, judge, projected, biases, cached, cos, sin, places, weights, scales, page_table)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _rotated_and_stored(
    eps: float,
    name: str,
    projected: Any,
    biases: Any,
    cached: Any,
    cos: Array,
    sin: Array,
    places: Any,
    weights: Any,
    scales: Any,
    page_table: Array | None,
) -> tuple[Array, Array, Array]:
    options: Any = dict(biases=biases, norms=weights, eps=eps, scales=scales, has_parts=True, implementation=name)
    options |= dict(page_table=page_table)
    return rotate_kernel.rotate_and_store(projected, cos, sin, cached, *places, **options)


def latents_stored(
    projected: PartialSums,
    cache: Float[Array, "_ 1 L W"],
    cos: Array,
    sin: Array,
    places: tuple[Array, Array, Array],
    norms: tuple[RMSNorm, ...],
    to_heads: Linear | None,
    *,
    is_interleaved: bool,
    page_table: Array | None,
    sms: int | None,
) -> tuple[Array | None, Array] | None:
    """(queries of all heads (B, S, N * D), the cache with the latents of these tokens), or None where no kernel does
    that.

    projected: what queries are made of, latents and keys, side by side. norms: of the first, where there is
    ``to_heads``, which makes queries of it, and of latents; without it the queries are None. places: starts, lengths,
    first_slots. sms: of ``num_sms``.
    """
    rows, lead, dtype = projected.parts[0], projected.lead, cache.dtype
    is_plain = projected.parts.shape[0] == 1 and not projected.biases and all(type(norm) is RMSNorm for norm in norms)
    weights = tuple(norm.weight[...] for norm in norms)
    is_plain &= {jnp.dtype(a.dtype) for a in (rows, cache, *weights)} == {jnp.dtype(dtype)}
    width_of_key = cache.shape[-1] - weights[-1].shape[0]
    if sms is None or 0 in lead or not is_plain or 2 * cos.shape[-1] != width_of_key:
        return None
    matrix = None if to_heads is None or to_heads.lora is not None else to_heads.weight.get_value()
    quantization = None
    if to_heads is not None and isinstance(matrix, QuantizedMatrix):
        quantization = quantized_rows([matrix], math.prod(lead), dtype, to_heads.implementation)
    kind, room = quantization or ("none", 0)
    settings: Any = dict(eps=norms[0].eps, is_interleaved=is_interleaved, quantization=kind, scale_rows=room or None)
    of_queries = weights[0] if len(weights) == 2 else None
    desc = latents_kernel.describe(rows, cos, cache, weights[-1], of_queries, page_table, **settings)
    if latents_kernel.config_error(desc, latents_kernel.choose_config(desc, sms)) is not None:
        return None
    options = (norms[0].eps, is_interleaved, kind, room)
    arguments: Any = rows, cache, cos, sin, places, weights, page_table

    if quantization is None:
        run, judge = (functools.partial(_latents_stored, *options, name) for name in ("hopper", "reference"))
        both: Any = with_gradient_of(run, judge, *arguments)
        return None if to_heads is None else to_heads(both[0].reshape(*lead, -1)), both[1]
    assert to_heads is not None
    implementation = to_heads.implementation

    def by_kernel(*operands):
        *operands, matrix, bias = operands
        (codes, scales), cache = _latents_stored(*options, "hopper", *operands)
        biases = None if bias is None else [bias]
        return products_of_rows(codes, scales, desc.rows.num_tokens, [matrix], biases, dtype, implementation)[0], cache

    arguments = *arguments, matrix, None if to_heads.bias is None else to_heads.bias[...]
    shape: Any = jax.eval_shape(by_kernel, *arguments)[0]

    def by_xla(*operands):
        *operands, matrix, bias = operands
        found, cache = _latents_stored(*options[:2], "none", 0, "reference", *operands)
        y = _product_by_xla(found, matrix, bias)
        return jnp.pad(y, ((0, shape.shape[0] - y.shape[0]), (0, 0))), cache

    both = with_gradient_of(by_kernel, by_xla, *arguments)
    return PartialSums(both[0][None], lead).whole(dtype), both[1]


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _latents_stored(
    eps: float,
    is_interleaved: bool,
    quantization: str,
    scale_rows: int,
    name: str,
    rows: Array,
    cache: Array,
    cos: Array,
    sin: Array,
    places: tuple[Array, Array, Array],
    weights: tuple[Array, ...],
    page_table: Array | None,
) -> tuple[Any, Array]:
    options: Any = dict(eps=eps, is_interleaved=is_interleaved, quantization=quantization, implementation=name)
    options |= dict(kv_norm=weights[-1], q_norm=weights[0] if len(weights) == 2 else None)
    options |= dict(scale_rows=scale_rows or None, page_table=page_table)
    return latents_kernel.store_latents(rows, cos, sin, cache, *places, **options)
