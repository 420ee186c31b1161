"""``MoEMethod``: what a quantization method does with the tensors of one layer's experts, and ``LeafSpec``.

The life of a layer's weights: ``create_weights`` says which leaves a checkpoint must fill and in which shapes; a loader
fills them, or ``quantize_leaves`` makes them from full-precision weights; ``process_weights_after_loading`` turns them
into ``ExpertWeights``. Loader-facing leaves keep vLLM's names and stack both halves along the rows (w13 is (E, 2I, H),
gate rows first); ``ExpertWeights`` holds them as (E, G, I, H), which is a view.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from moe_jax.quantization._format import Packing, QuantFormat, Scheme, Strategy
from moe_jax.quantization._scale_checks import check_held_exactly, check_scale_values, common_input_scale
from moe_jax.quantization._schemes import check_scheme
from moe_jax.quantization._tensors import ExpertWeights, QuantizedTensor

if TYPE_CHECKING:
    # MoEConfig holds a Scheme and so lives above this package.
    from moe_jax._config import MoEConfig


# What files store scales in; all convert to float32 exactly.
SCALE_DTYPES = tuple(np.dtype(d) for d in (jnp.float32, jnp.float16, jnp.bfloat16, jnp.float8_e8m0fnu))


# Leaves that have to come in the dtype of their spec, value by value what the file has.
_EXACT_KINDS = ("weight", "bias", "zero_point", "channel_zero_point", "g_idx")


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """One loader-facing leaf.

    shape: stacked over experts, (E, ...). dtype: what a loader stores; scales of 16 and 32 bits become float32.
    kind: "weight", "tensor", "channel", "group", "block", "zero_point", "channel_zero_point", "g_idx", "input_scale" or
    "bias": the rule by which one expert's tensor finds its place. init: the value before loading in vLLM's layout
    (None: uninitialised); it never stands in for a missing tensor. pack_extent: elements of a packed axis that fill
    whole stored numbers.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    kind: str
    init: float | None = None
    pack_extent: int = 1

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class MoEMethod(abc.ABC):
    """The create / quantize / process verbs of one scheme. Subclasses say how they quantize and what they accept."""

    scheme: Scheme

    # AutoRound writes symmetric integer scales of either sign; a negative FP8 scale can only be damage.
    allows_negative_scales: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "scheme", check_scheme(self.scheme))

    @property
    def weight_format(self) -> QuantFormat:
        """How the weights are stored; a scheme that keeps them unquantized has none (ValueError)."""
        if self.scheme.weights is None:
            raise ValueError(f"scheme {self.scheme.name!r} does not quantize weights")
        return self.scheme.weights

    def create_weights(self, config: "MoEConfig") -> dict[str, LeafSpec]:
        """The leaves a checkpoint has to fill for ``config``, by vLLM's parameter names. Allocates nothing."""
        experts, halves = config.num_experts, config.num_halves
        inner, hidden = config.intermediate_size, config.hidden_size
        param_dtype = np.dtype(config.param_dtype)
        weights, activations = self.scheme.weights, self.scheme.activations
        specs = {
            f"{prefix}_{name}": spec
            for prefix, lead, n, k in (("w13", (experts, halves), inner, hidden), ("w2", (experts,), hidden, inner))
            for name, spec in _matrix_specs(weights, lead, n, k, param_dtype).items()
        }
        if activations is not None and activations.needs_input_scale:
            name = input_scale_name(activations)
            specs[f"w13_{name}"] = LeafSpec((experts, halves), np.dtype(np.float32), "input_scale", 1.0)
            specs[f"w2_{name}"] = LeafSpec((experts,), np.dtype(np.float32), "input_scale", 1.0)
        if config.has_bias:
            specs["w13_bias"] = LeafSpec((experts, halves * inner), param_dtype, "bias", 0.0)
            specs["w2_bias"] = LeafSpec((experts, hidden), param_dtype, "bias", 0.0)
        return specs

    def process_weights_after_loading(self, leaves: Mapping[str, Any], config: "MoEConfig") -> ExpertWeights:
        """Checkpoint leaves -> ``ExpertWeights``. Pure; the tree's structure depends on config and scheme only.

        leaves: NumPy or JAX arrays (also tracers) of ``create_weights``' names and shapes; scales may be float32,
        16-bit floats or e8m0, with or without trailing axes of size 1; 8-bit scales of groups stay as they are. The big
        leaves are reshaped, never converted. Weight scales, global ones too, stay per half, (E, G, ...): nothing is
        requantized. A static input scale is the maximum over all experts and over gate and up.

        Raises ValueError naming leaf, expert and projection for a leaf that is missing, surplus, of a wrong shape or
        dtype, and for a scale that is NaN, infinite or (FP8, input scales) negative; under a trace values cannot be
        checked.
        """
        specs = self.create_weights(config)
        where = f"{config.name}: " if config.name else ""
        _check_names(leaves, specs, where)
        checked = self._checked(leaves, specs, where, ("w1", "w3")[: config.num_halves])

        def product(prefix, lead, n, k):
            own = {name.removeprefix(f"{prefix}_"): leaf for name, leaf in checked.items() if name.startswith(prefix)}
            return self._assemble(own, lead, n, k, f"{where}{prefix}_")

        experts, halves = config.num_experts, config.num_halves
        inner, hidden = config.intermediate_size, config.hidden_size
        bias = checked.get("w13_bias")
        return ExpertWeights(
            w13=product("w13", (experts, halves), inner, hidden),
            w2=product("w2", (experts,), hidden, inner),
            w13_bias=None if bias is None else bias.reshape(experts, halves, inner),
            w2_bias=checked.get("w2_bias"),
            scheme=self.scheme,
        )

    def quantize_leaves(self, w13: Any, w2: Any, biases: tuple[Any, Any] | None, config: "MoEConfig") -> dict[str, Any]:
        """Full-precision experts -> the leaves of ``create_weights`` (online quantization), one expert at a time.

        w13: (E, G, I, H), w2: (E, H, I), any float dtype. biases: ((E, G, I), (E, H)) exactly when config.has_bias.
        Temporaries in float32 are those of one expert. Raises ValueError for other shapes and for static activations.
        """
        activations = self.scheme.activations
        if activations is not None and activations.needs_input_scale:
            raise ValueError(
                f"scheme {self.scheme.name!r} needs calibrated input scales, which only a checkpoint has; "
                "for online quantization use a dynamic scheme such as 'fp8_tensor' or 'nvfp4_dynamic'"
            )
        if (biases is not None) != config.has_bias:
            raise ValueError(f"has_bias={config.has_bias}, but biases are {'missing' if biases is None else 'given'}")
        experts, halves = config.num_experts, config.num_halves
        inner, hidden = config.intermediate_size, config.hidden_size
        w13_bias, w2_bias = biases or (None, None)
        for name, array, expected in (
            ("w13", w13, (experts, halves, inner, hidden)),
            ("w2", w2, (experts, hidden, inner)),
            ("w13_bias", w13_bias, (experts, halves, inner)),
            ("w2_bias", w2_bias, (experts, hidden)),
        ):
            if array is not None and tuple(array.shape) != expected:
                raise ValueError(f"{name} has shape {tuple(array.shape)}, expected {expected}")
        leaves = {}
        for prefix, w in (("w13", w13), ("w2", w2)):
            leaves |= {f"{prefix}_{name}": leaf for name, leaf in self.quantize_stack(w, config.param_dtype).items()}
        if biases is not None:
            leaves["w13_bias"], leaves["w2_bias"] = (jnp.asarray(bias).astype(config.param_dtype) for bias in biases)
        return {name: leaves[name].reshape(spec.shape) for name, spec in self.create_weights(config).items()}

    def matrix_specs(self, n: int, k: int) -> dict[str, LeafSpec]:
        """The leaves of one (n, k) matrix outside the experts (attention, say): names as after its module's, and shapes
        of which the first axis, 1, is not in the file."""
        specs = _matrix_specs(self.scheme.weights, (1,), n, k, np.dtype(np.float32))
        activations = self.scheme.activations
        if activations is not None and activations.needs_input_scale:
            specs[input_scale_name(activations)] = LeafSpec((1,), np.dtype(np.float32), "input_scale", 1.0)
        return specs

    def process_matrix(self, leaves: Mapping[str, Any], n: int, k: int, where: str = "") -> QuantizedTensor:
        """The leaves of ``matrix_specs`` as files have them -> one matrix (1, n, k). Raises what experts raise."""
        specs = self.matrix_specs(n, k)
        _check_names(leaves, specs, where)
        checked = self._checked({name: leaf[None] for name, leaf in leaves.items()}, specs, where, ())
        return self._assemble(checked, (1,), n, k, where)

    def _checked(
        self, leaves: Mapping[str, Any], specs: Mapping[str, LeafSpec], where: str, halves: tuple[str, ...]
    ) -> dict[str, Any]:
        """Leaves in the shapes and dtypes of their specs, with scales that are possible."""
        checked = {name: _conform(leaves[name], spec, where + name) for name, spec in specs.items()}
        for name, spec in specs.items():
            if spec.kind in _EXACT_KINDS:
                continue
            leaf = checked[name]
            if name.endswith("input_global_scale") and not isinstance(leaf, Tracer):
                leaf = np.where(np.isposinf(leaf), 1.0, leaf)  # an expert without calibration
            check_scale_values(
                leaf,
                where + name,
                ("w2",) if name.startswith("w2_") else halves,
                allow_negative=self.allows_negative_scales and spec.kind != "input_scale",
                is_divisor=name.endswith("global_scale"),
                largest=_greatest_code(self.scheme.weights, name),
            )
            if spec.kind in ("group", "block") and self.scheme.weights is not None:
                check_held_exactly(leaf, self.scheme.weights.group_scale_dtype, where + name)
        return checked

    def _assemble(
        self, leaves: Mapping[str, Any], lead: tuple[int, ...], n: int, k: int, where: str
    ) -> QuantizedTensor:
        """Checked leaves without prefix -> matrices lead + (n, k)."""
        fmt, activations = self.scheme.weights, self.scheme.activations
        if fmt is None:
            return QuantizedTensor(data=leaves["weight"].reshape(*lead, n, k))
        global_scale, input_scale = leaves.get(global_scale_name(fmt)), None
        if activations is not None and activations.needs_input_scale:
            name = input_scale_name(activations)
            input_scale = common_input_scale(leaves[name], activations, where + name)
        zero_point, g_idx = leaves.get("weight_zero_point"), leaves.get("weight_g_idx")
        return QuantizedTensor(
            data=leaves[data_name(fmt)].reshape(*lead, n, fmt.stored_length(k)),
            scale=leaves["weight_scale"].reshape(*lead, *fmt.scale_shape(n, k)),
            global_scale=None if global_scale is None else global_scale.reshape(lead),
            input_scale=input_scale,
            zero_point=None if zero_point is None else zero_point.reshape(*lead, *fmt.zero_point_shape(n, k)),
            g_idx=None if g_idx is None else _checked_g_idx(g_idx, fmt, f"{where}weight_g_idx"),
            fmt=fmt,
            num_columns=None if fmt.packing is None else k,
        )

    @abc.abstractmethod
    def quantize_stack(self, w: Any, param_dtype: Any) -> dict[str, Any]:
        """Quantize a stack of matrices (E, ..., N, K). Returns its leaves without prefix: {"weight": ..., ...}."""

    def abstract_weights(self, config: "MoEConfig") -> ExpertWeights:
        """``ExpertWeights`` of ShapeDtypeStructs: what processing will return, without memory."""
        specs = self.create_weights(config)
        leaves = {name: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for name, spec in specs.items()}
        return jax.eval_shape(functools.partial(self.process_weights_after_loading, config=config), leaves)


def _greatest_code(fmt: QuantFormat | None, name: str) -> float:
    """The greatest magnitude that a weight's scale multiplies, or NVFP4's global scale divides or multiplies."""
    if fmt is None or "input" in name:
        return 1.0
    if fmt.global_scale is not None:
        return 6.0 * 448.0 if name.endswith(global_scale_name(fmt)) else 1.0
    if fmt.element_type.is_float:
        return fmt.element_type.max
    return 2.0 ** (fmt.element_type.bits - (1 if fmt.symmetric else 0))


def data_name(fmt: QuantFormat) -> str:
    """Leaf of the stored matrix, without its prefix."""
    is_packed = fmt.packing is not None and fmt.global_scale != "multiplies"  # ModelOpt says "weight" all the same
    return "weight_packed" if is_packed else "weight"


def global_scale_name(fmt: QuantFormat) -> str:
    """Leaf of NVFP4's global scales, without its prefix."""
    return "weight_scale_2" if fmt.global_scale == "multiplies" else "weight_global_scale"


def input_scale_name(fmt: QuantFormat) -> str:
    """Leaf of the static scales of activations of this format, without its prefix."""
    return "input_global_scale" if fmt.global_scale == "divides" else "input_scale"


def _matrix_specs(
    fmt: QuantFormat | None, lead: tuple[int, ...], n: int, k: int, param_dtype: np.dtype
) -> dict[str, LeafSpec]:
    """Loader-facing leaves of (n, k) matrices stacked as ``lead`` = (E,) or (E, G), without their prefix."""
    experts, halves = lead[0], math.prod(lead[1:])
    if fmt is None:
        return {"weight": LeafSpec((experts, halves * n, k), param_dtype, "weight")}
    specs = {
        data_name(fmt): LeafSpec(
            (experts, halves * n, fmt.stored_length(k)), fmt.storage, "weight", None, fmt.pack_extent
        ),
        "weight_scale": _scale_spec(fmt, lead, n, k),
    }
    if fmt.packing is Packing.NIBBLES and k % 2:
        raise ValueError(f"{fmt.element} stores pairs of columns, expected an even number of them, found {k}")
    if fmt.global_scale is not None:
        specs[global_scale_name(fmt)] = LeafSpec(lead, np.dtype(np.float32), "tensor", 1.0)
    if not fmt.symmetric:
        rows, groups = fmt.zero_point_shape(n, k)
        kind = "channel_zero_point" if fmt.strategy is Strategy.CHANNEL else "zero_point"
        specs["weight_zero_point"] = LeafSpec((experts, halves * rows, groups), fmt.storage, kind, 0.0, fmt.pack_extent)
    if fmt.actorder:
        specs["weight_g_idx"] = LeafSpec((experts, k), np.dtype(np.int32), "g_idx")
    return specs


def _checked_g_idx(g_idx: Any, fmt: QuantFormat, name: str) -> jax.Array:
    """Group of each column, (E, K). An expert whose entries are all -1 (unset, in old files) has them by position.

    Raises ValueError naming the first entry that is no group; under a trace values cannot be checked.
    """
    columns = g_idx.shape[-1]
    by_position = np.arange(columns, dtype=np.int32) // (fmt.group_size or columns)
    if not isinstance(g_idx, Tracer):
        values = np.asarray(g_idx)
        bad = ((values < 0) | (values > by_position[-1])) & (values != -1).any(-1, keepdims=True)
        if bad.any():
            expert, column = (int(i) for i in np.argwhere(bad)[0])
            raise ValueError(
                f"{name}: expert {expert} has group {values[expert, column]} at column {column}, expected 0 to "
                f"{by_position[-1]} for {columns} columns in groups of {fmt.group_size}"
            )
    g_idx = jnp.asarray(g_idx)
    return jnp.where((g_idx < 0).all(-1, keepdims=True), by_position, g_idx)


def _scale_spec(fmt: QuantFormat, lead: tuple[int, ...], n: int, k: int) -> LeafSpec:
    """Loader-facing scale of (n, k) matrices stacked as ``lead`` = (E,) or (E, G); each half has its own blocks."""
    experts, *halves = lead
    rows_and_columns = fmt.scale_shape(n, k)
    if fmt.strategy is Strategy.TENSOR:
        shape = lead
    else:
        rows, columns = rows_and_columns if len(rows_and_columns) == 2 else (n, 1)
        shape = (experts, math.prod(halves) * rows, columns)
    return LeafSpec(shape, fmt.scale_dtype, fmt.strategy.value, 1.0 if fmt.scale == "float32" else None)


def _check_names(leaves: Mapping[str, Any], specs: Mapping[str, LeafSpec], where: str) -> None:
    missing, surplus = sorted(specs.keys() - leaves.keys()), sorted(leaves.keys() - specs.keys())
    if missing or surplus:
        raise ValueError(f"{where}leaves missing: {missing or 'none'}; not part of the scheme: {surplus or 'none'}")


def _conform(leaf: Any, spec: LeafSpec, name: str) -> Any:
    """The leaf in the spec's shape and dtype; only scales may differ, in float dtype and in trailing axes of size 1."""
    shape, dtype = tuple(leaf.shape), np.dtype(leaf.dtype)
    if spec.kind in _EXACT_KINDS:
        if shape != spec.shape:
            raise ValueError(f"{name} has shape {shape}, expected {spec.shape}")
        if dtype != spec.dtype:
            raise ValueError(f"{name} has dtype {dtype}, expected {spec.dtype}; load it in the dtype of the scheme")
        return leaf
    if _without_trailing_ones(shape) != _without_trailing_ones(spec.shape):
        raise ValueError(f"{name} has shape {shape}, expected {spec.shape}; a different shape means a different scheme")
    if spec.dtype.itemsize == 1:
        if dtype == jnp.float8_e8m0fnu and spec.dtype == np.uint8:
            leaf, dtype = leaf.view(np.uint8), spec.dtype
        if dtype != spec.dtype:
            raise ValueError(f"{name} has dtype {dtype}, expected {spec.dtype}; another dtype means another scheme")
        return leaf.reshape(spec.shape)
    if dtype not in SCALE_DTYPES:
        raise ValueError(f"{name} has dtype {dtype}, expected one of {', '.join(d.name for d in SCALE_DTYPES)}")
    return leaf.reshape(spec.shape).astype(np.float32, copy=False)


def _without_trailing_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape
