"""Each format through real vLLM: created, loaded, processed by our subclass, both applies; against float32."""

import pytest

pytest.importorskip("vllm")

import torch

from tests.support.checkpoints.vllm_formats import FORMATS
from tests.support.vllm_layers import (
    computed_by_reference,
    experts_float32,
    load_experts,
    make_layer,
    vllm_without_gpu,
    weights_of,
)

E, TOP_K, H, INTERMEDIATE = 4, 2, 256, 256
TOLERANCES = {16: 0.01, 8: 0.12}
pytestmark = pytest.mark.filterwarnings("ignore")


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
        w13, w2 = load_experts(layer, form, generator, E, H, INTERMEDIATE)
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
        expected = experts_float32(x, weights, ids, found13, found2)
        assert method.is_monolithic
        for y in (
            method.apply(layer, x, weights, ids.to(torch.int32), None, None),
            method.apply_monolithic(layer, x, logits),
        ):
            error = (y.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
            assert error.max() < TOLERANCES[form.activations], error
