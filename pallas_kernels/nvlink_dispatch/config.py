"""What one exchange asks (``ExchangeDesc``), how it is run (``ExchangeConfig``), and whether the Hopper kernels can."""

import dataclasses
import math

import jax.numpy as jnp

from pallas_kernels.common.rows import pieces, vector_length
from pallas_kernels.common.sm90 import WARPGROUP
from pallas_kernels.quantize_and_permute.config import WITH_SCALES

QUANTIZATIONS = ("none", *WITH_SCALES)
GROUP = 128
GROUPED_WIDTH = 4 * GROUP  # rows quantized in groups are whole numbers of these columns
MAX_DEVICES = 8  # of one NVLink host
# CTAs of one warpgroup that an SM holds at once with up to 128 registers a thread. All CTAs of a combine wait for other
# devices, so all must be resident.
CTAS_PER_SM = 4


@dataclasses.dataclass(frozen=True)
class ExchangeDesc:
    """Static description of one exchange.

    Args:
        mesh: (axis, size) of the whole mesh, in its order.
        axis: the one that splits the experts.
        num_tokens: T, tokens of each device.
        width: H.
        top_k: experts of a token.
        slots_per_device: experts of a device.
        dtype: of the tokens.
        quantization: of rows on their way to the experts, one of ``QUANTIZATIONS``.
        row_dtype: of the experts' rows.
        sum_dtype: of the partial sum that each device returns for a token, over its own experts. None: it returns their
            rows.
    """

    mesh: tuple[tuple[str, int], ...]
    axis: str
    num_tokens: int
    width: int
    top_k: int
    slots_per_device: int
    dtype: str
    quantization: str = "none"
    row_dtype: str = "bfloat16"
    sum_dtype: str | None = None

    @property
    def size(self) -> int:
        """Devices that exchange rows."""
        return dict(self.mesh)[self.axis]

    @property
    def strides(self) -> dict[str, int]:
        """How far devices that are neighbours along an axis lie apart in the mesh's order."""
        sizes = [size for _, size in self.mesh]
        return {name: math.prod(sizes[i + 1 :]) for i, (name, _) in enumerate(self.mesh)}

    @property
    def num_rows(self) -> int:
        """Rows that may arrive: all tokens of all devices, one copy of each."""
        return self.size * self.num_tokens

    @property
    def num_pairs(self) -> int:
        """(token, slot) pairs of one device."""
        return self.num_tokens * self.top_k

    @property
    def padded_pairs(self) -> int:
        """``num_pairs`` in whole vectors of a warpgroup."""
        return -(-self.num_pairs // WARPGROUP) * WARPGROUP

    @property
    def num_vectors(self) -> int:
        """Vectors that a device sends to all others: of slots, and of weights where sums return."""
        return self.padded_pairs // WARPGROUP * (1 if self.sum_dtype is None else 2)

    @property
    def is_grouped(self) -> bool:
        """Whether every 128 columns have a scale."""
        return self.quantization.startswith("e4m3_group")

    @property
    def code_dtype(self) -> str:
        """Dtype of rows on their way to the experts."""
        kind = self.quantization.partition("_")[0]
        return {"none": self.dtype, "e4m3": "float8_e4m3fn", "int8": "int8"}[kind]

    @property
    def scale_shape(self) -> tuple[int, ...] | None:
        """Shape of the scales that arrive, or None."""
        if self.quantization == "none":
            return None
        return (self.num_rows, self.width // GROUP) if self.is_grouped else (self.num_rows,)

    @property
    def mailbox_rows(self) -> int:
        """Rows that may come back: one of every pair, or one of every device for each token."""
        return self.num_pairs if self.sum_dtype is None else self.num_rows

    @property
    def mailbox_dtype(self) -> str:
        """Dtype of rows or partial sums on their way back."""
        return self.row_dtype if self.sum_dtype is None else self.sum_dtype

    @property
    def return_vector(self) -> int:
        """Elements of a row on its way back that a thread holds together."""
        return vector_length(self.width, max(jnp.dtype(d).itemsize for d in (self.row_dtype, self.mailbox_dtype)))


@dataclasses.dataclass(frozen=True)
class ExchangeConfig:
    """How the kernels of an exchange run.

    Args:
        num_ctas: persistent CTAs of one warpgroup.
        takes_whole_rows: whether a CTA of a combine takes all columns of a token's rows, or one piece of 128 vectors.
    """

    num_ctas: int
    takes_whole_rows: bool = True


def config_error(desc: ExchangeDesc, config: ExchangeConfig, num_sms: int) -> str | None:
    """Why the Hopper kernels cannot run ``desc``, or None when they can."""
    if not 2 <= desc.size <= MAX_DEVICES:
        return f"{desc.size} devices along axis {desc.axis!r}: 2 to {MAX_DEVICES}"
    if desc.num_tokens < 1 or desc.top_k < 1:
        return "no tokens: there is nothing to exchange"
    for what, dtype in (("tokens", desc.dtype), ("rows", desc.row_dtype), ("sums", desc.sum_dtype or "float32")):
        if dtype not in ("bfloat16", "float16", "float32"):
            return f"{what} are {dtype}; there are bfloat16, float16 and float32"
    if desc.is_grouped and desc.width % GROUPED_WIDTH:
        return f"H={desc.width}: groups of {GROUP} take a multiple of {GROUPED_WIDTH}"
    if not vector_length(desc.width, jnp.dtype(desc.dtype).itemsize) or not desc.return_vector:
        return f"H={desc.width}: a row must give each of 128 threads an element"
    if not 1 <= config.num_ctas <= CTAS_PER_SM * num_sms:
        return f"num_ctas={config.num_ctas}: 1 to {CTAS_PER_SM * num_sms}, all of which are resident"
    if desc.mailbox_rows * desc.width >= 1 << 31:
        return f"{desc.mailbox_rows} rows of {desc.width} come back: more elements than 32 bits count"
    return None


def choose_dispatch_config(desc: ExchangeDesc, num_sms: int) -> ExchangeConfig:
    """A CTA for each token and each vector of slots, up to four CTAs an SM."""
    return ExchangeConfig(max(1, min(desc.num_tokens + desc.num_vectors, CTAS_PER_SM * num_sms)))


def choose_combine_config(desc: ExchangeDesc, num_sms: int) -> ExchangeConfig:
    """A CTA for each piece of a token where tokens are few, else for each token."""
    most, parts = CTAS_PER_SM * num_sms, len(pieces(desc.width, WARPGROUP * desc.return_vector))
    is_few = desc.num_rows * parts <= 2 * most
    return ExchangeConfig(min(desc.num_rows * (parts if is_few else 1), most), not is_few)


@dataclasses.dataclass(frozen=True)
class PlaceDesc:
    """Static description of placing what arrived.

    Args:
        num_rows: N, rows that may have arrived.
        num_places: Mp, rows in expert order.
        width: H.
        top_k: places of a row.
        num_groups: scales of a row, 0 for one.
    """

    num_rows: int
    num_places: int
    width: int
    top_k: int
    num_groups: int


def place_error(desc: PlaceDesc) -> str | None:
    """Why the Hopper kernel cannot run ``desc``, or None when it can."""
    if not vector_length(desc.width, 1):
        return f"H={desc.width}: a row must give each of 128 threads an element"
    if desc.num_groups % 4:
        return f"{desc.num_groups} scales a row: a multiple of 4"
    return None


def choose_place_config(desc: PlaceDesc, num_sms: int) -> ExchangeConfig:
    """As for ``quantize_and_permute``."""
    return ExchangeConfig(max(1, min(desc.num_rows, 4 * num_sms)))
