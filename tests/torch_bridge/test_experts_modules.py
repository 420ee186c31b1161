"""transformers' experts_implementation="moe_jax": every class that transformers runs by its table, judged by it."""

import importlib
import re
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import torch_bridge
from tests.support.refusals import refuses
from torch_bridge._experts_modules import activation_of

E, K, H, INTER, T = 5, 3, 48, 32, 9
MODELS = Path(transformers.__file__).parent / "models"
CLASSES = [
    (path.parent.name, path.stem, name)
    for path in sorted(MODELS.glob("*/modeling_*.py"))
    for name in re.findall(r"\n@use_experts_implementation.*\nclass (\w+)", path.read_text())
]
# One class of each kind in every run; the others are "silu, (out, in), no bias" in all but name.
KINDS = ("GptOss", "OpenAIPrivacyFilter", "Aria", "NemotronH", "DeepseekV4", "Inkling2", "MuseSpark", "Gemma4Text")
REFUSED = {"Inkling2Experts": "is none of silu", "MuseSparkExperts": "has_post_expert_norm"}


class AnyConfig:
    """Answers whatever a class of experts asks its config for."""

    hidden_act = hidden_activation = "silu"
    mlp_hidden_act = "relu2"
    swiglu_limit, swiglu_alpha, moe_latent_size, mlp_bias = 1.5, 1.702, None, False
    _experts_implementation = "eager"

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return H if "hidden" in name else INTER if "intermediate" in name else E


@pytest.fixture(autouse=True)
def registered():
    torch_bridge.register_experts()
    yield
    for name in [name for name in ALL_EXPERTS_FUNCTIONS.keys() if name.startswith("moe_jax")]:
        ALL_EXPERTS_FUNCTIONS._global_mapping.pop(name)


class KernelConfig(AnyConfig):
    """Sizes that the Hopper kernels take."""

    def __getattr__(self, name):
        found = super().__getattr__(name)
        return 8 if found == E else 256


def make(folder, file, name, config=AnyConfig):
    torch.manual_seed(0)
    module = getattr(importlib.import_module(f"transformers.models.{folder}.{file}"), name)(config())
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter.data, std=0.4)
    return module.requires_grad_(False)


def call(seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, H, generator=generator)
    weights, ids = torch.rand(T, E, generator=generator).topk(K)
    return x, ids, weights


def run(module, implementation, *arguments):
    module.config._experts_implementation = implementation
    return module(*arguments)


@pytest.mark.parametrize(
    ("folder", "file", "name"),
    [
        pytest.param(*found, id=found[2], marks=() if found[2].removesuffix("Experts") in KINDS else pytest.mark.slow)
        for found in CLASSES
    ],
)
def test_each_class_of_transformers(folder, file, name):
    """What the class itself computes, in float32; what cannot be computed is refused by name."""
    module = make(folder, file, name)
    if name in REFUSED:
        with pytest.raises(NotImplementedError, match=f"{name}.*{REFUSED[name]}"):
            run(module, "moe_jax", *call())
        return
    expected = run(module, "eager", *call())
    torch.testing.assert_close(run(module, "moe_jax", *call()), expected, rtol=1e-4, atol=1e-4)


def test_all_classes_were_found():
    assert len(CLASSES) >= 60 and {name for *_, name in CLASSES} >= set(REFUSED)


@pytest.mark.parametrize("name", ["GptOssExperts", "AriaExperts", "MixtralExperts"])
def test_weights_have_one_memory(name):
    """State dicts stay as they were; a parameter that is written into, or replaced, is what is computed with."""
    module = make(*next(found for found in CLASSES if found[2] == name))
    before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    run(module, "moe_jax", *call())
    after = module.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    with torch.no_grad():
        module.down_proj[1] *= 3
        module.gate_up_proj[2] *= 0.5
    expected = run(module, "eager", *call())
    torch.testing.assert_close(run(module, "moe_jax", *call()), expected, rtol=1e-4, atol=1e-4)
    module.load_state_dict({key: 2 * tensor for key, tensor in before.items()})
    module.gate_up_proj.data = 0.5 * module.gate_up_proj.data
    expected = run(module, "eager", *call())
    torch.testing.assert_close(run(module, "moe_jax", *call()), expected, rtol=1e-4, atol=1e-4)
    module.down_proj = torch.nn.Parameter(3 * module.down_proj.data, requires_grad=False)
    torch.testing.assert_close(run(module, "moe_jax", *call()), run(module, "eager", *call()), rtol=1e-4, atol=1e-4)
    own = 0.5 * module.down_proj.data
    del module.down_proj
    module.down_proj = own  # no parameter, as some wrappers leave it
    torch.testing.assert_close(run(module, "moe_jax", *call()), run(module, "eager", *call()), rtol=1e-4, atol=1e-4)


def test_new_weights_at_an_old_address():
    """gpt-oss' rows of gate and up are copied, so nothing else holds the memory of those that are let go."""
    module = make("gpt_oss", "modeling_gpt_oss", "GptOssExperts")
    shape = module.gate_up_proj.shape
    for value in range(1, 7):
        run(module, "moe_jax", *call())
        module.gate_up_proj.data = torch.empty(0)
        module.gate_up_proj.data = torch.full(shape, 0.01 * value)
        expected = run(module, "eager", *call())
        torch.testing.assert_close(run(module, "moe_jax", *call()), expected, rtol=1e-4, atol=1e-4)


def test_expert_parallel_sentinels():
    """transformers gives experts of other ranks the id num_experts: they add nothing."""
    module = make("mixtral", "modeling_mixtral", "MixtralExperts")
    x, ids, weights = call()
    ids[:, 1] = E
    expected = run(module, "eager", x, ids, weights)
    torch.testing.assert_close(run(module, "moe_jax", x, ids, weights), expected, rtol=1e-4, atol=1e-4)


def test_quantized_at_the_first_call():
    torch_bridge.register_experts("moe_jax_int8", quantize="int8_w8a16")
    module = make("mixtral", "modeling_mixtral", "MixtralExperts")
    expected = run(module, "eager", *call())
    y = run(module, "moe_jax_int8", *call())
    error = (y - expected).norm() / expected.norm()
    assert 1e-4 < error < 0.02
    assert not sum(parameter.numel() for parameter in module.parameters())
    assert torch.equal(run(module, "moe_jax_int8", *call()), y)
    refuses(NotImplementedError, "MixtralExperts was quantized by moe_jax.*save the model before", module.state_dict)
    for name in ("eager", "grouped_mm"):
        with pytest.raises(NotImplementedError, match=f"MixtralExperts: experts_implementation='{name}', but moe_jax"):
            run(module, name, *call())
    assert torch.equal(run(module, "moe_jax_int8", *call()), y)


def test_gradients():
    """Inputs and routing weights get the module's own; experts get none, which is said."""
    module = make("mixtral", "modeling_mixtral", "MixtralExperts")
    grads = []
    for implementation in ("eager", "moe_jax"):
        x, ids, weights = call()
        x.requires_grad_()
        weights.requires_grad_()
        run(module, implementation, x, ids, weights).square().sum().backward()
        grads.append((x.grad, weights.grad))
    for found, expected in zip(grads[1], grads[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    fresh = make("mixtral", "modeling_mixtral", "MixtralExperts").requires_grad_(True)
    with pytest.warns(UserWarning, match="MixtralExperts: moe_jax gives experts no gradients"):
        run(fresh, "moe_jax", *call())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(fresh, "moe_jax", *call())


def test_a_whole_model(tmp_path):
    """from_pretrained with the switch; generate and save_pretrained go on."""
    config = transformers.OlmoeConfig(
        vocab_size=64,
        hidden_size=H,
        intermediate_size=INTER,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=E,
        num_experts_per_tok=K,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "a")
    read = transformers.AutoModelForCausalLM.from_pretrained
    eager, ours = (read(tmp_path / "a", experts_implementation=name).eval() for name in ("eager", "moe_jax"))
    ids = torch.arange(1, 10)[None]
    with torch.no_grad():
        expected = eager(ids).logits
        torch.testing.assert_close(ours(ids).logits, expected, rtol=1e-4, atol=1e-4)
    tokens = [model.generate(ids, max_new_tokens=4, do_sample=False) for model in (eager, ours)]
    assert torch.equal(*tokens)
    ours.save_pretrained(tmp_path / "b")
    with torch.no_grad():
        torch.testing.assert_close(read(tmp_path / "b")(ids).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["MixtralExperts", "GptOssExperts"])
@pytest.mark.parametrize("quantize, most", [(None, 0.02), ("fp8_channel", 0.1)])
def test_on_torchs_stream(name, quantize, most):
    """Rows beside the module's own in float32, also behind work that is queued; a CUDA graph replays other inputs."""
    torch_bridge.register_experts("moe_jax_gpu", quantize=quantize)
    found = next(found for found in CLASSES if found[2] == name)
    exact, module = (make(*found, KernelConfig) for _ in range(2))
    for parameter in module.parameters():
        parameter.data *= 0.1  # of make's spread: what passes keeps its size
        parameter.data = parameter.data.to("cuda", torch.bfloat16)
    for own, parameter in zip(exact.parameters(), module.parameters(), strict=True):
        own.data = parameter.data.float()

    def inputs(seed):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(16, 256, generator=generator).to("cuda", torch.bfloat16)
        weights, ids = torch.rand(16, 8, generator=generator).to("cuda").topk(K)
        return x, ids, weights.bfloat16()

    def check(y, x, ids, weights):
        expected = run(exact, "eager", x.float(), ids, weights.float())
        assert ((y.float() - expected).norm(dim=1) / expected.norm(dim=1)).max() < most

    given = inputs(1)
    check(run(module, "moe_jax_gpu", *given), *given)
    late = [torch.zeros_like(tensor) for tensor in given]
    torch.cuda._sleep(100_000_000)
    for target, source in zip(late, inputs(2), strict=True):
        target.copy_(source)
    check(run(module, "moe_jax_gpu", *late), *inputs(2))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(module, "moe_jax_gpu", *late)
    for target, source in zip(late, inputs(3), strict=True):
        target.copy_(source)
    graph.replay()
    check(out, *inputs(3))


def test_refusals(monkeypatch):
    refuses(ValueError, "unknown scheme 'fp9'", torch_bridge.register_experts, quantize="fp9")
    module = make("mixtral", "modeling_mixtral", "MixtralExperts").to("meta")
    with pytest.raises(ValueError, match="MixtralExperts is on the meta device"):
        run(module, "moe_jax", *call())
    monkeypatch.setattr(transformers.integrations.moe, "use_experts_implementation", lambda cls, *, has_bias=False: cls)
    with pytest.raises(
        ImportError, match="does not say whether rows of gate and up alternate; install transformers 5.7"
    ):
        torch_bridge.register_experts()
    monkeypatch.delattr(transformers.integrations.moe, "ALL_EXPERTS_FUNCTIONS")
    refuses(ImportError, "no table of experts implementations; install transformers 5.7", torch_bridge.register_experts)


def test_a_transformers_that_knows_no_norm_of_experts():
    """5.7 to 5.17 mark no module with has_post_expert_norm."""
    module = make("mixtral", "modeling_mixtral", "MixtralExperts")
    del module.has_post_expert_norm
    expected = run(module, "eager", *call())
    torch.testing.assert_close(run(module, "moe_jax", *call()), expected, rtol=1e-4, atol=1e-4)


def test_activations_are_told_apart():
    """By values, not by names: a clamp, an alternating layout and a gate that comes second are seen."""
    module = make("mixtral", "modeling_mixtral", "MixtralExperts")
    assert activation_of(module) == dict(activation="silu")
    module.limit, module._apply_gate = 2.0, lambda h: _clamped(*h.chunk(2, -1), 2.0)
    assert activation_of(module) == dict(activation="silu", swiglu_limit=2.0)
    module._apply_gate = lambda h: torch.nn.functional.silu(h.chunk(2, -1)[1]) * h.chunk(2, -1)[0]
    refuses(NotImplementedError, "is none of silu", activation_of, module)


def _clamped(gate, up, limit):
    return torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
