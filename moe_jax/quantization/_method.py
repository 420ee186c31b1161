"""``MoEMethod``: what a scheme does with the tensors of one layer's experts; ``ExpertShape`` and ``LeafSpec``.

The life of a layer's weights: ``create_weights`` says which leaves a checkpoint must fill and in which shapes. A loader
fills them, or ``quantize_leaves`` makes them from full-precision weights. ``process_weights_after_loading`` turns them
into ``ExpertWeights``. Loader-facing leaves keep vLLM's names and stack both projections along the rows: w13 is
(E, 2I, H), gate rows first. ``ExpertWeights`` holds them as (E, G, I, H), which is a view.

Deviations from vLLM, each exact where vLLM is lossy:

- FP8 and NVFP4: gate and up keep a scale of their own (vLLM requantizes both to the larger FP8 scale, and takes gate's
  global scale for both).
- FP8: a dynamic scale per tensor of activations is really used. I may be no multiple of the block; each projection then
  has a shorter last row of blocks.
- NVFP4, MX: block scales are never flushed or rescaled. Activations are really rounded to FP4 where the scheme says so
  (on Hopper vLLM leaves them in 16 bits). Global scales stay in the checkpoint's own convention.
- Integers: w4a8_fp8 multiplies group scales in float32 (vLLM's kernel rounds code times scale to e4m3). int4 weights
  with int8 activations stay integers on every platform. Every width takes zero points. Columns of an act-order matrix
  find their scale by g_idx instead of by a permutation.
- int8: the scale is amax / 127 and codes lie within +-127. compressed-tensors' own quantizer uses amax / 127.5 and may
  write -128, which loads unchanged.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike

from moe_jax._typing import AnyArray, Leaf
from moe_jax.quantization._code_checks import check_codes, check_groups
from moe_jax.quantization._formats import GROUP_SCALE_DTYPES, Packing, QuantFormat, Strategy
from moe_jax.quantization._numerics import quantize_experts
from moe_jax.quantization._scale_checks import (
    check_held_exactly,
    check_rounding,
    check_scale_values,
    common_input_scale,
)
from moe_jax.quantization._schemes import Scheme, SchemeLike, check_scheme
from moe_jax.quantization._tensors import ExpertWeights, QuantizedTensor
from pallas_kernels.common import numerics

# What files store scales in; all convert to float32 exactly.
SCALE_DTYPES = tuple(np.dtype(d) for d in (jnp.float32, jnp.float16, jnp.bfloat16, jnp.float8_e8m0fnu))


# Leaves that have to come in the dtype of their spec, value by value what the file has.
_EXACT_KINDS = ("weight", "bias", "zero_point", "channel_zero_point", "g_idx")


@dataclasses.dataclass(frozen=True)
class ExpertShape:
    """What a method has to know of a layer of experts.

    Args:
        num_experts: E.
        num_projections: G, matrices stacked in w13: 2 (gate and up) when gated, else 1.
        hidden_size: H.
        intermediate_size: I of one expert.
        param_dtype: of unquantized weights and of biases.
        has_bias: whether both products have one.
        name: of the layer, for error messages.
        intermediate_size_full: I of the whole layer, where these experts hold a part of I. Act-order columns of that
            part belong to groups of the whole. None: I.
    """

    num_experts: int
    num_projections: int
    hidden_size: int
    intermediate_size: int
    param_dtype: DTypeLike = jnp.bfloat16
    has_bias: bool = False
    name: str = ""
    intermediate_size_full: int | None = None

    @property
    def shape(self) -> "ExpertShape":
        return self

    @property
    def products(self) -> tuple[tuple[str, tuple[int, ...], int, int], ...]:
        """(leaf prefix, leading axes, rows, columns) of the matrices of both products."""
        experts, hidden, intermediate = self.num_experts, self.hidden_size, self.intermediate_size
        return (
            ("w13", (experts, self.num_projections), intermediate, hidden),
            ("w2", (experts,), hidden, intermediate),
        )

    def grouped_columns(self, prefix: str, fmt: QuantFormat | None) -> int:
        """How many columns the groups of a product cover: its own, or those of all parts where it is one of several.

        prefix: "w13" or "w2".
        """
        if prefix == "w13":
            return self.hidden_size
        is_act_order = fmt is not None and fmt.actorder
        return (is_act_order and self.intermediate_size_full) or self.intermediate_size


@runtime_checkable
class HasShape(Protocol):
    """An ``ExpertShape``, or a ``MoEConfig``."""

    @property
    def shape(self) -> ExpertShape: ...


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """One loader-facing leaf.

    Args:
        shape: stacked over experts, (E, ...).
        dtype: what a loader stores; scales of 16 and 32 bits become float32.
        kind: "weight", "tensor", "channel", "group", "block", "zero_point", "channel_zero_point", "g_idx",
            "input_scale" or "bias": the rule by which one expert's tensor finds its place.
        init: the value before loading in vLLM's layout, None: uninitialised. It never stands in for a missing tensor.
        pack_extent: elements of a packed axis that fill whole stored numbers.
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
class MoEMethod:
    """The create / quantize / process verbs of one scheme. A subclass may override any of them for a format of its own.

    ``config`` is a ``MoEConfig`` or an ``ExpertShape`` throughout.

    Args:
        scheme: what is quantized, and to what.
        legacy_fp16_requant: FP8 per tensor: reproduce what vLLM makes of scales that differ between gate and up. Both
            projections are dequantized to float16 and quantized again with the larger scale. Loses bits, and what
            exceeds 65504 saturates.
        arithmetic_dtype: int8 per channel: the dtype in which online quantization computes scale and quotient. float32
            is the accurate default; the weights' own 16-bit dtype reproduces vLLM's Int8OnlineMoEMethod bit for bit.
    """

    scheme: Scheme
    legacy_fp16_requant: bool = False
    arithmetic_dtype: DTypeLike = jnp.float32

    def __post_init__(self) -> None:
        object.__setattr__(self, "scheme", check_scheme(self.scheme))

    @property
    def weight_format(self) -> QuantFormat:
        """How the weights are stored; a scheme that keeps them unquantized has none (ValueError)."""
        if self.scheme.weights is None:
            raise ValueError(f"scheme {self.scheme.name!r} does not quantize weights")
        return self.scheme.weights

    @property
    def allows_negative_scales(self) -> bool:
        """AutoRound writes symmetric integer scales of either sign; a negative float scale can only be damage."""
        return self.scheme.weights is not None and not self.scheme.weights.element_type.is_float

    @property
    def _input_scale_leaf(self) -> str | None:
        """Leaf of the static scales of activations, None for a scheme without them."""
        activations = self.scheme.activations
        return activations.input_scale_leaf if activations is not None and activations.needs_input_scale else None

    def create_weights(self, config: HasShape) -> dict[str, LeafSpec]:
        """The leaves a checkpoint has to fill for ``config``, by vLLM's parameter names. Allocates nothing."""
        shape, param_dtype = config.shape, np.dtype(config.shape.param_dtype)
        specs = {
            f"{prefix}_{name}": spec
            for prefix, lead, n, k in shape.products
            for name, spec in _matrix_specs(
                self.scheme.weights, lead, n, k, param_dtype, shape.grouped_columns(prefix, self.scheme.weights)
            ).items()
        }
        for prefix, lead, _, _ in shape.products:
            if self._input_scale_leaf is not None:
                specs[f"{prefix}_{self._input_scale_leaf}"] = _input_scale_spec(lead)
        for prefix, lead, n, _ in shape.products if shape.has_bias else ():
            specs[f"{prefix}_bias"] = LeafSpec((lead[0], math.prod(lead[1:]) * n), param_dtype, "bias", 0.0)
        return specs

    def process_weights_after_loading(self, leaves: Mapping[str, AnyArray], config: HasShape) -> ExpertWeights:
        """Checkpoint leaves -> ``ExpertWeights``. Pure; the tree's structure depends on config and scheme only.

        The big leaves are reshaped, never converted. Weight scales, global ones too, stay per projection, (E, G, ...):
        nothing is requantized. A static input scale is the maximum over all experts and over gate and up.

        Args:
            leaves: arrays of ``create_weights``' names and shapes. Scales may be float32, 16-bit floats or e8m0, with
                or without trailing axes of size 1; 8-bit scales of groups stay as they are.

        Raises:
            ValueError: naming leaf, expert and projection: a leaf that is missing, surplus, of a wrong shape or dtype,
                a scale that is NaN, infinite or (FP8, input scales) negative, or a code in a byte that has more bits
                than the scheme. Under a trace values cannot be checked.
        """
        shape, specs = config.shape, self.create_weights(config)
        where = f"{shape.name}: " if shape.name else ""
        _check_names(leaves, specs, where)
        checked = self._checked(leaves, specs, where, ("w1", "w3")[: shape.num_projections])
        products = {}
        for prefix, lead, n, k in shape.products:
            own = {name.removeprefix(f"{prefix}_"): leaf for name, leaf in checked.items() if name.startswith(prefix)}
            grouped = shape.grouped_columns(prefix, self.scheme.weights)
            products[prefix] = self._assemble(own, lead, n, k, f"{where}{prefix}_", grouped)
        bias = checked.get("w13_bias")
        weights = ExpertWeights(
            **products,
            w13_bias=None if bias is None else bias.reshape(*shape.products[0][1], shape.intermediate_size),
            w2_bias=checked.get("w2_bias"),
            scheme=self.scheme,
        )
        fmt = self.scheme.weights
        if self.legacy_fp16_requant and fmt is not None and (fmt.element, fmt.strategy) == ("e4m3", Strategy.TENSOR):
            return dataclasses.replace(weights, w13=_requantized(weights.w13))
        return weights

    def quantize_leaves(
        self, w13: AnyArray, w2: AnyArray, biases: tuple[AnyArray, AnyArray] | None, config: HasShape
    ) -> dict[str, Leaf]:
        """Full-precision experts -> the leaves of ``create_weights`` (online quantization), one expert at a time.

        Temporaries in float32 are those of one expert.

        Args:
            w13: (E, G, I, H), any float dtype.
            w2: (E, H, I).
            biases: ((E, G, I), (E, H)) exactly when the layer has biases.

        Raises:
            ValueError: other shapes; a scheme of static activations.
        """
        shape = config.shape
        self._check_online()
        if (biases is not None) != shape.has_bias:
            raise ValueError(f"has_bias={shape.has_bias}, but biases are {'missing' if biases is None else 'given'}")
        leaves = {}
        for (prefix, lead, n, k), w in zip(shape.products, (w13, w2), strict=True):
            _check_shape(prefix, w, (*lead, n, k))
            leaves |= {f"{prefix}_{name}": leaf for name, leaf in self.quantize_stack(w, shape.param_dtype).items()}
        for (prefix, lead, n, _), bias in zip(shape.products, biases or (), strict=biases is not None):
            _check_shape(f"{prefix}_bias", bias, (*lead, n))
            leaves[f"{prefix}_bias"] = jnp.asarray(bias).astype(shape.param_dtype)
        return {name: leaves[name].reshape(spec.shape) for name, spec in self.create_weights(config).items()}

    def quantize_stack(self, w: AnyArray, param_dtype: DTypeLike) -> dict[str, Leaf]:
        """Quantize a stack of matrices (E, ..., N, K). Returns its leaves without prefix: {"weight": ..., ...}.

        Scales of groups and blocks are rounded to the format's ``group_scale_dtype`` after the values are. param_dtype:
        what an unquantized weight is cast to. Raises ValueError for a matrix whose scales have no place in that dtype.
        """
        fmt = self.scheme.weights
        if fmt is None:
            return {"weight": jnp.asarray(w).astype(param_dtype)}
        quantized = quantize_experts(w, fmt, jnp.dtype(self.arithmetic_dtype))
        leaves = dict(zip(fmt.quantized_leaves, quantized, strict=True))
        has_own_dtype = fmt.scale == "float32" and fmt.strategy in (Strategy.GROUP, Strategy.BLOCK)
        if has_own_dtype and fmt.group_scale_dtype != "float32":
            wide = leaves["weight_scale"]
            leaves["weight_scale"] = wide.astype(GROUP_SCALE_DTYPES[fmt.group_scale_dtype]).astype(wide.dtype)
            check_rounding(leaves["weight_scale"], wide, w, fmt.group_scale_dtype)
        return leaves

    def _check_online(self) -> None:
        if self._input_scale_leaf is not None:
            raise ValueError(
                f"scheme {self.scheme.name!r} needs calibrated input scales, which only a checkpoint has; "
                "for online quantization use a dynamic scheme such as 'fp8_tensor' or 'nvfp4_dynamic'"
            )

    def abstract_weights(self, config: HasShape) -> ExpertWeights:
        """``ExpertWeights`` of ShapeDtypeStructs: what processing will return, without memory."""
        specs = self.create_weights(config)
        leaves = {name: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for name, spec in specs.items()}
        return jax.eval_shape(functools.partial(self.process_weights_after_loading, config=config), leaves)

    def matrix_specs(self, n: int, k: int) -> dict[str, LeafSpec]:
        """The leaves of one (n, k) matrix outside the experts (attention, say): names as after its module's, and shapes
        of which the first axis, 1, is not in the file."""
        specs = _matrix_specs(self.scheme.weights, (1,), n, k, np.dtype(np.float32), k)
        if self._input_scale_leaf is not None:
            specs[self._input_scale_leaf] = _input_scale_spec((1,))
        return specs

    def process_matrix(self, leaves: Mapping[str, AnyArray], n: int, k: int, where: str = "") -> QuantizedTensor:
        """The leaves of ``matrix_specs`` as files have them -> one matrix (1, n, k). Raises what experts raise."""
        specs = self.matrix_specs(n, k)
        _check_names(leaves, specs, where)
        checked = self._checked({name: leaf[None] for name, leaf in leaves.items()}, specs, where, ())
        return self._assemble(checked, (1,), n, k, where, k)

    def abstract_matrix(self, n: int, k: int) -> QuantizedTensor:
        """``process_matrix`` of ShapeDtypeStructs: what it will return, without memory."""
        specs = self.matrix_specs(n, k)
        leaves = {name: jax.ShapeDtypeStruct(spec.shape[1:], spec.dtype) for name, spec in specs.items()}
        return jax.eval_shape(functools.partial(self.process_matrix, n=n, k=k), leaves)

    def quantize_matrix(self, w: AnyArray) -> QuantizedTensor:
        """A full-precision matrix (N, K) -> (1, N, K). Raises ValueError for a scheme of static activations."""
        self._check_online()
        leaves = {name: leaf[0] for name, leaf in self.quantize_stack(w[None], jnp.float32).items()}
        n, k = w.shape
        return self.process_matrix(leaves, n, k)

    def _checked(
        self, leaves: Mapping[str, AnyArray], specs: Mapping[str, LeafSpec], where: str, w13_shards: tuple[str, ...]
    ) -> dict[str, Leaf]:
        """Leaves in the shapes and dtypes of their specs, with codes and scales that are possible."""
        checked = {name: _conform(leaves[name], spec, where + name) for name, spec in specs.items()}
        for name, spec in specs.items():
            leaf, projections = checked[name], ("w2",) if name.startswith("w2_") else w13_shards
            if spec.kind == "weight" and self.scheme.weights is not None:
                check_codes(leaf, where + name, projections, fmt=self.scheme.weights)
            rule = self.scale_rule(name, spec)
            if rule is None:
                continue
            if name.endswith("input_global_scale") and not isinstance(leaf, Tracer):
                leaf = np.where(np.isposinf(leaf), 1.0, leaf)  # an expert without calibration
            check_scale_values(leaf, where + name, projections, **rule)
            if spec.kind in ("group", "block") and self.scheme.weights is not None:
                check_held_exactly(leaf, self.scheme.weights.group_scale_dtype, where + name)
        return cast(dict[str, Leaf], checked)

    def scale_rule(self, name: str, spec: LeafSpec) -> dict[str, Any] | None:
        """What ``check_scale_values`` is told of a leaf's values; None for a leaf that is no scale."""
        if spec.kind in _EXACT_KINDS:
            return None
        return dict(
            allow_negative=self.allows_negative_scales and spec.kind != "input_scale",
            is_divisor=name.endswith("global_scale"),
            largest=_greatest_code(self.scheme.weights, name),
        )

    def _assemble(
        self, leaves: Mapping[str, Leaf], lead: tuple[int, ...], n: int, k: int, where: str, grouped: int
    ) -> QuantizedTensor:
        """Checked leaves without prefix -> matrices lead + (n, k), with scales for ``grouped`` columns."""
        fmt, activations = self.scheme.weights, self.scheme.activations
        if fmt is None:
            return QuantizedTensor(data=leaves["weight"].reshape(*lead, n, k))
        global_scale, input_scale = leaves.get(fmt.global_scale_leaf), None
        if activations is not None and (name := self._input_scale_leaf) is not None:
            input_scale = common_input_scale(leaves[name], activations, where + name)
        zero_point, g_idx = leaves.get("weight_zero_point"), leaves.get("weight_g_idx")
        return QuantizedTensor(
            data=leaves[fmt.data_leaf].reshape(*lead, n, fmt.stored_length(k)),
            scale=leaves["weight_scale"].reshape(*lead, *fmt.scale_shape(n, grouped)),
            global_scale=None if global_scale is None else global_scale.reshape(lead),
            input_scale=input_scale,
            zero_point=None if zero_point is None else zero_point.reshape(*lead, *fmt.zero_point_shape(n, grouped)),
            g_idx=None if g_idx is None else _checked_g_idx(g_idx, fmt, f"{where}weight_g_idx", grouped),
            fmt=fmt,
            num_columns=None if fmt.packing is None else k,
        )


def _greatest_code(fmt: QuantFormat | None, name: str) -> float:
    """The greatest magnitude that a weight's scale multiplies, or NVFP4's global scale divides or multiplies."""
    if fmt is None or "input" in name:
        return 1.0
    if fmt.global_scale is not None:
        return 6.0 * 448.0 if name.endswith(fmt.global_scale_leaf) else 1.0
    if fmt.element_type.is_float:
        return fmt.element_type.max
    return 2.0 ** (fmt.element_type.bits - (1 if fmt.symmetric else 0))


def _matrix_specs(
    fmt: QuantFormat | None, lead: tuple[int, ...], n: int, k: int, param_dtype: np.dtype, grouped: int
) -> dict[str, LeafSpec]:
    """Loader-facing leaves of (n, k) matrices stacked as ``lead`` = (E,) or (E, G), without their prefix.

    grouped: columns that their scales and zero points cover.
    """
    experts, projections = lead[0], math.prod(lead[1:])
    if fmt is None:
        return {"weight": LeafSpec((experts, projections * n, k), param_dtype, "weight")}
    specs = {
        fmt.data_leaf: LeafSpec(
            (experts, projections * n, fmt.stored_length(k)), fmt.storage, "weight", None, fmt.pack_extent
        ),
        "weight_scale": _scale_spec(fmt, lead, n, grouped),
    }
    if fmt.packing is Packing.NIBBLES and k % 2:
        raise ValueError(f"{fmt.element} stores pairs of columns, expected an even number of them, found {k}")
    if fmt.global_scale is not None:
        specs[fmt.global_scale_leaf] = LeafSpec(lead, np.dtype(np.float32), "tensor", 1.0)
    if not fmt.symmetric:
        rows, groups = fmt.zero_point_shape(n, grouped)
        kind = "channel_zero_point" if fmt.strategy is Strategy.CHANNEL else "zero_point"
        specs["weight_zero_point"] = LeafSpec(
            (experts, projections * rows, groups), fmt.storage, kind, 0.0, fmt.pack_extent
        )
    if fmt.actorder:
        specs["weight_g_idx"] = LeafSpec((experts, k), np.dtype(np.int32), "g_idx")
    return specs


def _checked_g_idx(g_idx: AnyArray, fmt: QuantFormat, name: str, grouped: int) -> jax.Array:
    """Group of each column, (E, K). An expert whose entries are all -1 (unset, in old files) has them by position.

    grouped: columns of the whole matrix, of which these K may be a part.
    """
    check_groups(g_idx, name, fmt=fmt, grouped=grouped)
    g_idx = jnp.asarray(g_idx)
    if g_idx.shape[-1] != grouped:
        return g_idx
    return jnp.where((g_idx < 0).all(-1, keepdims=True), fmt.groups_by_position(grouped), g_idx)


def _scale_spec(fmt: QuantFormat, lead: tuple[int, ...], n: int, k: int) -> LeafSpec:
    """Loader-facing scale of (n, k) matrices stacked as ``lead`` = (E,) or (E, G); each projection has its
    own blocks."""
    rows_and_columns = fmt.scale_shape(n, k)
    if fmt.strategy is Strategy.TENSOR:
        shape = lead
    else:
        rows, columns = rows_and_columns if len(rows_and_columns) == 2 else (n, 1)
        shape = (lead[0], math.prod(lead[1:]) * rows, columns)
    return LeafSpec(shape, fmt.scale_dtype, fmt.strategy.value, 1.0 if fmt.scale == "float32" else None)


def _input_scale_spec(lead: tuple[int, ...]) -> LeafSpec:
    return LeafSpec(lead, np.dtype(np.float32), "input_scale", 1.0)


def _requantized(w13: QuantizedTensor) -> QuantizedTensor:
    """Both projections of each expert with the larger of their scales, by way of float16."""
    scale = jnp.asarray(w13.scale)
    common = jnp.broadcast_to(scale.max(axis=1, keepdims=True), scale.shape)
    values = numerics.round_to_float(
        numerics.widen(jnp.asarray(w13.data), jnp.float32) * scale[..., None, None], jnp.float16
    )
    data = numerics.cast_e4m3(values * numerics.reciprocal(common)[..., None, None])
    return dataclasses.replace(w13, data=data, scale=common)


def _check_names(leaves: Mapping[str, AnyArray], specs: Mapping[str, LeafSpec], where: str) -> None:
    missing, surplus = sorted(specs.keys() - leaves.keys()), sorted(leaves.keys() - specs.keys())
    if missing or surplus:
        raise ValueError(f"{where}leaves missing: {missing or 'none'}; not part of the scheme: {surplus or 'none'}")


def _conform(leaf: AnyArray, spec: LeafSpec, name: str) -> AnyArray:
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


def _check_shape(name: str, array: AnyArray, expected: tuple[int, ...]) -> None:
    if tuple(array.shape) != expected:
        raise ValueError(f"{name} has shape {tuple(array.shape)}, expected {expected}")


def method_for(scheme: SchemeLike) -> MoEMethod:
    """The method of a scheme, given as anything ``Scheme.parse`` accepts (and raising what it raises)."""
    return MoEMethod(Scheme.parse(scheme))
