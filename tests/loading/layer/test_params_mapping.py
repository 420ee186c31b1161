"""M109: ``make_expert_params_mapping``, the rows by which checkpoint names become places in a layer."""

import numpy as np
import pytest

from moe_jax.loading import make_expert_params_mapping


def test_rows():
    rows = make_expert_params_mapping(None, "gate_proj", "down_proj", "up_proj", 2)
    assert rows == [
        ("experts.w13_", "experts.0.gate_proj.", 0, "w1"),
        ("experts.w2_", "experts.0.down_proj.", 0, "w2"),
        ("experts.w13_", "experts.0.up_proj.", 0, "w3"),
        ("experts.w13_", "experts.1.gate_proj.", 1, "w1"),
        ("experts.w2_", "experts.1.down_proj.", 1, "w2"),
        ("experts.w13_", "experts.1.up_proj.", 1, "w3"),
    ]


def test_redundant_experts():
    """Slots beyond the logical experts are copies of 0, 1, 2, ... in turn."""
    rows = make_expert_params_mapping(None, "w1", "w2", "w3", 3, num_redundant_experts=4)
    logical = [int(fragment.split(".")[1]) for _, fragment, _, shard in rows if shard == "w1"]
    physical = [expert for _, _, expert, shard in rows if shard == "w1"]
    assert logical == [0, 1, 2, 0, 1, 2, 0]
    assert physical == list(range(7))


@pytest.mark.parametrize("kind", ["names", "torch", "nnx", "pytree"])
def test_base_layer(kind):
    for has_lora in (False, True):
        model = model_with(kind, has_lora)
        rows = make_expert_params_mapping(model, "w1", "w2", "w3", 1)
        base = "base_layer." if has_lora else ""
        assert rows[0][:2] == (f"experts.{base}w13_", f"experts.0.w1.{base}")
        assert rows[1][:2] == (f"experts.{base}w2_", f"experts.0.w2.{base}")


def model_with(kind, has_lora):
    inner = "base_layer" if has_lora else "linear"
    if kind == "names":
        return [f"mlp.q.{inner}.weight"]
    if kind == "pytree":
        return {"q": {inner: {"weight": np.zeros(2)}}}
    if kind == "torch":
        import torch

        return torch.nn.ModuleDict({"q": torch.nn.ModuleDict({inner: torch.nn.Linear(1, 1)})})
    from flax import nnx

    class Wrapper(nnx.Module):
        def __init__(self):
            setattr(self, inner, nnx.Linear(1, 1, rngs=nnx.Rngs(0)))

    class Model(nnx.Module):
        def __init__(self):
            self.q = Wrapper()

    return Model()
