"""``quantize_and_permute``: tokens to rows in expert order, quantized on the way."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.common.device import hopper_sms, portable_sms, portable_target
from pallas_kernels.common.implementations import first_that_runs
from pallas_kernels.quantize_and_permute.config import (
    QUANTIZATIONS,
    TAKES_SCALE,
    PermuteConfig,
    PermuteDesc,
    choose_config,
    config_error,
)
from pallas_kernels.quantize_and_permute.reference import quantize_and_permute_ref


def quantize_and_permute(
    x: jax.Array,
    row_of: jax.Array | None = None,
    num_rows: int | None = None,
    *,
    quantization: str,
    scale: jax.Array | None = None,
    rows: jax.Array | None = None,
    columns: jax.Array | None = None,
    tile_expert: jax.Array | None = None,
    scale_rows: int | None = None,
    config: PermuteConfig | None = None,
    implementation: str | Sequence[str] | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Quantize tokens and copy each to the rows that ``row_of`` names.

    The rules of rounding are those of common/numerics.py and common/microscaling.py.

    Args:
        x: (T, H) bfloat16, float16 or float32.
        row_of: (T, top_k) int32, the output row of each (token, slot), -1 for none; distinct otherwise. None: rows keep
            their places.
        num_rows: Mp, rows of the output, static; T with row_of None.
        quantization: one of
            "none": a copy;
            "e4m3_row", "int8_row": a scale per row, from its largest magnitude;
            "e4m3_group": a scale per row and 128 columns, the last group of a row being what remains (the kernel takes
            128 or 64);
            "e4m3_group_ue8m0": such a scale rounded up to a power of two;
            "e4m3_tensor": the given scale multiplies the codes;
            "e4m3_tensor_row": a scale per row by the rule of one for a whole tensor, which a row by itself is;
            "mxfp4", "mxfp8": values on the grid of the format, in groups of 32, which bfloat16 holds exactly;
            "nvfp4": so in groups of 16; the given scale is the global one that block scales are multiplied by, and it
            stays in the values;
            "nvfp4_row": "nvfp4" with a global scale from each row.
        scale: () float32, for "e4m3_tensor" and "nvfp4" alone.
        rows: with row_of None, (n,) int32 names the rows in use, -1 for none; the others are then unspecified.
        columns: (E, H) int32, an order of x's columns for each expert: column c of a row of expert e is column
            columns[e, c] of its token. Such rows are copied, not quantized.
        tile_expert: (Mp / block_m,) int32, the expert of each tile of rows; goes with columns.
        scale_rows: with row_of None, the scales have room for this many rows, at least T; those past T are unspecified.
        config: of the Hopper kernel; None for its own choice.
        implementation: "hopper", "portable", "reference", or several in the order to try; None for this order.

    Returns:
        (codes (Mp, H), scales). Scales multiply; they are (Mp,) per row, (ceil(H / 128), Mp) per group of 128, else
        None. Rows that no token fills are unspecified.

    Raises:
        ValueError, TypeError: a wrong call. NotImplementedError: no implementation can run it.
    """
    desc, operands = describe(
        x, row_of, num_rows, quantization=quantization, scale=scale, rows=rows, scale_rows=scale_rows
    )
    if columns is not None or tile_expert is not None:
        desc, orders = _with_columns(desc, columns, tile_expert)
        operands += orders

    def kernel(num_sms: int) -> tuple[jax.Array, jax.Array | None]:
        chosen = config or choose_config(desc, num_sms)
        if reason := config_error(desc, chosen):
            raise NotImplementedError(reason)

        # here: importing it loads Pallas
        from pallas_kernels.quantize_and_permute.gather_sm90 import gather_rows_sm90
        from pallas_kernels.quantize_and_permute.kernel_sm90 import quantize_and_permute_sm90
        from pallas_kernels.quantize_and_permute.narrow_sm90 import quantize_narrow_rows_sm90

        kernel = quantize_narrow_rows_sm90 if chosen.rows_at_once > 1 else quantize_and_permute_sm90
        if desc.num_experts:
            kernel = gather_rows_sm90
        return kernel(desc, chosen)(*operands)

    def portable() -> tuple[jax.Array, jax.Array | None]:
        if desc.out_dtype == "float8_e4m3fn" and not portable_target().multiplies_e4m3:
            raise NotImplementedError(f"e4m3 codes: {portable_target()} converts none")
        return kernel(portable_sms())

    runs = dict(
        hopper=lambda: kernel(hopper_sms()),
        portable=portable,
        reference=lambda: quantize_and_permute_ref(desc, x, row_of, scale, columns, tile_expert),
    )
    return first_that_runs("quantize_and_permute", runs, implementation)


def _with_columns(
    desc: PermuteDesc, columns: jax.Array | None, tile_expert: jax.Array | None
) -> tuple[PermuteDesc, list[jax.Array]]:
    if columns is None or tile_expert is None or not desc.top_k or desc.quantization != "none":
        raise ValueError("columns goes with tile_expert, row_of and quantization='none'")
    if columns.dtype != jnp.int32 or columns.ndim != 2 or columns.shape[1] != desc.width:
        raise ValueError(f"columns is {columns.dtype}{columns.shape}, expected int32 (E, {desc.width})")
    if tile_expert.dtype != jnp.int32 or tile_expert.ndim != 1 or desc.num_rows % max(tile_expert.size, 1):
        raise ValueError(
            f"tile_expert is {tile_expert.dtype}{tile_expert.shape}, expected int32 (Mp / block_m,) for "
            f"Mp={desc.num_rows} rows"
        )
    block_m = desc.num_rows // max(tile_expert.size, 1)
    return dataclasses.replace(desc, num_experts=columns.shape[0], block_m=block_m), [columns, tile_expert]


def describe(
    x: jax.Array,
    row_of: jax.Array | None = None,
    num_rows: int | None = None,
    *,
    quantization: str,
    scale: jax.Array | None = None,
    rows: jax.Array | None = None,
    scale_rows: int | None = None,
) -> tuple[PermuteDesc, list[jax.Array]]:
    """The description of a call without columns, and the kernel's operands. Raises ValueError or TypeError."""
    if x.ndim != 2:
        raise ValueError(f"x has shape {x.shape}, expected (T, H)")
    if quantization not in QUANTIZATIONS:
        raise ValueError(f"quantization={quantization!r} is not one of {QUANTIZATIONS}")
    if (scale is not None) != (quantization in TAKES_SCALE):
        raise ValueError(f"scale is given exactly when quantization is one of {TAKES_SCALE}, found {quantization!r}")
    if scale is not None and scale.shape != ():
        raise ValueError(f"scale has shape {scale.shape}, expected ()")
    num_tokens, width = x.shape
    if scale_rows is not None and (row_of is not None or scale_rows < num_tokens):
        raise ValueError(f"scale_rows={scale_rows} goes with row_of=None and is at least T={num_tokens}")
    operands, top_k = [x], 0
    if row_of is None:
        if num_rows not in (None, num_tokens):
            raise ValueError(f"num_rows={num_rows} with row_of=None: rows keep their places, {num_tokens} of them")
        out_rows = num_tokens
    else:
        if row_of.ndim != 2 or row_of.shape[0] != num_tokens:
            raise ValueError(f"row_of has shape {row_of.shape}, expected ({num_tokens}, top_k)")
        if row_of.dtype != jnp.int32:
            raise TypeError(f"row_of is {row_of.dtype}, expected int32")
        if num_rows is None:
            raise ValueError("num_rows is needed with row_of")
        if rows is not None:
            raise ValueError("rows goes with row_of=None: row_of says which rows are in use")
        out_rows, top_k = num_rows, row_of.shape[1]
        operands.append(row_of)
    if scale is not None:
        operands.append(scale.reshape(1))
    if rows is not None:
        if rows.ndim != 1 or rows.dtype != jnp.int32:
            raise ValueError(f"rows is {rows.dtype}{rows.shape}, expected int32 (n,)")
        operands.append(rows)
    desc = PermuteDesc(
        num_tokens=num_tokens,
        width=width,
        top_k=top_k,
        num_rows=out_rows,
        dtype=jnp.dtype(x.dtype).name,
        quantization=quantization,
        num_named=None if rows is None else rows.size,
        scale_rows=scale_rows or 0,
    )
    return desc, operands
