"""Llama 4: one expert per token whose input, not output, is scaled by the sigmoid of its logit; a shared expert.

Most layers attend within chunks and rotate; the others see all positions, do not rotate, and sharpen with distance.
"""

from typing import Any

from moe_jax.models._config import ConfigReader, DecoderConfig, read_decoder_config
from moe_jax.models._decoder import CausalLM
from moe_jax.models.families._layer_rules import attention_biases


class Llama4ForCausalLM(CausalLM):
    """The language model of Llama 4 Scout and Maverick alone, and models of its architecture."""

    model_type = "llama4_text"
    architecture = "Llama4ForCausalLM"
    moe_module = dense_module = "feed_forward"
    router_module = "router"
    shared_module = "shared_expert"

    @staticmethod
    def read_config(reader: ConfigReader) -> DecoderConfig:
        return read_decoder_config(
            reader,
            **_experts(reader),
            **_attention(reader),
            intermediate_size=reader.integer("intermediate_size_mlp"),
            **attention_biases(reader),
        )


class Llama4ForConditionalGeneration(Llama4ForCausalLM):
    """The language model of Llama 4 Scout and Maverick as published, with a vision model beside it."""

    model_type = "llama4"
    architecture = "Llama4ForConditionalGeneration"
    model_module = "language_model.model"
    head_module = "language_model.lm_head"
    other_modules = ("vision_model", "multi_modal_projector")

    @staticmethod
    def read_config(reader: ConfigReader) -> DecoderConfig:
        return Llama4ForCausalLM.read_config(reader.part("text_config"))


def _experts(reader: ConfigReader) -> dict[str, Any]:
    if reader.integer("num_experts_per_tok", default=1) != 1:
        raise reader.error("num_experts_per_tok must be 1, since the router weight scales an expert's input")
    return dict(
        moe_intermediate_size=("intermediate_size",),
        renormalize=False,
        moe_layers=_moe_layers(reader),
        custom_routing_function="llama4",
        apply_router_weight_on_input=True,
        shared_intermediate_size=reader.integer("intermediate_size"),
    )


def _attention(reader: ConfigReader) -> dict[str, Any]:
    """``no_rope_layers`` has 1 where a layer rotates; empty, every ``no_rope_layer_interval``-th layer does not."""
    layers = range(reader.integer("num_hidden_layers"))
    step, stated = reader.integer("no_rope_layer_interval", default=4), reader.integers("no_rope_layers")
    rotates = stated or tuple(int((layer + 1) % step != 0) for layer in layers)
    if len(rotates) < len(layers):
        raise reader.error(f"no_rope_layers has {len(rotates)} entries, expected one for each of {len(layers)} layers")
    kinds = reader.value(
        "layer_types", default=["chunked_attention" if rotates[i] else "full_attention" for i in layers]
    )
    if (
        not isinstance(kinds, list)
        or len(kinds) != len(layers)
        or not {*kinds} <= {"chunked_attention", "full_attention"}
    ):
        raise reader.error(f"layer_types is {kinds!r}, expected {len(layers)} of chunked_attention or full_attention")
    has_chunks = reader.value("attention_chunk_size") is not None
    is_tuned = reader.value("attn_temperature_tuning", default=True)  # the published files have 4 for true
    return dict(
        is_rope_interleaved=True,
        unrotated_layers=tuple(layer for layer in layers if not rotates[layer]),
        qk_norm="rotated_unit" if reader.boolean("use_qk_norm") else None,
        temperature=(reader.positive("floor_scale"), reader.positive("attn_scale")) if is_tuned else None,
        attention_chunk=reader.integer("attention_chunk_size") if has_chunks else None,
        chunked_layers=tuple(layer for layer in layers if kinds[layer] == "chunked_attention"),
    )


def _moe_layers(reader: ConfigReader) -> tuple[int, ...]:
    """``moe_layers`` as listed, else every ``interleave_moe_layer_step``-th layer, counted from 1."""
    step, count = reader.integer("interleave_moe_layer_step", default=1), reader.integer("num_hidden_layers")
    if reader.value("moe_layers") is None:
        return tuple(range(step - 1, count, step))
    listed = reader.integers("moe_layers")
    if any(layer >= count for layer in listed):
        raise reader.error(f"moe_layers is {list(listed)}, expected indices below num_hidden_layers={count}")
    return tuple(sorted(set(listed)))
