"""route against the routers of transformers: identity as router weight, so that hidden states are the logits."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.cohere2_moe.modeling_cohere2_moe import Cohere2MoeTopKRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HashRouter, DeepseekV4TopKRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.llama4.modeling_llama4 import Llama4Router
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashTopkRouter
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter
from transformers.models.phimoe.modeling_phimoe import sparsemixer
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from moe_jax.routing import RoutingParams
from tests.support.cases.routing import BIAS, E, K, config, jit_route

LOGITS = np.random.default_rng(0).normal(size=(32, E)).astype(np.float32)
TOKENS = np.random.default_rng(2).integers(0, 13, 32)


def judge(router, **fields):
    """A transformers router whose logits are its input."""
    settings = dict(
        num_experts=E, num_local_experts=E, n_routed_experts=E, zero_expert_num=0, hidden_size=E, num_experts_per_tok=K,
        norm_topk_prob=True, routed_scaling_factor=2.5, n_group=4, topk_group=2, vocab_size=13,
    )  # fmt: skip
    module = router(SimpleNamespace(**(settings | fields)))
    getattr(module, "classifier", module).weight.data = torch.eye(E)
    for name in ("bias", "e_score_correction_bias"):
        if isinstance(getattr(module, name, None), torch.Tensor):
            getattr(module, name).data = torch.zeros(E) if name == "bias" else torch.from_numpy(BIAS)
    return module


def check(expected_weights, expected_ids, c, params=None, **arrays):
    """Compare as sets: several of transformers' routers return their picks unsorted."""
    r = jit_route(jnp.asarray(LOGITS), c, params=params, **arrays)
    for row, (weights, ids) in enumerate(zip(expected_weights.tolist(), expected_ids.tolist(), strict=True)):
        found = dict(zip(r.topk_ids[row].tolist(), r.topk_weights[row].tolist(), strict=True))
        assert found == pytest.approx(dict(zip(ids, weights, strict=True)), rel=1e-5), f"token {row}"


def run(module, *args):
    with torch.no_grad():
        return [t.detach() for t in module(torch.from_numpy(LOGITS), *args)]


WITH_BIAS = RoutingParams(jnp.asarray(BIAS))


@pytest.mark.parametrize("renormalize", [True, False])
def test_qwen3_moe(renormalize):
    _, weights, ids = run(judge(Qwen3MoeTopKRouter, norm_topk_prob=renormalize))
    check(weights, ids, config(renormalize=renormalize))


def test_gpt_oss():
    _, weights, ids = run(judge(GptOssTopKRouter))
    check(weights, ids, config())


@pytest.mark.parametrize("renormalize", [True, False])
def test_deepseek_v3(renormalize):
    _, weights, ids = run(judge(DeepseekV3TopkRouter, norm_topk_prob=renormalize))
    groups = dict(use_grouped_topk=True, num_expert_group=4, topk_group=2)
    c = config(scoring_func="sigmoid", renormalize=renormalize, routed_scaling_factor=2.5, **groups)
    check(weights, ids, c, WITH_BIAS)


def test_deepseek_v4():
    _, weights, ids = run(judge(DeepseekV4TopKRouter, scoring_func="sqrtsoftplus"))
    c = config(scoring_func="sqrtsoftplus", routed_scaling_factor=2.5)
    check(weights, ids, c, WITH_BIAS)


def test_deepseek_v4_hash():
    module = judge(DeepseekV4HashRouter, scoring_func="sqrtsoftplus")
    # A token's experts are distinct in real tables.
    table = np.argsort(np.random.default_rng(3).random((13, E)), axis=1)[:, :K]
    module.tid2eid.data = torch.from_numpy(table)
    _, weights, ids = run(module, torch.from_numpy(TOKENS))
    params = RoutingParams(hash_indices_table=jnp.asarray(table, jnp.int32))
    c = config(scoring_func="sqrtsoftplus", routed_scaling_factor=2.5)
    check(weights, ids, c, params, token_ids=jnp.asarray(TOKENS, jnp.int32))


def test_minimax_m2():
    _, weights, ids = run(judge(MiniMaxM2TopKRouter), torch.from_numpy(BIAS))
    check(weights, ids, config(scoring_func="sigmoid"), WITH_BIAS)


def test_longcat_flash_zero_experts():
    # 12 real experts, 4 zero experts: what transformers gives to ids >= 12 is ours in zero_expert_weight.
    _, weights, ids = run(judge(LongcatFlashTopkRouter, n_routed_experts=E))
    c = config(12, renormalize=False, routed_scaling_factor=2.5, zero_expert_type="identity")
    r = jit_route(jnp.asarray(LOGITS), c, params=WITH_BIAS)
    is_zero = ids.numpy() >= 12
    assert is_zero.any() and not is_zero.all()
    np.testing.assert_allclose(r.zero_expert_weight, np.where(is_zero, weights, 0).sum(1), rtol=1e-5)
    np.testing.assert_array_equal(np.sort(r.topk_ids), np.sort(np.where(is_zero, -1, ids)))
    np.testing.assert_allclose(r.topk_weights.sum(1), np.where(is_zero, 0, weights).sum(1), rtol=1e-5)


def test_llama4_preset():
    dense, _ = run(judge(Llama4Router))
    weights, ids = dense.topk(K)
    check(weights, ids, config(custom_routing_function="llama4"))


@pytest.mark.parametrize("renormalize", [True, False])
def test_cohere2_preset(renormalize):
    _, weights, ids = run(judge(Cohere2MoeTopKRouter, norm_topk_prob=renormalize, expert_selection_fn="sigmoid"))
    check(weights, ids, config(renormalize=renormalize, custom_routing_function="cohere2"))


def test_phi_sparsemixer_preset():
    weights, ids = sparsemixer(torch.from_numpy(LOGITS), jitter_eps=0.01, training=False)
    check(weights, ids, config(E, 2, renormalize=False, custom_routing_function="phi_sparsemixer"))
