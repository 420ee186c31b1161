"""What several families' config.json say in the same keys: layers with experts, groups, biases, sliding windows."""

from typing import Any

from moe_jax.loading._errors import shown
from moe_jax.models._config import ConfigReader, IndexerConfig, LinearAttentionConfig, MLAConfig


def layers_by_step(reader: ConfigReader) -> tuple[int, ...]:
    """Qwen: every ``decoder_sparse_step``-th layer, counted from 1, but for ``mlp_only_layers``."""
    step, dense = reader.integer("decoder_sparse_step", default=1), set(reader.integers("mlp_only_layers"))
    return tuple(i for i in range(reader.integer("num_hidden_layers")) if i not in dense and (i + 1) % step == 0)


def layers_after_dense(reader: ConfigReader) -> tuple[int, ...]:
    """DeepSeek and GLM: from ``first_k_dense_replace`` on, every ``moe_layer_freq``-th layer, counted from 0."""
    first = reader.integer("first_k_dense_replace", minimum=0, default=0)
    step = reader.integer("moe_layer_freq", default=1)
    return tuple(i for i in range(first, reader.integer("num_hidden_layers")) if i % step == 0)


def expert_groups(reader: ConfigReader) -> dict[str, int]:
    """``n_group`` and ``topk_group`` as arguments of ``FusedMoE``; none where one group holds all experts."""
    groups, kept = (reader.integer(key, default=1) for key in ("n_group", "topk_group"))
    return {} if groups == 1 else {"num_expert_group": groups, "topk_group": kept}


def attention_biases(reader: ConfigReader, *, default: bool = False) -> dict[str, Any]:
    """``attention_bias``: of the projections into attention and of the one out of it."""
    has_biases = reader.boolean("attention_bias", default=default)
    return dict(use_attention_bias=has_biases, use_output_bias=has_biases)


def shared_experts_size(reader: ConfigReader) -> int:
    """``n_shared_experts`` experts of the size of a routed one, side by side."""
    return reader.integer("n_shared_experts", minimum=0, default=0) * reader.integer("moe_intermediate_size")


def corrected_experts(
    reader: ConfigReader, *, routed_scaling_factor: float, scoring_funcs: tuple[str, ...] = ("sigmoid",)
) -> dict[str, Any]:
    """DeepSeek-V3, GLM-4 MoE and dots1: sigmoid scores, a correction bias, groups of experts, shared experts.

    routed_scaling_factor: its default. scoring_funcs: words for the scores.
    """
    # transformers 5 writes neither key: both follow from the architecture.
    reader.one_of("scoring_func", scoring_funcs, default="sigmoid")
    reader.one_of("topk_method", ("noaux_tc",), default="noaux_tc")
    return dict(
        moe_intermediate_size=("moe_intermediate_size",),
        renormalize=reader.boolean("norm_topk_prob", default=True),
        moe_layers=layers_after_dense(reader),
        scoring_func="sigmoid",
        has_correction_bias=True,
        routed_scaling_factor=reader.positive("routed_scaling_factor", default=routed_scaling_factor),
        shared_intermediate_size=shared_experts_size(reader),
        **expert_groups(reader),
    )


def gated_shared_experts(reader: ConfigReader, *, renormalize: bool) -> dict[str, Any]:
    """Qwen2-MoE and Qwen3-Next, which differ in the default of ``norm_topk_prob`` alone: a shared expert behind a
    sigmoid gate."""
    return dict(
        moe_intermediate_size=("moe_intermediate_size",),
        renormalize=reader.boolean("norm_topk_prob", default=renormalize),
        moe_layers=layers_by_step(reader),
        shared_intermediate_size=reader.integer("shared_expert_intermediate_size"),
        has_shared_expert_gate=True,
    )


def layers_by_type(reader: ConfigReader) -> tuple[int, ...]:
    """Newer GLM: transformers writes ``mlp_layer_types``, published files have what ``layers_after_dense`` reads."""
    kinds, count = reader.value("mlp_layer_types"), reader.integer("num_hidden_layers")
    if kinds is None:
        return layers_after_dense(reader)
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in ("dense", "sparse") for kind in kinds):
        raise reader.error(f"mlp_layer_types is {shown(kinds)}, expected a list of {count}, each dense or sparse")
    return tuple(index for index, kind in enumerate(kinds) if kind == "sparse")


def latent_attention(reader: ConfigReader, indexer: IndexerConfig | None = None) -> dict[str, Any]:
    """DeepSeek's attention, MLA."""
    ranked = reader.value("q_lora_rank") is not None
    return dict(
        mla=MLAConfig(
            q_lora_rank=reader.integer("q_lora_rank") if ranked else None,
            kv_lora_rank=reader.integer("kv_lora_rank"),
            qk_nope_head_dim=reader.integer("qk_nope_head_dim"),
            qk_rope_head_dim=reader.integer("qk_rope_head_dim"),
            v_head_dim=reader.integer("v_head_dim"),
            is_interleaved=reader.boolean("rope_interleave", default=True),
            indexer=indexer,
        ),
        **attention_biases(reader),
    )


def indexer_of_tokens(reader: ConfigReader, *, is_interleaved: bool) -> IndexerConfig:
    """DeepSeek-V3.2 and GLM-5, which differ in the default of ``indexer_rope_interleave``."""
    count = reader.integer("num_hidden_layers")
    kinds, pattern = reader.value("indexer_types"), reader.value("index_topk_pattern")
    step = reader.integer("index_topk_freq", default=1)
    offset = reader.integer("index_skip_topk_offset", minimum=0, default=2)
    if kinds is None and pattern is not None:
        kinds = [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern] if pattern else []
    if kinds is None:
        kinds = ["shared" if max(index - offset + 1, 0) % step else "full" for index in range(count)]
    if not isinstance(kinds, list) or len(kinds) < count or any(kind not in ("full", "shared") for kind in kinds):
        raise reader.error(f"indexer_types is {shown(kinds)}, expected a list of {count}, each full or shared")
    return IndexerConfig(
        num_heads=reader.integer("index_n_heads"),
        head_dim=reader.integer("index_head_dim"),
        topk=reader.integer("index_topk"),
        is_interleaved=reader.boolean("indexer_rope_interleave", default=is_interleaved),
        shared_layers=tuple(index for index in range(count) if kinds[index] == "shared"),
    )


def layers_with_windows(reader: ConfigReader) -> dict[str, Any]:
    """``sliding_window`` in the layers that ``layer_types`` calls sliding_attention."""
    kinds, count = reader.value("layer_types"), reader.integer("num_hidden_layers")
    known = ("sliding_attention", "full_attention")
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in known for kind in kinds):
        raise reader.error(f"layer_types is {shown(kinds)}, expected a list of {count}, each {' or '.join(known)}")
    layers = tuple(index for index, kind in enumerate(kinds) if kind == known[0])
    return dict(sliding_window=reader.integer("sliding_window"), sliding_layers=layers) if layers else {}


def windows_above(reader: ConfigReader) -> dict[str, Any]:
    """``sliding_window``, where stated, from layer ``max_window_layers`` on."""
    count = reader.integer("num_hidden_layers")
    if reader.value("sliding_window") is None:
        return {}
    layers = tuple(range(reader.integer("max_window_layers", minimum=0), count))
    return dict(sliding_window=reader.integer("sliding_window"), sliding_layers=layers) if layers else {}


def gated_delta_net(reader: ConfigReader, *, is_fused: bool) -> dict[str, Any]:
    """Qwen3-Next and Qwen3.5: linear attention in most layers; the others have gated heads, rotated in part.

    is_fused: see ``LinearAttentionConfig``.
    """
    if not reader.boolean("attn_output_gate", default=True):
        raise reader.error("attn_output_gate=false is not supported for this architecture; expected true")
    reader.one_of("output_gate_type", ("swish", "silu"), default="swish")  # of linear attention
    return dict(
        linear_attention=LinearAttentionConfig(
            num_key_heads=reader.integer("linear_num_key_heads"),
            num_value_heads=reader.integer("linear_num_value_heads"),
            key_head_dim=reader.integer("linear_key_head_dim"),
            value_head_dim=reader.integer("linear_value_head_dim"),
            conv_steps=reader.integer("linear_conv_kernel_dim"),
            is_fused=is_fused,
        ),
        linear_layers=_linear_layers(reader),
        has_output_gate=True,
        norm="zero_centered_rms",
        qk_norm="head",
        **attention_biases(reader),
        partial_rotary_factor=0.25,
    )


def _linear_layers(reader: ConfigReader) -> tuple[int, ...]:
    """``layer_types`` as listed, else all but every ``full_attention_interval``-th layer, counted from 1."""
    step, count = reader.integer("full_attention_interval", default=4), reader.integer("num_hidden_layers")
    known = ("linear_attention", "full_attention")
    kinds = reader.value("layer_types", default=[known[(i + 1) % step == 0] for i in range(count)])
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in known for kind in kinds):
        raise reader.error(f"layer_types is {shown(kinds)}, expected a list of {count}, each {' or '.join(known)}")
    return tuple(index for index, kind in enumerate(kinds) if kind == known[0])
