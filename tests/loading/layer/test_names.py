"""Every spelling of an expert tensor is understood, and none is skipped without a word."""

import pytest
from safetensors import safe_open

from moe_jax.loading import ExpertNames, layer_of, make_expert_params_mapping
from moe_jax.loading.layer._names import is_expert_name, map_expert_name
from moe_jax.models import FAMILIES
from tests.support.refusals import refuses

NAMES = ExpertNames()


@pytest.mark.parametrize("container", ["mlp", "block_sparse_moe", "feed_forward"])
@pytest.mark.parametrize(
    "projection, shards",
    [
        *(("w1", ("w1",)), ("gate_proj", ("w1",)), ("w3", ("w3",)), ("up_proj", ("w3",))),
        *(("w2", ("w2",)), ("down_proj", ("w2",)), ("gate_up_proj", ("w1", "w3"))),
    ],
)
@pytest.mark.parametrize(
    "suffix, stored",
    [
        *(("weight", "weight"), ("weight_scale", "weight_scale"), ("weight_scale_inv", "weight_scale")),
        *(("input_scale", "input_scale"), ("bias", "bias"), ("base_layer.weight", "weight")),
    ],
)
def test_per_expert(container, projection, shards, suffix, stored):
    name = f"model.layers.12.{container}.experts.7.{projection}.{suffix}"
    tensor = NAMES.parse(name)
    assert (tensor.layer, tensor.expert, tensor.shards, tensor.suffix) == (12, 7, shards, stored)
    assert tensor.leaf == f"{'w2' if shards == ('w2',) else 'w13'}_{stored}"
    assert tensor.module == f"model.layers.12.{container}.experts.7.{projection}"
    assert tensor.name == name
    for prefix in ("", f"{container}."):
        bare = NAMES.parse(f"{prefix}experts.7.{projection}.{suffix}")
        assert (bare.layer, bare.expert, bare.shards, bare.leaf) == (None, 7, shards, tensor.leaf)


@pytest.mark.parametrize(
    "tail, leaf",
    [
        ("gate_up_proj", "w13_weight"),
        ("gate_up_proj.weight", "w13_weight"),
        ("gate_up_proj_bias", "w13_bias"),
        ("gate_up_proj.bias", "w13_bias"),
        ("gate_up_proj_scale", "w13_weight_scale"),
        ("gate_up_proj_scale_inv", "w13_weight_scale"),
        ("gate_up_proj.weight_scale_inv", "w13_weight_scale"),
        ("gate_up_proj_weight_scale", "w13_weight_scale"),
        ("gate_up_proj_input_scale", "w13_input_scale"),
        ("base_layer.gate_up_proj", "w13_weight"),
        ("down_proj", "w2_weight"),
        ("down_proj_bias", "w2_bias"),
        ("down_proj.weight_scale", "w2_weight_scale"),
        ("gate_proj", "w13_weight"),
        ("w3.weight", "w13_weight"),
        # gpt-oss' MXFP4
        ("gate_up_proj_blocks", "w13_weight_packed"),
        ("down_proj_scales", "w2_weight_scale"),
    ],
)
def test_all_experts(tail, leaf):
    tensor = NAMES.parse(f"model.layers.0.mlp.experts.{tail}")
    assert (tensor.expert, tensor.leaf) == (None, leaf)
    assert len(tensor.shards) == (2 if "gate_up" in tail else 1)
    assert tensor.module.endswith(("gate_up_proj", "down_proj", "gate_proj", "w3"))


@pytest.mark.parametrize(
    "tail, expert, leaf, shards",
    [
        ("input_linear.weight", None, "w13_weight", ("w1", "w3")),
        ("output_linear.weight", None, "w2_weight", ("w2",)),
        ("input_linear.base_layer.weight", None, "w13_weight", ("w1", "w3")),
        ("input_linear.11.weight_packed", 11, "w13_weight_packed", ("w1", "w3")),
        ("output_linear.0.weight_scale", 0, "w2_weight_scale", ("w2",)),
    ],
)
def test_granite(tail, expert, leaf, shards):
    """Experts without an "experts" component; older writers number them after the projection."""
    name = f"model.layers.5.block_sparse_moe.{tail}"
    tensor = NAMES.parse(name)
    assert (tensor.layer, tensor.expert, tensor.leaf, tensor.shards) == (5, expert, leaf, shards)
    number = "" if expert is None else f".{expert}"
    assert tensor.module == f"model.layers.5.block_sparse_moe.{tail.split('.')[0]}{number}"
    for other in (name.replace("block_sparse_moe", "shared_mlp"), f"mtp.{name}"):
        assert not is_expert_name(other) and NAMES.parse(other) is None
    refuses(ValueError, "unknown spelling", NAMES.parse, "model.layers.0.block_sparse_moe.input_linear.1")


def test_layers_for_multi_token_prediction_are_not_the_models_own():
    """Qwen3-Next numbers them from 0 too."""
    assert is_expert_name("model.layers.0.mlp.experts.0.up_proj.weight")
    assert not is_expert_name("mtp.layers.0.mlp.experts.0.up_proj.weight")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.experts.0.gate.weight",
        "model.layers.0.mlp.experts.0.gate_proj",
        "model.layers.0.mlp.experts.0.weight",
        "model.layers.0.mlp.experts.0",
        "model.layers.0.mlp.experts",
        "model.layers.0.mlp.experts.-1.gate_proj.weight",
        "model.layers.0.mlp.experts.01.gate_proj.weight",
        "model.layers.0.mlp.experts.1e1.gate_proj.weight",
        "model.layers.0.mlp.experts.٣.gate_proj.weight",
        "model.layers.0.mlp.experts.99999999999999999999.gate_proj.weight",
        "model.layers.0.moe.experts.0.gate_proj.weight",
        "model.layers.0.experts.experts.0.gate_proj.weight",
        "model.layers.0.mlp.experts.gate_up_projection",
        "model.layers.0.mlp.experts.w4.weight",
        "model.layers.0.mlp.experts.W1",
        "model.layers.0.block_sparse_moe.experts.mlp.w1",
    ],
)
def test_unknown_spelling(name):
    refuses(ValueError, "unknown spelling of an expert tensor, expected experts", NAMES.parse, name)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.shared_experts.gate_proj.weight",
        "model.layers.0.mlp.shared_expert.down_proj.weight",
        "model.layers.0.block_sparse_moe.gate.weight",
        "model.layers.0.mlp.expertz.0.gate_proj.weight",
    ],
)
def test_not_an_expert(name):
    assert NAMES.parse(name) is None


def test_not_gated():
    names = ExpertNames(is_gated=False)
    for projection, shard in (("w1", "w1"), ("up_proj", "w1"), ("w2", "w2"), ("down_proj", "w2")):
        assert names.parse(f"experts.0.{projection}.weight").shards == (shard,)
    for projection in ("gate_proj", "w3", "gate_up_proj"):
        refuses(ValueError, "this layer is not gated", names.parse, f"experts.0.{projection}.weight")
    assert names.describe("w13_weight", "w1") == "up_proj.weight"


def test_layer_of():
    assert layer_of("model.layers.31.mlp.gate.weight") == 31
    assert layer_of("model.language_model.layers.4.mlp.experts.0.w1.weight") == 4
    assert layer_of("model.layers.x.mlp") is None
    assert layer_of("experts.0.w1.weight") is None


def test_families():
    """Each family file says how its experts' tensors are called."""
    names = {model_type: family.expert_names for model_type, family in FAMILIES.items()}
    assert names["mixtral"].describe("w13_weight_scale", "w3") == "w3.weight_scale"
    assert names["granitemoe"].describe("w2_weight", "w2") == "output_linear.weight"
    assert names["qwen3_moe"].describe("w2_bias", "w2") == "down_proj.bias"
    assert [name for name in names if names[name].parse("experts.gate_up_proj").is_interleaved] == ["gpt_oss"]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("kind", ["bf16", "fused", "fp8_channel", "native"])
def test_names_of_real_writers(written, family, kind):
    """Each expert tensor of a written file is understood, and together they are each projection of each expert once."""
    with safe_open(written(family, kind) / "model.safetensors", "np") as file:
        names = list(file.keys())
    parsed = {name: FAMILIES[family].expert_names.parse(name) for name in names}
    experts = [t for t in parsed.values() if t is not None]
    assert all((".experts." in name) == (tensor is not None) for name, tensor in parsed.items())
    count = {"mixtral": 4, "qwen3_moe": 6}[family]
    expected = {
        (layer, expert, shard, suffix)
        for layer in range(2)
        for expert in (range(count) if kind != "fused" else [None])
        for shard in ("w1", "w3", "w2")
        for suffix in (("weight",) if kind in ("bf16", "fused") else ("weight", "weight_scale"))
    }
    found = [(t.layer, t.expert, shard, t.suffix) for t in experts for shard in t.shards]
    assert sorted(found, key=str) == sorted(expected, key=str)


class TestMapping:
    """Names read by rows of make_expert_params_mapping."""

    ROWS = make_expert_params_mapping(None, "w1", "w2", "w3", 12, num_redundant_experts=2)

    @pytest.mark.parametrize("prefix", ["", "model.layers.3.block_sparse_moe."])
    def test_replicas(self, prefix):
        """One checkpoint tensor fills every replica of its expert."""
        tensors = map_expert_name(self.ROWS, f"{prefix}experts.1.w3.weight_scale_inv")
        assert [(t.expert, t.shards, t.leaf) for t in tensors] == [
            (1, ("w3",), "w13_weight_scale"),
            (13, ("w3",), "w13_weight_scale"),
        ]
        assert [t.expert for t in map_expert_name(self.ROWS, "experts.11.w2.weight")] == [11]

    def test_fragment_needs_a_border(self):
        assert map_expert_name(self.ROWS, "shared_experts.0.w1.weight") == ()
        assert map_expert_name(self.ROWS, "experts.0.gate_proj.weight") == ()
        assert map_expert_name(self.ROWS, "experts.0.w1.") == ()

    def test_base_layer(self):
        rows = make_expert_params_mapping(["a.base_layer.weight"], "w1", "w2", "w3", 1)
        (tensor,) = map_expert_name(rows, "experts.0.w2.base_layer.weight")
        assert tensor.leaf == "w2_weight"
