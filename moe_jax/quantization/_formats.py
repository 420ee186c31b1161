"""``QuantFormat``: how one tensor is stored, as data.

Everything that depends on a format asks this object; nothing guesses bits or packing from an array's dtype.
The vocabulary of strategies is that of compressed-tensors: tensor, channel (one scale per output row), token (one per
activation row), group (a run of ``group_size`` along K), block (2-D).
"""

import dataclasses
import enum
import math

import jax.numpy as jnp
import numpy as np

from moe_jax._pytrees import static_type


@static_type
class Strategy(enum.Enum):
    """Extent of one scale."""

    TENSOR = "tensor"
    CHANNEL = "channel"
    TOKEN = "token"
    GROUP = "group"
    BLOCK = "block"


@static_type
class Packing(enum.Enum):
    """How several elements of a row share one stored number; element 0 is always in the lowest bits.

    WORDS: int32 words of unsigned codes (value + 2**(bits - 1)) without gaps, an element may straddle two words.
    NIBBLES: uint8, two elements of 4 bits.
    """

    WORDS = "words"
    NIBBLES = "nibbles"


_PACKED_DTYPES = {Packing.WORDS: np.dtype(np.int32), Packing.NIBBLES: np.dtype(np.uint8)}


@dataclasses.dataclass(frozen=True)
class ElementType:
    """One stored number: its bits, family and largest finite value.

    name: "e4m3", "int8", "int4", ...; storage: numpy dtype of one unpacked element; max: largest finite magnitude that
    a quantizer targets (448 for e4m3, 127 for int8).
    """

    name: str
    bits: int
    is_float: bool
    max: float
    storage: np.dtype


ELEMENTS = {
    e.name: e
    for e in (
        ElementType("e4m3", 8, True, 448.0, np.dtype(jnp.float8_e4m3fn)),
        *(ElementType(f"int{b}", b, False, 2.0 ** (b - 1) - 1, np.dtype(np.int8)) for b in range(2, 9)),
        ElementType("e2m1", 4, True, 6.0, np.dtype(np.uint8)),
    )
}

# What a stored scale is. "ue8m0" is a float32 that was rounded up to a power of two (activations of DeepSeek-V3.1).
SCALE_STORAGE = {
    "float32": np.dtype(np.float32),
    "ue8m0": np.dtype(np.float32),
    "e4m3": np.dtype(jnp.float8_e4m3fn),
    "e8m0": np.dtype(np.uint8),
}
GROUP_SCALE_DTYPES = {name: np.dtype(name) for name in ("float32", "float16")} | {"bfloat16": np.dtype(jnp.bfloat16)}
# How a second, coarse scale enters: value = code * (scale / global) or code * (scale * global); "token": it is computed
# for each row of activations.
GLOBAL_SCALES = ("divides", "multiplies", "token")

# FP8 kinds that exist elsewhere; refused by name, since their bytes read as e4m3 would be wrong without a sign of it.
_REFUSED_ELEMENTS = ("e5m2", "e4m3fnuz", "e5m2fnuz", "e4m3b11fnuz")


@static_type
@dataclasses.dataclass(frozen=True)
class QuantFormat:
    """How one tensor is quantized.

    A stored value times its scale is the real value.

    Args:
        element: key of ``ELEMENTS``.
        strategy: extent of one scale.
        group_size: elements of K per scale (GROUP only).
        block_shape: (rows, columns) per scale (BLOCK only).
        dynamic: the scale is computed from the current values (activations only).
        packing: how elements share stored numbers along K; None for one number per element.
        symmetric: False for integers with a zero point per scale, which is subtracted before scaling.
        actorder: columns belong to groups in a stored order (``g_idx``) instead of by position (integers, GROUP only).
        scale: key of ``SCALE_STORAGE``.
        global_scale: one of ``GLOBAL_SCALES``; given exactly for NVFP4's e4m3 scales.
        amax_bound: activations beyond it saturate (e4m3 per token; fbgemm's ``activation_scale_ub``).
        approximate: activations are rounded although the checkpoint does not ask for it.
        group_scale_dtype: key of ``GROUP_SCALE_DTYPES``, for "float32" scales of groups or blocks: a dtype that holds
            every one of them exactly, so that kernels may keep them in it. A checkpoint's headers say it; other weights
            have to fit it. Two formats that differ only in it compare equal.
    """

    element: str
    strategy: Strategy
    group_size: int | None = None
    block_shape: tuple[int, int] | None = None
    dynamic: bool = False
    packing: Packing | None = None
    symmetric: bool = True
    actorder: bool = False
    scale: str = "float32"
    global_scale: str | None = None
    amax_bound: float | None = None
    approximate: bool = False
    group_scale_dtype: str = dataclasses.field(default="float32", compare=False)

    def __post_init__(self) -> None:
        if self.element in _REFUSED_ELEMENTS:
            raise NotImplementedError(f"element type {self.element!r} is not supported; FP8 means e4m3 (float8_e4m3fn)")
        if self.element not in ELEMENTS:
            raise ValueError(f"unknown element type {self.element!r}; known: {sorted(ELEMENTS)}")
        if (self.strategy is Strategy.GROUP) != (self.group_size is not None):
            raise ValueError(f"group_size={self.group_size} does not fit strategy {self.strategy.value!r}")
        if (self.strategy is Strategy.BLOCK) != (self.block_shape is not None):
            raise ValueError(f"block_shape={self.block_shape} does not fit strategy {self.strategy.value!r}")
        if any(size < 1 for size in (self.group_size or 1, *(self.block_shape or ()))):
            raise ValueError(f"group_size={self.group_size}, block_shape={self.block_shape}: sizes must be positive")
        if self.scale not in SCALE_STORAGE or self.global_scale not in (None, *GLOBAL_SCALES):
            raise ValueError(f"unknown scale={self.scale!r} or global_scale={self.global_scale!r}")
        if self.group_scale_dtype not in GROUP_SCALE_DTYPES:
            raise ValueError(f"unknown group_scale_dtype={self.group_scale_dtype!r}; {', '.join(GROUP_SCALE_DTYPES)}")
        if (self.scale == "e4m3") != (self.global_scale is not None):
            raise ValueError(f"global_scale={self.global_scale!r} does not fit scale={self.scale!r}")
        if self.amax_bound is not None and not (self.dynamic and self.strategy is Strategy.TOKEN):
            raise ValueError(f"amax_bound={self.amax_bound} is for dynamic activations per token")
        if not self.symmetric and self.element_type.is_float:
            raise ValueError(f"symmetric=False: {self.element} has no zero point, only integers do")
        if self.actorder and (self.element_type.is_float or self.strategy is not Strategy.GROUP):
            raise ValueError(f"actorder=True needs integers in groups, found {self.element} per {self.strategy.value}")

    @property
    def block(self) -> tuple[int, int]:
        """``block_shape`` of a format that has blocks."""
        assert self.block_shape is not None, f"{self.element} has one scale per {self.strategy.value}"
        return self.block_shape

    @property
    def element_type(self) -> ElementType:
        return ELEMENTS[self.element]

    @property
    def storage(self) -> np.dtype:
        """dtype of the stored matrix."""
        return self.element_type.storage if self.packing is None else _PACKED_DTYPES[self.packing]

    @property
    def holds_all_codes(self) -> bool:
        """Whether all that the stored numbers can be are codes: not where integers of fewer bits take whole bytes."""
        return self.packing is not None or self.element_type.is_float or self.element_type.bits == 8

    @property
    def pack_extent(self) -> int:
        """The least number of elements that fill whole stored numbers: 8 for 4 bits in words, 32 for 3 bits."""
        if self.packing is None:
            return 1
        bits = 8 * self.storage.itemsize
        return bits // math.gcd(bits, self.element_type.bits)

    def stored_length(self, count: int) -> int:
        """Stored numbers that ``count`` elements take along a packed axis."""
        if self.packing is None:
            return count
        return -(-count * self.element_type.bits // (8 * self.storage.itemsize))

    @property
    def scale_dtype(self) -> np.dtype:
        """Of the scale as it is stored."""
        return SCALE_STORAGE[self.scale]

    @property
    def needs_input_scale(self) -> bool:
        """Whether activations of this format need a number from the checkpoint: their scale, or the global one."""
        return not self.dynamic or self.global_scale in ("divides", "multiplies")

    @property
    def data_leaf(self) -> str:
        """Leaf of the stored matrix; leaves have vLLM's names, here without their prefix ("w13_", "w2_")."""
        is_packed = (
            self.packing is not None and self.global_scale != "multiplies"
        )  # ModelOpt says "weight" all the same
        return "weight_packed" if is_packed else "weight"

    @property
    def global_scale_leaf(self) -> str:
        """Leaf of NVFP4's global scales."""
        return "weight_scale_2" if self.global_scale == "multiplies" else "weight_global_scale"

    @property
    def input_scale_leaf(self) -> str:
        """Leaf of the static scales of activations of this format."""
        return "input_global_scale" if self.global_scale == "divides" else "input_scale"

    @property
    def quantized_leaves(self) -> tuple[str, ...]:
        """Leaves of a matrix in the order in which ``quantize_weight`` returns them."""
        last = (self.global_scale_leaf,) if self.global_scale is not None else ()
        return (self.data_leaf, "weight_scale", *(last if self.symmetric else ("weight_zero_point",)))

    def scale_shape(self, n: int, k: int) -> tuple[int, ...]:
        """Trailing scale shape of an (n, k) matrix: () per tensor, (n,) per channel or token, (n, k/g), blocks."""
        match self.strategy, self.group_size, self.block_shape:
            case Strategy.TENSOR, _, _:
                return ()
            case Strategy.GROUP, int(size), _:
                return (n, -(-k // size))
            case Strategy.BLOCK, _, (bn, bk):
                return (-(-n // bn), -(-k // bk))
        return (n,)

    def groups_by_position(self, k: int) -> np.ndarray:
        """(k,) int32: the group of each column where columns lie in the order of their groups."""
        return np.arange(k, dtype=np.int32) // (self.group_size or k)

    def zero_point_shape(self, n: int, k: int) -> tuple[int, int]:
        """Trailing zero point shape of an (n, k) matrix: (n, groups), packed along n as the matrix is along k."""
        shape = self.scale_shape(n, k)
        return self.stored_length(n), shape[1] if len(shape) > 1 else 1

    def __str__(self) -> str:
        """For error messages: "e4m3 dynamic per token", "int4 static per group 128, asymmetric"."""
        extent = self.group_size or self.block_shape
        text = f"{self.element} {'dynamic' if self.dynamic else 'static'} per {self.strategy.value}"
        return text + (f" {extent}" if extent else "") + ("" if self.symmetric else ", asymmetric")


Formats = tuple[QuantFormat | None, QuantFormat | None]  # of weights and activations; None: not quantized


def e4m3_tokens(amax_bound: float | None = None) -> QuantFormat:
    """Activations in e4m3 with a scale per token."""
    return QuantFormat("e4m3", Strategy.TOKEN, dynamic=True, amax_bound=amax_bound)


def nvfp4(global_scale: str, *, packing: Packing | None = None, dynamic: bool = False) -> QuantFormat:
    """e2m1 in groups of 16 with e4m3 scales, and a global scale that enters as ``GLOBAL_SCALES`` says."""
    return QuantFormat("e2m1", Strategy.GROUP, 16, None, dynamic, packing, scale="e4m3", global_scale=global_scale)


def mx(element: str, *, packing: Packing | None = None, dynamic: bool = False) -> QuantFormat:
    """MXFP4 or MXFP8: "e2m1" or "e4m3" in groups of 32 with a power of two as their scale."""
    return QuantFormat(element, Strategy.GROUP, 32, None, dynamic, packing, scale="e8m0")


E4M3_CHANNEL = QuantFormat("e4m3", Strategy.CHANNEL)
NVFP4, MXFP4 = nvfp4("divides", packing=Packing.NIBBLES), mx("e2m1", packing=Packing.NIBBLES)
MXFP8 = mx("e4m3")
