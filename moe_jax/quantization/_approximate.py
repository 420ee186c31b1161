"""FP8 activations for weights of few bits whose checkpoint leaves activations in 16 bits: faster, and approximate.

``<scheme>_approximate_fp8`` is a weight-only scheme of at most 4 bits with rows rounded to e4m3, one scale a row. That
is no checkpoint's scheme: every activation loses up to 1/16 of itself, which calibration never saw. Weights keep their
values but for MXFP4 on Hopper, see ``pallas_kernels.grouped_gemm.packed``.
"""

from moe_jax.quantization._format import QuantFormat, Scheme, Strategy

APPROXIMATE_SUFFIX = "_approximate_fp8"
_ROWS = QuantFormat("e4m3", Strategy.TOKEN, dynamic=True, approximate=True)


def with_approximate_fp8(scheme: Scheme) -> Scheme:
    """A weight-only scheme with e4m3 activations. Raises ValueError for a scheme that says how activations are
    quantized, NotImplementedError for weights that are wider than 4 bits.
    """
    if scheme.weights is None or scheme.activations is not None:
        raise ValueError(
            f"{APPROXIMATE_SUFFIX[1:]} goes with weight-only schemes such as 'mxfp4_a16', found {scheme.name!r}"
        )
    bits = scheme.weights.element_type.bits
    if bits > 4:
        raise NotImplementedError(
            f"{scheme.name}: weights of {bits} bits with approximate fp8 activations are not built; at most 4 bits are"
        )
    return Scheme(scheme.name + APPROXIMATE_SUFFIX, scheme.weights, _ROWS)
