"""``grouped_gemm``: rows in expert order times the weights of their experts, with what surrounds a product fused in."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.combine import combine
from pallas_kernels.combine.api import check_operands
from pallas_kernels.common.activations import Activation
from pallas_kernels.common.device import hopper_sms
from pallas_kernels.common.implementations import check_config, first_that_runs
from pallas_kernels.common.rows import check_unpermuted_rows, in_every_tile, scales_in_every_tile
from pallas_kernels.grouped_gemm.config import GemmConfig, config_error
from pallas_kernels.grouped_gemm.few_rows import FewRowsConfig
from pallas_kernels.grouped_gemm.heuristics import choose_config
from pallas_kernels.grouped_gemm.problem import SCALE_GROUP, GemmDesc, GroupedGemm
from pallas_kernels.grouped_gemm.reference import grouped_gemm_ref
from pallas_kernels.grouped_gemm.vector import VectorConfig
from pallas_kernels.quantize_and_permute import PermuteDesc, quantize_and_permute
from pallas_kernels.quantize_and_permute.config import WITH_SCALES

Operands = dict[str, Any]  # arrays by name, None for those that a call has not
OF_SUM = ("row_of", "slot_weights", "shared")
OF_TILES = ("tile_rows", "tile_bits")


def grouped_gemm(
    x: jax.Array,
    w: jax.Array | tuple[jax.Array, ...],
    tile_expert: jax.Array,
    num_tiles: jax.Array,
    *,
    x_scale: jax.Array | None = None,
    w_scale: jax.Array | tuple[jax.Array, ...] | None = None,
    bias: jax.Array | tuple[jax.Array, ...] | None = None,
    activation: Activation | None = None,
    out_dtype: DTypeLike = jnp.bfloat16,
    requantize: Literal["none", "group", "group_ue8m0", "tensor"] = "none",
    out_scale: jax.Array | None = None,
    tile_rows: jax.Array | None = None,
    tile_bits: jax.Array | None = None,
    block_m: int | None = None,
    transposes_w: bool = False,
    keeps_before: bool = False,
    quantization: str = "none",
    k_parts: int = 1,
    row_of: jax.Array | None = None,
    slot_weights: jax.Array | None = None,
    shared: jax.Array | None = None,
    config: Any = None,
    implementation: str | Sequence[str] | None = None,
) -> Any:
    """Grouped GEMM over rows in expert order, each expert's rows starting at a tile of their own.

    Everything the call depends on may live on the device. Scales multiply the stored values. Scales of x per group go
    with scales of w per block. The sum over each 128 of K is then scaled, and these sums are added in float32.

    Args:
        x: (Mp, K) e4m3, int8, bfloat16 or float16.
        w: (E, N, K) or (E, G, N, K) of x's dtype, K contiguous; G = 2 stacks gate and up for a gated activation. A
            tuple of weights (1, N_i, K) gives their products side by side, N being the sum; w_scale and bias are then
            tuples too.
        tile_expert: (Mp / block_m,) int32, the expert of each tile of rows, and so the tile size.
        num_tiles: () or (1,) int32, tiles in use.
        x_scale: None, or float32 () per tensor, (Mp,) per row, or (ceil(K/128), Mp) per 128 of K.
        w_scale: None, or float32 (E[, G]) per matrix, (E[, G], N) per channel, or (E[, G], ceil(N/128), ceil(K/128))
            per 128 x 128 block.
        bias: (E[, G], N), added before the activation.
        activation: applied to the product; (E, G, N, K) weights only.
        out_dtype: of the product.
        requantize: "group" returns e4m3 codes and their scales (ceil(N/128), Mp) float32, one per row and 128 columns;
            "group_ue8m0" rounds these scales up to powers of two; "tensor" returns codes for the given out_scale. With
            out_dtype bfloat16 values are rounded to it first.
        out_scale: () float32, for requantize="tensor".
        tile_rows: (Mp / block_m,) int32, rows in use of each tile: the others may then be neither read nor written.
        tile_bits: (Mp / block_m,) int32, where other rows lie among these: which are in use, as ``TileMap`` says.
        block_m: with it x is (T, K), T <= block_m: the unpermuted tokens, which are the first rows of every tile.
            Scales of rows are then those of one tile, (block_m,) or (ceil(K/128), block_m), of any value past T.
        transposes_w: w is (E, K, N), N contiguous. The gradient of a product with respect to its rows takes weights so,
            as they lie: that product's N is K here. bfloat16 and float16, without scales.
        keeps_before: what the activation is given, (Mp, G * N) of ``out_dtype``, projections one after the other, is
            returned as well: (result, what it was made of). Not with requantize.
        quantization: "none", or how x, then (Mp, K) bfloat16, float16 or float32, is quantized first, in place of
            x_scale: "e4m3_row", "int8_row", "e4m3_group" or "e4m3_group_ue8m0", as by ``quantize_and_permute``. The
            Hopper kernel of tiles of one row does that.
        k_parts: with more than 1, tile t of unpermuted rows has their products with the t-th of so many equal parts of
            K: partial sums of the product with one expert, which the reader adds up. The Hopper kernel does that.
        row_of: (T, top_k) int32; with it the result is (T, N), for each token the sum of these rows times
            ``slot_weights``, (T, top_k) float, and of ``shared``, (T, N) or None, as ``combine`` makes it, of rows that
            are not rounded first. The Hopper kernel of tiles of one row does that for T = 1.
        config: GemmConfig of the hopper implementation, VectorConfig for tiles of one row, FewRowsConfig for those of
            four, or MmaConfig of the portable one; chosen when None.
        implementation: "hopper", "portable" or "reference", or several in the order to try; all when None.

    Returns (Mp, N) out_dtype, or codes, or (codes, scales). Rows of tiles from num_tiles on, and rows that are not in
    use, are unspecified.

    Raises ValueError or TypeError for a wrong call and NotImplementedError, with one reason for each implementation
    tried, when none can run it.
    """
    tiles = dict(tile_expert=tile_expert, num_tiles=num_tiles, tile_rows=tile_rows, tile_bits=tile_bits)
    operands = dict(x=x, **tiles, x_scale=x_scale, out_scale=out_scale)
    of_tokens = dict(row_of=row_of, slot_weights=slot_weights, shared=shared)
    desc, operands = describe_products(
        operands, w, w_scale, bias, activation, out_dtype, requantize, block_m, transposes_w, quantization
    )
    desc = dataclasses.replace(desc, keeps_before=keeps_before, k_parts=k_parts)
    if row_of is not None and (desc.requantize != "none" or keeps_before):
        raise ValueError(
            f"row_of goes without requantize and keeps_before, found requantize={desc.requantize!r} and "
            f"keeps_before={keeps_before}: the sum is the only output"
        )
    desc = dataclasses.replace(desc, **describe_sum(desc, **of_tokens))
    _check_parts(desc, operands)
    operands |= of_tokens
    runs = {name: functools.partial(run, desc, config, operands) for name, run in _RUN.items()}
    return first_that_runs("grouped_gemm", runs, implementation)


def describe_products(
    operands: Operands,
    w: jax.Array | tuple[jax.Array, ...],
    w_scale: jax.Array | tuple[jax.Array, ...] | None,
    bias: jax.Array | tuple[jax.Array, ...] | None,
    *options: Any,
) -> tuple[GemmDesc, Operands]:
    """``describe_gemm`` of one weight or several side by side, and all operands by name, experts with an axis of
    projections."""
    each = of_each_weight(w=w, w_scale=w_scale, bias=bias)
    desc = side_by_side([describe_gemm(operands | own, *options) for own in each], is_one=not isinstance(w, tuple))
    for own in each:
        if own["w"].ndim == 3:
            own.update({name: leaf[:, None] for name, leaf in own.items() if leaf is not None})
    return desc, operands | numbered(each)


def of_one_expert(num_rows: int, block_m: int) -> Operands:
    """Arguments of a product of so many tiles of rows, all full, with one expert."""
    tiles = num_rows // block_m
    return dict(tile_expert=jnp.zeros(tiles, jnp.int32), num_tiles=jnp.full(1, tiles, jnp.int32))


def describe_one_expert(
    x: jax.Array,
    block_m: int,
    w: jax.Array | tuple[jax.Array, ...],
    bias: jax.Array | tuple[jax.Array, ...] | None,
    out_dtype: DTypeLike,
) -> tuple[GemmDesc, Operands]:
    """``describe_products`` of x (R, K), rows of whole tiles, and weights of one expert, without scales."""
    given: Operands = dict(x=x, x_scale=None, out_scale=None, tile_rows=None, **of_one_expert(x.shape[0], block_m))
    return describe_products(given, w, None, bias, None, out_dtype, "none", None, False)


def of_each_weight(**given: Any) -> list[Operands]:
    """The operands of each weight, of a tuple of them or of one."""
    sizes = {len(own) if isinstance(own, tuple) else None for own in given.values() if own is not None}
    if len(sizes) > 1 or sizes == {0}:
        found = ", ".join(f"{name}: {len(own) if isinstance(own, tuple) else 'one'}" for name, own in given.items())
        raise ValueError(f"weights side by side: {found}; expected tuples of one length")
    count = sizes.pop()
    if count is None:
        return [given]
    return [{name: own if own is None else own[index] for name, own in given.items()} for index in range(count)]


def side_by_side(descs: list[Any], *, is_one: bool) -> Any:
    """The description of the product with all weights, from those of each weight's."""
    if is_one:
        return descs[0]
    widths, alike = tuple(desc.n for desc in descs), {dataclasses.replace(desc, n=0) for desc in descs}
    if len(alike) > 1 or descs[0].num_experts > 1 or descs[0].projections > 1:
        raise ValueError(f"weights side by side are {descs}; expected one expert, and differences in N alone")
    return dataclasses.replace(descs[0], n=sum(widths), widths=widths)


def numbered(each: list[Operands]) -> Operands:
    """Operands of all weights by the names of ``GroupedGemm.of_each_weight``."""
    return {f"{name}_{i}" if i else name: leaf for i, own in enumerate(each) for name, leaf in own.items()}


def check_tiles(
    x: jax.Array, tile_expert: jax.Array, num_tiles: jax.Array, block_m: int | None
) -> tuple[int, int, int]:
    """(Mp, rows of x that are unpermuted or 0, rows that x_scale is for), or raise what a wrong call raises."""
    tiles = tile_expert.shape[0] if tile_expert.ndim == 1 else 0
    rows = scaled = x.shape[0]
    unpermuted = 0
    if block_m is not None:
        check_unpermuted_rows(rows, block_m)
        unpermuted, rows, scaled = rows, tiles * block_m, block_m
    if not tiles or rows % tiles:
        raise ValueError(f"tile_expert has shape {tile_expert.shape}, expected (Mp / block_m,) for Mp={rows} rows")
    if num_tiles.size != 1:
        raise ValueError(f"num_tiles has shape {num_tiles.shape}, expected () or (1,)")
    for name, value in (("tile_expert", tile_expert), ("num_tiles", num_tiles)):
        if value.dtype != jnp.int32:
            raise TypeError(f"{name} is {value.dtype}, expected int32")
    return rows, unpermuted, scaled


def check_tile_rows(tile_rows: jax.Array | None, tile_bits: jax.Array | None, tile_expert: jax.Array) -> None:
    """Raise where these are not the rows in use of each tile."""
    if tile_bits is not None and tile_rows is None:
        raise ValueError("tile_bits goes with tile_rows: the number of rows among which they are")
    for name, array in (("tile_rows", tile_rows), ("tile_bits", tile_bits)):
        if array is None:
            continue
        if array.shape != tile_expert.shape:
            raise ValueError(f"{name} has shape {array.shape}, expected {tile_expert.shape}")
        if array.dtype != jnp.int32:
            raise TypeError(f"{name} is {array.dtype}, expected int32")


def check_before(before: jax.Array, shape: tuple[int, int], dtype: DTypeLike) -> None:
    """Raise where this is not what an activation was given, (Mp, G * N) of ``dtype``."""
    if before.shape != shape or before.dtype != dtype:
        raise ValueError(f"before is {before.dtype}{before.shape}, expected {jnp.dtype(dtype).name} {shape}")


def expected_projections(activation: Activation | None) -> tuple[int, str]:
    """How many projections feed an activation, and its name."""
    if activation is None:
        return 1, "no activation"
    return 2 if activation.is_gated else 1, activation.name


def check_block_m(config: Any, operands: Mapping[str, Any], rows: int) -> int:
    """Rows of a tile; ValueError where a configuration that was given has others."""
    block_m = rows // operands["tile_expert"].shape[0]
    if config is not None and config.block_m != block_m:
        raise ValueError(f"config.block_m={config.block_m}, but tile_expert has tiles of {block_m} rows")
    return block_m


def permuted(operands: Operands, rows: int) -> Operands:
    """Operands of unpermuted rows as if x had a row for each of a tile."""
    tiles = operands["tile_expert"].shape[0]
    x = in_every_tile(operands["x"], tiles, rows // tiles)
    return dict(operands, x=x, x_scale=scales_in_every_tile(operands["x_scale"], tiles))


def flattened(operands: Operands) -> Operands:
    """Operands as the kernels take them: (E, G, ...) as (E * G, ...), and scalars as (1,)."""
    flat = dict(operands)
    for name in flat:
        if flat[name] is not None and name.startswith(("w", "bias")):
            flat[name] = flat[name].reshape(-1, *flat[name].shape[2:])
    for name in ("num_tiles", "x_scale", "out_scale"):
        if flat[name] is not None and flat[name].ndim == 0:
            flat[name] = flat[name].reshape(1)
    return flat


def _run_hopper(desc: GemmDesc, config: Any, operands: Operands) -> Any:
    check_config(config, GemmConfig, VectorConfig, FewRowsConfig)
    block_m = check_block_m(config, operands, desc.rows)
    config = config or choose_config(desc, block_m, hopper_sms())
    if reason := config_error(desc, config):
        raise NotImplementedError(reason)
    flat = flattened(operands)
    # here: importing it loads Pallas
    from pallas_kernels.grouped_gemm.kernel_sm90 import grouped_gemm_sm90

    return grouped_gemm_sm90(desc, config)(flat)


def _run_reference(desc: GemmDesc, config: Any, operands: Operands) -> Any:
    del config
    if desc.top_k:
        return sum_of_reference(desc, operands, _run_reference)
    given = permuted(operands, desc.rows) if desc.unpermuted_rows else operands
    given = {name: leaf for name, leaf in given.items() if name not in (*OF_TILES, *OF_SUM)}
    if desc.k_parts > 1:
        given["x"] = _parts_of_rows(given["x"], desc.k_parts)
    if desc.quantization != "none":
        given["x"], given["x_scale"] = quantize_and_permute(
            given["x"], quantization=desc.quantization, implementation="reference"
        )
    if desc.transposes_w:
        given["w"] = jnp.swapaxes(given["w"], -1, -2)
    return in_turn(desc, given, ("w", "w_scale", "bias"), grouped_gemm_ref)


def sum_of_reference(desc: Any, operands: Operands, run: Callable[..., jax.Array]) -> jax.Array:
    """The sum of a token's rows, which ``run(desc, config, operands)`` makes."""
    rows = run(dataclasses.replace(desc, top_k=0, out_dtype="float32"), None, operands)
    row_of, slot_weights, shared = (operands[name] for name in OF_SUM)
    out_dtype = jnp.dtype(desc.out_dtype)
    return combine(rows, row_of, slot_weights, shared=shared, out_dtype=out_dtype, implementation="reference")


def in_turn(desc: Any, operands: Operands, names: Sequence[str], run: Callable[..., Any]) -> Any:
    """``run(desc, **operands)``, of several weights once for each. names: of operands that each weight has."""
    if not desc.widths:
        return run(desc, **operands)
    numbers = {name: desc.of_each_weight(name) for name in names}
    common = {name: leaf for name, leaf in operands.items() if name not in sum(numbers.values(), [])}
    own = [{name: operands[numbers[name][i]] for name in names} for i in range(len(desc.widths))]
    descs = [dataclasses.replace(desc, n=width, widths=()) for width in desc.widths]
    return jnp.concatenate([run(one, **common, **leaves) for one, leaves in zip(descs, own, strict=True)], axis=-1)


def _parts_of_rows(x: jax.Array, k_parts: int) -> jax.Array:
    """Rows of tiles, one for each part of K, with zeros outside of it."""
    parts = x.reshape(k_parts, -1, k_parts, x.shape[1] // k_parts)
    own = jnp.eye(k_parts, dtype=bool)[:, None, :, None]
    return jnp.where(own, parts, jnp.zeros((), x.dtype)).reshape(x.shape)


def _check_parts(desc: GemmDesc, operands: Operands) -> None:
    """Raise ValueError where ``desc.k_parts`` does not go with the rest of a call."""
    parts, tiles = desc.k_parts, operands["tile_expert"].shape[0]
    if parts == 1:
        return
    is_one = desc.num_experts == 1 and desc.unpermuted_rows and tiles == parts and desc.k % parts == 0
    is_plain = desc.activation is None and desc.bias_dtype is None and not desc.top_k
    is_plain &= desc.requantize == desc.quantization == "none"
    if parts < 1 or not is_one or not is_plain:
        raise ValueError(
            f"k_parts={parts} with {desc.num_experts} experts, {tiles} tiles, K={desc.k}, block_m "
            f"{'given' if desc.unpermuted_rows else 'not given'}; expected block_m, one expert, {parts} tiles, K a "
            "multiple of it, and no activation, bias, requantize, quantization or row_of"
        )


def _run_portable(desc: GemmDesc, config: Any, operands: Operands) -> jax.Array:
    # here: it loads Pallas, and knows packed weights, which know this module
    from pallas_kernels.grouped_gemm.portable import run

    if desc.widths:
        raise NotImplementedError(f"{len(desc.widths)} weights side by side: the Hopper kernels read them")
    if desc.keeps_before:
        raise NotImplementedError("keeps_before: the Hopper kernels have it")
    if desc.quantization != "none":
        raise NotImplementedError(f"quantization {desc.quantization!r} of x: the Hopper kernel of single rows has it")
    if desc.top_k:
        raise NotImplementedError("the sum of a token's rows: the Hopper kernel of single rows has it")
    if desc.k_parts > 1:
        raise NotImplementedError(f"k_parts={desc.k_parts}: the Hopper kernels have it")
    block_m = check_block_m(config, operands, desc.rows)
    desc = dataclasses.replace(desc, has_tile_rows=False, has_tile_bits=False)  # tiles in use are written whole
    return run(desc, config, block_m, flattened(operands | dict.fromkeys(OF_TILES)))


_RUN = {"hopper": _run_hopper, "portable": _run_portable, "reference": _run_reference}


def describe_gemm(
    operands: Operands,
    activation: Activation | None,
    out_dtype: DTypeLike,
    requantize: str,
    block_m: int | None,
    transposes_w: bool,
    quantization: str = "none",
) -> GemmDesc:
    """The description of a call; its shapes and dtypes are checked here once."""
    x, w, tile_expert, num_tiles = (operands[name] for name in ("x", "w", "tile_expert", "num_tiles"))
    bias, out_scale, tile_rows = (operands[name] for name in ("bias", "out_scale", "tile_rows"))
    tile_bits = operands.get("tile_bits")
    if x.ndim != 2 or w.ndim not in (3, 4):
        raise ValueError(
            f"x has shape {x.shape}, expected (Mp, K); w has {w.shape}, expected (E, N, K) or (E, G, N, K)"
        )
    lead = w.shape[:-2]
    k, (n, depth) = x.shape[1], w.shape[:-3:-1] if transposes_w else w.shape[-2:]
    projections = lead[1] if len(lead) == 2 else 1
    expected, name = expected_projections(activation)
    if projections != expected or (activation is not None and len(lead) == 1):
        raise ValueError(f"w has shape {w.shape}; {name} needs (E, {expected}, N, K)")
    if depth != k:
        stored = "(..., K, N) with transposes_w" if transposes_w else "(..., N, K)"
        raise ValueError(f"x has K={k} and w has K={depth}; w is stored {stored}")
    if transposes_w and w.ndim == 4:
        raise ValueError(f"w has shape {w.shape}; with transposes_w it is (E, K, N)")
    quantized_scale = _scale_of_rows(x, w, operands["x_scale"], quantization)
    if not quantized_scale and x.dtype != w.dtype:
        raise TypeError(f"x is {x.dtype} and w is {w.dtype}; both operands have one dtype")
    rows, unpermuted_rows, scaled = check_tiles(x, tile_expert, num_tiles, block_m)
    check_tile_rows(tile_rows, tile_bits, tile_expert)

    k_groups, n_groups = -(-k // SCALE_GROUP), -(-n // SCALE_GROUP)
    lhs_scale = _kind("x_scale", operands["x_scale"], {(): "tensor", (scaled,): "row", (k_groups, scaled): "group"})
    w_shapes = {lead: "tensor", (*lead, n): "channel", (*lead, n_groups, k_groups): "block"}
    rhs_scale = _kind("w_scale", operands["w_scale"], w_shapes)
    if quantized_scale and (quantized_scale == "group") != (rhs_scale == "block"):
        raise ValueError(
            f"quantization={quantization!r} with scales of w {rhs_scale!r}; expected 'block' where x has a scale per "
            "group, another kind where it has one per row"
        )
    if bias is not None and bias.shape != (*lead, n):
        raise ValueError(f"bias has shape {bias.shape}, expected {(*lead, n)}")
    if requantize not in ("none", "group", "group_ue8m0", "tensor"):
        raise ValueError(f"requantize={requantize!r} is not one of 'none', 'group', 'group_ue8m0', 'tensor'")
    if (out_scale is not None) != (requantize == "tensor"):
        raise ValueError("out_scale is given exactly when requantize='tensor'")
    if transposes_w and (operands["x_scale"] is not None or operands["w_scale"] is not None):
        raise ValueError("transposes_w goes without scales")
    if out_scale is not None and out_scale.shape != ():
        raise ValueError(f"out_scale has shape {out_scale.shape}, expected ()")

    return GemmDesc(
        rows=rows,
        n=n,
        k=k,
        num_experts=lead[0],
        dtype=jnp.dtype(w.dtype).name,
        out_dtype=jnp.dtype(out_dtype).name,
        projections=projections,
        lhs_scale=quantized_scale or lhs_scale,
        rhs_scale=rhs_scale,
        bias_dtype=None if bias is None else jnp.dtype(bias.dtype).name,
        activation=activation,
        requantize="group" if requantize == "group_ue8m0" else requantize,
        has_tile_rows=tile_rows is not None,
        has_tile_bits=tile_bits is not None,
        has_power_of_two_scales=requantize == "group_ue8m0",
        unpermuted_rows=unpermuted_rows,
        transposes_w=transposes_w,
        quantization=quantization,
    )


def describe_sum(
    desc: GroupedGemm, row_of: jax.Array | None, slot_weights: jax.Array | None, shared: jax.Array | None
) -> dict[str, Any]:
    """Fields of the description of a call whose rows are added up; none for others."""
    if (row_of is None) != (slot_weights is None) or (row_of is None and shared is not None):
        raise ValueError("row_of and slot_weights go together, and shared with both")
    if row_of is None or slot_weights is None:
        return {}
    if desc.activation is not None:
        raise ValueError("row_of goes without an activation: rows of hidden values are not added up")
    check_operands((desc.rows, desc.n), row_of, slot_weights, shared)
    if not row_of.size:
        raise ValueError(f"row_of has shape {row_of.shape}, expected (T, top_k) of at least one token and one row")
    shared_dtype = None if shared is None else jnp.dtype(shared.dtype).name
    return dict(num_tokens=row_of.shape[0], top_k=row_of.shape[1], shared_dtype=shared_dtype)


def _scale_of_rows(x: jax.Array, w: jax.Array, x_scale: jax.Array | None, quantization: str) -> Any:
    """The kind of scale that rows get which are quantized first; "" for others."""
    if quantization == "none":
        return ""
    if quantization not in WITH_SCALES:
        raise ValueError(f"quantization={quantization!r} is not one of 'none', {', '.join(map(repr, WITH_SCALES))}")
    rows = PermuteDesc(x.shape[0], x.shape[1], 0, x.shape[0], jnp.dtype(x.dtype).name, quantization)
    dtype = rows.out_dtype
    if jnp.dtype(x.dtype).name not in ("bfloat16", "float16", "float32") or w.dtype != dtype:
        raise TypeError(
            f"x is {x.dtype}, w {w.dtype}; with quantization={quantization!r} x has 16 or 32 bits and w is {dtype}"
        )
    if x_scale is not None:
        raise ValueError("x_scale goes without a quantization of x, which makes the scales")
    return "group" if rows.is_grouped else "row"


def _kind(name: str, value: Any, shapes: dict[tuple[int, ...], str]) -> Any:
    if value is None:
        return "none"
    if value.dtype != jnp.float32:
        raise TypeError(f"{name} is {value.dtype}, expected float32")
    if value.shape not in shapes:
        expected = ", ".join(f"{shape} ({kind})" for shape, kind in shapes.items())
        raise ValueError(f"{name} has shape {value.shape}, expected one of {expected}")
    return shapes[value.shape]
