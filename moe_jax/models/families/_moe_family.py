"""``MoEFamily``: what a model family says about its blocks with experts, and how one of them is built.

A family is one file with one subclass. Its class attributes are the words of its checkpoints; ``read_config`` turns its
config.json into a typed config. A family derives from ``CausalLM``, which is a MoEFamily.
"""

from collections.abc import Collection
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx

from moe_jax._typing import DTypeLike, Json
from moe_jax._versions import Place
from moe_jax.loading import ExpertNames
from moe_jax.models._config import ConfigReader, DecoderConfig, MoEBlockConfig
from moe_jax.models._layers import Linear, SharedExperts
from moe_jax.nn import FusedMoE, MoEBlock
from moe_jax.nn._variables import CORRECTION_BIAS
from moe_jax.parallel._logical import EMBED, name_axes
from moe_jax.quantization import Scheme

# Fields of a config that are arguments of ``FusedMoE``.
_OF_EXPERTS = ("renormalize", "scoring_func", "num_expert_group", "topk_group", "routed_scaling_factor")
_OF_EXPERTS += ("custom_routing_function", "apply_router_weight_on_input")
_OF_EXPERTS += ("activation", "swiglu_limit", "swiglu_alpha", "has_bias")


class MoEFamily:
    """One family of models with experts.

    model_type, architecture: config.json's words; other_model_types and other_architectures mean the same. moe_module:
    where a layer's experts and router lie in a checkpoint; router_module, shared_module and shared_gate_module lie in
    it, and so does the correction bias, None for one of the router. expert_names: what the experts' tensors are called
    in messages, and whether gate and up rows alternate. model_module, head_module: where the language model and its
    head lie; other_modules: where a checkpoint keeps other models, such as one of pictures, which are left out.
    """

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    other_model_types: ClassVar[tuple[str, ...]] = ()
    other_architectures: ClassVar[tuple[str, ...]] = ()
    moe_module: ClassVar[str] = "mlp"
    router_module: ClassVar[str] = "gate"
    shared_module: ClassVar[str] = "shared_experts"
    shared_gate_module: ClassVar[str] = "shared_expert_gate"
    correction_bias_name: ClassVar[str | None] = None
    expert_names: ClassVar[ExpertNames] = ExpertNames()
    model_module: ClassVar[str] = "model"
    head_module: ClassVar[str] = "lm_head"
    other_modules: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def read_config(reader: ConfigReader) -> DecoderConfig:
        raise NotImplementedError("a family defines read_config")

    @classmethod
    def is_described_by(cls, reader: ConfigReader) -> bool:
        """Whether a config.json has this family's words; it may leave ``architectures`` out."""
        stated = reader.value("architectures", default=[])
        known = (cls.architecture, *cls.other_architectures)
        is_known = reader.value("model_type") in (cls.model_type, *cls.other_model_types)
        return is_known and (stated == [] or stated in [[name] for name in known])

    @classmethod
    def doubts(cls, source: Any, raw: Json) -> str | None:
        """What a user should be warned of: a checkpoint that is sound by its names and shapes and may still be wrong.

        source: has the ``names`` of the tensors. raw: the parsed config.json.
        """
        return None

    @classmethod
    def make_moe_block(
        cls,
        config: MoEBlockConfig,
        layer: int,
        *,
        scheme: Scheme | None = None,
        implementation: Any = None,
        dtype: DTypeLike = jnp.bfloat16,
        rngs: nnx.Rngs | None = None,
    ) -> MoEBlock:
        """The block with experts of one layer; router logits are kept in float32."""
        options: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        experts = FusedMoE(
            config.num_experts,
            config.hidden_size,
            config.moe_intermediate_size,
            top_k=config.top_k,
            scheme=scheme,
            use_grouped_topk=config.num_expert_group is not None,
            e_score_correction_bias=config.has_correction_bias or None,
            **{name: getattr(config, name) for name in _OF_EXPERTS},
            name=cls.moe_prefix(layer),
            implementation=implementation,
            pinned_tokens=config.pinned_tokens,
            param_dtype=dtype,
            **options,
        )
        router = Linear(
            config.hidden_size,
            config.num_experts,
            use_bias=config.has_router_bias,
            out_dtype=jnp.float32,
            **options,
        )
        name_axes(router.weight, (None, EMBED))
        shared = None
        if config.shared_intermediate_size:
            shared = SharedExperts(
                config.hidden_size,
                config.shared_intermediate_size,
                has_gate=config.has_shared_expert_gate,
                **options,
            )
        return MoEBlock(experts, router, shared)

    @classmethod
    def left_out(cls, names: Collection[str]) -> dict[str, int]:
        """How many of a checkpoint's tensors belong to each of ``other_modules``."""
        counts = {module: sum(name.startswith(f"{module}.") for name in names) for module in cls.other_modules}
        return {module: count for module, count in counts.items() if count}

    @classmethod
    def layers_module(cls) -> str:
        """Name of the layers in checkpoints of the family."""
        return f"{cls.model_module}.layers"

    @classmethod
    def moe_prefix(cls, layer: int) -> str:
        """Name of a layer's block in checkpoints of the family."""
        return f"{cls.layers_module()}.{layer}.{cls.moe_module}"

    @classmethod
    def moe_dense_modules(cls, block: MoEBlock, layer: int) -> dict[str, Any]:
        """Checkpoint name -> module, or place of a parameter, for what is not an expert in a block."""
        prefix, shared = cls.moe_prefix(layer), block.shared_experts
        router = f"{prefix}.{cls.router_module}"
        modules: dict[str, Any] = {router: block.router}
        if block.experts.correction_bias is not None:
            name = cls.correction_bias_name or f"{cls.router_module}.{CORRECTION_BIAS}"
            modules[f"{prefix}.{name}"] = Place(block.experts, "correction_bias")
        if isinstance(shared, SharedExperts):
            for name in ("gate_proj", "up_proj", "down_proj"):
                modules[f"{prefix}.{cls.shared_module}.{name}"] = getattr(shared, name)
            if shared.gate is not None:
                modules[f"{prefix}.{cls.shared_gate_module}"] = shared.gate
        return modules
