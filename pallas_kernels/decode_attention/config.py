"""What one decode step asks (``DecodeDesc``), how it runs (``DecodeConfig``), and what the Hopper kernel cannot run."""

import dataclasses

from pallas_kernels.common.sm90 import SMEM_BYTES, TMA_BOX, WARPGROUP, WARPS, smem_bytes
from pallas_kernels.quantize_and_permute.config import GROUP, WITH_SCALES, PermuteConfig, PermuteDesc
from pallas_kernels.quantize_and_permute.config import config_error as permute_error

DTYPES = ("bfloat16", "float16")
MAX_COLUMNS = 64  # of a tile
MAX_REGISTERS = 152  # of a thread, for scores, weights and sums
MAX_WIDTH = 576
MAX_WARPGROUPS = 8
WIDE_STAGES = 2  # steps of a cache in e4m3 that lie in shared memory as 16-bit numbers
E4M3_WIDTHS = (64, 128, 256)
MAX_SCORES = 128 * 128 * 24  # products of a step's scores; above it ptxas spills
SM_BYTES = 228 * 1024  # shared memory of an SM
RESERVED_BYTES = 1024  # of it for each CTA
_MAX_SUMS = 2048  # of a tile, where a CTA adds up several splits
_MOST_SLOTS = 1536  # of a tile that a CTA takes as a whole: a row by itself is not spread over the SMs then
_MORE_SLOTS = 128  # that such CTAs may have to do than CTAs with even shares
_BARRIERS = 4096  # bytes, more than the barriers and the scratch of reductions take
_BARRIERS_OF_ROWS = 2048  # where queries are rows


@dataclasses.dataclass(frozen=True)
class DecodeDesc:
    """Static description of one call: S queries of each of B rows over L slots of keys and values.

    Args:
        batch, num_queries, num_slots: B, S, L.
        num_heads, num_kv_heads: N query heads; each of M key heads serves N / M of them.
        width, value_width: of a query or key, and of a value.
        is_latent: values are the first value_width elements of the keys, as in MLA.
        dtype: of all of them and of the output.
        is_e4m3: keys and values are e4m3 codes, with a scale of all keys and one of all values.
        num_pages: of PAGE_SLOTS slots each, in which a table says where rows have theirs; 0 where rows have their own.
        scale: of the scores, above 0.
        window: how many slots up to its own a query sees; None for all.
        has_sinks: each query head has a logit more.
    """

    batch: int
    num_queries: int
    num_slots: int
    num_heads: int
    num_kv_heads: int
    width: int
    value_width: int
    dtype: str
    scale: float
    window: int | None = None
    has_sinks: bool = False
    is_latent: bool = False
    is_e4m3: bool = False
    num_pages: int = 0

    @property
    def group(self) -> int:
        """Query heads of one key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def columns(self) -> int:
        """Columns of a key head: its queries and their heads."""
        return self.num_queries * self.group


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """How the kernel runs.

    Args:
        columns: of a tile, a multiple of 8; those of a key head take as many tiles as they need.
        split: slots of a work item; the sums of the splits are added in their order.
        doubles_at: a row that sees more slots than one of these has splits twice as long, for each of them.
        joins_rest: slots behind the last whole split, if they are fewer than half of one, belong to it.
        runs: a CTA takes several splits of a tile, one after the other, and adds them up itself (schedule.py).
        whole_tiles: a CTA takes all splits of a tile, adds them up, and makes the outputs; there is no second launch.
            Where queries are rows, tiles have one split.
        block_kv: slots of one step, a divisor of split.
        num_stages: steps whose keys and values lie in shared memory as they are in the cache.
        num_ctas: persistent CTAs, one or two an SM.
        swap_ab: keys are the rows of the products; else queries are, 64 of a tile, for MLA's latents alone.
    """

    columns: int
    split: int
    block_kv: int
    num_stages: int
    num_ctas: int
    swap_ab: bool = True
    doubles_at: tuple[int, ...] = ()
    joins_rest: bool = False
    runs: bool = False
    whole_tiles: bool = False

    @property
    def adds_up(self) -> bool:
        """Whether CTAs add up splits."""
        return self.runs or self.whole_tiles

    @property
    def query_stages(self) -> int:
        """Tiles of queries in shared memory."""
        return 2 if self.swap_ab else 1

    def num_splits(self, desc: DecodeDesc) -> int:
        """Of a row that fills all slots, if none is twice as long."""
        rest = self.split // 2 if self.joins_rest else self.split - 1
        return max(1, (desc.num_slots + rest) // self.split)

    def num_tiles(self, desc: DecodeDesc) -> int:
        """Of the columns of a key head."""
        return -(-desc.columns // self.columns)

    def all_tiles(self, desc: DecodeDesc) -> int:
        """Of all key heads of all rows."""
        return desc.batch * desc.num_kv_heads * self.num_tiles(desc)


def shared_bytes(desc: DecodeDesc, config: DecodeConfig) -> int:
    """Shared memory of a CTA."""
    columns, block = config.columns, config.block_kv
    both = desc.width + (0 if desc.is_latent else desc.value_width)
    stored = "float8_e4m3fn" if desc.is_e4m3 else desc.dtype
    shapes = [
        ((config.query_stages, columns, desc.width), desc.dtype),
        ((config.num_stages, block, both), stored),
        ((WIDE_STAGES if desc.is_e4m3 else 0, block, both), desc.dtype),
        ((columns, block), desc.dtype),
        ((desc.value_width + 2 + WARPS if config.adds_up and config.swap_ab else 0, columns), "float32"),
    ]
    barriers = _BARRIERS if config.swap_ab else _BARRIERS_OF_ROWS
    return sum(smem_bytes(shape, dtype) for shape, dtype in shapes) + barriers


def config_error(desc: DecodeDesc, config: DecodeConfig) -> str | None:
    """Why the Hopper kernel cannot run ``desc``, or None when it can."""
    if desc.dtype not in DTYPES:
        return f"{desc.dtype}; there are {' and '.join(DTYPES)}"
    for what, width in (("width", desc.width), ("value_width", desc.value_width)):
        if width % 64 or not 64 <= width <= MAX_WIDTH:
            return f"{what}={width}: a multiple of 64, at most {MAX_WIDTH}"
    if desc.is_e4m3 and (desc.is_latent or not {desc.width, desc.value_width} <= {*E4M3_WIDTHS}):
        widths = f"width={desc.width}, value_width={desc.value_width}"
        return f"{widths} in e4m3: {', '.join(map(str, E4M3_WIDTHS))}, values of their own"
    if desc.num_pages and not config.swap_ab:
        return "swap_ab=False: rows with slots of their own, no pages"
    if config.columns % 8 or not 8 <= config.columns <= MAX_COLUMNS:
        return f"columns={config.columns}: a multiple of 8, at most {MAX_COLUMNS}"
    if desc.num_slots % 8:
        return f"num_slots={desc.num_slots}: a multiple of 8"
    if config.block_kv % 64 or not 64 <= config.block_kv <= TMA_BOX:
        return f"block_kv={config.block_kv}: a multiple of 64, at most {TMA_BOX}"
    if config.split % config.block_kv:
        return f"split={config.split}: a multiple of block_kv={config.block_kv}"
    is_whole = desc.is_latent and desc.value_width % 128 == 0 and (config.columns, config.block_kv) == (64, 64)
    if not config.swap_ab and not is_whole:
        return "swap_ab=False: for latents in tiles of 64 queries and steps of 64 slots"
    is_wide = config.block_kv * desc.width * config.columns > MAX_SCORES
    is_wide |= 2 * (desc.value_width + config.block_kv) * config.columns > MAX_REGISTERS * WARPGROUP
    if config.swap_ab and is_wide:
        widths = f"width={desc.width}, value_width={desc.value_width}"
        return f"{widths}, block_kv={config.block_kv}, columns={config.columns}: too many registers"
    if config.whole_tiles and not config.swap_ab:
        if config.num_splits(desc) > 1 or desc.columns % config.columns or desc.num_kv_heads > 1 or desc.has_sinks:
            of_rows = f"{config.num_splits(desc)} splits, {desc.columns} columns of {desc.num_kv_heads} key heads"
            return f"whole tiles, swap_ab=False, {of_rows}: one split, whole tiles of one key head, no sinks"
    elif config.adds_up and not (config.swap_ab and _has_room_for_sums(desc, config)):
        values = f"columns={config.columns}, value_width={desc.value_width}"
        return f"splits added up by a CTA with {values}: at most {_MAX_SUMS} sums of a tile, and no latents"
    if config.adds_up and (config.joins_rest and config.swap_ab or config.runs == config.whole_tiles):
        return f"{config}: runs or whole tiles, without joins_rest"
    if config.whole_tiles and WARPGROUP % config.columns:
        return f"whole tiles with columns={config.columns}: a divisor of {WARPGROUP}"
    sums = config.all_tiles(desc) * config.num_splits(desc) * config.columns * desc.value_width
    if sums >= 1 << 31:
        return f"{config.num_splits(desc)} splits of {desc.batch} rows: {sums} sums, which are counted in 31 bits"
    if config.num_stages < 1 or config.num_ctas < 1:
        return f"{config}: at least one stage, and one CTA"
    if (size := shared_bytes(desc, config)) > SMEM_BYTES:
        return f"{size} bytes of shared memory, there are {SMEM_BYTES}"
    return None


def values_a_thread(desc: DecodeDesc, config: DecodeConfig) -> int:
    """Outputs of a key head that a thread has where they are quantized."""
    return desc.value_width * config.columns // WARPGROUP


def quantizing_error(desc: DecodeDesc, config: DecodeConfig, rows: PermuteDesc) -> str | None:
    """Why outputs cannot be quantized as ``rows`` says, by the launch that adds up the splits or behind it, or None
    when they can."""
    if rows.quantization not in WITH_SCALES:
        return f"quantization {rows.quantization!r}; one of {', '.join(WITH_SCALES)}"
    if not config.swap_ab:
        return "swap_ab=False: outputs are quantized with keys as rows"
    if config.whole_tiles and not rows.is_grouped:  # by a launch of its own
        return permute_error(rows, PermuteConfig(1))
    if desc.num_queries > 1 or config.num_tiles(desc) > 1 or config.columns not in (8, 16, 32):
        return (
            f"{desc.num_queries} queries, columns={config.columns}: one query, whose heads are one tile of 8, 16 or 32"
        )
    if rows.is_grouped and desc.value_width != GROUP:
        return f"value_width={desc.value_width} with {rows.quantization}: {GROUP}, so that a head has one scale"
    warpgroups = 1 if rows.is_grouped else desc.num_kv_heads
    if warpgroups > MAX_WARPGROUPS or values_a_thread(desc, config) * warpgroups > MAX_WARPGROUPS * 8:
        return f"{desc.num_kv_heads} key heads of {desc.columns} x {desc.value_width}: more registers than a CTA has"
    return None


@dataclasses.dataclass(frozen=True)
class DecodeForm:
    """What ``choose_config`` is told: fields of ``DecodeConfig``, and CTAs an SM, None for two where they fit and a
    batch that fills its cache has more items than SMs. block_kv: None for 64, and 128 of e4m3 codes (64 rows of 1024
    tokens take 30.5 us so for 34.7, H200). Wide heads have 64.
    """

    split: int = 256
    block_kv: int | None = None
    ctas_per_sm: int | None = None
    swap_ab: bool = True
    doubles_at: tuple[int, ...] = (2048, 12288)
    joins_rest: bool = False


# No row's bits depend on its batch but for MLA's latents, whose forms follow from the number of rows.
FEW = DecodeForm()  # of keys with values of their own, and of latents of few rows
# Of latents of MANY_ROWS rows and more: 64 heads fill the rows of a product. Longer splits leave fewer sums to add up,
# where rounds of tiles of 64 heads over the 132 SMs of a Hopper GPU are nearly full, and in long rows.
MANY_LATENTS = DecodeForm(swap_ab=False, doubles_at=(2048, 4096, 16384), joins_rest=True)
FULL_LATENTS = DecodeForm(split=1024, swap_ab=False, doubles_at=(4096, 16384), joins_rest=True)
MANY_ROWS = 16
ONE_ROUND, TWO_ROUNDS = range(128, 133), 256  # tiles


def choose_config(
    desc: DecodeDesc, num_sms: int, form: DecodeForm | None = None, rows: PermuteDesc | None = None
) -> DecodeConfig:
    """As many stages as fit; longer steps than 64 slots for narrow heads alone, up to 32 columns, of MLA 8: so nothing
    spills.

    form: None for the one of FEW, MANY_LATENTS and FULL_LATENTS. Calls that cannot have queries as rows are FEW. rows:
    how the outputs are quantized, None for not at all.
    """
    if form is None:
        form = _latents_form(desc) if desc.is_latent else FEW
    if not form.swap_ab:
        config = DecodeConfig(64, form.split, 64, 2, num_sms, False, form.doubles_at, form.joins_rest)
        whole = dataclasses.replace(config, num_ctas=min(num_sms, config.all_tiles(desc)), whole_tiles=True)
        for one in (whole, config):
            if config_error(desc, one) is None:
                return one
        form = FEW
    columns = min(-(-desc.columns // 8) * 8, 32 if desc.value_width <= 192 else 24 if desc.value_width <= 256 else 8)
    fits = desc.width + desc.value_width <= 256 and 128 * desc.width * columns <= MAX_SCORES
    block_kv = form.block_kv or (128 if desc.is_e4m3 else 64)
    block_kv = block_kv if fits else 64
    config = DecodeConfig(columns, form.split, block_kv, 1, 1, True, form.doubles_at, form.joins_rest)
    items = config.all_tiles(desc) * config.num_splits(desc)
    # With 16 columns two were timed with more tiles than SMs alone: 256 take 0.95 and 0.99 of the time (H200).
    items_at_once = _most_items(desc, config) if columns == 8 else config.all_tiles(desc)
    ctas_per_sm = form.ctas_per_sm or (2 if _fits_twice(desc, config) and items_at_once > num_sms else 1)
    num_ctas = max(1, min(num_sms * ctas_per_sm, items))
    # CTAs have whole tiles or large parts where tiles are many; with fewer there is little to add up.
    is_many = items > num_ctas and 2 * config.all_tiles(desc) >= num_ctas and config.num_splits(desc) > 1
    runs = is_many and not config.joins_rest and _has_room_for_sums(desc, config)
    config = dataclasses.replace(config, num_ctas=num_ctas, runs=runs)
    whole = dataclasses.replace(config, num_ctas=min(num_ctas, config.all_tiles(desc)), runs=False, whole_tiles=True)
    whole = _with_stages(desc, whole, ctas_per_sm)
    config = _with_stages(desc, config, ctas_per_sm)
    if config_error(desc, whole) is not None or (rows is not None and quantizing_error(desc, whole, rows) is not None):
        return config
    must_be_whole = rows is not None and quantizing_error(desc, config, rows) is not None and _is_short(desc, config)
    return whole if must_be_whole or _are_tiles_even(desc, config, num_sms * ctas_per_sm) else config


def _with_stages(desc: DecodeDesc, config: DecodeConfig, ctas_per_sm: int) -> DecodeConfig:
    """With as many as fit, of up to twelve."""
    for stages in range(1, 13):
        wider = dataclasses.replace(config, num_stages=stages)
        fits = (shared_bytes(desc, wider) + RESERVED_BYTES) * ctas_per_sm <= SM_BYTES
        if fits and config_error(desc, wider) is None:
            config = wider
    return config


def _most_items(desc: DecodeDesc, config: DecodeConfig) -> int:
    """Of rows that fill their cache."""
    most = _most_seen(desc)
    size = config.split << sum(most > bound for bound in config.doubles_at)
    splits = -(-most // size) + (desc.window is not None)  # a window may begin inside of a split
    return config.all_tiles(desc) * min(splits, config.num_splits(desc))


def _fits_twice(desc: DecodeDesc, config: DecodeConfig) -> bool:
    """Whether ptxas gives a thread so few registers that an SM has those of two CTAs."""
    is_narrow = config.columns <= 16 and max(desc.width, desc.value_width) <= 128
    return is_narrow and desc.num_queries == 1 and not desc.is_e4m3


def _are_tiles_even(desc: DecodeDesc, config: DecodeConfig, num_ctas: int) -> bool:
    """Whether tiles have one split, or CTAs that take whole tiles have at most _MORE_SLOTS more to do than CTAs that
    share all splits evenly, where rows are full; and a row among shorter ones not too many."""
    steps = _most_steps(desc, config)
    whole = -(-config.all_tiles(desc) // num_ctas) * steps
    even = -(-config.all_tiles(desc) * steps // num_ctas)
    is_even = (whole - even) * config.block_kv <= _MORE_SLOTS
    return config.num_splits(desc) == 1 or (is_even and _is_short(desc, config))


def _is_short(desc: DecodeDesc, config: DecodeConfig) -> bool:
    return _most_steps(desc, config) * config.block_kv <= _MOST_SLOTS


def _most_steps(desc: DecodeDesc, config: DecodeConfig) -> int:
    return -(-_most_seen(desc) // config.block_kv) + (desc.window is not None)


def _most_seen(desc: DecodeDesc) -> int:
    """Slots, of a row that fills its cache."""
    return min(desc.num_slots, desc.num_slots if desc.window is None else desc.window + desc.num_queries - 1)


def _has_room_for_sums(desc: DecodeDesc, config: DecodeConfig) -> bool:
    """Whether a CTA has room for what it has added up of a tile."""
    return not desc.is_latent and config.columns * desc.value_width <= _MAX_SUMS


def _latents_form(desc: DecodeDesc) -> DecodeForm:
    if desc.batch < MANY_ROWS or desc.columns < MAX_COLUMNS:
        return FEW
    tiles = desc.batch * -(-desc.columns // MAX_COLUMNS)
    return FULL_LATENTS if tiles in ONE_ROUND or tiles >= TWO_ROUNDS else MANY_LATENTS
