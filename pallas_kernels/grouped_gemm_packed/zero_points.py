"""What the kernel subtracts from the unpacked bits of an integer."""

from typing import Any

from pallas_kernels.grouped_gemm_packed.blocks import PackedFormat


def zero_offset(fmt: PackedFormat, zero_point: Any) -> Any:
    """The number for a signed zero point; it is exact in ``fmt.operand``.

    Four bits are unpacked as 128 + u (float16: 1024 + u, int8: u) with u = code + 8, eight bits as the code itself.
    """
    if fmt.bits == 8:
        return zero_point
    return zero_point + {"bfloat16": 128.0 + 8.0, "float16": 1024.0 + 8.0, "int8": 8.0}[fmt.operand]
