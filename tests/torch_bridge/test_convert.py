"""Blocks and models of transformers on our experts, judged by transformers itself."""

import numpy as np
import pytest
import torch
import transformers
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

import torch_bridge
from tests.support.cases.torch_bridge import assert_same_weights, loaded_bridge, plain_arrays, stored_arrays
from tests.support.refusals import refuses

H, INTER, E, K = 64, 32, 8, 2
SIZES = dict(
    vocab_size=64,
    hidden_size=H,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_experts_per_tok=K,
    max_position_embeddings=64,
    eos_token_id=None,
    pad_token_id=0,
)
CONFIGS = {
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, intermediate_size=INTER, num_local_experts=E),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, head_dim=16, intermediate_size=INTER, moe_intermediate_size=INTER, num_experts=E, norm_topk_prob=False
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        hidden_size=H,
        moe_intermediate_size=INTER,
        n_routed_experts=E,
        num_experts_per_tok=K,
        n_group=4,
        topk_group=2,
        n_shared_experts=1,
        routed_scaling_factor=2.5,
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        hidden_size=H, intermediate_size=INTER, num_local_experts=E, num_experts_per_tok=K
    ),
}
BLOCKS = {
    "mixtral": MixtralSparseMoeBlock,
    "qwen3_moe": Qwen3MoeSparseMoeBlock,
    "deepseek_v3": DeepseekV3MoE,
    "gpt_oss": GptOssMLP,
}


def random_block(family):
    torch.manual_seed(0)
    config = CONFIGS[family]()
    config._experts_implementation = "eager"
    block = BLOCKS[family](config).eval()
    for parameter in [*block.parameters(), *block.buffers()]:
        torch.nn.init.normal_(parameter.data, std=0.2)
    return block.requires_grad_(False)


def result(output):
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("family", BLOCKS)
@pytest.mark.sample(4)
def test_blocks_against_transformers(family):
    """Converted with its routing, and patched with the block's own: both what the block computes, in float32."""
    block = random_block(family)
    x = torch.randn(1, 11, H, generator=torch.Generator().manual_seed(1))
    expected = result(block(x))
    layer = torch_bridge.convert(block)
    router = block.router if family == "gpt_oss" else block.gate
    y = layer(x[0], router(x[0])[0])
    if family == "deepseek_v3":
        y = y + block.shared_experts(x[0])
    torch.testing.assert_close(y[None], expected, rtol=1e-4, atol=1e-5)
    holder = torch.nn.ModuleDict({"mlp": block})
    assert torch_bridge.patch(holder) == ["mlp.experts"]
    torch.testing.assert_close(result(block(x)), expected, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def models():
    """Tiny whole models with sharp logits, made once."""

    def make(family):
        torch.manual_seed(0)
        config = CONFIGS[family]()
        model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter.data, std=0.15)
        return model.requires_grad_(False)

    return make


# Error of a row of logits relative to its largest value. int8 steps are 1/254 of a row's largest weight and e4m3 steps
# 1/16 of a value; they average over H and I, and reach the logits beside the residual stream of two layers.
TOLERANCE = {None: 1e-4, "int8_w8a16": 0.03, "fp8_channel": 0.15}


@pytest.mark.parametrize("quantize", TOLERANCE)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.sample(6)
def test_patched_models_generate(family, quantize, models):
    """Logits of every row near the unpatched model's; generate() goes on, with the KV cache."""
    model, ids = models(family), torch.arange(1, 10)[None] * 5 % 64
    chosen: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, args, out: chosen.append(out[2].sort(-1).values))
    expected = model(ids).logits[0]
    names = torch_bridge.patch(model, quantize=quantize)
    assert names == [f"model.layers.{i}.mlp.experts" for i in range(2)]
    logits = model(ids).logits[0]
    error = (logits - expected).abs().amax(-1) / expected.abs().amax(-1)
    # A token whose experts change after quantization is another function of its input; few may.
    is_same = torch.stack([(a == b).all(-1) for a, b in zip(chosen[:2], chosen[2:], strict=True)]).all(0)
    assert is_same.sum() >= (len(is_same) if quantize is None else 6)
    assert error[is_same].max() < TOLERANCE[quantize]
    assert quantize is None or error.max() > 0
    tokens = model.generate(ids, max_new_tokens=2, do_sample=False)
    assert tokens.shape == (1, 11) and torch.equal(tokens[:, :9], ids)
    step = model(tokens[:, :-1]).logits[0]
    assert torch.equal(step[8:].argmax(-1), tokens[0, 9:])
    held = sum(p.nbytes for n, p in model.named_parameters() if ".experts." in n)
    full = 2 * 3 * E * H * INTER * 4
    assert held == full if quantize is None else held < 0.35 * full
    refuses(ValueError, "no block with experts", torch_bridge.patch, model)


def test_gradients_through_a_patched_model(models):
    """Activations before the experts get gradients, near those of the unpatched model."""
    grads = []
    for patched in (False, True):
        model = models("mixtral")
        if patched:
            torch_bridge.patch(model)
        embeddings = model.get_input_embeddings()(torch.arange(1, 8)[None]).requires_grad_()
        model(inputs_embeds=embeddings).logits.square().sum().backward()
        grads.append(embeddings.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-2, atol=1e-3 * float(grads[0].abs().max()))


def test_saved_models_read_back(models, tmp_path):
    """save_pretrained of a patched model writes transformers' names; what from_pretrained reads computes the same."""
    model, ids = models("mixtral"), torch.arange(1, 10)[None]
    expected, names = model(ids).logits, set(model.state_dict())
    torch_bridge.patch(model)
    assert set(model.state_dict()) == names
    model.load_state_dict(model.state_dict())
    model.save_pretrained(tmp_path)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager")
    torch.testing.assert_close(read(ids).logits, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("family", BLOCKS)
def test_state_dicts_of_patched_blocks_are_the_blocks_own(family):
    """Names, shapes and bits, also of gpt-oss, which keeps matrices (in, out) and the rows of gate and up mixed."""
    block = random_block(family)
    holder, before = torch.nn.ModuleDict({"mlp": block}), {n: t.clone() for n, t in block.state_dict().items()}
    torch_bridge.patch(holder)
    after = block.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    block.load_state_dict({name: tensor * 2 for name, tensor in before.items()})
    assert all(torch.equal(tensor, before[name] * 2) for name, tensor in block.state_dict().items())


def test_saving_quantized_models_is_refused(models, tmp_path):
    model = models("mixtral")
    torch_bridge.patch(model, quantize="int8_w8a16")
    with pytest.raises(
        NotImplementedError, match=r"MixtralForCausalLM has experts of scheme 'int8_w8a16'.*quantize_ch"
    ):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_parameters_of_other_libraries_are_refused():
    """bitsandbytes and GGUF: by name, before anything is read; also through the loader and as a config."""
    block = random_block("mixtral")
    block.experts.down_proj.quant_state = object()
    refuses(NotImplementedError, "down_proj: a parameter of bitsandbytes.*full precision", torch_bridge.convert, block)
    layer = torch_bridge.FusedMoE(E, K, H, INTER)
    layer.w2_weight.is_gguf_weight = True
    with pytest.raises(NotImplementedError, match="experts.w2_weight: a parameter of GGUF"):
        layer.weight_loader(layer.w2_weight, torch.zeros(H, INTER), "experts.w2_weight", "w2", 0)
    for method in ("bitsandbytes", "gguf"):
        with pytest.raises(NotImplementedError, match=f"quant_method '{method}' is not supported.*; name the scheme"):
            torch_bridge.FusedMoE(E, K, H, INTER, quant_config={"quant_method": method})


def test_refusals():
    block = random_block("mixtral")
    with pytest.raises(NotImplementedError, match=r"supported experts: MixtralExperts"):
        torch_bridge.convert(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="unknown scheme"):
        torch_bridge.patch(torch.nn.ModuleDict({"mlp": block}), quantize="fp9")
    assert type(block.experts).__name__ == "MixtralExperts"
    refuses(ValueError, "needs input scales", torch_bridge.convert, block, quantize="nvfp4")
    block.experts.act_fn = torch.nn.Tanh()
    with pytest.raises(NotImplementedError, match=r"MixtralExperts: its activation \(Tanh\) is none of silu, gelu"):
        torch_bridge.convert(block)
    with pytest.raises(ValueError, match="meta device"):
        torch_bridge.convert(random_block("mixtral").to("meta"))


@pytest.mark.parametrize("scheme", ["bf16", "fp8_block", "nvfp4", "w4a16_g32_asym"])
@pytest.mark.sample(2)
def test_nnx_and_back(scheme):
    """The same weights under either shell, bit for bit; a part of a layer does not convert."""
    layer = loaded_bridge(scheme, stored_arrays(scheme))
    shell = torch_bridge.to_nnx(layer)
    assert_same_weights(shell.weights.get_value(), layer.expert_weights)
    back = torch_bridge.from_nnx(shell)
    assert_same_weights(back.expert_weights, layer.expert_weights)
    assert back.config.scheme == layer.config.scheme and back.config.top_k == layer.config.top_k
    with pytest.raises(ValueError, match="one part of 2"):
        torch_bridge.to_nnx(loaded_bridge(scheme, stored_arrays(scheme), ep_size=2, ep_rank=0))


class Trap:
    """What unpickling would run."""

    def __reduce__(self):
        return print, ("executed",)


def test_torch_files_are_read_as_tensors_only(tmp_path, capfd):
    """.bin and .pt through weights_only; a file that would run code is refused in one line and runs nothing."""
    from tests.support.cases.torch_bridge import nnx_layer, torch_pairs

    torch.save(dict(torch_pairs(plain_arrays())), tmp_path / "model.bin")
    layer = torch_bridge.FusedMoE(4, 2, 128, 256, torch.bfloat16)
    layer.load_weights(torch_bridge.load_tensors(tmp_path / "model.bin").items())
    layer.process_weights_after_loading()
    assert_same_weights(layer.expert_weights, nnx_layer("bf16", plain_arrays()).weights.get_value())
    torch.save({"weight": Trap()}, tmp_path / "trap.pt")
    torch.save({"weight": 3}, tmp_path / "number.pt")
    (tmp_path / "noise.pt").write_bytes(np.arange(100, dtype=np.uint8).tobytes())
    for name, message in (
        ("trap.pt", "weights_only"),
        ("number.pt", "expected named tensors"),
        ("noise.pt", "not a file of tensors"),
        ("model.npz", "expected a file ending in"),
    ):
        with pytest.raises(ValueError, match=message) as raised:
            torch_bridge.load_tensors(tmp_path / name)
        assert "\n" not in str(raised.value)
    refuses(NotImplementedError, "GGUF files are not supported", torch_bridge.load_tensors, tmp_path / "model.gguf")
    assert "executed" not in capfd.readouterr().out
