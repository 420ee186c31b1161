"""Llama 4: one expert per token whose input, not output, is scaled by the sigmoid of its logit; a shared expert."""

from moe_jax.models._config import ConfigReader, MoEBlockConfig, read_block_config
from moe_jax.models.families._moe_family import MoEFamily


class Llama4Text(MoEFamily):
    """The language model of Llama 4 Scout and Maverick alone, and models of its architecture."""

    model_type = "llama4_text"
    architecture = "Llama4ForCausalLM"
    moe_module = "feed_forward"
    router_module = "router"
    shared_module = "shared_expert"

    @staticmethod
    def read_config(reader: ConfigReader) -> MoEBlockConfig:
        if reader.integer("num_experts_per_tok", default=1) != 1:
            raise reader.error("num_experts_per_tok must be 1, since the router weight scales an expert's input")
        size = reader.integer("intermediate_size")
        return read_block_config(
            reader,
            moe_intermediate_size=("intermediate_size",),
            renormalize=False,
            moe_layers=_moe_layers(reader),
            custom_routing_function="llama4",
            apply_router_weight_on_input=True,
            shared_intermediate_size=size,
        )


class Llama4(Llama4Text):
    """Llama 4 Scout and Maverick as published, with their vision model, which is not read."""

    model_type = "llama4"
    architecture = "Llama4ForConditionalGeneration"
    layers_module = "language_model.model.layers"

    @staticmethod
    def read_config(reader: ConfigReader) -> MoEBlockConfig:
        return Llama4Text.read_config(reader.part("text_config"))


def _moe_layers(reader: ConfigReader) -> tuple[int, ...]:
    """``moe_layers`` as listed, else every ``interleave_moe_layer_step``-th layer, counted from 1."""
    step, count = reader.integer("interleave_moe_layer_step", default=1), reader.integer("num_hidden_layers")
    if reader.value("moe_layers") is None:
        return tuple(range(step - 1, count, step))
    listed = reader.integers("moe_layers")
    if any(layer >= count for layer in listed):
        raise reader.error(f"moe_layers is {list(listed)}, expected indices below num_hidden_layers={count}")
    return tuple(sorted(set(listed)))
