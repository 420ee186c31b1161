"""``LayerLoader``: fills the leaves of one layer from checkpoint tensors and knows what is still missing."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax._config import MoEConfig
from moe_jax.loading._errors import listed, shorten
from moe_jax.loading.files._pairs import checked_experts, checked_pairs
from moe_jax.loading.layer._coverage import Coverage, experts_text
from moe_jax.loading.layer._host_copies import HostCopies, aligned_zeros
from moe_jax.loading.layer._names import (
    CORRECTION_BIAS,
    ExpertNames,
    ExpertTensor,
    is_correction_bias_name,
    is_expert_name,
    is_misspelt,
    layer_of,
    map_expert_name,
)
from moe_jax.loading.layer._online import OnlineExperts
from moe_jax.loading.layer._packed_tensors import check_weight_shape, conform_packed
from moe_jax.loading.layer._steps import Decision, Step, kind_of
from moe_jax.loading.layer._tensor_checks import (
    FULL_PRECISION,
    IN_OUT,
    OUT_IN,
    check_contents,
    check_dtype,
    check_transposable,
    conform_scale,
    copy_checked,
    disk_shape,
    fused_layout,
    split_shards,
)
from moe_jax.loading.layer._weight_loader import Placement, weight_loader
from moe_jax.quantization import ExpertWeights, LeafSpec, MoEMethod, Scheme, method_for

DUMMY_BOUND, DUMMY_SEED = 1e-3, 1234  # vLLM's, so that dummy runs can be compared
_LISTED = 12  # entries of each list in the error of an incomplete layer


class LayerLoader:
    """Stages the expert tensors of ONE layer on the host, in any order, and turns them into ``ExpertWeights``.

    Every (leaf, expert, projection) must be written exactly once. Tensors are checked against the config as they
    arrive; ``finish`` names everything missing, doubled or left over in one error. A full-precision checkpoint under
    a quantizing scheme is quantized expert by expert, each as soon as it is complete. Read-only arrays (memory-mapped
    views, JAX arrays) are kept without a copy where their layout fits; arrays that could still change are copied.

    Args:
        config: the layer.
        method: what the leaves are and how they are processed: a ``MoEMethod``, a ``Scheme``, a scheme's name, or
            None for ``config.scheme``.
        experts: ids of the experts to be filled, where these are not all of the config's; the result holds them in this
            order, and tensors of other experts have no place in it.
        layer: index of the layer; tensors of other layers are not used. None takes it from ``config.name``, or else
            from the first name that carries one, and then refuses other layers.
        names: how checkpoint names are read; None understands every known spelling.
        expert_mapping: rows of ``make_expert_params_mapping`` to read names with instead.
        has_correction_bias: True: the layer also needs its router's e_score_correction_bias, see ``correction_bias``.
            False: it routes without one, and one that is there is left over. None: it is the business of somebody else.
        quantize: True: tensors are full precision and get quantized. False: they are stored as the scheme says.
            None: the first weight or scale decides.
        fused_layout: "out_in" for weights of all experts stored as (E, 2I, H) and (E, H, I), "in_out" for (E, H, 2I)
            and (E, I, H). None tells them apart by shape, and refuses where both shapes are the same.
        words_are_dense: how 3, 5, 6 and 7-bit codes lie in 32-bit words: True as compressed-tensors packs from 0.18 on,
            False as before. None tells them apart by shape, and refuses where both shapes are the same.
        executor: its threads check values and copy, so that files are read in parallel; a later call raises what they
            find wrong (``TensorError``). Arrays must then not change before ``finish``. Quantization stays in the
            caller's thread.

    Attributes:
        peak_staged_bytes: the most that ``staged_bytes`` has been.
        correction_bias: (E,) float32 once it was accepted, else None.
    """

    def __init__(
        self,
        config: MoEConfig,
        method: MoEMethod | Scheme | str | None = None,
        *,
        experts: Sequence[int] | None = None,
        layer: int | None = None,
        names: ExpertNames | None = None,
        expert_mapping: Sequence[Any] | None = None,
        has_correction_bias: bool | None = None,
        quantize: bool | None = None,
        fused_layout: str | None = None,
        words_are_dense: bool | None = None,
        executor: Executor | None = None,
    ):
        if fused_layout not in (None, OUT_IN, IN_OUT):
            raise ValueError(f"fused_layout={fused_layout!r}, expected None, {OUT_IN!r} or {IN_OUT!r}")
        if not isinstance(method, MoEMethod):
            method = method_for(config.scheme if method is None else method)
        self._method = method
        self._experts = range(config.num_experts) if experts is None else checked_experts(experts, config.num_experts)
        config = dataclasses.replace(config, num_experts=len(self._experts))
        self._config = dataclasses.replace(config, scheme=method.scheme)
        self._stored_specs = method.create_weights(self._config)
        self._plain_specs = method_for(None).create_weights(dataclasses.replace(config, scheme=Scheme.parse(None)))
        self._quantizes = quantize if method.scheme.is_quantized else False
        self._online = OnlineExperts(method, self._config) if self._quantizes else None
        self._layer = layer_of(config.name) if layer is None else layer
        self._skips_other_layers = self._layer is not None
        self._names = names or ExpertNames(is_gated=config.is_act_and_mul)
        self._mapping = expert_mapping
        self._has_correction_bias = has_correction_bias
        self._stated_layout, self._seen_layout = fused_layout, fused_layout
        self._words_are_dense = words_are_dense
        self._has_packed_weights = "w2_weight_packed" in self._stored_specs
        self._copies = None if executor is None else HostCopies(executor)
        self._decisions: dict[tuple[Any, ...], Decision] = {}
        self._seen_shapes: set[tuple[int | None, tuple[str, ...]]] = set()
        self._buffers: dict[str, np.ndarray] = {}
        self._buffered_bytes = 0
        self._coverage = Coverage(config.is_act_and_mul)
        self._dtypes: dict[str, tuple[np.dtype, str]] = {}
        self._doubled: list[str] = []
        self._unexpected: list[str] = []
        self._strangers: list[str] = []  # of this layer or of others: its number may still be unknown
        self._is_finished = False
        self.correction_bias: np.ndarray | None = None
        self.peak_staged_bytes: int = 0

    # -- filling ------------------------------------------------------------------------------------------------------

    def load(self, pairs: Iterable[tuple[str, Any]]) -> set[str]:
        """``accept`` every (name, array); returns the names that were used."""
        return {name for name, array in checked_pairs(pairs) if self.accept(name, array)}

    def accept(self, name: str, array: Any) -> bool:
        """Stage one checkpoint tensor: of one expert, or of all experts with the expert axis first.

        Returns:
            Whether it was used. Tensors of other layers and tensors that are no experts are not. Neither are those
            whose place is taken already, that have no place in this layer, or that look like misspelt experts, and
            ``finish`` then refuses.

        Raises:
            ValueError: a shape or dtype that does not fit; the loader is then as it was before.
        """
        self._check_open()
        is_correction_bias = bool(self._has_correction_bias) and name.rpartition(".")[2] == CORRECTION_BIAS
        if not is_correction_bias and not is_expert_name(name):
            if is_misspelt(name) or (self._has_correction_bias is False and is_correction_bias_name(name)):
                self._strangers.append(name)
            return False
        layer = layer_of(name)
        if None not in (layer, self._layer) and layer != self._layer:
            if self._skips_other_layers:
                return False
            raise ValueError(f"{shorten(name)}: belongs to layer {layer}, earlier tensors to layer {self._layer}")
        accept = self._accept_correction_bias if is_correction_bias else self._accept_expert
        used = accept(name, np.asarray(array))
        self._layer = layer if self._layer is None else self._layer
        return used

    def accept_tensor(self, tensor: ExpertTensor, array: Any) -> bool:
        """``accept`` for a name of this layer that is parsed already."""
        self._check_open()
        used = self._stage([tensor], np.asarray(array))
        self._layer = tensor.layer if self._layer is None else self._layer
        return used

    def accept_shard(self, leaf: str, shard_id: str, expert_id: int | None, array: Any) -> bool:
        """``accept`` by the leaf's name, the projection "w1", "w3" or "w2", and the expert (None: all)."""
        self._check_open()
        name = f"{leaf} {shard_id} of {'all experts' if expert_id is None else f'expert {expert_id}'}"
        tensor = ExpertTensor(name, self._layer, expert_id, (shard_id,), leaf.partition("_")[2], module="")
        if tensor.leaf != leaf:
            raise ValueError(f"shard_id={shard_id!r} is not part of {leaf}: w13 leaves take w1 and w3, w2 leaves w2")
        return self._stage([tensor], np.asarray(array))

    def fill_dummy(self) -> None:
        """Stand-in values for runs without a checkpoint: uniform in +-1e-3 with seed 1234 for each weight and bias of
        which nothing was loaded. They take the way of full-precision tensors, so the layer gets quantized."""
        for leaf, spec in self._plain_specs.items():
            if self._coverage.any(leaf):
                continue
            values = np.random.default_rng(DUMMY_SEED).uniform(-DUMMY_BOUND, DUMMY_BOUND, spec.shape)
            dtype, _ = self._dtypes.get(leaf.partition("_")[2], (spec.dtype, ""))
            shards = self._coverage.shards(leaf)
            for shard, part in zip(shards, np.split(values.astype(dtype), len(shards), axis=1), strict=True):
                for expert, own in zip(self._experts, part, strict=True):
                    self.accept_shard(leaf, shard, expert, own)

    def _accept_expert(self, name: str, array: np.ndarray) -> bool:
        try:
            if self._mapping is not None:
                tensors = map_expert_name(self._mapping, name)
            else:
                parsed = self._names.parse(name)
                tensors = () if parsed is None else (parsed,)
        except ValueError:
            tensors = ()
        if not tensors:  # an expert tensor that nobody understands is never skipped without a word
            self._unexpected.append(name)
            return False
        return self._stage(tensors, array)

    def _accept_correction_bias(self, name: str, array: np.ndarray) -> bool:
        count = self._config.num_experts
        is_long_enough = array.size > count and self._config.zero_expert_type is not None
        if array.ndim != 1 or not (array.size == count or is_long_enough) or array.dtype not in FULL_PRECISION:
            raise ValueError(f"{shorten(name)}: expected ({count},) floats, found {array.dtype} {array.shape}")
        if self.correction_bias is not None:
            self._doubled.append(name)
            return False
        self.correction_bias = array.astype(np.float32)
        return True

    def _stage(self, tensors: Sequence[ExpertTensor], array: np.ndarray) -> bool:
        """Check everything, then write. tensors: the places of one array; several when experts have replicas."""
        if not isinstance(self._experts, range):
            tensors = [self._among_experts(tensor) for tensor in tensors]
        quantizes = self._decide(tensors[0], array.dtype) if self._quantizes is None else self._quantizes
        specs = self._plain_specs if quantizes else self._stored_specs
        kind = kind_of(tensors, array)
        decision, stored = None if kind is None else self._decisions.get(kind), array
        if decision is None and not quantizes and self._has_packed_weights:
            if tensors[0].suffix == "weight_shape":
                return self._accept_weight_shape(tensors, array)
            array = conform_packed(tensors[0], array, self._config, self._words_are_dense)
        doubled, unexpected, steps, layout = [], [], [], self._seen_layout
        for tensor in tensors:
            expert, leaf = tensor.expert, tensor.leaf
            experts = slice(None) if expert is None else slice(expert, expert + 1)
            if leaf not in specs or (expert is not None and expert >= self._config.num_experts):
                unexpected.append(tensor.name)
            elif self._coverage.any(leaf, experts, tensor.shards):
                doubled.append(tensor.name)
            elif decision is not None and expert is not None:
                steps.append(decision.step(expert, array))
            else:
                oriented, layout = self._check_tensor(tensor, array, specs[leaf], layout)
                for shard, part in split_shards(tensor, oriented, specs[leaf], self._config):
                    placements = weight_loader(
                        specs, leaf, part, tensor.name, shard, expert, is_act_and_mul=self._config.is_act_and_mul
                    )
                    steps += [Step(placement, shard, part) for placement in cast(tuple[Placement, ...], placements)]
        online = OnlineExperts(self._method, self._config) if quantizes and not self._online else self._online
        is_deferred = self._copies is not None and not quantizes
        is_checked_online = online is not None and online.checks_values and tensors[0].suffix == "weight"
        if steps and not (is_deferred or is_checked_online):
            self._check_contents(tensors[0], array, specs)
        for step in steps:
            self._check_common(step, tensors[0].name)

        # Nothing below fails.
        self._doubled += doubled
        self._unexpected += unexpected
        if steps:
            self._online, self._quantizes, self._seen_layout = online, quantizes, layout
            self._dtypes.setdefault(tensors[0].suffix, (array.dtype, tensors[0].name))
            if kind is not None and array is stored and quantizes is not None and decision is None:
                self._decisions[kind] = Decision(steps[0].placement, steps[0].shard, steps[0].array.dtype)
            self._store(steps, tensors[0], array, specs, is_deferred)
        return bool(steps)

    def _among_experts(self, tensor: ExpertTensor) -> ExpertTensor:
        """With the expert's place among those that are filled; past the last one for an expert that is not."""
        if tensor.expert is None:
            raise ValueError(
                f"{shorten(tensor.name)}: holds all experts, but only experts {list(self._experts)} are to be filled; "
                "give their tensors one by one, or reload all experts"
            )
        is_filled = tensor.expert in self._experts
        return dataclasses.replace(
            tensor, expert=self._experts.index(tensor.expert) if is_filled else len(self._experts)
        )

    def _accept_weight_shape(self, tensors: Sequence[ExpertTensor], array: np.ndarray) -> bool:
        """Only checked: the shapes are known, and some writers leave it out."""
        check_weight_shape(tensors[0], array, self._config)
        places = {(tensor.expert, tensor.shards) for tensor in tensors}
        if self._seen_shapes & places:
            self._doubled.append(tensors[0].name)
            return False
        self._seen_shapes |= places
        return True

    def _decide(self, tensor: ExpertTensor, dtype: np.dtype) -> bool | None:
        """Whether this checkpoint has to be quantized; None while only biases have been seen, which do not tell."""
        if tensor.suffix == "weight":
            return dtype in FULL_PRECISION
        return None if tensor.leaf in self._plain_specs else False

    def _check_tensor(
        self, tensor: ExpertTensor, array: np.ndarray, spec: LeafSpec, layout: str | None
    ) -> tuple[np.ndarray, str | None]:
        """The array as (out, in), and the layout of this layer's weights of all experts."""
        dtype, first = self._dtypes.get(tensor.suffix, (array.dtype, tensor.name))
        if array.dtype != dtype:
            raise ValueError(
                f"{shorten(tensor.name)}: found dtype {array.dtype}, expected {dtype} as in {shorten(first)}: "
                f"all {tensor.suffix} tensors of a layer's experts share one dtype"
            )
        check_dtype(tensor, array.dtype, spec, self._method.scheme.name)
        if spec.dtype == np.uint8:
            array = array.view(np.uint8)  # exponents, which some writers call float8_e8m0fnu
        if tensor.expert is None:
            array = conform_scale(array, spec)
        if tensor.expert is not None or spec.kind != "weight" or tensor.suffix == "weight_packed":
            return array, layout  # packed matrices are always (out, in)
        found = fused_layout(tensor, array.shape, disk_shape(tensor, spec, self._config), self._stated_layout)
        if layout not in (None, found):
            raise ValueError(f"{shorten(tensor.name)}: stored as {found}, other weights of this layer as {layout}")
        if found == IN_OUT and array.dtype not in FULL_PRECISION:
            check_transposable(tensor, self._method.scheme.weights)
        return (array.swapaxes(1, 2) if found == IN_OUT else array), found

    def _check_contents(self, tensor: ExpertTensor, array: np.ndarray, specs: Mapping[str, LeafSpec]) -> None:
        check_contents(tensor.name, array, specs[tensor.leaf], self._method.scheme.weights)

    def _check_common(self, step: Step, name: str) -> None:
        """w1 and w3 may share one place (an input scale (E,)); then they have to agree, whatever the first one was."""
        placement = step.placement
        if placement.is_common and self._coverage.any(placement.leaf, placement.index[0]):
            pair = self._buffers[placement.leaf][placement.index], placement.value(step.array)
            stored, value = np.broadcast_arrays(*pair)
            differs = ~np.isclose(stored, value, rtol=1e-5, atol=0, equal_nan=True)
            if differs.any():
                raise ValueError(
                    f"{shorten(name)}: {placement.leaf} of w1 and w3 must be equal: {stored[differs][0]} and "
                    f"{value[differs][0]} ({differs.sum()} of {differs.size} differ)"
                )

    # -- storing ------------------------------------------------------------------------------------------------------

    def _store(
        self,
        steps: list[Step],
        tensor: ExpertTensor,
        array: np.ndarray,
        specs: Mapping[str, LeafSpec],
        is_deferred: bool,
    ) -> None:
        """Quantize or copy. is_deferred: its values are still to be checked, by the thread that copies."""
        is_adopted = self._adopt(steps, array, specs)
        copies: list[tuple[np.ndarray, Step]] = []
        for step in steps:
            placement, spec = step.placement, specs[step.placement.leaf]
            if self._online and spec.kind == "weight":
                self._quantize(step, tensor.name)
            elif not is_adopted:
                if placement.leaf not in self._buffers:
                    self._keep(placement.leaf, aligned_zeros(spec.shape, spec.dtype))
                copies.append((self._buffers[placement.leaf], step))
            self._coverage.mark(placement.leaf, spec.shape[0], placement.index[0], step.shard)
        self._count_bytes()

        def copy() -> None:
            if is_deferred and len(copies) == 1:
                ((buffer, step),) = copies
                value, target = np.asarray(step.placement.value(step.array)), buffer[step.placement.index]
                copy_checked(tensor.name, value, target, specs[tensor.leaf], self._method.scheme.weights)
                return
            if is_deferred:
                self._check_contents(tensor, array, specs)
            for buffer, step in copies:
                step.placement.write(buffer, step.array)

        # What w1 and w3 have in common is compared when the second one comes, so it has to be there by then.
        if self._copies is not None and is_deferred and not any(step.placement.is_common for step in steps):
            self._copies.add(tensor.name, copy, array.nbytes)
        else:
            copy()

    def _keep(self, leaf: str, buffer: np.ndarray) -> None:
        self._buffers[leaf] = buffer
        self._buffered_bytes += buffer.nbytes

    def _adopt(self, steps: list[Step], array: np.ndarray, specs: Mapping[str, LeafSpec]) -> bool:
        """Use a read-only array as the buffer of a weight leaf when it fills all of it in the same layout."""
        leaf = steps[0].placement.leaf
        if self._online or specs[leaf].kind != "weight" or array.shape != specs[leaf].shape:
            return False
        is_same = array.dtype == specs[leaf].dtype and not array.flags.writeable
        is_straight = all(step.array.strides == array.strides for step in steps)
        is_whole = sum(step.placement.num_elements for step in steps) == array.size
        if not (is_same and is_straight and is_whole):
            return False
        self._keep(leaf, array)
        return True

    def _quantize(self, step: Step, name: str) -> None:
        array = step.array.copy() if step.array.flags.writeable else step.array
        experts = range(*step.placement.index[0].indices(self._config.num_experts))
        for expert, part in zip(experts, array.reshape(len(experts), *array.shape[-2:]), strict=True):
            self._online.add(expert, step.shard, part, name)
            self._count_bytes()
            self._online.quantize_if_complete(expert)

    def _count_bytes(self) -> None:
        self.peak_staged_bytes = max(self.peak_staged_bytes, self.staged_bytes)

    @property
    def is_spoiled(self) -> bool:
        """Whether ``finish`` can only fail: something was doubled, has no place, or was found damaged late."""
        is_damaged = (self._online and self._online.is_damaged) or (self._copies and self._copies.failure)
        return bool(self._doubled or self._left_over() or is_damaged)

    def _left_over(self) -> list[str]:
        return self._unexpected + [name for name in self._strangers if layer_of(name) in (None, self._layer)]

    @property
    def staged_bytes(self) -> int:
        """Bytes held for tensors as the checkpoint stores them; what is quantized already does not count."""
        pending = self._online.pending_bytes if self._online else 0
        return pending + self._buffered_bytes

    # -- finishing ----------------------------------------------------------------------------------------------------

    def missing(self) -> dict[str, dict[str, list[int]]]:
        """{leaf: {shard: experts}} of everything that was not written yet; empty when the layer is complete."""
        return self._coverage.missing(self._plain_specs if self._quantizes else self._stored_specs)

    def finish(self, like: ExpertWeights | None = None) -> ExpertWeights:
        """Process the complete layer and put it on the default device; the loader is spent afterwards.

        Args:
            like: weights to be replaced; structure, shapes and dtypes must come out the same: nothing recompiles.

        Raises:
            ValueError: in one line, what is missing, doubled or left over; a scale that is not finite; weights unlike
                ``like``. The loader keeps what it has: missing tensors can still be added.
        """
        self._check_open()
        if self._copies is not None:
            self._copies.finish()
        if self._online is not None:
            self._online.finish()
        self._check_complete()
        leaves = self._buffers | (self._online.leaves if self._online else {})
        processed = self._method.process_weights_after_loading(leaves, self._config)
        if like is not None and _signature(processed) != _signature(like):
            raise ValueError(
                f"{self._label()}: expected weights like {_signature(like)}, found {_signature(processed)}"
            )
        weights = jax.tree.map(_on_device, processed)
        self._is_finished = True
        self._buffers, self._buffered_bytes, self._online = {}, 0, None
        return weights

    def _check_open(self) -> None:
        if self._is_finished:
            raise ValueError(f"{self._label()}: already finished; a reload needs a new LayerLoader")

    def _check_complete(self) -> None:
        total = self._config.num_experts
        absent = [
            f"{self._names.describe(leaf, shard)} of {experts_text([self._experts[e] for e in experts], total)}"
            for leaf, shards in self.missing().items()
            for shard, experts in shards.items()
        ]
        if self._has_correction_bias and self.correction_bias is None:
            absent.append(CORRECTION_BIAS)
        lists = {"missing": absent, "doubled": self._doubled, "left over": self._left_over()}
        problems = [f"{label}: {listed(items, _LISTED)}" for label, items in lists.items() if items]
        if problems:
            raise ValueError(
                f"{self._label()}: {'; '.join(problems)}; expected every tensor of {self._config.num_experts} experts "
                f"exactly once for scheme {self._method.scheme.name!r}"
            )

    def _label(self) -> str:
        if self._config.name:
            return f"experts of {self._config.name}"
        return "experts" if self._layer is None else f"experts of layer {self._layer}"


def _on_device(leaf: Any) -> jax.Array:
    """A processed leaf on the default device, never sharing memory with a file or an array of the caller.

    Those are read-only; what is writeable is our own staging, which nobody else holds and XLA may take over. It does so
    on the CPU where memory is aligned to 64 bytes, even with may_alias=False (jax 0.10.2); jnp.array always copies.
    """
    if isinstance(leaf, jax.Array):  # made by the method
        return leaf
    return jax.device_put(leaf) if leaf.flags.writeable else jnp.array(leaf)


def _signature(weights: ExpertWeights) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), weights)
