"""NVFP4 and MX in NumPy float64, from formats.md 4.3, 4.4 and spec 8.7, 8.9; part of the judge in experts_numpy.py."""

import ml_dtypes
import numpy as np

E4M3, E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn


def matrix(data, scale, global_scale, fmt):
    """Stored lead + (N, K) -> float64."""
    if fmt.element == "e2m1":
        codes = np.stack([data & 15, data >> 4], -1).reshape(*data.shape[:-1], -1).astype(np.uint8)
        values = codes.view(E2M1).astype(np.float64)
    else:
        values = data.astype(np.float64)
    if fmt.scale == "e8m0":
        scale = 2.0 ** (scale.astype(np.float64) - 127)
    else:
        scale, spread = scale.astype(np.float64), np.asarray(global_scale, np.float64)[..., None, None]
        scale = scale / spread if fmt.global_scale == "divides" else scale * spread
    return values * np.repeat(scale, fmt.group_size, axis=-1)[..., : values.shape[-1]]


def rounded_row(row, fmt, stored):
    """One row of activations rounded to its groups' grids. stored: the checkpoint's global scale or None."""
    if fmt.scale == "e4m3":
        if fmt.global_scale == "token":
            stored = 2688 / np.abs(row).max() if row.any() else 1.0
        large = 1 / float(stored) if fmt.global_scale == "multiplies" else float(stored)
    out = np.zeros_like(row)
    for start in range(0, row.size, fmt.group_size):
        group = row[start : start + fmt.group_size]
        amax = np.abs(group).max()
        if amax == 0:
            continue
        if fmt.scale == "e4m3":
            scale = float(np.clip(large * amax / 6, 0, 448).astype(E4M3)) / large
        else:
            fraction, exponent = np.frexp(amax)  # amax = fraction * 2**exponent, fraction in [0.5, 1)
            largest = 2 if fmt.element == "e2m1" else 8
            scale = 2.0 ** (exponent - (fraction < 0.875) - largest)
        if scale == 0:
            continue
        limit, dtype = (6, E2M1) if fmt.element == "e2m1" else (448, E4M3)
        codes = np.clip(group / scale, -limit, limit).astype(dtype)
        out[start : start + fmt.group_size] = codes.astype(np.float64) * scale
    return out
