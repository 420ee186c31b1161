"""What the kernel adds to the unpacked bits of an integer, or subtracts from those of 8-bit operands."""

from typing import Any

from pallas_kernels.grouped_gemm.packed.format import PackedFormat


def zero_term(fmt: PackedFormat, zero_point: Any) -> Any:
    """The number for a signed zero point; it is exact in ``fmt.operand``.

    Codes u, unsigned, are unpacked as u * fmt.unit (bfloat16), 1024 + u (float16) or u (int8, from which the term is
    subtracted).
    """
    zero = zero_point + (1 << (fmt.bits - 1))
    if fmt.operand == "bfloat16":
        return zero * -fmt.unit
    return zero if fmt.is_8bit else -(zero + 1024)


def zero_point_of(fmt: PackedFormat, term: Any) -> Any:
    """Inverse of ``zero_term``."""
    if fmt.operand == "bfloat16":
        zero = term / -fmt.unit
    else:
        zero = term if fmt.is_8bit else -term - 1024
    return zero - (1 << (fmt.bits - 1))
