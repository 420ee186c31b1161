"""config.json of both dialects -> DecoderConfig, and everything that is refused by name."""

import copy

import pytest

from moe_jax.models.families._registry import read_family
from moe_jax.models.families.mixtral import MixtralForCausalLM
from moe_jax.models.families.qwen3_moe import Qwen3MoeForCausalLM
from tests.support.refusals import refuses

# As the hub has them (transformers 4).
QWEN3_HUB = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MIXTRAL_HUB = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.36.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}


def changed(config, drop=(), **changes):
    result = {**copy.deepcopy(config), **changes}
    return {key: value for key, value in result.items() if key not in drop}


def test_qwen3_hub_file():
    family, config = read_family(QWEN3_HUB)
    assert family is Qwen3MoeForCausalLM and hash(config)
    assert (config.hidden_size, config.num_layers, config.vocab_size) == (2048, 48, 151936)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (32, 4, 128)
    assert (config.num_experts, config.top_k, config.moe_intermediate_size, config.renormalize) == (128, 8, 768, True)
    assert config.moe_layers == tuple(range(48)) and config.qk_norm == "head" and not config.use_attention_bias
    assert config.sliding_window is None and config.rope.theta == 1e6 and config.rms_norm_eps == 1e-6
    assert config.eos_token_id == (151645,) and config.rope.max_seq_len == 40960


def test_mixtral_hub_file():
    family, config = read_family(MIXTRAL_HUB)
    assert family is MixtralForCausalLM
    assert config.head_dim == 128 and config.moe_intermediate_size == 14336 and config.num_experts == 8
    assert config.renormalize and config.qk_norm is None and config.moe_layers == tuple(range(32))


@pytest.mark.parametrize("hub", [QWEN3_HUB, MIXTRAL_HUB], ids=["qwen3", "mixtral"])
def test_transformers_5_dialect(hub):
    new = changed(hub, drop=("torch_dtype", "rope_theta", "rope_scaling", "num_experts"), dtype="bfloat16")
    new["rope_parameters"] = {"rope_theta": 1e6, "rope_type": "default"}
    new["num_local_experts"] = hub.get("num_experts", hub.get("num_local_experts"))
    assert read_family(new) == read_family(hub)


def test_dense_layers():
    _, config = read_family(changed(QWEN3_HUB, num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3]))
    assert config.moe_layers == (1, 5)


def test_windows():
    assert read_family(changed(MIXTRAL_HUB, sliding_window=4096))[1].sliding_window == 4096
    assert read_family(changed(QWEN3_HUB, sliding_window=4096))[1].sliding_window is None
    everywhere = changed(QWEN3_HUB, sliding_window=4096, use_sliding_window=True)
    assert read_family(everywhere)[1].sliding_window == 4096
    refuses(ValueError, "max_window_layers=28 of 48", read_family, changed(everywhere, max_window_layers=28))


def test_eos_list():
    assert read_family(changed(QWEN3_HUB, eos_token_id=[1, 5]))[1].eos_token_id == (1, 5)
    assert read_family(changed(QWEN3_HUB, eos_token_id=None))[1].eos_token_id == ()


def test_unrelated_keys_are_harmless():
    extra = changed(
        QWEN3_HUB, transformers_version="9", _name_or_path="x", pad_token_id=0, quantization_config={"a": 1}
    )
    assert read_family(extra) == read_family(QWEN3_HUB)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(model_type="llama"), ["'llama'", "MixtralForCausalLM", "Qwen3MoeForCausalLM"]),
        (dict(model_type=None), ["model_type"]),
        (dict(architectures=["Qwen3MoeForSequenceClassification"]), ["Qwen3MoeForSequenceClassification", "supported"]),
        (dict(hidden_act="gelu"), ["hidden_act", "'gelu'", "silu"]),
        (dict(hidden_size="2048"), ["hidden_size", "'2048'", "integer"]),
        (dict(hidden_size=0), ["hidden_size", "0"]),
        (dict(num_hidden_layers=True), ["num_hidden_layers", "True"]),
        (dict(num_key_value_heads=5), ["num_attention_heads=32", "num_key_value_heads=5"]),
        (dict(num_experts_per_tok=129), ["num_experts_per_tok=129", "128"]),
        (dict(num_local_experts=64), ["num_local_experts=64", "num_experts=128", "disagree"]),
        (dict(rms_norm_eps="tiny"), ["rms_norm_eps", "'tiny'"]),
        (dict(norm_topk_prob=1), ["norm_topk_prob", "true or false"]),
        (dict(mlp_only_layers="0"), ["mlp_only_layers", "'0'"]),
        (dict(rope_scaling={"rope_type": "spiral"}), ["spiral"]),
        (dict(rope_theta=None), ["rope_theta"]),
        (dict(shared_expert_intermediate_size=512), ["shared_expert_intermediate_size=512"]),
        (dict(final_logit_softcapping=30.0), ["final_logit_softcapping=30.0"]),
        (dict(partial_rotary_factor=0.5), ["partial_rotary_factor=0.5"]),
        (dict(scoring_func="sigmoid"), ["scoring_func='sigmoid'"]),
        (dict(eos_token_id=151936), ["eos_token_id=[151936]", "0 to 151935"]),
        (dict(eos_token_id=[1, 2**40]), ["eos_token_id", "vocabulary"]),
        (dict(eos_token_id=list(range(10**6))), ["eos_token_id=[0, 1", " ... is outside the vocabulary"]),
        (dict(model_type=10**300), ["model_type 1000", " ... is not supported"]),
        (dict(architectures=["x" * 10**4]), ["architectures ['xxx", " ... is not supported"]),
    ],
)
def test_refusals(changes, words):
    with pytest.raises(ValueError) as caught:
        read_family(changed(QWEN3_HUB, **changes), source="dir/config.json")
    message = str(caught.value)
    assert message.startswith("dir/config.json: ") and all(word in message for word in words) and "\n" not in message
    assert len(message) < 1000


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "vocab_size",
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "rms_norm_eps",
        "norm_topk_prob",
        "hidden_act",
        "max_position_embeddings",
        "num_attention_heads",
    ],
)
def test_missing_keys(key):
    refuses(ValueError, key, read_family, changed(QWEN3_HUB, drop=(key,)))


def test_misspelt_optional_key():
    wrong = changed(QWEN3_HUB, drop=("tie_word_embeddings",), tie_word_embedings=True)
    refuses(ValueError, "'tie_word_embedings'; was 'tie_word_embeddings' meant", read_family, wrong)
