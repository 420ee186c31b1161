"""``FusedMoE`` and ``MoEBlock``: thin nnx modules that own quantized parameters; the arithmetic lives in experts.py."""

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_jax._arguments import boolean, check_array, check_callables, check_is_kept, check_not_traced, check_rngs, shown
from moe_jax._config import MoEConfig
from moe_jax._pytrees import signature
from moe_jax._typing import Array, ArrayArg, DTypeLike
from moe_jax._versions import Place, Versioned, changing, install, one_version
from moe_jax.activations import NOT_GATED_SUFFIX, parse_activation, resolve_activation
from moe_jax.experts import MoEStats, explain, fused_moe
from moe_jax.experts._choice import in_best_layout, order_of, plain_layout
from moe_jax.experts._fused_moe import routed_rows
from moe_jax.loading import LayerLoader
from moe_jax.nn._frozen import warn_of_frozen_experts
from moe_jax.nn._lora import ExpertLoRA
from moe_jax.nn._moe_block import check_output, without_padding
from moe_jax.nn._random_weights import random_experts, random_shares
from moe_jax.nn._variables import (
    CORRECTION_BIAS,
    ExpertParams,
    QuantizedParam,
    RoutingParam,
    WeightsVersion,
    checked_bias,
    routing_bias,
    routing_scale,
    routing_table,
    value_of,
    weights_variable,
)
from moe_jax.parallel import ParallelConfig, Placement
from moe_jax.parallel import fused_moe as fused_moe_over_mesh
from moe_jax.parallel._explicit import in_auto_axes, lies_on_explicit_axes, ready_to_split
from moe_jax.parallel._layer import PlacementParam, explain_parallel, make_parallel, make_placement
from moe_jax.parallel._sharding import lay_out, plain_shares
from moe_jax.parallel._weights import abstract_placed_weights, is_placed, replace_experts
from moe_jax.quantization import ExpertWeights, Scheme, SchemeLike, method_for
from moe_jax.routing import RoutingParams, validate_routing
from pallas_kernels.combine import RoutedRows

# Loaders hold host memory while a layer is being filled; kept off the module so that they never enter its pytree.
_staging: "weakref.WeakKeyDictionary[FusedMoE, LayerLoader]" = weakref.WeakKeyDictionary()

Submodule = Callable[..., Any]  # a module or a function of tokens (T, H)


class FusedMoE(Versioned):
    """Routed experts of one layer with parameters kept quantized. Call as ``layer(x, router_logits)``.

    Pass the layer as an *argument* of a jitted function: ``jax.jit(lambda layer, x, z: layer(x, z))``. Captured in a
    closure, its weights would be constants of the compiled program, and a later reload would not change them.

    Example:
        >>> import jax, jax.numpy as jnp, moe_jax
        >>> from flax import nnx
        >>> layer = moe_jax.FusedMoE(8, 64, 32, top_k=2, scheme="fp8_channel", rngs=nnx.Rngs(0))
        >>> y = jax.jit(lambda layer, x, z: layer(x, z))(layer, jnp.ones((3, 64), jnp.bfloat16), jnp.zeros((3, 8)))
        >>> y.shape
        (3, 64)

    Args:
        num_experts: logical experts E.
        hidden_size: H, width of input and output.
        intermediate_size: I of one expert.
        top_k: experts per token.
        scheme: what is quantized: a scheme name, a ``Scheme``, a quantization config group, or None for unquantized.
        activation: name of an activation of ``moe_jax.activations``.
        is_act_and_mul: the layer is gated: w13 holds w1 (gate) and w3 (up).
        renormalize, scoring_func, use_grouped_topk, num_expert_group, topk_group, routed_scaling_factor,
            custom_routing_function: routing, see ``moe_jax.routing.route``.
        e_score_correction_bias: None, True (a leaf (E,) float32 to be loaded) or an array (E,).
        apply_routed_scale_to_output: multiply the routed output instead of the router weights by the factor.
        apply_router_weight_on_input: multiply x by its router weight before w13; requires top_k = 1.
        router_logits_dtype: dtype in which router logits are taken; None keeps what the caller passes.
        zero_expert_type: "identity" if the logits have extra columns, for "zero experts", which return their input.
        hash_indices_table: (vocab, top_k) int array of expert ids by token id; the call then needs ``token_ids``.
        per_expert_scale: (E,) learned scale of the router weights, read by the "gemma4" routing preset.
        swiglu_limit, swiglu_alpha, swiglu_beta: parameters of clamped SwiGLU activations.
        has_bias: the experts have biases, (E, G, I) and (E, H) in ``param_dtype``.
        router: module mapping x (T, H) to logits (T, E), used when the call passes ``router_logits=None``.
        shared_experts: module that maps the untransformed input x to an output that is added to the routed one.
        shared_expert_gate: module mapping x to (T, 1); its sigmoid scales the shared output.
        routed_input_transform: callable applied to the input of the routed experts only.
        routed_output_transform: callable applied to the output of the routed experts only.
        mesh, expert_axis, tensor_axis, data_axis, sequence_axis, dispatch, reduce_results: the layer over a mesh, see
            ``moe_jax.parallel.ParallelConfig``. Weights are made, loaded and held in shards.
        placement: "linear" or "round_robin", which experts lie on which device of the expert axis.
        enable_eplb: experts may be moved and copied according to their load.
        num_redundant_experts: slots for copies, with ``enable_eplb``.
        expert_mapping: rows of ``make_expert_params_mapping``, which translate checkpoint names. None recognises the
            known spellings.
        name: shown in errors and by ``explain``.
        implementation: name of a backend, or ordered names to try; None takes the order of the platform.
        pinned_tokens: choose tiles as for this many tokens in every call. A token's output then has the same bits
            beside any number of other tokens (except with per-tensor dynamic activation scales).
        keep_hidden: the forward pass keeps gate and up of each row for the backward pass, see ``MoEConfig``.
        dtype: computation dtype, bfloat16, float16 or float32.
        param_dtype: storage dtype of unquantized weights and biases.
        rngs: random state to initialise from; None builds an abstract layer (no memory) to be loaded.

    Raises:
        ValueError: contradictory arguments.
        NotImplementedError: a capability that is not built yet, by name.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        top_k: int,
        scheme: SchemeLike = None,
        activation: str = "silu",
        is_act_and_mul: bool = True,
        renormalize: bool = True,
        scoring_func: str = "softmax",
        use_grouped_topk: bool = False,
        num_expert_group: int | None = None,
        topk_group: int | None = None,
        e_score_correction_bias: ArrayArg | bool | None = None,
        routed_scaling_factor: float = 1.0,
        apply_routed_scale_to_output: bool = False,
        apply_router_weight_on_input: bool = False,
        custom_routing_function: Callable[..., Any] | str | None = None,
        router_logits_dtype: DTypeLike | None = None,
        zero_expert_type: str | None = None,
        hash_indices_table: ArrayArg | None = None,
        per_expert_scale: ArrayArg | None = None,
        swiglu_limit: float | None = None,
        swiglu_alpha: float | None = None,
        swiglu_beta: float | None = None,
        has_bias: bool = False,
        router: Submodule | None = None,
        shared_experts: Submodule | None = None,
        shared_expert_gate: Submodule | None = None,
        routed_input_transform: Submodule | None = None,
        routed_output_transform: Submodule | None = None,
        mesh: Any = None,
        expert_axis: str | None = None,
        tensor_axis: str | None = None,
        data_axis: str | None = None,
        sequence_axis: str | None = None,
        dispatch: str | None = None,
        reduce_results: bool = True,
        placement: str = "linear",
        enable_eplb: bool = False,
        num_redundant_experts: int = 0,
        expert_mapping: Any = None,
        name: str = "",
        implementation: "str | Iterable[str] | None" = None,
        pinned_tokens: int | None = None,
        keep_hidden: bool = False,
        dtype: DTypeLike = jnp.bfloat16,
        param_dtype: DTypeLike = jnp.bfloat16,
        rngs: nnx.Rngs | None = None,
    ):
        arguments = dict(locals())
        check_rngs(rngs)
        check_callables(
            router=router,
            shared_experts=shared_experts,
            shared_expert_gate=shared_expert_gate,
            routed_input_transform=routed_input_transform,
            routed_output_transform=routed_output_transform,
        )
        self.parallel: ParallelConfig | None = make_parallel(**_settings(ParallelConfig, arguments))
        self.placement: PlacementParam | None = make_placement(
            self.parallel, num_experts, placement, enable_eplb=enable_eplb, num_redundant_experts=num_redundant_experts
        )
        if shared_expert_gate is not None and shared_experts is None:
            raise ValueError("shared_expert_gate is given without shared_experts; pass both or neither")
        if zero_expert_type is not None and (routed_input_transform or routed_output_transform):
            raise ValueError(
                f"zero_expert_type={zero_expert_type!r} adds the layer's input to its output, which means nothing with "
                "routed_input_transform or routed_output_transform; drop one of them"
            )
        if not reduce_results and routed_output_transform is not None:
            raise ValueError("reduce_results=False leaves sums to the caller, but routed_output_transform needs them")
        activation = parse_activation(activation, is_gated=boolean("is_act_and_mul", is_act_and_mul))
        names = (implementation,) if isinstance(implementation, str) else implementation
        derived: dict[str, Any] = dict(
            scheme=Scheme.parse(scheme),
            activation=activation,
            is_act_and_mul=not activation.endswith(NOT_GATED_SUFFIX),
            implementation=None if names is None else tuple(names),
        )
        self.config: MoEConfig = MoEConfig(**_settings(MoEConfig, arguments) | derived)
        resolve_activation(self.config)
        order_of(self.config, platform="cpu")  # checks the names, which do not depend on the platform
        validate_routing(
            self.config,
            has_correction_bias=e_score_correction_bias is not None,
            has_hash_table=hash_indices_table is not None,
        )
        rows = _mapping_rows(expert_mapping)
        if rows is not None and enable_eplb:  # copies are made of what the first row of an expert brings
            rows = tuple(row for row in rows if row[2] < num_experts)
        self.expert_mapping = rows
        self.router = router
        self.shared_experts = shared_experts
        self.shared_expert_gate = shared_expert_gate
        self.routed_input_transform = routed_input_transform
        self.routed_output_transform = routed_output_transform
        self.loads_correction_bias: bool = e_score_correction_bias is True
        self.correction_bias: RoutingParam | None = routing_bias(
            e_score_correction_bias, self.config, is_abstract=rngs is None
        )
        self.hash_table: RoutingParam | None = routing_table(hash_indices_table, top_k, num_experts)
        if per_expert_scale is not None and custom_routing_function != "gemma4":
            raise ValueError("per_expert_scale is read by custom_routing_function='gemma4' only; drop one or name it")
        self.per_expert_scale: RoutingParam | None = routing_scale(per_expert_scale, num_experts)
        self.version: WeightsVersion = WeightsVersion(np.zeros((), np.int32))
        self.lora: ExpertLoRA | None = None  # moe_jax.lora gives it one
        self.weights: QuantizedParam | ExpertParams = weights_variable(
            self._abstract_weights() if rngs is None else self._random_weights(rngs.params())
        )
        self.weights.name_axes(self.parallel)

    # -- forward ------------------------------------------------------------------------------------------------------

    @overload
    def __call__(
        self,
        x: ArrayArg,
        router_logits: Any = None,
        *,
        token_mask: ArrayArg | None = None,
        token_ids: ArrayArg | None = None,
        replayed_ids: ArrayArg | None = None,
        return_stats: Literal[False] = False,
    ) -> Array: ...

    @overload
    def __call__(
        self,
        x: ArrayArg,
        router_logits: Any = None,
        *,
        token_mask: ArrayArg | None = None,
        token_ids: ArrayArg | None = None,
        replayed_ids: ArrayArg | None = None,
        return_stats: Literal[True],
    ) -> tuple[Array, MoEStats]: ...

    @overload
    def __call__(
        self,
        x: ArrayArg,
        router_logits: Any = None,
        *,
        token_mask: ArrayArg | None = None,
        token_ids: ArrayArg | None = None,
        replayed_ids: ArrayArg | None = None,
        return_stats: bool,
    ) -> Array | tuple[Array, MoEStats]: ...

    @property
    def takes_router_parts(self) -> bool:
        """Whether a call may use ``router_parts``."""
        return self.parallel is None and self.config.router_logits_dtype is None

    def __call__(
        self,
        x: ArrayArg,
        router_logits: Any = None,
        *,
        token_mask: ArrayArg | None = None,
        token_ids: ArrayArg | None = None,
        replayed_ids: ArrayArg | None = None,
        router_parts: ArrayArg | None = None,
        return_stats: bool = False,
    ) -> Array | tuple[Array, MoEStats]:
        """Route every token to its experts and return the weighted sum.

        Args:
            x: (..., H), floats of 16 or 32 bits; computation runs in ``dtype`` and the result has x's dtype.
            router_logits: (..., E) any float dtype, or None when the layer owns a router.
            token_mask: (...,) bool, False for padding: such tokens cost nothing and return 0.
            token_ids: (...,) int, needed by hash routing only.
            replayed_ids: (..., top_k) int, experts to take instead of choosing, see ``moe_jax.routing.RoutedExperts``.
            router_parts: (P, T, E) float32 whose sum over P is ``router_logits`` of all T tokens: a kernel that routes
                adds them up. A layer over a mesh does without.
            return_stats: also return ``MoEStats``; the layer itself is never mutated.

        Returns:
            (..., H) in x's dtype, or a pair of that and ``MoEStats``.

        Raises:
            ValueError: shapes do not fit, or the weights have not been loaded. TypeError: no array, or another dtype.
        """
        return_stats = boolean("return_stats", return_stats)
        self = one_version(self)  # other threads may reload meanwhile
        config = self.config
        weights = self.weights.get_value()
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(weights)):
            raise ValueError(
                f"{self._label()} has no weights yet: call load_weights(pairs), then process_weights_after_loading(), "
                "or build it with rngs="
            )
        check_array("x", x, jnp.floating, f"(..., {config.hidden_size}) for {self._label()}")
        check_is_kept("x", x)
        if x.ndim < 1 or (x.shape[-1] != config.hidden_size and self.routed_input_transform is None):
            raise ValueError(f"x has shape {x.shape}, expected (..., {config.hidden_size}) for {self._label()}")
        x = without_padding(x, token_mask)
        if router_logits is None:
            if self.router is None:
                raise ValueError(f"router_logits is None and {self._label()} owns no router; pass logits or router=")
            router_logits = self.router(x)
        check_array("router_logits", router_logits, jnp.floating, f"(..., {config.num_experts})")
        lead = x.shape[:-1]
        if router_logits.ndim < 1:
            raise ValueError(f"router_logits has shape (), expected {(*lead, config.num_experts)} to match x {x.shape}")
        if token_ids is not None:
            check_array("token_ids", token_ids, jnp.integer, f"{lead} to match x")
        if replayed_ids is not None:
            check_array("replayed_ids", replayed_ids, jnp.integer, f"{(*lead, config.top_k)}")
        for label, value, shape in (
            ("router_logits", router_logits, (*lead, router_logits.shape[-1])),
            ("token_ids", token_ids, lead),
            ("replayed_ids", replayed_ids, (*lead, config.top_k)),
        ):
            if value is not None and value.shape != shape:
                raise ValueError(f"{label} has shape {value.shape}, expected {shape} to match x {x.shape}")
        tokens = x.reshape(-1, x.shape[-1])
        mask = None if token_mask is None else token_mask.reshape(-1)
        routed_in: Any = tokens if self.routed_input_transform is None else self.routed_input_transform(tokens)
        shared = self._shared(tokens)
        is_added_last = shared is not None and self.routed_output_transform is not None
        options: dict[str, Any] = dict(
            router_logits=router_logits.reshape(-1, router_logits.shape[-1]),
            weights=weights if self.lora is None else self.lora.added_to(weights, lead),
            config=config,
            routing=self._routing_params(),
            token_mask=mask,
            token_ids=None if token_ids is None else token_ids.reshape(-1),
            replayed_ids=None if replayed_ids is None else replayed_ids.reshape(-1, replayed_ids.shape[-1]),
            shared_output=None if is_added_last else shared,
        )
        if router_parts is not None and self.takes_router_parts:
            options["router_parts"] = router_parts
        if self.parallel is not None:
            options |= dict(parallel=self.parallel, placement=self._slots)
            y, stats = fused_moe_over_mesh(routed_in, **options, return_stats=True)
        elif lies_on_explicit_axes((routed_in, options)):
            y, stats = in_auto_axes(_with_stats, routed_in, options)
        else:
            y, stats = _with_stats(routed_in, **options)
        if self.routed_output_transform is not None:
            y = self.routed_output_transform(y)
        if shared is not None and is_added_last:
            check_output("shared_experts", shared, y.shape)
            y = (y.astype(jnp.float32) + shared.astype(jnp.float32)).astype(y.dtype)
        if mask is not None:
            y = jnp.where(mask[:, None], y, jnp.zeros_like(y))
        y = ready_to_split(y, y.ndim - 2, lead).reshape(*y.shape[:-2], *lead, y.shape[-1])
        return (y, stats) if return_stats else y

    def routed_rows(
        self,
        x: Array,
        router_logits: Array,
        token_mask: Array | None = None,
        *,
        router_parts: Array | None = None,
        is_combined: bool = False,
    ) -> tuple[RoutedRows | Array, MoEStats] | None:
        """What a call adds up for each token, for a caller who adds it to more in one launch, and ``MoEStats``; or the
        sum, where the last product makes it or is_combined.

        x: (..., H) in ``dtype``, masked tokens anything. router_logits: (..., E). token_mask: (...,) bool or None;
        masked tokens have no rows, and a sum of zero. router_parts: as of a call. None where more than that sum
        follows, or no backend runs the layer so.
        """
        transforms = (self.routed_input_transform, self.routed_output_transform)
        is_plain = self.parallel is None and self.lora is None and transforms == (None, None)
        if not is_plain or x.dtype != self.config.dtype:
            return None
        if token_mask is not None and self.shared_experts is not None:  # whose output of masked tokens is zeroed
            return None
        tokens = x.reshape(-1, x.shape[-1])
        logits = router_logits.reshape(-1, router_logits.shape[-1])
        mask = None if token_mask is None else token_mask.reshape(-1)
        arguments = (self.weights.get_value(), self.config, self._routing_params(), mask, self._shared(tokens))
        parts = router_parts if self.takes_router_parts else None
        found = routed_rows(tokens, logits, *arguments, router_parts=parts, is_combined=is_combined)
        if found is None or isinstance(found[0], RoutedRows):
            return found
        return found[0].reshape(x.shape), found[1]

    def _shared(self, tokens: ArrayArg) -> Array | None:
        if self.shared_experts is None:
            return None
        shared = self.shared_experts(tokens)
        if self.shared_expert_gate is None:
            return shared
        gate = self.shared_expert_gate(tokens)
        check_output("shared_expert_gate", gate, (tokens.shape[0], 1))
        return shared.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))

    def _routing_params(self) -> RoutingParams:
        return RoutingParams(
            correction_bias=value_of(self.correction_bias),
            hash_indices_table=value_of(self.hash_table),
            per_expert_scale=value_of(self.per_expert_scale),
        )

    # -- loading ------------------------------------------------------------------------------------------------------

    def load_weights(self, pairs: Iterable[tuple[str, ArrayArg]]) -> set[str]:
        """Stage checkpoint tensors on the host; may be called any number of times, in any order of tensors.

        Args:
            pairs: (checkpoint name, array). Names may carry the layer's prefix; arrays are numpy or JAX arrays in the
                checkpoint's dtype and shape, per expert or fused over experts.

        Returns:
            The names that were used.

        Raises:
            ValueError: a wrong shape or dtype, a value that is not finite, or a layer that is processed already (use
                ``reload_weights``). Everything staged is then dropped: load all pairs again. What is unknown, duplicate
                or missing is named in one error by ``process_weights_after_loading``.
        """
        if self not in _staging:
            if not self._is_abstract():
                raise ValueError(
                    f"{self._label()} is already processed; use reload_weights(pairs) to replace its weights"
                )
            _staging[self] = self._new_loader()
        try:
            return _staging[self].load(pairs)
        except Exception:
            del _staging[self]  # which of the pairs came before is unknown to the caller: start over
            raise

    def process_weights_after_loading(self) -> None:
        """Turn staged tensors into ``ExpertWeights``. Idempotent; raises one error naming everything missing."""
        if self not in _staging:
            if not self._is_abstract():
                return
            self._new_loader().finish()  # raises: nothing has been loaded
        loader = _staging[self]
        try:
            self._install(loader, loader.finish())
        except Exception:
            if loader.is_invalid:
                del _staging[self]
            raise
        del _staging[self]

    def reload_weights(
        self, pairs: Iterable[tuple[str, ArrayArg]], *, experts: Sequence[int] | None = None
    ) -> set[str]:
        """Replace weights by others of the same shapes: atomic, and without recompiling what takes the layer.

        Args:
            pairs: as for ``load_weights``, with every tensor of the experts that are replaced. Full-precision tensors
                are quantized by the layer's scheme.
            experts: ids of the experts to replace, None for all. The others keep their weights, bit for bit. Not for
                schemes with input scales from the checkpoint, which all experts share.

        Returns:
            The names that were used.

        Raises:
            ValueError: as ``load_weights``, and what is missing, duplicate or unexpected. The old weights are untouched
                then, whatever the reason.
        """
        check_not_traced("reload_weights", self)
        if self._is_abstract():
            raise ValueError(f"{self._label()} has no weights to reload; use load_weights(pairs) first")
        loader = self._new_loader(experts)
        used = loader.load(pairs)
        weights, correction_bias = loader.finish(), loader.correction_bias
        with changing():
            if experts is not None:
                weights = self._with_experts(experts, weights)
                correction_bias = value_of(self.correction_bias) if self.loads_correction_bias else None
            install([*self.new_values(weights, correction_bias=correction_bias), self.next_version()])
        return used

    def _with_experts(self, experts: Sequence[int], weights: ExpertWeights) -> ExpertWeights:
        """The layer's weights with some experts replaced; every leaf has the experts as its first axis."""
        if self.parallel is not None:
            held = plain_shares(self.weights.get_value(), self.config, self._slots, self.parallel)
            return replace_experts(held, experts, weights, self._slots)
        index = jnp.asarray(experts)
        return jax.tree.map(lambda old, new: old.at[index].set(new), plain_layout(self.weights.get_value()), weights)

    def set_weights(self, weights: ExpertWeights, *, correction_bias: ArrayArg | None = None) -> None:
        """Install processed weights, for loaders that stream a whole model. Shapes and dtypes must be the layer's.

        Args:
            weights: as made by the method's ``process_weights_after_loading``.
            correction_bias: (E,), required exactly when the layer was built with ``e_score_correction_bias=True``.
        """
        with changing():
            install(self.new_values(weights, correction_bias=correction_bias))

    def new_values(self, weights: ExpertWeights, *, correction_bias: ArrayArg | None = None) -> list[tuple[Place, Any]]:
        """What ``set_weights`` would install: checks that can fail, without a change.

        weights: all experts in their order, or on the layer's mesh and in its slots.
        """
        are_placed = is_placed(weights, self.parallel)
        current = self._abstract_weights() if are_placed else self.weights.get_value()
        if not are_placed and (self.parallel is not None or weights.w13.layout.is_plain):
            current = method_for(self.config.scheme).abstract_weights(self.config)
        expected, found = signature(current), signature(weights)
        if expected != found:
            raise ValueError(f"{self._label()}: weights do not fit the layer: expected {expected}, found {found}")
        if (correction_bias is not None) != self.loads_correction_bias:
            found = "missing" if correction_bias is None else "given"
            raise ValueError(f"{self._label()}: {CORRECTION_BIAS} is {found}, but the layer was built otherwise")
        values: list[tuple[Place, Any]] = [(Place(self, "weights"), self._laid_out(weights))]
        if correction_bias is not None:
            values.append((Place(self, "correction_bias"), checked_bias(correction_bias, self.config)))
        return values

    def next_version(self) -> tuple[Place, Any]:
        """What a reload installs besides."""
        return Place(self, "version"), self.version.get_value() + np.int32(1)

    @property
    def num_slots(self) -> int:
        """Places of experts: E, and with copies of some over a mesh as many more."""
        return self.config.num_experts if self.placement is None else self._slots.num_slots

    @property
    def _slots(self) -> Placement:
        """Which expert each slot of the mesh holds; a layer without a mesh has none."""
        assert self.placement is not None
        return self.placement.get_value()

    def _abstract_weights(self) -> ExpertWeights:
        """What the layer holds, as shapes: over a mesh with shardings."""
        if self.parallel is None:
            return method_for(self.config.scheme).abstract_weights(self.config)
        return abstract_placed_weights(self.config, self._slots, self.parallel)

    def _random_weights(self, key: jax.Array) -> ExpertWeights:
        if self.parallel is None:
            return random_experts(self.config, key)
        return random_shares(self.config, key, self._slots, self.parallel)

    def _laid_out(self, weights: ExpertWeights) -> ExpertWeights:
        """All experts of the layer as it holds them: in shares over its mesh, or as this device reads them best."""
        if self.parallel is None and self.lora is not None:
            return in_best_layout(self.config, self._adapted(plain_layout(weights))).adapted(None, None)
        if self.parallel is None:
            return in_best_layout(self.config, weights)
        return lay_out(weights, self.config, self._slots, self.parallel)

    def _adapted(self, weights: ExpertWeights) -> ExpertWeights:
        return weights if self.lora is None else self.lora.added_to(weights)

    def set_lora(self, lora: ExpertLoRA | None) -> None:
        """Add an adapter to the experts, or take it away. The experts are laid out for the backend that then runs."""
        self.lora = nnx.data(lora)
        if not self._is_abstract():
            self.weights.set_value(self._laid_out(self.weights.get_value()))

    def _install(self, loader: LayerLoader, weights: ExpertWeights) -> None:
        self.set_weights(weights, correction_bias=loader.correction_bias)

    def _new_loader(self, experts: Sequence[int] | None = None) -> LayerLoader:
        activations = self.config.scheme.activations
        if experts is not None and activations is not None and activations.needs_input_scale:
            raise ValueError(
                f"{self._label()}: scheme {self.config.scheme.name!r} has one input scale for all experts, the maximum "
                "of theirs; reload all experts at once"
            )
        has_own_bias = self.correction_bias is not None and not self.loads_correction_bias
        return LayerLoader(
            self.config,
            experts=experts,
            expert_mapping=self.expert_mapping,
            has_correction_bias=None if has_own_bias else self.loads_correction_bias and experts is None,
            own_correction_bias=value_of(self.correction_bias) if has_own_bias else None,
        )

    def _is_abstract(self) -> bool:
        return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(self.weights.get_value()))

    # -- state of flax ------------------------------------------------------------------------------------------------

    def _graph_node_flatten(self) -> Any:
        self._warn_if_frozen()
        return super()._graph_node_flatten()

    def _pytree__flatten_with_paths(self) -> Any:
        self._warn_if_frozen()
        return super()._pytree__flatten_with_paths()

    def _warn_if_frozen(self) -> None:
        if isinstance(self.weights, QuantizedParam) and self.lora is None:
            warn_of_frozen_experts(self._label(), self.config.scheme.name)

    # -- text ---------------------------------------------------------------------------------------------------------

    def explain(self, num_tokens: int) -> str:
        """What would run for a call with ``num_tokens`` tokens and why; also the weights' version."""
        check_not_traced("explain", self)
        self = one_version(self)
        weights, version = self._adapted(self.weights.get_value()), self.version.get_value()
        if self.parallel is None:
            text = explain(self.config, weights, num_tokens)
        else:
            text = explain_parallel(self.config, self.parallel, self._slots, weights, num_tokens)
        return f"{text}\nweights version: {int(version)}"

    def _label(self) -> str:
        return f"FusedMoE {self.config.name!r}" if self.config.name else "FusedMoE"

    def __repr__(self) -> str:
        c = self.config
        return (
            f"FusedMoE(num_experts={c.num_experts}, hidden_size={c.hidden_size}, "
            f"intermediate_size={c.intermediate_size}, top_k={c.top_k}, scheme={c.scheme.name!r}, "
            f"activation={c.activation!r}, dtype={jnp.dtype(c.dtype).name!r}, name={c.name!r}"
            f"{'' if self.parallel is None else f', {self.parallel}, {self._slots}'})"
        )


def _with_stats(x: Any, router_logits: Any, weights: ExpertWeights, **options: Any) -> tuple[Any, Any]:
    return fused_moe(x, router_logits, weights, **options, return_stats=True)


def _mapping_rows(expert_mapping: Any) -> tuple[tuple[Any, ...], ...] | None:
    """Hashable rows (parameter, weight name, expert, shard). Raises TypeError for anything else."""
    if expert_mapping is None:
        return None
    try:
        rows = tuple(tuple(row) for row in expert_mapping)
        is_mapping = all([type(cell) for cell in row] == [str, str, int, str] for row in rows)
    except TypeError:
        rows, is_mapping = (), False
    if not is_mapping:
        raise TypeError(
            f"expert_mapping={shown(expert_mapping)}, expected rows of make_expert_params_mapping: (parameter name, "
            "weight name, expert, shard)"
        )
    return rows


def _settings(cls: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a layer's arguments that are fields of a config object."""
    return {field.name: arguments[field.name] for field in dataclasses.fields(cls) if field.name in arguments}
