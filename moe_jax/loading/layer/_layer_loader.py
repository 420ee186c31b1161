"""``LayerLoader`` fills one layer from checkpoint tensors in any order; ``ExpertStream`` fills several.

The way of a tensor: its name is read, ``LayerPlan`` says which copies it makes, values are checked, ``Staging`` writes
and keeps count. ``finish`` names what is missing and hands the leaves to the method.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax._config import MoEConfig
from moe_jax._pytrees import signature
from moe_jax._typing import AnyArray
from moe_jax.loading._errors import listed, shorten
from moe_jax.loading.files._arrays import checked_experts, checked_pairs
from moe_jax.loading.layer._bitpacked import check_weight_shape
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
from moe_jax.loading.layer._plan import FULL_PRECISION, IN_OUT, OUT_IN, Kind, LayerPlan, Step, kind_of
from moe_jax.loading.layer._staging import Staging, experts_text
from moe_jax.loading.layer._weight_loader import SCALAR_KINDS, Shard
from moe_jax.quantization import ExpertWeights, LeafSpec, MoEMethod, Scheme, common_input_scale, method_for

DUMMY_BOUND, DUMMY_SEED = 1e-3, 1234
_LISTED = 12  # entries of each list in the error of an incomplete layer


class LayerLoader:
    """Stages the expert tensors of ONE layer on the host, in any order, and turns them into ``ExpertWeights``.

    Every (leaf, expert, projection) must be written exactly once. Tensors are checked against the config as they
    arrive; ``finish`` names everything missing, duplicate or unexpected in one error. A full-precision checkpoint under
    a quantizing scheme is quantized expert by expert, each as soon as it is complete. Read-only arrays (those of
    files, JAX arrays) are kept without a copy where their layout fits; arrays that could still change are copied.

    Args:
        config: the layer.
        method: what the leaves are and how they are processed: a ``MoEMethod``, a ``Scheme``, a scheme's name, or
            None for ``config.scheme``.
        shard: the part of the layer to be filled from tensors of the whole layer; None for all of it.
        experts: ids of the experts to be filled, where these are not all of the config's; the result holds them in this
            order, and tensors of other experts have no place in it.
        layer: index of the layer; tensors of other layers are not used. None takes it from ``config.name``, or else
            from the first name that carries one, and then refuses other layers.
        names: how checkpoint names are read; None understands every known spelling.
        expert_mapping: rows of ``make_expert_params_mapping`` to read names with instead.
        has_correction_bias: True: the layer also needs its router's e_score_correction_bias, see ``correction_bias``.
            False: it routes without one, and one that is there is unexpected. None: somebody else's business.
        own_correction_bias: (E,), the bias that the layer was given; one among the tensors must be the same.
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

    _staging_type = Staging

    def __init__(
        self,
        config: MoEConfig,
        method: MoEMethod | Scheme | str | None = None,
        *,
        shard: Shard | None = None,
        experts: Sequence[int] | None = None,
        layer: int | None = None,
        names: ExpertNames | None = None,
        expert_mapping: Sequence[tuple[str, str, int, str]] | None = None,
        has_correction_bias: bool | None = None,
        own_correction_bias: AnyArray | None = None,
        quantize: bool | None = None,
        fused_layout: str | None = None,
        words_are_dense: bool | None = None,
        executor: Executor | None = None,
    ):
        if fused_layout not in (None, OUT_IN, IN_OUT):
            raise ValueError(f"fused_layout={fused_layout!r}, expected None, {OUT_IN!r} or {IN_OUT!r}")
        if not isinstance(method, MoEMethod):
            method = method_for(config.scheme if method is None else method)
        shard, weights = shard or Shard(), method.scheme.weights
        self._chosen = None if experts is None else checked_experts(experts, config.num_experts)
        if self._chosen is not None:
            config = dataclasses.replace(config, num_experts=len(self._chosen))
        config = dataclasses.replace(config, scheme=method.scheme)
        self._method, self._config, self._own_config = method, config, shard.local(config)
        self._experts = self._chosen or shard.experts(config.num_experts)  # of which leaves have rows
        self._plans = {
            quantizes: LayerPlan.create(config, method, shard, quantizes, fused_layout, words_are_dense)
            for quantizes in (False, True)
        }
        self._quantizes = quantize if method.scheme.is_quantized else False
        self._online = OnlineExperts(method, self._own_config) if self._quantizes else None
        self._layer = layer_of(config.name) if layer is None else layer
        self._skips_other_layers = self._layer is not None
        self._names = names or ExpertNames(is_gated=config.is_act_and_mul)
        self._mapping = expert_mapping
        self._has_correction_bias, self._own_correction_bias = has_correction_bias, own_correction_bias
        self._layout = fused_layout
        self._staging = self._staging_type(is_gated=config.is_act_and_mul, fmt=weights, executor=executor)
        self._known_steps: dict[Kind, Step] = {}
        self._seen_shapes: set[tuple[int | None, tuple[str, ...]]] = set()
        self._dtypes: dict[str, tuple[np.dtype, str]] = {}
        self._duplicate: list[str] = []
        self._unexpected: list[str] = []
        self._maybe_unexpected: list[str] = []  # of this layer or of others: its number may still be unknown
        self._is_finished = False
        self.correction_bias: np.ndarray | None = None

    @property
    def peak_staged_bytes(self) -> int:
        return self._staging.peak_nbytes

    @property
    def staged_bytes(self) -> int:
        """Bytes held for tensors as the checkpoint stores them; what is quantized already does not count."""
        return self._staging.nbytes

    @property
    def is_invalid(self) -> bool:
        """Whether ``finish`` can only fail: a duplicate, something without a place, or damage that was found late."""
        return bool(self._duplicate or self._all_unexpected() or self._staging.is_invalid)

    # -- filling ------------------------------------------------------------------------------------------------------

    def load(self, pairs: Iterable[tuple[str, AnyArray]]) -> set[str]:
        """``accept`` every (name, array); returns the names that were used."""
        return {name for name, array in checked_pairs(pairs) if self.accept(name, array)}

    def accept(self, name: str, array: AnyArray) -> bool:
        """Stage one checkpoint tensor: of one expert, or of all experts with the expert axis first.

        Returns:
            Whether it was used. Tensors of other layers or shards and tensors that are no experts are not. Neither are
            those whose place is taken already, that have no place in this layer, or that look like misspelt experts;
            ``finish`` then refuses.

        Raises:
            ValueError: a shape or dtype that does not fit, or with ``shard`` a tensor that has no place in the layer;
                the loader is then as it was before.
        """
        self._check_open()
        is_correction_bias = bool(self._has_correction_bias) and name.rpartition(".")[2] == CORRECTION_BIAS
        if not is_correction_bias and not is_expert_name(name):
            is_bias = is_correction_bias_name(name)
            if self._own_correction_bias is not None and name.rpartition(".")[2] == CORRECTION_BIAS:
                self._check_own_correction_bias(name, np.asarray(array))
            elif is_misspelt(name) or (is_bias and not self._leaves_bias_to_others):
                self._maybe_unexpected.append(name)
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

    def accept_tensor(self, tensor: ExpertTensor, array: AnyArray) -> bool:
        """``accept`` for a name of this layer that is parsed already."""
        self._check_open()
        used = self._take([self._among_chosen(tensor)], np.asarray(array))
        self._layer = tensor.layer if self._layer is None else self._layer
        return used

    def accept_shard(self, leaf: str, shard_id: str, expert_id: int | None, array: AnyArray) -> bool:
        """``accept`` by the leaf's name, the projection "w1", "w3" or "w2", and the expert (None: all)."""
        self._check_open()
        name = f"{leaf} {shard_id} of {'all experts' if expert_id is None else f'expert {expert_id}'}"
        tensor = ExpertTensor(name, self._layer, expert_id, (shard_id,), leaf.partition("_")[2], module="")
        if tensor.leaf != leaf:
            raise ValueError(f"shard_id={shard_id!r} is not part of {leaf}: w13 leaves take w1 and w3, w2 leaves w2")
        return self._take([self._among_chosen(tensor)], np.asarray(array))

    def accept_leaf(self, leaf: str, array: np.ndarray, *, is_interleaved: bool = False) -> bool:
        """``accept`` for a whole leaf of this shard, as a state dict has it: (E, 2I, ...), gate rows first.

        Args:
            leaf: its name.
            array: of the leaf's shape and dtype; a scale per expert may stand for both projections.
            is_interleaved: gate and up rows alternate.
        """
        plan = self._plans[bool(self._quantizes)]
        spec, shard = plan.own_specs.get(leaf), plan.shard
        if spec is not None and spec.kind in SCALAR_KINDS:
            if array.shape == (len(self._experts),):
                # vLLM keeps one value of an expert for gate and up, once it has processed them.
                array = np.broadcast_to(array.reshape(-1, *(1,) * (len(spec.shape) - 1)), (len(array), *spec.shape[1:]))
            if shard.expert_map is not None and spec.kind == "input_scale" and len(array) == len(self._experts):
                # The layer has one input scale; experts elsewhere may stand for any of ours.
                array = array[np.maximum(shard.expert_map, 0)]
        if spec is not None and array.shape != spec.shape:
            raise ValueError(f"{leaf}: found shape {array.shape}, expected {spec.shape}")
        return self._take_leaf(leaf, array, is_interleaved)

    def fill_dummy(self) -> None:
        """Stand-in values for runs without a checkpoint: uniform in +-1e-3, NumPy's with seed 1234, for each weight and
        bias of which nothing was loaded. They take the way of full-precision tensors, so the layer gets quantized."""
        for leaf, spec in self._plans[True].own_specs.items():
            if not self._staging.coverage.any(leaf):
                values = np.random.default_rng(DUMMY_SEED).uniform(-DUMMY_BOUND, DUMMY_BOUND, spec.shape)
                dtype, _ = self._dtypes.get(leaf.partition("_")[2], (spec.dtype, ""))
                self._take_leaf(leaf, values.astype(dtype))

    def _take_leaf(self, leaf: str, array: np.ndarray, is_interleaved: bool = False) -> bool:
        self._check_open()
        suffix, shards = leaf.partition("_")[2], self._staging.coverage.shards(leaf)
        used = False
        for at, shard in enumerate(shards):
            part = array
            if len(shards) == 2 and suffix != "weight_g_idx":  # both projections see the same columns
                part = array[:, at::2] if is_interleaved else np.split(array, 2, axis=1)[at]
            for expert in range(len(part)):
                tensor = ExpertTensor(leaf, None, expert, (shard,), suffix, "")
                used |= self._take([tensor], np.asarray(part[expert]), is_own_part=True)
        return used

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
        return self._take([self._among_chosen(tensor) for tensor in tensors], array)

    @property
    def _leaves_bias_to_others(self) -> bool:
        return self._has_correction_bias is None and self._own_correction_bias is None

    def _check_own_correction_bias(self, name: str, array: np.ndarray) -> None:
        if layer_of(name) in (None, self._layer) and not np.array_equal(array, np.asarray(self._own_correction_bias)):
            raise ValueError(
                f"{shorten(name)}: differs from the {CORRECTION_BIAS} that the layer was built with; leave it out, or "
                f"build the layer with {CORRECTION_BIAS}=True to load it"
            )

    def _accept_correction_bias(self, name: str, array: np.ndarray) -> bool:
        count = self._config.num_experts
        is_long_enough = array.size > count and self._config.zero_expert_type is not None
        if array.ndim != 1 or not (array.size == count or is_long_enough) or array.dtype not in FULL_PRECISION:
            raise ValueError(f"{shorten(name)}: expected ({count},) floats, found {array.dtype} {array.shape}")
        if self.correction_bias is not None:
            self._duplicate.append(name)
            return False
        self.correction_bias = array.astype(np.float32)
        return True

    def _take(self, tensors: Sequence[ExpertTensor], array: np.ndarray, *, is_own_part: bool = False) -> bool:
        """Check everything, then write.

        tensors: the places of one array; several when experts have replicas. is_own_part: of the whole layer's tensor
        the array is what the shard holds.
        """
        first = tensors[0]
        quantizes = self._decide(first, array.dtype)
        plan = self._plans[bool(quantizes)]
        if is_own_part:
            plan = plan.within_shard
        if first.suffix == "weight_shape" and plan.is_bitpacked:
            return self._take_weight_shape(tensors, array)
        kind, stored = kind_of(tensors, array), array
        known = None if kind is None else self._known_steps.get(kind)
        if known is None:
            array = plan.conform(first, array)
        duplicate, unexpected, steps, layout = [], [], [], self._layout
        for tensor in tensors:
            refusal = plan.refusal(tensor)
            if refusal is not None and not plan.shard.is_whole:
                raise ValueError(refusal)
            if refusal is not None:
                unexpected.append(tensor.name)
                continue
            experts = plan.experts_of(tensor)
            if experts is None:
                continue
            if self._staging.coverage.any(tensor.leaf, experts, tensor.shards):
                duplicate.append(tensor.name)
            elif known is not None:
                steps.append(known.for_expert(experts.start, array))
            else:
                self._check_dtype_is_shared(tensor, array.dtype)
                more, layout = plan.plan_tensor(tensor, array, layout)
                steps += more
        online, contents = self._online, [array] if plan.shard.is_whole else [step.value for step in steps]
        if plan.quantizes and online is None:
            online = OnlineExperts(self._method, self._own_config)
        if steps:
            self._staging.check(first.name, contents, steps, plan.own_specs[first.leaf], online)

        # Nothing below fails.
        self._duplicate += duplicate
        self._unexpected += unexpected
        if steps:
            self._quantizes, self._online, self._layout = quantizes, online, layout
            self._dtypes.setdefault(first.suffix, (array.dtype, first.name))
            is_simple = known is None and array is stored and len(steps) == 1
            if kind is not None and is_simple and quantizes is not None:
                self._known_steps[kind] = steps[0].without_values()
            self._staging.add(first.name, contents, steps, plan.own_specs, online)
        return bool(steps)

    def _decide(self, tensor: ExpertTensor, dtype: np.dtype) -> bool | None:
        """Whether this checkpoint has to be quantized; None while only biases have been seen, which do not tell."""
        if self._quantizes is not None:
            return self._quantizes
        if tensor.suffix == "weight":
            return dtype in FULL_PRECISION
        return None if tensor.leaf in self._plans[True].specs else False

    def _among_chosen(self, tensor: ExpertTensor) -> ExpertTensor:
        """With the expert's place among those that are filled; past the last one for an expert that is not."""
        if self._chosen is None:
            return tensor
        if tensor.expert is None:
            raise ValueError(
                f"{shorten(tensor.name)}: holds all experts, but only experts {self._chosen} are to be filled; "
                "give their tensors one by one, or reload all experts"
            )
        is_filled = tensor.expert in self._chosen
        return dataclasses.replace(tensor, expert=self._chosen.index(tensor.expert) if is_filled else len(self._chosen))

    def _take_weight_shape(self, tensors: Sequence[ExpertTensor], array: np.ndarray) -> bool:
        """Only checked: the shapes are known, and some writers leave it out."""
        plan = self._plans[False]
        for tensor in tensors:
            refusal = plan.refusal(dataclasses.replace(tensor, suffix="weight_packed"))
            if refusal is not None and not plan.shard.is_whole:
                raise ValueError(refusal)
            if refusal is not None:
                self._unexpected.append(tensor.name)
                return False
        check_weight_shape(tensors[0], array, self._config)
        places = {(tensor.expert, tensor.shards) for tensor in tensors}
        if self._seen_shapes & places:
            self._duplicate.append(tensors[0].name)
            return False
        self._seen_shapes |= places
        return True

    def _check_dtype_is_shared(self, tensor: ExpertTensor, found: np.dtype) -> None:
        dtype, first = self._dtypes.get(tensor.suffix, (found, tensor.name))
        if found != dtype:
            raise ValueError(
                f"{shorten(tensor.name)}: found dtype {found}, expected {dtype} as in {shorten(first)}: "
                f"all {tensor.suffix} tensors of a layer's experts share one dtype"
            )

    def _all_unexpected(self) -> list[str]:
        return self._unexpected + [name for name in self._maybe_unexpected if layer_of(name) in (None, self._layer)]

    # -- finishing ----------------------------------------------------------------------------------------------------

    def missing(self) -> dict[str, dict[str, list[int]]]:
        """{leaf: {shard: experts}} of everything that was not written yet; empty when the layer is complete."""
        return self._staging.coverage.missing(self._plans[bool(self._quantizes)].own_specs)

    def finish(self, like: ExpertWeights | None = None) -> ExpertWeights:
        """Process the complete layer and put it on the default device; the loader is spent afterwards.

        Args:
            like: weights to be replaced; structure, shapes and dtypes must come out the same: nothing recompiles.

        Raises:
            ValueError: in one line, what is missing, duplicate or unexpected; a scale that is not finite; weights
                unlike ``like``. The loader keeps what it has: missing tensors can still be added.
        """
        self._check_open()
        self._staging.finish()
        self._check_complete()
        leaves = self._staging.leaves()
        for leaf, spec in self._whole_input_scales().items():
            leaves[leaf] = np.full((len(self._experts), *spec.shape[1:]), self._common(leaves[leaf], leaf))
        processed = self._method.process_weights_after_loading(leaves, self._own_config)
        if like is not None and signature(processed) != signature(like):
            raise ValueError(f"{self._label()}: expected weights like {signature(like)}, found {signature(processed)}")
        weights = jax.tree.map(_on_device, processed)
        self._is_finished = True
        self._staging.release()
        self._online = None
        return weights

    def _whole_input_scales(self) -> dict[str, LeafSpec]:
        """Leaves with a row for every expert of the layer where the shard holds some of the experts."""
        plan = self._plans[False]
        if plan.shard.expert_map is None:
            return {}
        return {leaf: spec for leaf, spec in plan.own_specs.items() if spec.kind == "input_scale"}

    def _common(self, values: AnyArray, leaf: str) -> np.ndarray:
        """() float32, the input scale that all experts share."""
        activations = self._method.scheme.activations
        assert activations is not None, "a layer with input scales quantizes activations"
        if leaf.endswith("input_global_scale"):
            values = np.where(np.isposinf(values), np.float32(1), values)
        return np.asarray(common_input_scale(values, activations, leaf), np.float32)

    def _check_open(self) -> None:
        if self._is_finished:
            raise ValueError(f"{self._label()}: already finished; a reload needs a new LayerLoader")

    def _check_complete(self) -> None:
        absent = []
        for leaf, shards in self.missing().items():
            held = range(self._config.num_experts) if leaf in self._whole_input_scales() else self._experts
            absent += [
                f"{self._names.describe(leaf, shard)} of {experts_text([held[e] for e in experts], len(held))}"
                for shard, experts in shards.items()
            ]
        if self._has_correction_bias and self.correction_bias is None:
            absent.append(CORRECTION_BIAS)
        lists = {"missing": absent, "duplicate": self._duplicate, "unexpected": self._all_unexpected()}
        problems = [f"{label}: {listed(items, _LISTED)}" for label, items in lists.items() if items]
        if problems:
            raise ValueError(
                f"{self._label()}: {'; '.join(problems)}; expected every tensor of {len(self._experts)} experts "
                f"exactly once for scheme {self._method.scheme.name!r}"
            )

    def _label(self) -> str:
        if self._config.name:
            return f"experts of {self._config.name}"
        return "experts" if self._layer is None else f"experts of layer {self._layer}"


def _on_device(leaf: AnyArray) -> jax.Array:
    """A processed leaf on the default device, never sharing memory with a file or an array of the caller.

    Those are read-only; what is writeable is our own staging, which nobody else holds and XLA may take over. It does so
    on the CPU where memory is aligned to 64 bytes, even with may_alias=False (jax 0.10.2); jnp.array always copies.
    """
    if isinstance(leaf, jax.Array):  # made by the method
        return leaf
    return jax.device_put(leaf) if leaf.flags.writeable else jnp.array(leaf)


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """What a load or reload held on the host.

    peak_staged_bytes: the most bytes of expert tensors, as the checkpoint stores them, that waited at a time for others
    of their expert or layer. peak_open_layers: the most layers that were begun and not complete at a time: 1 where
    tensors come layer by layer.
    """

    peak_staged_bytes: int
    peak_open_layers: int


class ExpertStream:
    """Takes the expert tensors of all layers one by one and processes each layer once it is complete.

    Experts of a full-precision stream under a quantizing scheme are quantized one by one, as soon as they are complete.
    What is staged is bounded by what is incomplete: an expert where tensors come in order, every layer in the worst
    order. ``report`` says what it was.

    Args:
        configs: the layers that are expected, by their index in names.
        names: how names are read.
        words_are_dense: see ``LayerLoader``.

    Attributes:
        surplus: names of expert tensors in layers that are not expected; they are not kept.
    """

    def __init__(
        self, configs: Mapping[int, MoEConfig], *, names: ExpertNames | None = None, words_are_dense: bool | None = None
    ):
        names = names or ExpertNames()
        self._loaders = {
            layer: LayerLoader(
                config,
                layer=layer,
                names=dataclasses.replace(names, is_gated=config.is_act_and_mul),
                words_are_dense=words_are_dense,
            )
            for layer, config in configs.items()
        }
        self._open: set[int] = set()
        self._done: dict[int, ExpertWeights] = {}
        self._late: list[str] = []
        self._staged = self._peak_staged = self._peak_open = 0
        self.surplus: list[str] = []

    @property
    def report(self) -> LoadReport:
        return LoadReport(self._peak_staged, self._peak_open)

    def accept(self, name: str, array: AnyArray) -> None:
        """Stage one tensor; an array that could still change is copied. Raises ValueError as ``LayerLoader.accept``."""
        layer = layer_of(name)
        if layer is None:
            raise ValueError(f"{shorten(name)}: an expert tensor whose name carries no layer")
        loader = self._loaders.get(layer)
        if loader is None:
            self.surplus.append(name)
        elif layer in self._done:
            if not name.endswith("weight_shape"):  # optional, and known by now
                self._late.append(name)
        else:
            before = loader.staged_bytes
            loader.accept(name, array)
            self._open.add(layer)
            # An expert's last tensor is staged before the expert is quantized; one layer at a time grows.
            self._peak_staged = max(self._peak_staged, self._staged - before + loader.peak_staged_bytes)
            self._staged += loader.staged_bytes - before
            self._peak_staged = max(self._peak_staged, self._staged)
            self._peak_open = max(self._peak_open, len(self._open))
            if not loader.is_invalid and not loader.missing():
                self._finish(layer)

    def finish(self) -> dict[int, ExpertWeights]:
        """The weights of every layer. Raises ValueError naming what is missing, duplicate or unexpected."""
        for layer in self._loaders.keys() - self._done.keys():
            self._finish(layer)
        if self._late:
            count = f" (and {len(self._late) - 1} more)" if len(self._late) > 1 else ""
            raise ValueError(
                f"duplicate or unexpected: {shorten(self._late[0])}{count}; its layer was complete before it"
            )
        return self._done

    def _finish(self, layer: int) -> None:
        loader = self._loaders[layer]
        self._staged -= loader.staged_bytes
        self._done[layer] = loader.finish()
        self._open.discard(layer)
