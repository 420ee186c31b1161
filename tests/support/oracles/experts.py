"""A layer of experts in NumPy float64, expert after expert: the independent judge of moe_jax.experts.

Nothing of moe_jax computes here; formats are re-implemented from spec 8.3 to 8.9 and activations from spec 3.3.
"""

import dataclasses
import functools
import math
from typing import Any, cast

import numpy as np
from numpy.typing import DTypeLike

from moe_jax import MoEConfig
from moe_jax.quantization import ExpertWeights, Strategy
from tests.support.oracles import integers, microscaling
from tests.support.oracles.grids import Grid, grid_of

_erf = np.vectorize(math.erf)


def experts_numpy(x, topk_weights, topk_ids, weights, config, *, hidden_dtype="float64", quantizes=("input", "hidden")):
    """x (T, H), topk_weights and topk_ids (T, k), weights an ExpertWeights -> y (T, H) float64.

    hidden_dtype: hidden values are rounded to it before they are quantized, as kernels do that pass them in 16 bits.
    quantizes: which operands are rounded to the grid of the scheme's activations; fewer than both is a wrong layer.
    """
    return Experts(x, topk_weights, topk_ids, weights, config, hidden_dtype, quantizes=quantizes).y


@dataclasses.dataclass(frozen=True)
class Experts:
    """A call with what it computes on the way, by routed pair (token, slot): R of them, sorted by expert.

    hidden_dtype, row_dtype: what hidden values, and the rows of the second product, are rounded to. quantizes: which
    operands are rounded to the grid of the scheme's activations. sum_error: sums of both products are off by a normal
    deviate times this times the largest of their row, as a tensor core's may be; drawn from a seed. input_ulps: by how
    much the factor is off that inputs are quantized with. matrices: float64 ones that were needed, which
    ``dataclasses.replace`` hands on.
    """

    x: np.ndarray
    topk_weights: np.ndarray
    topk_ids: np.ndarray
    weights: ExpertWeights
    config: MoEConfig
    hidden_dtype: DTypeLike = "float64"
    row_dtype: DTypeLike = "float64"
    quantizes: tuple[str, ...] = ("input", "hidden")
    sum_error: float = 0.0
    input_ulps: int = 0
    matrices: dict[tuple[str, int], np.ndarray] = dataclasses.field(default_factory=dict, repr=False)

    @functools.cached_property
    def pairs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(token, expert, weight, whether a pair starts its expert) of every routed pair, each (R,)."""
        ids = np.asarray(self.topk_ids)
        token, slot = np.nonzero((ids >= 0) & (ids < self.config.num_experts))
        order = np.argsort(ids[token, slot], kind="stable")
        token, slot = token[order], slot[order]
        weight = np.asarray(self.topk_weights)[token, slot].astype(np.float64)
        return token, ids[token, slot], weight, np.diff(ids[token, slot], prepend=-1) != 0

    @functools.cached_property
    def sums(self) -> np.ndarray:
        """(G, R, I) of the first product, bias included."""
        token, expert, weight, _ = self.pairs
        rows = np.asarray(self.x).astype(np.float64)[token]
        if self.config.apply_router_weight_on_input:
            rows = rows * weight[:, None]
        codes = self._on_grid(rows, "input", self.weights.w13.input_scale)
        sums = np.zeros((self.config.num_projections, len(rows), self.weights.intermediate_size))
        for e, own in self._by_expert():
            sums[:, own] = np.moveaxis(self._matrix("w13", e) @ codes[own].T, -1, 1)
        sums = self._off(sums)
        for e, own in self._by_expert():
            if (addend := addend_numpy(self.weights.w13_lora, e)) is not None:
                sums[:, own] += np.moveaxis(addend @ rows[own].T, -1, 1)
        if self.weights.w13_bias is not None:
            bias = np.asarray(self.weights.w13_bias).astype(np.float64)
            sums += np.moveaxis(bias[expert], 1, 0)
        return sums

    @functools.cached_property
    def activated(self) -> np.ndarray:
        """Hidden values before any rounding (R, I)."""
        return activation_numpy(self.sums, self.config)

    def rounded(self, hidden: np.ndarray) -> np.ndarray:
        """Hidden values as they are stored, before they are quantized."""
        return hidden.astype(self.hidden_dtype).astype(np.float64)

    def hidden_grid(self, hidden: np.ndarray) -> Grid:
        """The grid of the rows (R, I) of a call."""
        return grid_of(hidden, cast(Any, self.weights.scheme.activations), cast(Any, self.weights.w2.input_scale))

    @functools.cached_property
    def y(self) -> np.ndarray:
        token, expert, weight, _ = self.pairs
        hidden = self._on_grid(self.rounded(self.activated), "hidden", self.weights.w2.input_scale)
        rows = np.zeros((len(token), self.weights.hidden_size))
        for e, own in self._by_expert():
            rows[own] = hidden[own] @ self.down(e).T
        if self.weights.w2_bias is not None:
            rows += np.asarray(self.weights.w2_bias).astype(np.float64)[expert]
        rows = self._off(rows).astype(self.row_dtype).astype(np.float64)
        for e, own in self._by_expert():
            if (addend := addend_numpy(self.weights.w2_lora, e)) is not None:
                rows[own] += self.activated[own] @ addend.T
        y = np.zeros(np.shape(self.x))
        np.add.at(y, token, rows if self.config.apply_router_weight_on_input else weight[:, None] * rows)
        return y

    def down(self, expert: int) -> np.ndarray:
        """The matrix (H, I) of the second product."""
        return self._matrix("w2", expert)

    def _matrix(self, name: str, expert: int) -> np.ndarray:
        if (name, expert) not in self.matrices:
            self.matrices[name, expert] = matrix_numpy(getattr(self.weights, name), expert)
        return self.matrices[name, expert]

    def _off(self, sums: np.ndarray) -> np.ndarray:
        noise = np.random.default_rng(7).standard_normal(sums.shape) if self.sum_error else 0.0
        return sums + self.sum_error * noise * np.abs(sums).max(-1, keepdims=True, initial=0)

    def _on_grid(self, rows: np.ndarray, which: str, stored: Any) -> np.ndarray:
        fmt = self.weights.scheme.activations
        if fmt is None or which not in self.quantizes or not len(rows):
            return rows
        grid = grid_of(rows, fmt, stored)
        return (grid.nudged(self.input_ulps) if which == "input" and self.input_ulps else grid).values(rows)

    def _by_expert(self):
        """(expert, slice of its pairs)."""
        _, expert, _, is_first = self.pairs
        starts = np.flatnonzero(is_first)
        for start, end in zip(starts, np.append(starts, len(expert))[1:], strict=True):
            yield int(expert[start]), slice(int(start), int(end))


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


def addend_numpy(lora, expert):
    """What an adapter adds to the matrix of one expert, lead + (N, K) float64; None without one."""
    if lora is None:
        return None
    a, b, scale = (np.asarray(leaf[expert]).astype(np.float64) for leaf in (lora.a, lora.b, lora.scale))
    return (b * scale) @ a


def matrix_numpy(tensor, expert):
    """The real values of one expert, lead + (N, K) float64."""
    data = np.asarray(tensor.data[expert]).astype(np.float64)
    if tensor.fmt is None:
        return data
    if tensor.fmt.scale != "float32":
        spread = None if tensor.global_scale is None else np.asarray(tensor.global_scale[expert])
        return microscaling.matrix(
            np.asarray(tensor.data[expert]), np.asarray(tensor.scale[expert]), spread, tensor.fmt
        )
    if tensor.fmt.element.startswith("int"):
        leaves = (tensor.data, tensor.scale, tensor.zero_point, tensor.g_idx)
        leaves = [None if leaf is None else np.asarray(leaf[expert]) for leaf in leaves]
        return integers.matrix(*leaves, tensor.fmt, tensor.shape[-1])
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
