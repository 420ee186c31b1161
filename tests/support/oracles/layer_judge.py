"""Layers with quantized activations against an oracle that rounds where they do, in NumPy float64 (experts.py).

The oracle quantizes the inputs, rounds hidden values and rows to the kernels' 16 bits, and quantizes hidden values
again. What is left between it and a right layer is the order of sums. A row is right in one of three ways:

1. Its error, root mean square by that of the row, is at most ``EXACT``. Sums in float32 are within 64 ulp of the row's
   largest, 2**-18. One rounding to 16 bits in 2**9 then goes the other way, by 2**-8 of the value, which is 2**-12 of a
   row; ``EXACT`` is 2**-11. Without such a rounding it is ``FLOAT32``, the 64 ulp, and ``XLA_ON_GPU`` on a GPU.
2. A hidden value beside a border of its 16 bits may get another code, and the largest of a group another scale. The
   oracle knows which values may: their columns of W2, and what other scales make of the row, are fitted to the error.
   The row, and an output of 16 bits, were rounded from other values then. A rounding to bfloat16 is 0.0017 of a row,
   four of them 0.0033; what is left is at most ``LEFT``. There are few such values; a row with more than H / 4 fails.
3. An FP8 tensor core keeps some 14 bits of a sum. On an H200 16% of the hidden values had another bfloat16, 2% another
   code and 9% of the rows another scale (benchmarks/results/fp8_sum_order_h200.txt). Too many to fit but the scales and
   the H / 32 largest codes. What is left is at most ``FP8_LEFT``: 2% of steps of 1/11 of a value are 0.013 of a row.

XLA divides on a GPU to 2 ulp, so a row's scale may be off by as much, and inputs that lie on a border between two
codes, as half of a row's largest does in int8, all fall to one side. On a GPU a row may also be right beside an oracle
whose inputs fall to either side.

In the last two a row must not look like a wrong layer either. What is left, projected on the difference that a wrong
layer makes, is at most ``HALF`` of that difference. Projected on the row itself, it is at most ``SCALE`` of the row.
Codes that moved are random signs in hundreds of columns: 0.013 of a row projects to 0.0008 of it, and to 0.03 of a
difference. With 16% of other bfloat16 values 5,000 right rows stayed below 0.0045 and 0.15. Wrong layers quantize no
activations, inputs alone or hidden values alone. test_layer_judge.py has them fail.

On a GPU one row in ``ONE_IN`` and one more, of at least as many, may be wrong by that and still be within ``FAR``: some
rows have a tie in the inputs and a border in the hidden values at once, or more columns than a fit bears. A wrong
layer has most rows wrong, and a row that was not written, or read from elsewhere, is off by its size.

16-bit activations are judged by 1 with ``SIXTEEN_BITS``: hidden values at the other side of a border, and group scales
that are folded into bfloat16 weights, 2**-9 / sqrt(3) of each, in both products; twice their sum in quadrature.
"""

import collections
import dataclasses
import functools
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from moe_jax import MoEConfig
from moe_jax.quantization import ExpertWeights, Strategy
from tests.support.oracles.experts import Experts, activation_numpy
from tests.support.oracles.grids import Grid

FLOAT32, EXACT = 2.0**-18, 2.0**-11
LEFT, FP8_LEFT = 0.005, 0.02
UNFITTED = 0.09
# float32 as XLA sums it on a GPU.
XLA_ON_GPU = 1e-4
SIXTEEN_BITS = 0.004
SCALE = 0.005
HALF = 0.5
# Rows of a call on a GPU that may be wrong, and how far.
ONE_IN, FAR = 50, {None: 0.01, "int8": 0.02}
# Of the largest sum of a row: by how much another may be off.
SUMS, XLA_SUMS, FP8_SUMS = 2.0**-18, 2.0**-13, 2.0**-11
# Of a quotient on a GPU, in ulp.
DIVISION = 2
WRONG = ((), ("input",), ("hidden",))
REPORT = "MOE_LAYER_ERRORS"


@dataclasses.dataclass(frozen=True)
class Found:
    """Of each row (T,): error, by its root mean square. left: after the fit, NaN where none was made. likeness: the
    largest projection on a wrong layer's difference. scale: the projection on the row. is_right.
    """

    error: np.ndarray
    left: np.ndarray
    likeness: np.ndarray
    scale: np.ndarray
    is_right: np.ndarray


@dataclasses.dataclass(frozen=True)
class LayerJudge:
    """The right answer of a call, and what its rows may differ by. Arguments as ``fused_experts`` has them.

    kernels: the layer runs on Hopper kernels or their references, which pass 16 bits between products; others stay in
    float32. on_gpu: sums are those of a GPU. added: (T, H) float32, added before the output is rounded. most: how many
    rows are fitted, evenly spaced; the others of an FP8 core are within ``UNFITTED``.
    """

    x: ArrayLike
    topk_weights: ArrayLike
    topk_ids: ArrayLike
    weights: ExpertWeights
    config: MoEConfig
    kernels: bool = True
    on_gpu: bool = False
    added: ArrayLike | None = None
    most: int = 512

    @functools.cached_property
    def right(self) -> Experts:
        hidden, rows = self._dtypes()
        return Experts(np.asarray(self.x), self.topk_weights, self.topk_ids, self.weights, self.config, hidden, rows)

    @functools.cached_property
    def wrong(self) -> list[np.ndarray]:
        """Of each layer of ``WRONG``: how far its rows are from the right ones (T, H)."""
        layers = [dataclasses.replace(self.right, quantizes=quantizes) for quantizes in WRONG]
        return [layer.y - self.right.y for layer in layers]

    @property
    def has_fp8_core(self) -> bool:
        fmt = self.weights.scheme.activations
        return self.on_gpu and self.kernels and fmt is not None and fmt.element == "e4m3" and fmt.scale != "e8m0"

    @property
    def _divisions(self) -> tuple[int, ...]:
        """By how many ulp a quotient may be off on a GPU: scales of whole rows or of the call. Scales of groups are
        products, and XLA divides inputs by them.
        """
        fmt = self.weights.scheme.activations
        if not self.on_gpu or fmt is None or not fmt.dynamic:
            return ()
        is_quotient = fmt.strategy in (Strategy.TOKEN, Strategy.TENSOR)
        is_divided = not self.kernels and fmt.strategy is Strategy.GROUP and fmt.element == "e4m3"
        return (-DIVISION, DIVISION) if is_quotient or is_divided else ()

    def check(self, actual: ArrayLike) -> None:
        """Fail unless every row of actual (T, H) is right."""
        found = self.find(actual)
        _record(self, found)
        if found.is_right.all() or (self.on_gpu and self._are_few(found)):
            return
        worst = int(np.argmax(np.where(found.is_right, -1, np.nan_to_num(found.error, nan=np.inf))))
        raise AssertionError(
            f"{int((~found.is_right).sum())} of {len(found.error)} row(s) are wrong; worst is row {worst}: error "
            f"{found.error[worst]:.3g} of its size, {found.left[worst]:.3g} beside roundings of values on a border, "
            f"{found.likeness[worst]:.2f} of the way to a layer that leaves activations unquantized, scaled by 1 + "
            f"{found.scale[worst]:.2g}"
        )

    def _are_few(self, found: Found) -> bool:
        """Whether the wrong rows are as many, and as far off, as some of a call may be on a GPU."""
        wrong, fmt = found.error[~found.is_right], self.weights.scheme.activations
        far = FAR.get(fmt and fmt.element, UNFITTED)
        allowed = len(found.error) // ONE_IN
        return len(wrong) <= allowed + bool(allowed) and bool((wrong <= far).all())

    def find(self, actual: ArrayLike) -> Found:
        """What ``check`` judges by: each row by itself."""
        found = self._find(actual)
        for ulps in self._divisions:
            if found.is_right.all():
                break
            aside = dataclasses.replace(self)
            vars(aside)["right"] = dataclasses.replace(self.right, input_ulps=ulps)
            other = aside._find(actual)
            is_better = ~found.is_right & other.is_right
            pairs = ((getattr(other, f.name), getattr(found, f.name)) for f in dataclasses.fields(Found))
            found = Found(*(np.where(is_better, theirs, own) for theirs, own in pairs))
        return found

    def _find(self, actual: ArrayLike) -> Found:
        actual = np.asarray(actual)
        expected = self.right.y if self.added is None else self.right.y + np.asarray(self.added, np.float64)
        if actual.dtype.itemsize == 2:
            expected = expected.astype(actual.dtype).astype(np.float64)
        difference, size = actual.astype(np.float64) - expected, _size(expected)
        unit = np.where(size > 0, size, 1.0)
        error = np.where((size == 0) & difference.any(1), np.inf, _size(difference) / unit)
        left, likeness, scale = (np.full(len(error), np.nan) for _ in range(3))
        exact, most_left = self._bounds(actual.dtype.itemsize == 2)
        if self.weights.scheme.activations is None:
            return Found(error, left, likeness, scale, error <= (SIXTEEN_BITS if self.kernels else exact))
        is_right = error <= exact
        unclear = np.flatnonzero(~is_right & np.isfinite(error))
        fitted = unclear[np.unique(np.linspace(0, len(unclear) - 1, min(len(unclear), self.most)).astype(int))]
        if self.has_fp8_core:
            is_right[unclear] = error[unclear] <= UNFITTED
        # Scales of values that are not rounded may lie side by side, and what they make of a row is parallel to it.
        most_of_scales = 2.0 if np.dtype(self.right.hidden_dtype) == np.float64 else np.inf
        for t in fitted:
            scales, codes = self._columns(t)
            if not self.has_fp8_core and codes.shape[1] + scales.shape[1] > expected.shape[1] / 4:
                continue
            directions = np.stack([difference[t], expected[t], *(wrong[t] for wrong in self.wrong)], 1)
            rest, row, *wrongs = _beside(scales, codes, directions, most_of_scales).T
            left[t] = np.sqrt((rest**2).mean()) / unit[t]
            likeness[t] = max(rest @ wrong / max(wrong @ wrong, 1e-300) for wrong in wrongs)
            scale[t] = rest @ row / max(row @ row, 1e-300)
            if row @ row < expected[t] @ expected[t] / 4:  # the fit leaves too little of the row to tell by that alone
                scale[t] = min(scale[t], difference[t] @ expected[t] / (expected[t] @ expected[t]), key=abs)
            is_alike = likeness[t] > HALF or abs(scale[t]) > SCALE
            is_right[t] = left[t] <= most_left and not is_alike
        return Found(error, left, likeness, scale, is_right)

    def _bounds(self, is_rounded: bool) -> tuple[float, float]:
        """Of a row's error, and of what a fit leaves of it. is_rounded: the output has 16 bits."""
        if self.has_fp8_core:
            return EXACT, FP8_LEFT
        if self.kernels or is_rounded:
            return EXACT, LEFT
        return (XLA_ON_GPU, 4 * XLA_ON_GPU) if self.on_gpu else (FLOAT32, FLOAT32)

    def _dtypes(self) -> tuple[str, str]:
        """Of hidden values and of rows. Kernels requantize those of float16 before they are rounded to it, where the
        scale is local.
        """
        if not self.kernels:
            return "float64", "float64"
        name, fmt = self.config.dtype.name, self.weights.scheme.activations
        is_local = fmt is not None and fmt.element == "e4m3" and fmt.scale != "e8m0"
        is_local = is_local and (fmt.strategy is Strategy.GROUP or not fmt.dynamic)
        return ("float64" if name == "float16" and is_local else name), name

    @functools.cached_property
    def _spread(self) -> np.ndarray:
        """How far each hidden value may be from the oracle's (R, I), before it is rounded."""
        right, config = self.right, self.config
        sums = FP8_SUMS if self.has_fp8_core else XLA_SUMS if self.on_gpu and not self.kernels else SUMS
        off = sums * np.abs(right.sums).max(2, keepdims=True)
        signs = np.array([(a, b)[: config.num_projections] for a in (-1, 1) for b in (-1, 1)])
        corners = (activation_numpy(right.sums + sign[:, None, None] * off, config) for sign in signs)
        return functools.reduce(np.maximum, (np.abs(corner - right.activated) for corner in corners))

    @functools.cached_property
    def _grids(self) -> list[Grid]:
        """The oracle's grid of the hidden rows, and those of rows that are larger or smaller by what they may be."""
        right = self.right
        toward = np.sign(right.activated) * self._spread
        rows = [right.rounded(right.activated + part * toward) for part in (0, -1, -0.5, 0.5, 1)]
        return [right.hidden_grid(each) for each in rows]

    @functools.cached_property
    def _ends(self) -> list[np.ndarray]:
        """Least, own and largest stored hidden values (R, I)."""
        right = self.right
        return [right.rounded(right.activated + part * self._spread) for part in (-1, 0, 1)]

    def _columns(self, token: int) -> tuple[np.ndarray, np.ndarray]:
        """(H, n) each: what other scales make of the token's rows, and the columns of values whose codes may be others;
        with an FP8 core the H / 32 of these that may move the row most. There values that lie on borders of a scale, as
        many do where the largest is a multiple of 7, as 448 is, count as what another scale makes of the row.
        """
        tokens, experts, weights, _ = self.right.pairs
        scales, codes = [], []
        for r in np.flatnonzero(tokens == token):
            low, own, high = (ends[r : r + 1] for ends in self._ends)
            grids = [grid.rows(np.array([r])) for grid in self._grids]
            down = weights[r] * self.right.down(int(experts[r]))
            values, scale = grids[0].values(own), np.broadcast_to(grids[0].scale, own.shape)
            step = np.zeros(own.shape[1])
            pieces = []
            for grid in grids:
                is_other = (np.broadcast_to(grid.scale, own.shape) != scale)[0]
                pieces += _by_group((grid.values(own) - values)[0], is_other, self._group)
                is_judged = is_other | (grid is grids[0])
                for ulps in self._divisions if self.has_fp8_core and is_judged.any() else ():
                    nudged = (grid.nudged(ulps).values(own) - grid.values(own))[0]
                    pieces += _by_group(nudged, np.full(nudged.shape, nudged.any()), self._group)
                step = np.maximum(step, np.where(is_judged, np.abs(grid.values(high) - grid.values(low))[0], 0))
            for ulps in self._divisions if not self.has_fp8_core else ():
                step = np.maximum(step, np.abs(grids[0].nudged(ulps).values(own) - values)[0])
            may_move = step > 0
            scales.append(down @ np.reshape(pieces, (-1, own.shape[1])).T)
            codes.append(down[:, may_move] * step[may_move])
        found = np.concatenate(codes, 1)
        if self.has_fp8_core:
            found = found[:, np.argsort(-_size(found.T))[: len(found) // 32]]
        return np.concatenate(scales, 1), found

    @property
    def _group(self) -> int:
        return self.weights.scheme.activations.group_size or self.weights.intermediate_size


def assert_layer_close(
    actual: ArrayLike,
    x: ArrayLike,
    topk_weights: ArrayLike,
    topk_ids: ArrayLike,
    weights: ExpertWeights,
    config: MoEConfig,
    **options: Any,
) -> None:
    """Fail unless every row of actual (T, H) is right. Arguments and options are those of ``LayerJudge``."""
    LayerJudge(x, topk_weights, topk_ids, weights, config, **options).check(actual)


def _by_group(moved: np.ndarray, is_other: np.ndarray, size: int) -> Iterable[np.ndarray]:
    """(I,) cut into pieces (I,) of the groups whose scale is another."""
    for start in range(0, moved.size, size):
        if is_other[start]:
            piece = np.zeros_like(moved)
            piece[start : start + size] = moved[start : start + size]
            yield piece


def _beside(scales: np.ndarray, codes: np.ndarray, directions: np.ndarray, most: float) -> np.ndarray:
    """What is left of directions (H, m) when a fit of the columns of scales and codes (H, n) is taken off. most: of a
    column of scales in the first direction; where the fit has more of one, no scale is fitted.
    """
    columns = np.concatenate([scales, codes], 1)
    size = np.maximum(_size(columns.T), 1e-300)
    columns = columns / size
    gram = columns.T @ columns
    gram += 1e-6 * max(np.trace(gram), 1e-300) * np.eye(len(gram))  # two columns may be one
    parts = np.linalg.solve(gram, columns.T @ directions)
    if (np.abs(parts[:, 0] / size)[: scales.shape[1]] > most).any():
        return _beside(scales[:, :0], codes, directions, most)
    return directions - columns @ parts


def _size(rows: np.ndarray) -> np.ndarray:
    return np.sqrt((rows**2).mean(1))


def _record(judge: LayerJudge, found: Found) -> None:
    """One line of JSON for ``report``, where the environment names a file."""
    if path := os.environ.get(REPORT):
        kind = "FP8 core" if judge.has_fp8_core else "kernels" if judge.kernels else "float32"
        figures = {f.name: _largest(getattr(found, f.name)) for f in dataclasses.fields(found) if f.name != "is_right"}
        line = dict(scheme=judge.weights.scheme.name, kind=kind, rows=len(found.error), **figures)
        with Path(path).open("a") as file:
            file.write(json.dumps(line) + "\n")


def _largest(values: np.ndarray) -> float:
    return float(np.nanmax(np.abs(values))) if np.isfinite(values).any() else 0.0


def report(path: Path) -> Iterable[str]:
    """Lines of text: by scheme the largest figures of all calls of a run."""
    of = collections.defaultdict(list)
    for line in map(json.loads, path.read_text().splitlines()):
        of[line["scheme"], line["kind"]].append(line)
    figures = ("error", "left", "likeness", "scale")
    yield f"{'scheme':32}{'sums':10}{'rows':>8}" + "".join(f"{name:>11}" for name in figures)
    for (scheme, kind), lines in sorted(of.items()):
        largest = "".join(f"{max(line[name] for line in lines):>11.2g}" for name in figures)
        yield f"{scheme:32}{kind:10}{sum(line['rows'] for line in lines):>8}{largest}"
    yield f"allowed: left {LEFT}, of an FP8 core {FP8_LEFT}; likeness {HALF}; scale {SCALE}"
    yield f"16-bit activations: error {SIXTEEN_BITS}"
