"""A layer of experts in NumPy float64, expert after expert, slot after slot: the independent judge of moe_jax.experts.

Nothing of moe_jax computes here; formats are re-implemented from spec 8.3, 8.4 and activations from spec 3.3. Codes are
rounded from float64 values, so where the library rounds from float32 a value on the border may fall on either side.
"""

import math

import ml_dtypes
import numpy as np

from moe_jax.quantization import Strategy
from tests.support.oracles import integers as integers_numpy
from tests.support.oracles import microscaling as microscaling_numpy

_erf = np.vectorize(math.erf)


def experts_numpy(x, topk_weights, topk_ids, weights, config, *, hidden_dtype="float64"):
    """x (T, H), topk_weights and topk_ids (T, k), weights an ExpertWeights -> y (T, H) float64.

    hidden_dtype: hidden values are rounded to it before they are quantized, as kernels do that pass them in 16 bits.
    """
    x, p, ids = np.asarray(x).astype(np.float64), np.asarray(topk_weights).astype(np.float64), np.asarray(topk_ids)
    acts = weights.scheme.activations
    pairs = [(t, k) for t in range(ids.shape[0]) for k in range(ids.shape[1]) if 0 <= ids[t, k] < config.num_experts]
    inputs = {tk: x[tk[0]] * (p[tk] if config.apply_router_weight_on_input else 1.0) for tk in pairs}
    inputs = _quantized(inputs, acts, weights.w13.input_scale)
    experts = {e: [tk for tk in pairs if ids[tk] == e] for e in sorted({int(ids[tk]) for tk in pairs})}
    hidden = {}
    for e, own in experts.items():
        h = np.moveaxis(_matrix(weights.w13, e) @ np.stack([inputs[tk] for tk in own]).T, -1, 1)  # (G, rows, I)
        if weights.w13_bias is not None:
            h = h + np.asarray(weights.w13_bias[e]).astype(np.float64)[:, None]
        h = activation_numpy(h, config).astype(hidden_dtype).astype(np.float64)
        hidden |= dict(zip(own, h, strict=True))
    hidden = _quantized(hidden, acts, weights.w2.input_scale)
    y = np.zeros_like(x)
    for e, own in experts.items():
        out = np.stack([hidden[tk] for tk in own]) @ _matrix(weights.w2, e).T
        if weights.w2_bias is not None:
            out = out + np.asarray(weights.w2_bias[e]).astype(np.float64)
        for (t, k), row in zip(own, out, strict=True):
            y[t] += row if config.apply_router_weight_on_input else p[t, k] * row
    return y


def activation_numpy(h, config):
    """h (G, ..., I) float64 -> (..., I); parameters as the config gives them, defaults as the spec does."""
    name = config.activation.removesuffix("_no_mul")
    gate, up = (h[0], h[1]) if config.is_act_and_mul else (h[0], 1.0)
    limit = config.swiglu_limit
    if name == "silu":
        if limit is not None:
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        return gate / (1 + np.exp(-gate)) * up
    if name == "gelu":
        return 0.5 * gate * (1 + _erf(gate / math.sqrt(2))) * up
    if name == "gelu_tanh":
        return 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    if name == "relu2":
        return np.maximum(gate, 0) ** 2
    if name == "swigluoai":
        gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
        return (up + 1) * gate / (1 + np.exp(-1.702 * gate))
    if name == "swigluoai_uninterleave":
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        alpha, beta = config.swiglu_alpha or 1.0, config.swiglu_beta or 0.0
        return gate / (1 + np.exp(-alpha * gate)) * (up + beta)
    if name == "swiglustep":
        return np.minimum(gate / (1 + np.exp(-gate)), 7.0) * np.clip(up, -7.0, 7.0)
    raise KeyError(name)


def _matrix(tensor, expert):
    """The real values of one expert, lead + (N, K) float64."""
    data = np.asarray(tensor.data[expert]).astype(np.float64)
    if tensor.fmt is None:
        return data
    if tensor.fmt.scale != "float32":
        spread = None if tensor.global_scale is None else np.asarray(tensor.global_scale[expert])
        return microscaling_numpy.matrix(
            np.asarray(tensor.data[expert]), np.asarray(tensor.scale[expert]), spread, tensor.fmt
        )
    if tensor.fmt.element.startswith("int"):
        leaves = (tensor.data, tensor.scale, tensor.zero_point, tensor.g_idx)
        leaves = [None if leaf is None else np.asarray(leaf[expert]) for leaf in leaves]
        return integers_numpy.matrix(*leaves, tensor.fmt, tensor.shape[-1])
    scale = np.asarray(tensor.scale[expert]).astype(np.float64)
    n, k = data.shape[-2:]
    if tensor.fmt.strategy is Strategy.TENSOR:
        scale = scale[..., None, None]
    elif tensor.fmt.strategy is Strategy.CHANNEL:
        scale = scale[..., None]
    else:
        rows, columns = tensor.fmt.block_shape
        scale = scale[..., np.arange(n) // rows, :][..., np.arange(k) // columns]
    return data * scale


def _quantized(rows, fmt, input_scale):
    """Rows by (token, slot) rounded to the grid of ``fmt`` and back."""
    if fmt is None or not rows:
        return rows
    if fmt.scale != "float32":
        return {tk: microscaling_numpy.rounded_row(row, fmt, input_scale) for tk, row in rows.items()}
    if fmt.strategy is Strategy.TENSOR:
        if fmt.dynamic:
            scale = max(np.abs(row).max() for row in rows.values()) / 448 or 1.0  # where all is zero any scale does
        else:
            scale = float(input_scale)
        return {tk: _e4m3(row / scale) * scale for tk, row in rows.items()}
    return {tk: _quantized_row(row, fmt) for tk, row in rows.items()}


def _quantized_row(row, fmt):
    if not fmt.symmetric:
        return integers_numpy.asymmetric_row(row)
    if fmt.element == "int8":
        scale = max(np.abs(row).max(), 1e-10) / 127
        return np.clip(np.round(row / scale), -127, 127) * scale
    if fmt.strategy is Strategy.TOKEN:
        scale = max(np.abs(row).max() / 448, 1 / (448 * 512))
        return _e4m3(row / scale) * scale
    out = np.empty_like(row)
    for start in range(0, row.size, fmt.group_size):
        group = row[start : start + fmt.group_size]
        scale = max(np.abs(group).max(), 1e-10) / 448
        out[start : start + fmt.group_size] = _e4m3(group / scale) * scale
    return out


def _e4m3(values):
    return np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
