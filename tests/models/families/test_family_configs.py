"""config.json of families as the hub has them -> what it says of experts and attention, and what is refused."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import pytest

from moe_jax.models import DecoderConfig, IndexerConfig, LinearAttentionConfig, MLAConfig, MoEBlockConfig, read_family
from tests.support.refusals import refuses

# Published files, with keys that are read by nobody; of families without a whole model only what is on experts.
HUB = json.loads((Path(__file__).parents[2] / "data/family_configs.json").read_text())
DEEPSEEK_V3 = HUB["deepseek_v3"]
DEEPSEEK_V2 = HUB["deepseek_v2"]
GLM4 = HUB["glm4_moe"]
GPT_OSS = HUB["gpt_oss"] | {"layer_types": ["sliding_attention", "full_attention"] * 12}
LLAMA4 = HUB["llama4"]
QWEN2 = HUB["qwen2_moe"]
QWEN3_NEXT = HUB["qwen3_next"]
QWEN3_5 = HUB["qwen3_5_moe"]
GRANITE = HUB["granitemoe"]
GLM5 = HUB["glm_moe_dsa"]
GLM4_LITE = HUB["glm4_moe_lite"]
MINIMAX = HUB["minimax_m2"] | {"attn_type_list": [1] * 62}
DOTS1 = HUB["dots1"]
PHI = HUB["phimoe"]
ERNIE = HUB["ernie4_5_moe"]
HUNYUAN = HUB["hunyuan_v1_moe"] | {
    "moe_intermediate_size": [3072] * 32,
    "moe_topk": [8] * 32,
    "num_shared_expert": [1] * 32,
}
FLEX_OLMO = HUB["flex_olmo"]
OLMOE = HUB["olmoe"]
YARN = DEEPSEEK_V3["rope_scaling"]
DEEPSEEK_V32 = DEEPSEEK_V3 | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "model_type": "deepseek_v32",
}
KIMI = DEEPSEEK_V3 | {
    "model_type": "kimi_k2",
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "rope_scaling": YARN | {"beta_fast": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
KIMI_25 = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "ignore_index": -100,
    "model_type": "kimi_k25",
    "text_config": KIMI | {"architectures": ["DeepseekV3ForCausalLM"]},
    "vision_config": {"model_type": "kimi_k25_vision"},
}


def block(model_type, hidden_size, num_layers, moe_layers, num_experts, top_k, size, renormalize, **fields):
    return MoEBlockConfig(
        model_type=model_type,
        hidden_size=hidden_size,
        num_layers=num_layers,
        moe_layers=tuple(moe_layers),
        num_experts=num_experts,
        top_k=top_k,
        moe_intermediate_size=size,
        renormalize=renormalize,
        **fields,
    )


CORRECTED = dict(scoring_func="sigmoid", has_correction_bias=True, routed_scaling_factor=2.5)
BLOCKS = {
    "deepseek_v3": (
        DEEPSEEK_V3,
        block(
            *("deepseek_v3", 7168, 61, range(3, 61), 256, 8, 2048, True),
            **CORRECTED,
            num_expert_group=8,
            topk_group=4,
            shared_intermediate_size=2048,
        ),
    ),
    "deepseek_v2": (
        DEEPSEEK_V2,
        block(
            *("deepseek_v2", 5120, 60, range(1, 60), 160, 6, 1536, False),
            routed_scaling_factor=16.0,
            num_expert_group=8,
            topk_group=3,
            shared_intermediate_size=3072,
        ),
    ),
    "glm4_moe": (
        GLM4,
        block("glm4_moe", 5120, 92, range(3, 92), 160, 8, 1536, True, **CORRECTED, shared_intermediate_size=1536),
    ),
    "gpt_oss": (
        GPT_OSS,
        block(
            *("gpt_oss", 2880, 24, range(24), 32, 4, 2880, True),
            activation="swigluoai",
            swiglu_limit=7.0,
            swiglu_alpha=1.702,
            has_bias=True,
            has_router_bias=True,
        ),
    ),
    "llama4": (
        LLAMA4,
        block(
            *("llama4_text", 5120, 48, range(1, 48, 2), 128, 1, 8192, False),
            custom_routing_function="llama4",
            apply_router_weight_on_input=True,
            shared_intermediate_size=8192,
        ),
    ),
    "qwen2_moe": (
        QWEN2,
        block(
            *("qwen2_moe", 2048, 24, range(24), 60, 4, 1408, False),
            shared_intermediate_size=5632,
            has_shared_expert_gate=True,
        ),
    ),
    "deepseek_v32": (
        DEEPSEEK_V32,
        block(
            *("deepseek_v32", 7168, 61, range(3, 61), 256, 8, 2048, True),
            **CORRECTED,
            num_expert_group=8,
            topk_group=4,
            shared_intermediate_size=2048,
        ),
    ),
    "glm_moe_dsa": (
        GLM5,
        block(*("glm_moe_dsa", 6144, 78, range(3, 78), 256, 8, 2048, True), **CORRECTED, shared_intermediate_size=2048),
    ),
    "kimi_k2": (
        KIMI,
        block(
            *("kimi_k2", 7168, 61, range(1, 61), 384, 8, 2048, True),
            **CORRECTED | dict(routed_scaling_factor=2.827),
            shared_intermediate_size=2048,
        ),
    ),
    "kimi_k25": (
        KIMI_25,
        block(
            *("kimi_k2", 7168, 61, range(1, 61), 384, 8, 2048, True),
            **CORRECTED | dict(routed_scaling_factor=2.827),
            shared_intermediate_size=2048,
        ),
    ),
    "glm4_moe_lite": (
        GLM4_LITE,
        block(
            *("glm4_moe_lite", 2048, 47, range(1, 47), 64, 4, 1536, True),
            **CORRECTED | dict(routed_scaling_factor=1.8),
            shared_intermediate_size=1536,
        ),
    ),
    "minimax_m2": (
        MINIMAX,
        block(
            *("minimax_m2", 3072, 62, range(62), 256, 8, 1536, True), scoring_func="sigmoid", has_correction_bias=True
        ),
    ),
    "dots1": (
        DOTS1,
        block("dots1", 4096, 62, range(1, 62), 128, 6, 1408, True, **CORRECTED, shared_intermediate_size=2816),
    ),
    "phimoe": (
        PHI,
        block("phimoe", 4096, 32, range(32), 16, 2, 6400, False, custom_routing_function="phi_sparsemixer"),
    ),
    "ernie4_5_moe": (
        ERNIE,
        block(
            *("ernie4_5_moe", 2560, 28, range(1, 28), 64, 6, 1536, True),
            has_correction_bias=True,
            shared_intermediate_size=3072,
        ),
    ),
    "qwen3_next": (
        QWEN3_NEXT,
        block(
            *("qwen3_next", 2048, 48, range(48), 512, 10, 512, True),
            shared_intermediate_size=512,
            has_shared_expert_gate=True,
        ),
    ),
    "qwen3_5_moe": (
        QWEN3_5,
        block(
            *("qwen3_5_moe_text", 2048, 40, range(40), 256, 8, 512, True),
            shared_intermediate_size=512,
            has_shared_expert_gate=True,
        ),
    ),
    "hunyuan_v1_moe": (
        HUNYUAN,
        block("hunyuan_v1_moe", 4096, 32, range(32), 64, 8, 3072, True, shared_intermediate_size=3072),
    ),
    "flex_olmo": (FLEX_OLMO, block("flex_olmo", 4096, 32, range(32), 7, 5, 11008, False)),
    "granitemoe": (GRANITE, block("granitemoe", 1536, 32, range(32), 40, 8, 512, True)),
    "olmoe": (OLMOE, block("olmoe", 2048, 16, range(16), 64, 8, 1024, False)),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_hub_files(name):
    config, expected = BLOCKS[name]
    family, found = read_family(config)
    of_block = {field.name: getattr(found, field.name) for field in dataclasses.fields(MoEBlockConfig)}
    assert (
        name in (family.model_type, *family.other_model_types)
        and MoEBlockConfig(**of_block) == expected
        and isinstance(hash(found), int)
    )
    assert isinstance(found, DecoderConfig) and name in ATTENTION


WIDTHS = dict(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
DELTA_NET = LinearAttentionConfig(
    num_key_heads=16, num_value_heads=32, key_head_dim=128, value_head_dim=128, conv_steps=4, is_fused=True
)
ATTENTION = {
    "deepseek_v2": dict(
        mla=MLAConfig(q_lora_rank=1536, **WIDTHS),
        head_dim=192,
    ),
    "deepseek_v3": dict(mla=MLAConfig(q_lora_rank=1536, **WIDTHS), head_dim=192, use_output_bias=False),
    "gpt_oss": dict(
        has_sinks=True, use_attention_bias=True, use_output_bias=True, sliding_layers=tuple(range(0, 24, 2))
    ),
    "qwen2_moe": dict(use_attention_bias=True, use_output_bias=False, qk_norm=None, num_kv_heads=16),
    "glm4_moe": dict(qk_norm="head", use_attention_bias=True, use_output_bias=False, head_dim=128),
    "kimi_k2": dict(mla=MLAConfig(q_lora_rank=1536, **WIDTHS), num_heads=64),
    "kimi_k25": dict(mla=MLAConfig(q_lora_rank=1536, **WIDTHS), num_heads=64),
    "llama4": dict(attention_chunk=8192, unrotated_layers=tuple(range(3, 48, 4)), head_dim=128, qk_norm=None),
    "deepseek_v32": dict(
        mla=MLAConfig(
            q_lora_rank=1536,
            indexer=IndexerConfig(num_heads=64, head_dim=128, topk=2048, is_interleaved=False),
            **WIDTHS,
        ),
    ),
    "glm_moe_dsa": dict(
        mla=MLAConfig(
            q_lora_rank=2048,
            indexer=IndexerConfig(num_heads=32, head_dim=128, topk=2048, is_interleaved=True),
            **WIDTHS | dict(qk_nope_head_dim=192, v_head_dim=256),
        ),
    ),
    "glm4_moe_lite": dict(
        mla=MLAConfig(q_lora_rank=768, **WIDTHS | dict(qk_nope_head_dim=192, v_head_dim=256)), head_dim=256
    ),
    "minimax_m2": dict(qk_norm="projection", head_dim=128, sliding_window=None),
    "granitemoe": dict(
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.015625,
        logits_scaling=6.0,
        tie_word_embeddings=True,
    ),
    "dots1": dict(qk_norm="head", use_attention_bias=False, sliding_window=None, sliding_layers=None),
    "phimoe": dict(
        norm="layer", use_attention_bias=True, use_output_bias=True, has_head_bias=True, sliding_window=131072
    ),
    "ernie4_5_moe": dict(is_rope_interleaved=True, tie_word_embeddings=True, num_kv_heads=4),
    "hunyuan_v1_moe": dict(qk_norm="rotated_head", head_dim=128, use_attention_bias=False),
    "qwen3_next": dict(
        norm="zero_centered_rms",
        qk_norm="head",
        has_output_gate=True,
        linear_layers=tuple(layer for layer in range(48) if layer % 4 != 3),
        linear_attention=DELTA_NET,
        eos_token_id=(151645,),
    ),
    "qwen3_5_moe": dict(
        has_output_gate=True,
        linear_layers=tuple(layer for layer in range(40) if layer % 4 != 3),
        linear_attention=dataclasses.replace(DELTA_NET, is_fused=False),
        eos_token_id=(248044,),
    ),
    "flex_olmo": dict(qk_norm="projection", is_post_norm=True, clip_qkv=None),
    "olmoe": dict(qk_norm="projection", clip_qkv=8.0, use_attention_bias=False, head_dim=128),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_of_hub_files(name):
    _, found = read_family(BLOCKS[name][0])
    assert {key: getattr(found, key) for key in ATTENTION[name]} == ATTENTION[name]


def test_what_the_cache_keeps():
    """(heads, width) of each array: keys and values, a latent, and index keys beside it."""
    widths = {name: {*map(read_family(config)[1].cache_widths, range(20))} for name, (config, _) in CACHED.items()}
    assert widths == {name: {expected} for name, (_, expected) in CACHED.items()}


CACHED = {
    "qwen2_moe": (QWEN2, ((16, 128),) * 2),
    "ernie4_5_moe": (ERNIE, ((4, 128),) * 2),
    "deepseek_v2": (DEEPSEEK_V2, ((1, 576),)),
    "deepseek_v32": (DEEPSEEK_V32, ((1, 576), (1, 128))),
}
# GLM-5.2: from layer 3 on, three of four layers share the selection of the one before.
SHARED = tuple(layer for layer in range(3, 78) if layer % 4 != 2)


@pytest.mark.parametrize(
    "stated",
    [
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"index_topk_pattern": "".join("S" if layer in SHARED else "F" for layer in range(78))},
        {"indexer_types": ["shared" if layer in SHARED else "full" for layer in range(78)]},
    ],
)
def test_layers_that_share_a_selection(stated):
    found = read_family(GLM5 | stated)[1]
    assert found.mla.indexer.shared_layers == SHARED
    assert [len(found.cache_widths(layer)) for layer in range(2, 8)] == [2, 1, 1, 1, 2, 1]


@pytest.mark.parametrize(
    "stated, words",
    [
        ({"indexer_types": ["full"]}, r"indexer_types is \['full'\], expected a list of 78, each full or shared"),
        ({"indexer_types": ["full", "half"] * 39}, "each full or shared"),
        ({"index_topk_pattern": "FX" * 39}, "each full or shared"),
        ({"index_topk_pattern": "S" * 78}, "layer 0 has no indexer"),
        ({"q_lora_rank": None}, "q_lora_rank is missing: index queries are made of compressed queries"),
        ({"index_head_dim": 32}, "index_head_dim=32 is below qk_rope_head_dim=64"),
        ({"index_topk": None}, "index_topk is missing"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types is .*, expected a list of 78"),
    ],
)
def test_indexers_that_are_refused(stated, words):
    refuses(ValueError, words, read_family, GLM5 | stated)


def test_rotated_parts_of_heads():
    """Half of a head in GLM-4, whatever the key says where; whole heads in families without the key."""
    assert [read_family(GLM4 | change)[1].rope.dim for change in ({}, {"partial_rotary_factor": 0.25})] == [64, 32]
    told = {key: value for key, value in GLM4.items() if key not in ("partial_rotary_factor", "rope_theta")}
    theta = {"rope_type": "default", "rope_theta": 1000000}
    for parameters, width in ((theta, 64), (theta | {"partial_rotary_factor": 0.75}, 96)):
        assert read_family(told | {"rope_parameters": parameters})[1].rope.dim == width


def test_hybrid_layers():
    """A quarter of each head is rotated, the key said or not; a cache of 2 arrays a layer, of one size or of slots."""
    for config in (QWEN3_NEXT, QWEN3_NEXT | {"partial_rotary_factor": None}, QWEN3_5):
        assert read_family(config)[1].rope.dim == 64
    found = read_family(QWEN3_NEXT | {"num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]})[1]
    slots, recurrent = (spec.zeros(3, 7, jnp.bfloat16) for spec in found.layer_caches)
    assert [(a.shape, a.dtype.name) for a in slots.arrays] == [((3, 2, 7, 256), "bfloat16")] * 2
    assert (recurrent.conv.shape, recurrent.conv.dtype.name) == ((3, 16, 3, 512), "bfloat16")
    assert (recurrent.state.shape, recurrent.state.dtype.name) == ((3, 32, 128, 128), "float32")


def test_layers_of_llama4():
    """Every fourth layer sees all positions and does not rotate."""
    found = read_family(LLAMA4["text_config"])[1]
    assert found.unrotated_layers == tuple(range(3, 48, 4)) and found.attention_chunk == 8192
    assert sorted({*found.unrotated_layers, *found.chunked_layers}) == [*range(48)] and len(found.chunked_layers) == 36
    assert (found.intermediate_size, found.temperature, found.qk_norm) == (16384, (8192.0, 0.1), None)
    assert read_family(LLAMA4["text_config"] | {"attn_temperature_tuning": 0})[1].temperature is None


def test_rotations_of_published_files():
    """MiniMax states a width, Hunyuan a stretched theta, Phi two amplitudes."""
    assert read_family(MINIMAX)[1].rope.dim == 64 and read_family(ERNIE)[1].rope.dim == 128
    hunyuan, phi = (read_family(config)[1].rope for config in (HUNYUAN, PHI))
    assert hunyuan.rope_type == "default" and hunyuan.theta == pytest.approx(1e4 * 1000 ** (128 / 126))
    assert (hunyuan.max_seq_len, phi.max_seq_len) == (32768, 131072)
    changed = PHI | {"rope_scaling": PHI["rope_scaling"] | {"long_mscale": 2.0}}
    amplitudes = read_family(changed)[1].rope.amplitudes(jnp.array([4096, 4097]))
    assert amplitudes.ravel().tolist() == pytest.approx([1.243163121016122, 2.0])


def test_windows_and_scales():
    """The window holds in the layers that say so; DeepSeek-V2 scales scores, not angles."""
    gpt_oss, deepseek = (read_family(config)[1] for config in (GPT_OSS, DEEPSEEK_V2))
    assert [gpt_oss.window_of(layer) for layer in (0, 1, 22, 23)] == [128, None, 128, None]
    assert deepseek.rope.amplitude == 1 and deepseek.rope.score_scale == pytest.approx((1 + 0.0707 * 3.6888795) ** 2)
    assert read_family(DEEPSEEK_V2 | {"q_lora_rank": None})[1].mla.q_lora_rank is None
    everywhere = QWEN2 | {"use_sliding_window": True, "num_hidden_layers": 2}
    windows = read_family(everywhere | {"layer_types": ["full_attention", "sliding_attention"]})[1]
    assert (windows.sliding_window, windows.sliding_layers) == (32768, (1,))


def test_what_transformers_5_leaves_out():
    """Neither key of the router is written any more; the number of experts has other names."""
    new = {key: v for key, v in DEEPSEEK_V3.items() if key not in ("scoring_func", "topk_method", "moe_layer_freq")}
    new["num_local_experts"] = new.pop("n_routed_experts")
    new["rope_parameters"] = new.pop("rope_scaling") | {"rope_theta": new.pop("rope_theta")}
    assert read_family(new) == read_family(DEEPSEEK_V3)
    assert read_family(DEEPSEEK_V2 | {"topk_method": None})[1].num_expert_group is None


@pytest.mark.parametrize(
    "config, changes, layers",
    [
        (DEEPSEEK_V3, dict(num_hidden_layers=9, moe_layer_freq=2), (4, 6, 8)),
        (DEEPSEEK_V3, dict(num_hidden_layers=5, first_k_dense_replace=0), (0, 1, 2, 3, 4)),
        (GLM4, dict(num_hidden_layers=4), (3,)),
        (GLM4_LITE, dict(num_hidden_layers=3, mlp_layer_types=["sparse", "dense", "sparse"]), (0, 2)),
        (ERNIE, dict(num_hidden_layers=8, moe_layer_interval=2, moe_layer_end_index=-1), (1, 3, 5, 7)),
        (ERNIE, dict(num_hidden_layers=8, moe_layer_start_index=3, moe_layer_end_index=5), (3, 4, 5)),
        (QWEN2, dict(num_hidden_layers=6, decoder_sparse_step=2), (1, 3, 5)),
        (QWEN2, dict(num_hidden_layers=6, mlp_only_layers=[0, 3]), (1, 2, 4, 5)),
        (QWEN2, dict(num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3]), (1, 5)),
        (LLAMA4["text_config"], dict(interleave_moe_layer_step=1, num_hidden_layers=3), (0, 1, 2)),
        (LLAMA4["text_config"], dict(moe_layers=[4, 0], num_hidden_layers=5), (0, 4)),
        (LLAMA4["text_config"], dict(moe_layers=[], num_hidden_layers=5), ()),
    ],
)
def test_which_layers_have_experts(config, changes, layers):
    assert read_family(config | changes)[1].moe_layers == layers


def test_groups():
    """One group is no choice; "greedy" chooses among all experts whatever the groups are."""
    assert read_family(DEEPSEEK_V2 | {"topk_method": "greedy"})[1].num_expert_group is None
    assert read_family(DEEPSEEK_V3 | {"n_group": 1, "topk_group": 1})[1].num_expert_group is None
    assert read_family(DEEPSEEK_V2 | {"n_shared_experts": None})[1].shared_intermediate_size == 0
    assert read_family(GPT_OSS | {"swiglu_alpha": 2.0, "swiglu_limit": 5})[1].swiglu_alpha == 2.0


@pytest.mark.parametrize(
    "config, changes, words",
    [
        (DEEPSEEK_V3, dict(scoring_func="softmax"), "scoring_func='softmax' is not supported; supported: sigmoid"),
        (DEEPSEEK_V3, dict(topk_method="greedy"), "topk_method='greedy' is not supported; supported: noaux_tc"),
        (DEEPSEEK_V3, dict(n_group=7), "n_group=7 does not divide the number of experts 256"),
        (DEEPSEEK_V3, dict(routed_scaling_factor=0), "routed_scaling_factor is 0, expected a positive number"),
        (DEEPSEEK_V3, dict(num_local_experts=8), "num_local_experts=8, n_routed_experts=256 disagree"),
        (DEEPSEEK_V3, dict(vocab_size=2**31), "vocab_size is 2147483648, expected at most 2147483647"),
        (GPT_OSS, dict(sliding_window=2**40), "sliding_window is 1099511627776, expected at most 2147483647"),
        (
            DEEPSEEK_V3,
            dict(rope_scaling=YARN | dict(original_max_position_embeddings=2**31)),
            "original_max_position_embeddings is 2147483648, expected an integer from 1 to 2147483647",
        ),
        (DEEPSEEK_V3, dict(moe_layer_freq=[0, 1]), r"moe_layer_freq is \[0, 1\], expected an integer >= 1"),
        (DEEPSEEK_V2, dict(norm_topk_prob=True), "norm_topk_prob=true has no agreed meaning"),
        (DEEPSEEK_V2, dict(topk_method="noaux_tc"), "supported: greedy, group_limited_greedy"),
        (
            QWEN3_NEXT,
            dict(linear_num_key_heads=5),
            "linear_num_value_heads=32 is not a multiple of linear_num_key_heads=5",
        ),
        (QWEN3_NEXT, dict(layer_types=["full"]), r"layer_types is \['full'\], expected a list of 48, each linear_att"),
        (QWEN3_NEXT, dict(linear_conv_kernel_dim=None), "linear_conv_kernel_dim is missing"),
        (QWEN3_NEXT, dict(output_gate_type="sigmoid"), "output_gate_type='sigmoid' is not supported; supported: swish"),
        (QWEN3_NEXT, dict(attn_output_gate=False), "attn_output_gate=false is not supported for this architecture"),
        (QWEN3_5, dict(text_config=QWEN3_5["text_config"] | {"mlp_only_layers": [1]}), "leave every layer its experts"),
        (QWEN3_5, dict(text_config=QWEN3_5["text_config"] | {"norm_topk_prob": False}), "norm_topk_prob=false is not"),
        (GPT_OSS, dict(experts_per_token=2), "num_experts_per_tok=4, experts_per_token=2 disagree"),
        (GPT_OSS, dict(swiglu_limit=-1.0), "swiglu_limit is -1.0, expected a positive number"),
        (GPT_OSS, dict(n_shared_experts=1), "n_shared_experts=1 is not supported for this architecture; expected 0"),
        (OLMOE, dict(routed_scaling_factor=2.0), "routed_scaling_factor=2.0 is not supported for this architecture"),
        (OLMOE, dict(hidden_act="gelu"), "hidden_act='gelu' is not supported; supported: silu"),
        (OLMOE, dict(num_experts_per_tok=65), "num_experts_per_tok=65 exceeds the number of experts 64"),
        (QWEN2, dict(shared_expert_intermediate_size=None), "shared_expert_intermediate_size is missing"),
        (QWEN2, dict(decoder_sparse_stepp=2, decoder_sparse_step=None), "was 'decoder_sparse_step' meant"),
        (QWEN2, dict(use_sliding_window=True), "use_sliding_window needs layer_types"),
        (GPT_OSS, dict(layer_types=["full_attention"]), r"layer_types is \['full_attention'\], expected a list of 24"),
        (GPT_OSS, dict(sliding_window=None), "sliding_window is missing"),
        (GPT_OSS, dict(rope_scaling=None), "rope_scaling is missing; gpt-oss is trained with YaRN"),
        (DEEPSEEK_V3, dict(kv_lora_rank=None), "kv_lora_rank is missing"),
        (DEEPSEEK_V3, dict(num_key_value_heads=8), "num_key_value_heads=8: every one of the 128 heads"),
        (DEEPSEEK_V3, dict(qk_rope_head_dim=63), "head_dim=63 is odd"),
        (DEEPSEEK_V2, dict(mlp_bias=True), "mlp_bias=True is not supported for this architecture; expected False"),
        (OLMOE, dict(clip_qkv=-1), "clip_qkv is -1, expected a positive number"),
        (GRANITE, dict(architectures=["Granite"]), "architectures .* is not supported"),
        (OLMOE, dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5 is not supported for this arch"),
        (GLM4, dict(partial_rotary_factor=1.5), "partial_rotary_factor is 1.5, expected a number above 0, at most 1"),
        (
            GLM4,
            dict(rope_scaling={"partial_rotary_factor": 1.0}),
            "partial_rotary_factor=0.5 and rope_parameters.*disag",
        ),
        (MINIMAX, dict(use_routing_bias=False), "use_routing_bias=false is not supported for this architecture"),
        (MINIMAX, dict(qk_norm_type="per_head"), "qk_norm_type='per_head' is not supported; supported: per_layer"),
        (GLM4_LITE, dict(mlp_layer_types=["dense"]), r"mlp_layer_types is \['dense'\], expected a list of 47"),
        (DOTS1, dict(norm_topk_prob=None), "norm_topk_prob is missing"),
        (PHI, dict(router_jitter_noise=0.1), "router_jitter_noise is the reach of the router's softmax; expected 0.01"),
        (PHI, dict(num_experts_per_tok=4), "num_experts_per_tok must be 2"),
        (ERNIE, dict(use_bias=True), "use_bias=true is not supported"),
        (ERNIE, dict(moe_num_shared_experts=None), "moe_num_shared_experts is missing"),
        (HUNYUAN, dict(use_cla=True), "use_cla=True is not supported for this architecture; expected False"),
        (HUNYUAN, dict(moe_topk=[8, 4] * 16), r"moe_topk is \[8, 4, .*, expected an integer >= 1"),
        (OLMOE, dict(attention_multiplier=0.5), "attention_multiplier=0.5 is not supported for this architecture"),
        (FLEX_OLMO, dict(residual_multiplier=0.5), "residual_multiplier=0.5 is not supported for this architecture"),
        (LLAMA4, dict(text_config=None), "config.json: text_config is missing"),
        (LLAMA4, dict(text_config=[]), r"text_config is \[\], expected an object"),
        (
            LLAMA4,
            dict(text_config=LLAMA4["text_config"] | {"hidden_size": 0}),
            "config.json: text_config: hidden_size is 0",
        ),
        (LLAMA4["text_config"], dict(num_experts_per_tok=2), "num_experts_per_tok must be 1"),
        (
            LLAMA4["text_config"],
            dict(no_rope_layers=[1, 0]),
            "no_rope_layers has 2 entries, expected one for each of 48",
        ),
        (LLAMA4["text_config"], dict(layer_types=["full"]), r"layer_types is \['full'\], expected 48 of chunked"),
        (LLAMA4["text_config"], dict(moe_layers=[48]), r"moe_layers is \[48\], expected indices below"),
        (GRANITE, dict(model_type="granitemoehybrid"), "model_type 'granitemoehybrid' is not supported; supported"),
    ],
)
def test_refusals(config, changes, words):
    merged = {key: value for key, value in (config | changes).items() if value is not None}
    with pytest.raises(ValueError, match=words) as error:
        read_family(merged)
    assert str(error.value).startswith("config.json: ")
