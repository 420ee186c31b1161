"""NVFP4 and MX in NumPy float64, from formats.md 4.3, 4.4 and spec 8.7, 8.9; part of the judge in experts_numpy.py."""

import ml_dtypes
import numpy as np


def matrix(data, scale, global_scale, fmt):
    """Stored lead + (N, K) -> float64."""
    if fmt.element == "e2m1":
        codes = np.stack([data & 15, data >> 4], -1).reshape(*data.shape[:-1], -1).astype(np.uint8)
        values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    else:
        values = data.astype(np.float64)
    if fmt.scale == "e8m0":
        scale = 2.0 ** (scale.astype(np.float64) - 127)
    else:
        scale, spread = scale.astype(np.float64), np.asarray(global_scale, np.float64)[..., None, None]
        scale = scale / spread if fmt.global_scale == "divides" else scale * spread
    return values * np.repeat(scale, fmt.group_size, axis=-1)[..., : values.shape[-1]]
