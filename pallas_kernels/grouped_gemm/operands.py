"""Which arrays a grouped GEMM kernel takes."""

from pallas_kernels.grouped_gemm.config import GemmDesc


def operand_names(desc: GemmDesc) -> list[str]:
    """Names of the arrays the kernel takes, in order.

    x (rows or unpermuted_rows, K); w (E * projections, N, K); tile_expert (rows / block_m,) i32; num_tiles (1,)
    i32; x_scale f32
    (1,), (rows,) or (ceil(K / 128), rows), with unpermuted_rows block_m of them; w_scale f32 (E * projections,),
    (E * projections, N)
    or (E * projections, ceil(N / 128), ceil(K / 128)); bias (E * projections, N); out_scale (1,) f32; tile_rows
    (rows / block_m,) i32.
    """
    names = ["x", "w", "tile_expert", "num_tiles"]
    names += ["x_scale"] if desc.lhs_scale != "none" else []
    names += ["w_scale"] if desc.rhs_scale != "none" else []
    names += ["bias"] if desc.bias_dtype is not None else []
    names += ["out_scale"] if desc.requantize == "tensor" else []
    names += ["tile_rows"] if desc.has_tile_rows else []
    return names
