"""What codes of a checkpoint may be where they take whole bytes and have fewer bits."""

import numpy as np
from jax.core import Tracer

from moe_jax._typing import AnyArray
from moe_jax.quantization._formats import QuantFormat


def check_codes(codes: AnyArray, name: str, projections: tuple[str, ...], *, fmt: QuantFormat) -> None:
    """Raise ValueError naming the first code (E, ...) that has more bits than the format: kernels would cut them off.

    projections: what the axis after E stacks, () for a matrix outside the experts. Under a trace values
    cannot be checked.
    """
    least, greatest = -(2 ** (fmt.element_type.bits - 1)), 2 ** (fmt.element_type.bits - 1) - 1
    if fmt.holds_all_codes or isinstance(codes, Tracer) or not codes.size:
        return
    if codes.min() >= least and codes.max() <= greatest:
        return
    values = np.asarray(codes)
    bad = (values < least) | (values > greatest)
    index = tuple(int(i) for i in np.argwhere(bad)[0])
    place = ""
    if projections:
        half = index[1] * len(projections) // values.shape[1]
        place = f"expert {index[0]} ({projections[half]}) has "
    raise ValueError(
        f"{name}: {place}code {values[index]} at {index}, expected {least} to {greatest} of {fmt.element} "
        f"({int(bad.sum())} of {bad.size} are not); the config may state too few bits"
    )
