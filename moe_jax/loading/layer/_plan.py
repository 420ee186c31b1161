"""``LayerPlan``: which copies one checkpoint tensor makes. Pure: nothing is stored or remembered here.

The way of a tensor: bitpacked words are brought to the layout of their leaf; its dtype is checked; a weight of all
experts is turned to (E, out, in); a stacked gate_up_proj is split; ``weight_loader`` says where each part goes.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from moe_jax._config import MoEConfig
from moe_jax._typing import HostArray
from moe_jax.loading._errors import shorten
from moe_jax.loading.layer._bitpacked import conform_bitpacked
from moe_jax.loading.layer._names import ExpertTensor
from moe_jax.loading.layer._weight_loader import RULES, SCALAR_KINDS, Shard, Target, weight_loader
from moe_jax.quantization import LeafSpec, MoEMethod, QuantFormat, Strategy, method_for

# Of weights of all experts: (E, out, in) as we and torch.nn.Linear keep it; (E, in, out) as torch.bmm likes it.
OUT_IN, IN_OUT = "out_in", "in_out"
FULL_PRECISION = tuple(np.dtype(name) for name in ("float32", "bfloat16", "float16"))
_EXPONENTS = (np.dtype(np.uint8), np.dtype("float8_e8m0fnu"))
_SCALES = (*FULL_PRECISION, _EXPONENTS[1])

Kind = tuple[str, tuple[str, ...], tuple[int, ...], np.dtype]


@dataclasses.dataclass(frozen=True)
class Step:
    """One checked copy: ``array`` into its target, which belongs to the projection ``shard``."""

    target: Target
    shard: str
    array: HostArray

    @property
    def value(self) -> HostArray:
        """What is written."""
        return self.target.value(self.array)

    def without_values(self) -> "Step":
        """To be kept for ``for_expert``."""
        return dataclasses.replace(self, array=np.empty(0, self.array.dtype))

    def for_expert(self, expert: int, array: HostArray) -> "Step":
        """The same step for another expert's tensor of the same ``kind_of``; expert: its place in the leaf."""
        index = (slice(expert, expert + 1), *self.target.index[1:])
        return Step(dataclasses.replace(self.target, index=index), self.shard, array.view(self.array.dtype))


def kind_of(tensors: Sequence[ExpertTensor], array: HostArray) -> Kind | None:
    """All that decides where a tensor goes but its expert; None where there is more to it: stacked, replicated, or
    groups of columns, of which values tell whether they are set."""
    first = tensors[0]
    is_simple = first.expert is not None and len(first.shards) == len(tensors) == 1 and first.suffix != "weight_g_idx"
    return (first.suffix, first.shards, array.shape, array.dtype) if is_simple else None


@dataclasses.dataclass(frozen=True, eq=False)
class LayerPlan:
    """How tensors of a whole layer fill the leaves of one shard.

    Args:
        config: the whole layer, with the scheme that its weights will have.
        specs: leaves of the whole layer as the checkpoint stores them.
        own_specs: leaves to be filled. Input scales have a row for every expert of the layer, local or not, since a
            layer has one, the widest.
        shard: the part that is filled.
        quantizes: tensors are full precision and get quantized.
        fused_layout, words_are_dense: see ``LayerLoader``.
    """

    config: MoEConfig
    specs: Mapping[str, LeafSpec]
    own_specs: Mapping[str, LeafSpec]
    shard: Shard
    quantizes: bool
    fused_layout: str | None
    words_are_dense: bool | None

    @classmethod
    def create(
        cls,
        config: MoEConfig,
        method: MoEMethod,
        shard: Shard,
        quantizes: bool,
        fused_layout: str | None,
        words_are_dense: bool | None,
    ) -> "LayerPlan":
        stored = method_for(None) if quantizes else method
        specs, own = stored.create_weights(config), stored.create_weights(shard.local(config))
        if shard.expert_map is not None:
            own |= {leaf: spec for leaf, spec in specs.items() if spec.kind == "input_scale"}
        return cls(config, specs, own, shard, quantizes, fused_layout, words_are_dense)

    @functools.cached_property
    def within_shard(self) -> "LayerPlan":
        """For tensors that hold this shard's part only."""
        return dataclasses.replace(self, config=self.shard.local(self.config), specs=self.own_specs, shard=Shard())

    @property
    def is_bitpacked(self) -> bool:
        return "w2_weight_packed" in self.specs

    def refusal(self, tensor: ExpertTensor) -> str | None:
        """Why the layer has no place for a tensor, in this shard or in another one; None where it has."""
        name = shorten(tensor.name)
        if tensor.leaf not in self.specs:
            known = ", ".join(sorted(self.specs))
            return f"{name}: there is no leaf {tensor.leaf!r} in this layer, expected one of {known}"
        count = self.specs[tensor.leaf].shape[0]
        if tensor.expert is not None and tensor.expert >= count:
            return f"{name}: expert {tensor.expert} is outside this layer's {count} experts"
        return None

    def experts_of(self, tensor: ExpertTensor) -> slice | None:
        """The rows of its leaf that a tensor with a place fills; None for an expert of another shard."""
        if tensor.expert is None:
            return slice(None)
        expert = tensor.expert
        if self.shard.expert_map is not None and self.specs[tensor.leaf].kind != "input_scale":
            expert = self.shard.expert_map[expert]
        return None if expert < 0 else slice(expert, expert + 1)

    def conform(self, tensor: ExpertTensor, array: HostArray) -> HostArray:
        """The array with its bitpacked words in the layout of their leaf, and with groups for columns that are cut."""
        if self.is_bitpacked:
            array = conform_bitpacked(tensor, array, self.config, self.words_are_dense)
        if tensor.suffix == "weight_g_idx" and self.shard.tp_size > 1 and (array == -1).all():  # unset, in old files
            by_position = self.config.scheme.weight_format.groups_by_position(array.shape[-1])
            array = np.broadcast_to(by_position, array.shape)
        return array

    def plan_tensor(self, tensor: ExpertTensor, array: HostArray, layout: str | None) -> tuple[list[Step], str | None]:
        """The copies of one tensor, none for an expert of another shard; how weights of all experts are stored.

        Args:
            tensor: has a place in the layer.
            array: conformed.
            layout: ``OUT_IN`` or ``IN_OUT`` as other weights of the layer showed, None before one did.

        Raises:
            ValueError: a dtype or shape that does not fit.
        """
        spec = self.specs[tensor.leaf]
        check_axes(tensor, array, spec)
        check_dtype(tensor, array.dtype, spec, self.config.scheme.name)
        if spec.dtype == np.uint8:
            array = array.view(np.uint8)  # exponents, which some writers call float8_e8m0fnu
        if tensor.expert is None:
            array = _conform_scale(array, spec)
            if spec.kind == "weight" and tensor.suffix != "weight_packed":  # bitpacked ones are always (out, in)
                array, layout = self._oriented(tensor, array, spec, layout)
        weights, steps = self.config.scheme.weights, []
        extent = None
        if weights is not None and not self.quantizes:
            extent = weights.block_shape or (None if weights.group_size is None else (1, weights.group_size))
        for shard, part in _split_shards(tensor, array, spec, self.config):
            targets = weight_loader(
                self.own_specs,
                tensor.leaf,
                part,
                tensor.name,
                shard,
                tensor.expert,
                is_act_and_mul=self.config.is_act_and_mul,
                tp_rank=self.shard.tp_rank,
                tp_size=self.shard.tp_size,
                expert_map=self.shard.expert_map,
                scale_extent=extent,
                keeps_all_experts=spec.kind == "input_scale",
                load_full_w2=weights is not None and weights.actorder and spec.kind in ("group", "zero_point"),
            )
            steps += [Step(target, self._shard_of(target, shard), part) for target in cast(tuple[Target, ...], targets)]
        return steps, layout

    def _oriented(
        self, tensor: ExpertTensor, array: HostArray, spec: LeafSpec, layout: str | None
    ) -> tuple[HostArray, str]:
        """A weight of all experts as (E, out, in), and how it is stored."""
        found = fused_layout(tensor, array.shape, disk_shape(tensor, spec, self.config), self.fused_layout)
        if layout not in (None, found):
            raise ValueError(f"{shorten(tensor.name)}: stored as {found}, other weights of this layer as {layout}")
        if found == IN_OUT and array.dtype not in FULL_PRECISION:
            _check_transposable(tensor, self.config.scheme.weights)
        return (array.swapaxes(1, 2) if found == IN_OUT else array), found

    def _shard_of(self, target: Target, shard: str) -> str:
        """The projection that is written: of a scale with the rows of w1 and w3 each part has its own."""
        spec = self.own_specs[target.leaf]
        if shard == "w2" or not self.config.is_act_and_mul or RULES[spec.kind].stack_axis is None:
            return shard
        return ("w1", "w3")[target.index[1].start * 2 // spec.shape[1]] if len(target.index) > 1 else shard


def check_axes(tensor: ExpertTensor, array: HostArray, spec: LeafSpec) -> None:
    """Raise ValueError for a tensor that ``weight_loader`` would take for all experts or spread over a matrix."""
    if spec.kind in SCALAR_KINDS:
        return
    is_of_one = tensor.expert is not None and tensor.module != ""  # by its name in the checkpoint
    if is_of_one and array.ndim == len(spec.shape):
        raise ValueError(
            f"{shorten(tensor.name)}: found shape {array.shape}, expected that of one expert, with no axis for all"
        )
    if not array.ndim:
        raise ValueError(f"{shorten(tensor.name)}: found a single number, shape (), expected an array of {tensor.leaf}")


def check_dtype(tensor: ExpertTensor, dtype: np.dtype, spec: LeafSpec, scheme_name: str) -> None:
    """Raise ValueError unless a leaf of this spec can be filled from ``dtype`` without changing what it means."""
    if spec.dtype == np.uint8 and spec.kind != "weight":
        allowed = _EXPONENTS
    elif spec.dtype not in FULL_PRECISION:
        allowed = (spec.dtype,)
    else:
        allowed = FULL_PRECISION if spec.kind in ("weight", "bias") else _SCALES
    if dtype not in allowed:
        raise ValueError(
            f"{shorten(tensor.name)}: found dtype {dtype}, expected {' or '.join(str(d) for d in allowed)} "
            f"for scheme {scheme_name!r}; does config.json describe this checkpoint?"
        )


def disk_shape(tensor: ExpertTensor, spec: LeafSpec, config: MoEConfig) -> tuple[int, ...]:
    """Shape of a tensor stored as (out, in), with the expert axis in front when it holds all experts."""
    experts, rows, *rest = spec.shape
    if tensor.leaf.startswith("w13"):
        rows = rows // config.num_projections * len(tensor.shards)
    return (*((experts,) if tensor.expert is None else ()), rows, *rest)


def fused_layout(tensor: ExpertTensor, shape: tuple[int, ...], expected: tuple[int, ...], stated: str | None) -> str:
    """``OUT_IN`` or ``IN_OUT`` of a weight of all experts: as stated, else as its shape tells.

    Raises ValueError when the shape fits neither, or both and nothing is stated.
    """
    swapped = (expected[0], expected[2], expected[1])
    if stated is None and shape == expected == swapped:
        raise ValueError(
            f"{shorten(tensor.name)}: shape {shape} fits (E, out, in) and (E, in, out) alike; "
            f"say which by fused_layout={OUT_IN!r} or {IN_OUT!r}"
        )
    for layout, fitting in ((OUT_IN, expected), (IN_OUT, swapped)):
        if shape == fitting and stated in (None, layout):
            return layout
    shapes = {None: f"{expected}, or {swapped} if stored as (in, out)", OUT_IN: expected, IN_OUT: swapped}
    raise ValueError(f"{shorten(tensor.name)}: found shape {shape}, expected {shapes[stated]}")


def _check_transposable(tensor: ExpertTensor, fmt: QuantFormat | None) -> None:
    """Raise ValueError unless each scale covers whole rows of (out, in), so that (in, out) holds the same numbers."""
    if fmt is None or fmt.strategy not in (Strategy.TENSOR, Strategy.CHANNEL):
        raise ValueError(
            f"{shorten(tensor.name)}: weights quantized in groups or blocks are stored as (E, in, out), expected (E, "
            "out, in) or one tensor for each expert"
        )


def _conform_scale(array: HostArray, spec: LeafSpec) -> HostArray:
    """A scale of all experts with the leaf's axes, or as it is where it needs no change or fits no leaf.

    Llama 4 keeps a scale per output as (E, 1, N), as its weights are (E, in, N); ModelOpt one number for all experts.
    """
    if spec.kind == "channel" and array.ndim == 3 and array.shape[1] == 1 != array.shape[2]:
        return array.swapaxes(1, 2)
    if spec.kind in SCALAR_KINDS and array.shape in ((), (1,)):
        return np.broadcast_to(array.reshape(()), spec.shape[:1])
    return array


def _split_shards(
    tensor: ExpertTensor, array: HostArray, spec: LeafSpec, config: MoEConfig
) -> list[tuple[str, HostArray]]:
    """(shard, view) for every projection in a tensor; only a stacked gate_up_proj holds two. ``array`` is (out, in)."""
    if len(tensor.shards) == 1:
        return [(tensor.shards[0], array)]
    if spec.kind == "g_idx":  # both see the same columns
        return [(shard, array) for shard in tensor.shards]
    axis = 1 if tensor.expert is None else 0
    if spec.kind in SCALAR_KINDS and array.shape[axis:] in ((), (1,)):  # one scale for both
        return [(shard, array) for shard in tensor.shards]
    expected = disk_shape(tensor, spec, config)
    if array.shape != expected:
        raise ValueError(f"{shorten(tensor.name)}: found shape {array.shape}, expected {expected}")
    if spec.kind == "block" and config.intermediate_size % config.scheme.weight_format.block[0]:
        # Blocks are counted over the stacked rows: here one of them would scale rows of both projections.
        raise ValueError(
            f"{shorten(tensor.name)}: blocks of {config.scheme.weight_format.block[0]} rows do not end at the border "
            f"between gate and up, row {config.intermediate_size}; only separate gate_proj and up_proj can be read"
        )
    if tensor.is_interleaved:
        rows = (slice(None),) * axis
        return [(shard, array[(*rows, slice(at, None, 2))]) for at, shard in enumerate(tensor.shards)]
    return list(zip(tensor.shards, np.split(array, 2, axis=axis), strict=True))
