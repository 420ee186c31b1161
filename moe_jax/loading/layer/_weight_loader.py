"""Where a checkpoint tensor goes inside the leaves of a layer: pure functions, no memory is touched here.

Every decision depends on the leaf's ``kind`` and is a row of ``RULES``; a new format adds rows, not branches. Arrays of
one expert are (out, in) as on disk; leaves carry a leading expert axis, and w13 leaves stack w1 (gate) over w3 (up).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_jax._config import MoEConfig
from moe_jax._typing import HostArray
from moe_jax.quantization import LeafSpec

SHARD_IDS = ("w1", "w2", "w3")


@dataclasses.dataclass(frozen=True)
class Rule:
    """How the tensors of one kind split over w1/w3 and over tensor-parallel ranks; axes count without the experts.

    stack_axis: axis of w13 leaves that stacks w1 and w3. A leaf without that axis keeps one value for both, which have
    to be equal.
    w13_tp_axis, w2_tp_axis: axis that tensor parallelism splits; None keeps the tensor whole on every rank.
    scales_weight: the split axis counts scales, so a cut must also fall between the runs of weights they cover.
    packed_axis: the axis that a packed leaf packs; a cut of it must fall between stored numbers.
    """

    stack_axis: int | None
    w13_tp_axis: int | None
    w2_tp_axis: int | None
    scales_weight: bool = False
    packed_axis: int | None = None


RULES = {
    "weight": Rule(stack_axis=0, w13_tp_axis=0, w2_tp_axis=1, packed_axis=1),
    "group": Rule(stack_axis=0, w13_tp_axis=0, w2_tp_axis=1, scales_weight=True),
    "block": Rule(stack_axis=0, w13_tp_axis=0, w2_tp_axis=1, scales_weight=True),
    "channel": Rule(stack_axis=0, w13_tp_axis=0, w2_tp_axis=None),
    "zero_point": Rule(stack_axis=0, w13_tp_axis=0, w2_tp_axis=1, scales_weight=True, packed_axis=0),
    "channel_zero_point": Rule(stack_axis=0, w13_tp_axis=0, w2_tp_axis=None, packed_axis=0),
    "g_idx": Rule(stack_axis=None, w13_tp_axis=None, w2_tp_axis=0),
    "bias": Rule(stack_axis=0, w13_tp_axis=0, w2_tp_axis=None),
    "tensor": Rule(stack_axis=0, w13_tp_axis=None, w2_tp_axis=None),
    "input_scale": Rule(stack_axis=0, w13_tp_axis=None, w2_tp_axis=None),
}
SCALAR_KINDS = ("tensor", "input_scale")  # one number per expert and projection, stored as [] or [1]
_COMBINED_KINDS = ("channel", "group", "block")  # scales that ModelOpt may store for w1 and w3 in one tensor


@dataclasses.dataclass(frozen=True)
class Shard:
    """The part of a layer that one process holds: a slice of I of every expert, or some of the experts.

    Args:
        tp_rank, tp_size: which slice of I, out of how many.
        expert_map: local index of every expert of the layer, -1 for experts elsewhere; None: all are local.
    """

    tp_rank: int = 0
    tp_size: int = 1
    expert_map: tuple[int, ...] | None = None

    @property
    def is_whole(self) -> bool:
        return self.tp_size == 1 and self.expert_map is None

    def experts(self, num_experts: int) -> Sequence[int]:
        """The layer's experts that are local, in the order in which leaves hold them."""
        if self.expert_map is None:
            return range(num_experts)
        held = {local: expert for expert, local in enumerate(self.expert_map) if local >= 0}
        return [held[local] for local in sorted(held)]

    def local(self, config: MoEConfig) -> MoEConfig:
        """The configuration of the local experts, which see no router. Raises ValueError where I does not divide."""
        if self.is_whole:
            return config
        if config.intermediate_size % self.tp_size:
            raise ValueError(f"intermediate_size={config.intermediate_size} does not divide by tp_size={self.tp_size}")
        weights = config.scheme.weights
        has_groups_of_all = self.tp_size > 1 and weights is not None and weights.actorder
        return dataclasses.replace(
            config,
            num_experts=len(self.experts(config.num_experts)),
            intermediate_size=config.intermediate_size // self.tp_size,
            intermediate_size_full=config.intermediate_size if has_groups_of_all else None,
        )


@dataclasses.dataclass(frozen=True)
class Target:
    """One copy: ``leaf[index] = value(loaded)``.

    Args:
        leaf: its name.
        index: slices into the leaf, expert axis first.
        source: slices into the loaded array once it is viewed as ``shape``.
        shape: of that view.
        num_elements: elements of the leaf that are written.
        transpose: exchange the last two axes of the loaded array first.
        is_common: w1 and w3 both write these elements and must bring the same value.
    """

    leaf: str
    index: tuple[slice, ...]
    source: tuple[slice, ...]
    shape: tuple[int, ...]
    num_elements: int
    transpose: bool = False
    is_common: bool = False

    def value(self, loaded: HostArray) -> HostArray:
        """The part of ``loaded`` that is written, a view."""
        return (loaded.swapaxes(-1, -2) if self.transpose else loaded).reshape(self.shape)[self.source]

    def write(self, leaf: np.ndarray, loaded: HostArray) -> None:
        """Copy into a host buffer of the leaf's full shape."""
        leaf[self.index] = self.value(loaded)


def weight_loader(
    specs: Mapping[str, LeafSpec],
    leaf: str,
    loaded: Any,
    weight_name: str,
    shard_id: str,
    expert_id: int | None,
    return_success: bool = False,
    *,
    is_act_and_mul: bool = True,
    tp_rank: int = 0,
    tp_size: int = 1,
    expert_map: Any = None,
    is_transposed: bool = False,
    transpose_loaded: bool = False,
    load_full_w2: bool = False,
    scale_extent: tuple[int, int] | None = None,
    allow_padding: bool = False,
    keeps_all_experts: bool = False,
) -> tuple[Target, ...] | tuple[tuple[Target, ...], bool]:
    """Decide where one checkpoint tensor goes; the counterpart of vLLM's ``FusedMoE.weight_loader`` as a pure function.

    Args:
        specs: leaf name -> ``LeafSpec`` of this rank, as ``create_weights`` returns them: w13 (E, 2I, H) and so on.
        leaf: the leaf to fill, "w13_weight", "w2_weight_scale", ...
        loaded: the tensor, or anything with its ``shape``, or the shape: of one expert, or of all, expert axis first.
        weight_name: the tensor's name, for errors.
        shard_id: "w1" (gate), "w3" (up) or "w2" (down). A scale with the rows of both w1 and w3, in this order, fills
            both whichever of the two is named.
        expert_id: physical expert; None when ``loaded`` carries all experts. A weight with one axis more than an
            expert's part carries all experts whatever the id, as in vLLM.
        return_success: also return whether the tensor belongs here: False for an expert that is not local.
        is_act_and_mul: w13 holds two projections; False when it holds w1 alone.
        tp_rank, tp_size: this rank's part of I. The specs are per rank, ``loaded`` is whole.
        expert_map: (P,) ints, global to local expert, -1 where not local; None when all are local.
        is_transposed: the leaf keeps (in, out) and ``loaded`` is (out, in).
        transpose_loaded: ``loaded`` is (in, out) and the leaf keeps (out, in).
        load_full_w2: keep w2 whole under tensor parallelism (group scales and zero points of act-order checkpoints).
        scale_extent: (rows, columns) of weight under one scale; needed to cut group and block scales when tp_size > 1.
        allow_padding: the leaf may be larger than the tensor; what it does not reach keeps its initial zeros.
        keeps_all_experts: the leaf has a scale for every expert of the model, local or not, since a kernel takes their
            maximum: ``expert_map`` does not count. Only for one number per expert and projection.

    Returns:
        Targets, empty for an expert that is not local; with ``return_success`` a pair (targets, success).

    Raises:
        ValueError: unknown leaf, shard or kind; expert or expert_map out of range; w3 of a layer that is not gated; a
            shape that does not fit or does not divide by tp_size. The message names the tensor, what was expected and
            what was found.
    """
    spec = _lookup(specs, leaf, weight_name)
    shape = tuple(getattr(loaded, "shape", loaded))
    if not 0 <= tp_rank < tp_size:
        raise ValueError(f"{weight_name}: tp_rank={tp_rank} is outside tp_size={tp_size}")
    if keeps_all_experts:
        if spec.kind not in SCALAR_KINDS:
            raise ValueError(
                f"{weight_name}: keeps_all_experts is for scales with one number per expert, {leaf} is of kind "
                f"{spec.kind!r}"
            )
        expert_map = None
    part_rank = len(spec.shape) - 1
    carries_all = expert_id is None or (spec.kind not in SCALAR_KINDS and len(shape) == part_rank + 1)
    experts = _local_experts(spec, weight_name, None if carries_all else expert_id, expert_map)
    if not experts:
        return ((), False) if return_success else ()
    if shard_id not in SHARD_IDS:
        raise ValueError(f"{weight_name}: shard_id={shard_id!r}, expected one of {', '.join(SHARD_IDS)}")
    if leaf.startswith("w2_") != (shard_id == "w2"):
        raise ValueError(f"{weight_name}: shard_id={shard_id!r} does not belong to {leaf}")
    if shard_id == "w3" and not is_act_and_mul:
        raise ValueError(
            f"{weight_name}: w3 has no place in a layer that is not gated (is_act_and_mul=False holds w1 alone)"
        )

    rule = _rule(spec, leaf)
    transpose = part_rank == 2 and is_transposed != transpose_loaded
    if transpose and len(shape) >= 2:
        shape = (*shape[:-2], shape[-1], shape[-2])
    num_experts = spec.shape[0] if expert_map is None else len(expert_map)
    lead = (num_experts,) if carries_all else ()
    shape = _aligned(shape, lead, part_rank, spec.kind, weight_name)

    flip = is_transposed and part_rank == 2
    is_stacked = shard_id != "w2" and is_act_and_mul
    stack_axis = _flipped(rule.stack_axis, flip) if is_stacked and part_rank else None
    tp_axis = rule.w13_tp_axis if shard_id != "w2" else None if load_full_w2 else rule.w2_tp_axis
    tp_axis = _flipped(tp_axis, flip) if tp_size > 1 else None
    room = [size // 2 if axis == stack_axis else size for axis, size in enumerate(spec.shape[1:])]
    if tp_axis is not None:
        _check_cut(specs, leaf, weight_name, tp_axis, is_act_and_mul, scale_extent)
    part, projections = shape, (1 if shard_id == "w3" else 0,)
    if spec.kind in _COMBINED_KINDS and stack_axis is not None and len(shape) == len(lead) + part_rank:
        axis, rows = len(lead) + stack_axis, room[stack_axis] * (tp_size if tp_axis == stack_axis else 1)
        if shape[axis] == 2 * rows:
            part, projections = (*shape[:axis], rows, *shape[axis + 1 :]), (0, 1)
    source, index = _part_slices(
        part, lead, room, tp_axis, tp_rank, tp_size, allow_padding, f"{weight_name} for {leaf}"
    )
    per_expert = math.prod(s.stop - s.start for s in index)
    if expert_map is None and carries_all:
        experts = [(slice(0, num_experts), slice(0, num_experts))]
    targets = []
    for at in projections:
        place, taken_part = list(index), list(source)
        if stack_axis is not None and place:
            place[stack_axis] = _moved(index[stack_axis], at * room[stack_axis])
            if part != shape:
                taken_part[stack_axis] = _moved(source[stack_axis], at * part[len(lead) + stack_axis])
        targets += [
            Target(
                leaf=leaf,
                index=(local, *place),
                source=(taken, *taken_part) if carries_all else tuple(taken_part),
                shape=shape,
                num_elements=per_expert * (local.stop - local.start),
                transpose=transpose,
                is_common=is_stacked and stack_axis is None,
            )
            for taken, local in experts
        ]
    return (tuple(targets), True) if return_success else tuple(targets)


def _lookup(specs: Mapping[str, LeafSpec], leaf: str, weight_name: str) -> LeafSpec:
    if leaf not in specs:
        raise ValueError(
            f"{weight_name}: there is no leaf {leaf!r} in this layer, expected one of {', '.join(sorted(specs))}"
        )
    return specs[leaf]


def _rule(spec: LeafSpec, leaf: str) -> Rule:
    if spec.kind not in RULES:
        raise ValueError(f"{leaf}: unknown kind {spec.kind!r}, expected one of {', '.join(RULES)}")
    return RULES[spec.kind]


def _local_experts(
    spec: LeafSpec, weight_name: str, expert_id: int | None, expert_map: Any
) -> list[tuple[slice, slice]]:
    """(slice of the global expert axis, slice of the leaf's) for every local expert that the tensor holds."""
    local = range(spec.shape[0]) if expert_map is None else _checked_map(expert_map, spec.shape[0], weight_name)
    if expert_id is not None and not 0 <= expert_id < len(local):
        raise ValueError(f"{weight_name}: expert {expert_id} is outside this layer's {len(local)} experts")
    wanted = range(len(local)) if expert_id is None else (expert_id,)
    return [(slice(e, e + 1), slice(local[e], local[e] + 1)) for e in wanted if local[e] >= 0]


def _checked_map(expert_map: Any, num_local: int, weight_name: str) -> list[int]:
    """Global -> local expert; each local expert at most once, so that no part of a leaf is written by two."""
    experts = np.asarray(expert_map)
    if experts.ndim != 1 or experts.dtype.kind not in "iu":
        found = f"{experts.dtype} {experts.shape}"
        raise ValueError(f"{weight_name}: expert_map is {found}, expected integers of shape (P,)")
    held = np.sort(experts[experts >= 0])
    if held.size and held[-1] >= num_local:
        raise ValueError(
            f"{weight_name}: expert_map holds local expert {held[-1]}, expected -1 to {num_local - 1}: the leaf has "
            f"{num_local} experts"
        )
    twice = held[1:][held[1:] == held[:-1]]
    if twice.size:
        raise ValueError(f"{weight_name}: expert_map holds local expert {twice[0]} twice, expected once at most")
    return experts.tolist()


def _aligned(
    shape: tuple[int, ...], lead: tuple[int, ...], part_rank: int, kind: str, weight_name: str
) -> tuple[int, ...]:
    """View a scalar ([] or [1] on disk) and a channel scale ([N] or [N, 1]) with the axes of the leaf's part."""
    if kind == "channel" and part_rank == 2 and len(shape) == len(lead) + 1:
        return (*shape, 1)
    if kind not in SCALAR_KINDS:
        return shape
    if math.prod(shape) != math.prod(lead) or shape[: len(lead)] != lead:
        expected = f"{lead[0]} values, one per expert" if lead else "a single value"
        raise ValueError(f"{weight_name}: expected {expected}, found shape {shape}")
    return (*lead, *(1,) * part_rank)


def _moved(part: slice, offset: int) -> slice:
    return slice(part.start + offset, part.stop + offset)


def _flipped(axis: int | None, flip: bool) -> int | None:
    return 1 - axis if flip and axis is not None else axis


def _part_slices(
    shape: tuple[int, ...],
    lead: tuple[int, ...],
    room: list[int],
    tp_axis: int | None,
    tp_rank: int,
    tp_size: int,
    allow_padding: bool,
    what: str,
) -> tuple[list[slice], list[slice]]:
    """Slices of one expert's part in the tensor and in the leaf, where ``room`` is what the leaf offers this shard."""
    if not shape and not lead:  # a 0-dim tensor is never cut: it fills the whole place
        return [], [slice(0, size) for size in room]
    part = shape[len(lead) :]
    ranks = [tp_size if axis == tp_axis else 1 for axis in range(len(room))]
    expected = (*lead, *(size * n for size, n in zip(room, ranks, strict=True)))
    fits = len(shape) == len(expected) and shape[: len(lead)] == lead
    if fits and allow_padding:
        if any(size % n for size, n in zip(part, ranks, strict=True)):
            raise ValueError(
                f"{what}: shape {shape} does not divide by tp_size={tp_size} on axis {len(lead) + (tp_axis or 0)}"
            )
        fits = all(size // n <= limit for size, n, limit in zip(part, ranks, room, strict=True))
    elif fits:
        fits = shape == expected
    if not fits:
        bound = "at most " if allow_padding else ""
        split = f" (tp_size={tp_size})" if tp_size > 1 else ""
        raise ValueError(f"{what}: expected shape {bound}{expected}{split}, found {shape}")
    taken = [size // n for size, n in zip(part, ranks, strict=True)]
    source = [slice(tp_rank * n, (tp_rank + 1) * n) if axis == tp_axis else slice(0, n) for axis, n in enumerate(taken)]
    return source, [slice(0, n) for n in taken]


def _check_cut(
    specs: Mapping[str, LeafSpec],
    leaf: str,
    weight_name: str,
    tp_axis: int,
    is_act_and_mul: bool,
    scale_extent: tuple[int, int] | None,
) -> None:
    """A rank's part of I must hold whole runs of weights under one scale, and whole words of packed weights."""
    rule, is_w2 = RULES[specs[leaf].kind], leaf.startswith("w2_")
    if tp_axis == rule.packed_axis:
        extent, covered = specs[leaf].pack_extent, "fill whole words"
    elif rule.scales_weight:
        if scale_extent is None:
            raise ValueError(f"{weight_name}: cutting {leaf} for tensor parallelism needs scale_extent=(rows, columns)")
        extent, covered = scale_extent[1 if is_w2 else 0], "one scale covers"
    else:
        return
    if extent == 1:
        return
    # I is the axis of w13's rows, packed or not: the split one, and for w2 the other one.
    w13 = next((specs[name] for name in ("w13_weight", "w13_weight_packed") if name in specs), None)
    if w13 is None:
        raise ValueError(f"{weight_name}: cutting {leaf} needs the spec of w13_weight or w13_weight_packed beside it")
    size = w13.shape[1 + (1 - tp_axis if is_w2 else tp_axis)] // (2 if is_act_and_mul else 1)
    if size % extent:
        raise ValueError(
            f"{weight_name}: {size} of the intermediate size per rank is not a multiple of the {extent} that {covered};"
            " choose a smaller tp_size"
        )
