"""Quantized expert weights as pytrees: few leaves, static metadata.

Shapes: G is the number of stacked projections, 2 for a gated layer (index 0 gate = w1, index 1 up = w3), 1 otherwise.

=================  ==============================  ====================================
leaf               w13                             w2
=================  ==============================  ====================================
data               (E, G, I, H)                    (E, H, I)
data, nibbles      (E, G, I, H/2) uint8            (E, H, I/2) uint8
data, int32 words  (E, G, I, ceil(H*b/32))         (E, H, ceil(I*b/32))
scale, tensor      (E, G)                          (E,)
scale, channel     (E, G, I)                       (E, H)
scale, group       (E, G, I, ceil(H/g))            (E, H, ceil(I/g))
scale, block       (E, G, ceil(I/bn), ceil(H/bk))  (E, ceil(H/bn), ceil(I/bk))
global_scale       (E, G) f32, NVFP4               (E,) f32
zero_point         (E, G, I, groups) int8          (E, H, groups) int8
zero_point, words  (E, G, ceil(I*b/32), groups)    (E, ceil(H*b/32), groups)
g_idx              (E, H) int32                    (E, I) int32
input_scale        () f32, static activations      () f32
bias               (E, G, I)                       (E, H)
=================  ==============================  ====================================

These are the shapes of layout "plain"; others belong to kernels (moe_jax/experts/hopper/_kernel_layout.py).
"""

import dataclasses
from typing import Any, ClassVar

import jax
from jax.sharding import PartitionSpec

from moe_jax._pytrees import pytree, static_type
from moe_jax._typing import Leaf
from moe_jax.quantization._formats import QuantFormat
from moe_jax.quantization._schemes import Scheme
from pallas_kernels.common import PLAIN, WeightLayout

static_type(WeightLayout)


@pytree
@dataclasses.dataclass(frozen=True, repr=False)
class QuantizedTensor:
    """A stack of (N, K) matrices as stored; the real values are ``(data - zero_point) * scale``, spread by ``fmt``.

    data: lead + (N, K) in ``fmt.storage``, K counting stored numbers when packed; in the parameter dtype when ``fmt``
        is None.
    scale: ``fmt.scale_dtype``, lead + ``fmt.scale_shape(N, K)``; None when ``fmt`` is None.
    global_scale: float32, lead, as the checkpoint has it: ``fmt.global_scale`` says whether it divides or multiplies.
    input_scale: () float32, the static scale of this product's activations, or their global one, which divides or
        multiplies as their format says; None unless that ``needs_input_scale``.
    zero_point: lead + ``fmt.zero_point_shape(N, K)``, packed along N where data is along K; None when symmetric.
    g_idx: int32 (E, K), the group of each column, common to both projections; None unless ``fmt.actorder``.
    num_columns: K where data is packed, since words may end in padding; None where it is not.
    In trees of the same structure a leaf may also be a ShapeDtypeStruct or a sharding.
    """

    data: Leaf
    scale: Leaf | None = None
    global_scale: Leaf | None = None
    input_scale: Leaf | None = None
    zero_point: Leaf | None = None
    g_idx: Leaf | None = None
    fmt: QuantFormat | None = dataclasses.field(default=None, metadata=dict(static=True))
    layout: WeightLayout = dataclasses.field(default=PLAIN, metadata=dict(static=True))
    num_columns: int | None = dataclasses.field(default=None, metadata=dict(static=True))

    @property
    def shape(self) -> tuple[int, ...]:
        """lead + (N, K) of the real values."""
        if self.layout.shape is not None:
            return (self.data.shape[0], *self.layout.shape)
        return (*self.data.shape[:-1], self.data.shape[-1] if self.num_columns is None else self.num_columns)


@pytree
@dataclasses.dataclass(frozen=True, repr=False)
class QuantizedMatrix:
    """One quantized matrix outside the experts, (N, K) by its real values, and the scheme that it follows.

    tensor: the leaves of w2 with E = 1, so data is (1, N, ...).
    """

    tensor: QuantizedTensor
    scheme: Scheme = dataclasses.field(metadata=dict(static=True))

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.tensor.shape[-2:]
        return n, k

    @property
    def dtype(self) -> Any:
        """Of the stored numbers."""
        return self.tensor.data.dtype

    def split_axes(self, axis: int) -> "QuantizedMatrix":
        """The same structure in layout "plain" with, for each leaf, its axis that counts rows (axis 0) or columns (1);
        -1 where it has none."""
        tensor = self.tensor

        def of(name: str) -> int | None:
            leaf = getattr(tensor, name)
            if leaf is None:
                return None
            if len(leaf.shape) == 3:
                return 1 + axis
            return 1 if len(leaf.shape) == 2 and axis == (1 if name == "g_idx" else 0) else -1

        names = ("data", "scale", "global_scale", "input_scale", "zero_point", "g_idx")
        return dataclasses.replace(self, tensor=dataclasses.replace(tensor, **{name: of(name) for name in names}))

    def leaf_specs(self, spec: PartitionSpec) -> "QuantizedMatrix":
        """The same structure with a ``PartitionSpec`` for each leaf, all whole where the layout is a kernel's.

        spec: of rows and columns.
        """
        if not self.tensor.layout.is_plain:
            return jax.tree.map(lambda leaf: PartitionSpec(), self)
        rows, columns = spec

        def of_leaf(leaf: Leaf, row_axis: int, column_axis: int) -> PartitionSpec:
            entries = {column_axis: columns, row_axis: rows}
            return PartitionSpec(*(entries.get(axis) for axis in range(len(leaf.shape))))

        return jax.tree.map(of_leaf, self, self.split_axes(0), self.split_axes(1))


@pytree
@dataclasses.dataclass(frozen=True, repr=False)
class LowRank:
    """A low-rank addend of each of a stack of matrices W (N, K): ``W + b diag(scale) a`` (LoRA).

    a: of w13 (E, G, R, K), or (E, 1, R, K) where both projections have one; of w2 (E, R, K). b: (E, G, N, R) or
    (E, N, R). Both in any float dtype. scale: (E, R) float32, of each of the R ranks. chosen: (T, R) float32, 1 for the
    ranks of the adapter that a token of the call has chosen and 0 for others; None: all tokens take all.
    """

    a: Leaf
    b: Leaf
    scale: Leaf
    chosen: Leaf | None = None

    @property
    def rank(self) -> int:
        return self.scale.shape[-1]


@pytree
@dataclasses.dataclass(frozen=True, repr=False)
class ExpertWeights:
    """All routed experts of one layer: two stacked matrices, optional biases, and the scheme they follow."""

    w13: QuantizedTensor
    w2: QuantizedTensor
    w13_bias: Leaf | None = None
    w2_bias: Leaf | None = None
    scheme: Scheme = dataclasses.field(default=Scheme("bf16"), metadata=dict(static=True))

    # Fields of AdaptedWeights. Saves name every field, so that here they would keep older ones from restoring.
    w13_lora: ClassVar[Any] = None
    w2_lora: ClassVar[Any] = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, H, I)."""
        return self.num_experts, self.hidden_size, self.intermediate_size

    @property
    def dtype(self) -> Any:
        """Of the stored numbers."""
        return self.w13.data.dtype

    @property
    def num_experts(self) -> int:
        return self.w2.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.w2.shape[1]

    @property
    def intermediate_size(self) -> int:
        return self.w13.shape[2]

    @property
    def is_gated(self) -> bool:
        return self.w13.shape[1] == 2

    @property
    def has_adapters(self) -> bool:
        return self.w13_lora is not None or self.w2_lora is not None

    def adapted(self, w13_lora: LowRank | None, w2_lora: LowRank | None) -> "ExpertWeights":
        """The same weights with these addends, and no others."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(ExpertWeights)}
        if w13_lora is None and w2_lora is None:
            return ExpertWeights(**fields)
        return AdaptedWeights(**fields, w13_lora=w13_lora, w2_lora=w2_lora)

    def nbytes(self) -> int:
        """Bytes of all leaves as stored."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))


@pytree
@dataclasses.dataclass(frozen=True, repr=False)
class AdaptedWeights(ExpertWeights):
    """Experts with low-rank addends (LoRA) of their matrices, which take rows before these are quantized.

    w13_lora, w2_lora: ``LowRank``, or None for a matrix without one.
    """

    w13_lora: Any = None
    w2_lora: Any = None
