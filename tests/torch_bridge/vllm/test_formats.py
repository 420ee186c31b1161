"""Each format through real vLLM: created, loaded, processed by our subclass, both applies; against float32."""

import pytest

pytest.importorskip("vllm")

import torch

from tests.support.checkpoints.vllm_formats import FORMATS
from tests.support.vllm_layers import computed_by_reference, make_layer, vllm_without_gpu, weights_of

E, TOP_K, H, INTERMEDIATE = 4, 2, 256, 256
TOLERANCES = {16: 0.01, 8: 0.12}
pytestmark = pytest.mark.filterwarnings("ignore")


def load(layer, form, generator, *, num_experts=E, intermediate=INTERMEDIATE):
    """Every expert's tensors through ``RoutedExperts.weight_loader``; the float32 weights."""
    w13, w2 = [], []
    parameters = dict(layer.named_parameters())
    for expert in range(num_experts):
        found, orders = {}, [torch.randperm(k, generator=generator) for k in (H, intermediate)]
        for shard, n, k, order in (
            ("w1", intermediate, H, orders[0]),
            ("w3", intermediate, H, orders[0]),
            ("w2", H, intermediate, orders[1]),
        ):
            tensors, found[shard] = form.write(generator, n, k, order)
            for suffix, tensor in tensors.items():
                name = f"{'w2' if shard == 'w2' else 'w13'}_{suffix}"
                if name in parameters:
                    loader = parameters[name].weight_loader
                    loader(parameters[name], tensor, f"experts.{expert}.{name}", shard_id=shard, expert_id=expert)
        w13.append(torch.stack([found["w1"], found["w3"]]))
        w2.append(found["w2"])
    return torch.stack(w13), torch.stack(w2)


@pytest.mark.parametrize("name", FORMATS)
def test_layer_of_each_format(name, monkeypatch):
    computed_by_reference(monkeypatch)
    form = FORMATS[name]
    generator = torch.Generator().manual_seed(len(name))
    with vllm_without_gpu():
        layer = make_layer(
            form.config, num_experts=E, top_k=TOP_K, hidden_size=H, intermediate_size=INTERMEDIATE, **form.settings
        )
        method = layer.quant_method
        assert type(method).__name__ == form.method and hasattr(method, "moe_jax")
        w13, w2 = load(layer, form, generator)
        if not method.moe_jax.form.online:
            method.process_weights_after_loading(layer)
        experts = method.moe_jax.experts
        found13, found2 = map(torch.from_numpy, weights_of(experts))
        if method.moe_jax.form.online:
            assert (found13 - w13).norm() < 0.05 * w13.norm() and (found2 - w2).norm() < 0.05 * w2.norm()
        else:
            torch.testing.assert_close(found13, w13, rtol=1e-6, atol=0)
            torch.testing.assert_close(found2, w2, rtol=1e-6, atol=0)
        x = torch.randn(5, H, generator=generator).to(torch.bfloat16)
        logits = torch.randn(5, E, generator=generator).to(torch.bfloat16).float()
        weights, ids = torch.softmax(logits, -1).topk(TOP_K)
        weights = weights / weights.sum(-1, keepdim=True)
        expected = forward(x, weights, ids, found13, found2)
        assert method.is_monolithic
        for y in (
            method.apply(layer, x, weights, ids.to(torch.int32), None, None),
            method.apply_monolithic(layer, x, logits),
        ):
            error = (y.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
            assert error.max() < TOLERANCES[form.activations], error


def forward(x, weights, ids, w13, w2):
    """SwiGLU experts in float32, one token and expert at a time."""
    y = torch.zeros(x.shape)
    for token in range(x.shape[0]):
        for weight, expert in zip(weights[token], ids[token], strict=True):
            gate, up = w13[expert] @ x[token].float()
            y[token] += weight * (w2[expert] @ (torch.nn.functional.silu(gate) * up))
    return y
