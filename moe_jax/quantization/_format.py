"""``QuantFormat`` (how one tensor is stored) and ``Scheme`` (weights + activations): formats as data.

Everything that depends on a format asks these objects; nothing guesses bits or packing from an array's dtype.
The vocabulary of strategies is that of compressed-tensors: tensor, channel (one scale per output row), token (one per
activation row), group (a run of ``group_size`` along K), block (2-D).
"""

import dataclasses
import enum
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np


class Strategy(enum.Enum):
    """Extent of one scale."""

    TENSOR = "tensor"
    CHANNEL = "channel"
    TOKEN = "token"
    GROUP = "group"
    BLOCK = "block"


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


@dataclasses.dataclass(frozen=True)
class QuantFormat:
    """How one tensor is quantized.

    element: key of ``ELEMENTS``. strategy: extent of one scale. group_size: elements of K per scale (GROUP only).
    block_shape: (rows, columns) per scale (BLOCK only). dynamic: the scale is computed from the current values
    (activations only). Scales multiply the stored value to give the real one.

    packing: how elements share stored numbers along K; None for one number per element. symmetric: False for integers
    with a zero point per scale, which is subtracted before scaling. actorder: columns belong to groups in an order that
    is stored (``g_idx``) instead of by position (integers, GROUP only). scale: key of ``SCALE_STORAGE``. global_scale:
    one of ``GLOBAL_SCALES``, exactly for NVFP4's e4m3 scales. amax_bound: activations beyond it saturate (e4m3 per
    token; fbgemm's ``activation_scale_ub``). approximate: activations that the checkpoint does not round.

    group_scale_dtype: key of ``GROUP_SCALE_DTYPES``, where scales are "float32": what holds every scale of a group or
    block, so that kernels may keep them in it. A checkpoint's headers say it; other weights have to fit it. It does not
    tell formats apart.
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
    def element_type(self) -> ElementType:
        return ELEMENTS[self.element]

    @property
    def storage(self) -> np.dtype:
        """dtype of the stored matrix."""
        return self.element_type.storage if self.packing is None else _PACKED_DTYPES[self.packing]

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

    def zero_point_shape(self, n: int, k: int) -> tuple[int, int]:
        """Trailing zero point shape of an (n, k) matrix: (n, groups), packed along n as the matrix is along k."""
        shape = self.scale_shape(n, k)
        return self.stored_length(n), shape[1] if len(shape) > 1 else 1


@dataclasses.dataclass(frozen=True)
class Scheme:
    """What is quantized in an expert layer: weights (None: kept in param_dtype), activations (None: left alone)."""

    name: str = dataclasses.field(compare=False)
    weights: QuantFormat | None = None
    activations: QuantFormat | None = None

    @property
    def is_quantized(self) -> bool:
        return self.weights is not None

    @classmethod
    def parse(cls, scheme: "str | Scheme | Mapping[str, Any] | None") -> "Scheme":
        """What ``scheme=``, ``quantize=`` and ``--scheme`` accept, as a supported Scheme.

        scheme: a canonical name or alias ("fp8_block", "FP8_DYNAMIC", ...), a Scheme, None (unquantized), one group
        of a compressed-tensors config ({"weights": {...}, "input_activations": {...} or None}), or a whole
        quantization_config with one scheme in it. Raises ValueError when it is wrong or unknown (an unknown name lists
        all) and NotImplementedError, naming the capability, when it is a real format that is not built.
        """
        # Imported late: the table of schemes is made of Scheme objects.
        from moe_jax.quantization._schemes import parse_scheme

        return parse_scheme(scheme)
