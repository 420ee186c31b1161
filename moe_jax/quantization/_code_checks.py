"""What integers of a checkpoint may be: codes that take whole bytes and have fewer bits, and groups of columns."""

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


def check_groups(g_idx: AnyArray, name: str, *, fmt: QuantFormat, grouped: int) -> None:
    """Raise ValueError naming the first entry of g_idx (E, K) that is no group. Those of an expert may all be -1.

    grouped: columns of the whole matrix; -1 is refused where these K are a part. Under a trace values cannot be
    checked.
    """
    if isinstance(g_idx, Tracer):
        return
    last = int(fmt.groups_by_position(grouped)[-1])
    values = np.asarray(g_idx)
    is_unset = (values == -1).all(-1, keepdims=True) & (values.shape[-1] == grouped)
    bad = ((values < 0) | (values > last)) & ~is_unset
    if bad.any():
        expert, column = (int(i) for i in np.argwhere(bad)[0])
        raise ValueError(
            f"{name}: expert {expert} has group {values[expert, column]} at column {column}, expected 0 to {last} for "
            f"{grouped} columns in groups of {fmt.group_size}"
        )
