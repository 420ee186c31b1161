"""Two processes of torch.distributed (gloo, CPU): each holds its part, and the reduced output is the single layer's."""

import os
import subprocess
import sys
from pathlib import Path

import torch

RANK = """
import sys, torch, torch_bridge
rank, store = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
g = torch.Generator().manual_seed(0)
pairs = [(f"mlp.experts.{e}.{w}.weight", torch.randn(shape, generator=g) * 0.1)
         for e in range(5) for w, shape in (("gate_proj", (32, 16)), ("up_proj", (32, 16)), ("down_proj", (16, 32)))]
x, z = torch.randn(7, 16, generator=g), torch.randn(7, 5, generator=g)

def layer(**options):
    one = torch_bridge.FusedMoE(5, 2, 16, 32, torch.float32, **options)
    one.load_weights(pairs)
    one.process_weights_after_loading()
    return one

whole = layer()
assert whole.maybe_all_reduce(x) is x
found = {"whole": whole(x, z)}
for kind in ("tp_size", "ep_size"):
    part = layer(**{kind: 2}, reduce_results=True)
    assert (part.tp_rank if kind == "tp_size" else part.ep_rank) == rank
    assert part.w13_weight.numel() < whole.w13_weight.numel()
    found[kind] = part(x, z)
    part.reduce_results = False
    found[f"{kind} part"] = own = part(x, z)
    kept = own.clone()
    assert not torch.equal(part.maybe_all_reduce(own), own) and torch.equal(own, kept)

shared, squared = torch.nn.Linear(16, 16, bias=False), torch.nn.Module()
shared.weight.data = torch.randn(16, 16, generator=g)
squared.forward = torch.square
options = dict(shared_experts=shared, routed_output_transform=squared)
found["around whole"] = layer(**options)(x, z).detach()
found["around"] = layer(**options, ep_size=2, reduce_results=True)(x, z).detach()
torch.save(found, f"{store}.{rank}")
"""


def test_reduced_outputs_of_two_ranks_are_the_single_layers(tmp_path):
    """M107, M46: every rank gets the sum of the parts, which is the whole layer's output in float32; a part is not.

    What follows the sum, a transform and shared experts, sees it once.
    """
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], env=env, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=600)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    found = [torch.load(tmp_path / f"store.{rank}", weights_only=True) for rank in range(2)]
    whole = found[0]["whole"]
    assert whole.abs().max() > 0 and torch.equal(whole, found[1]["whole"])
    for rank in found:
        torch.testing.assert_close(rank["around"], found[0]["around whole"], rtol=1e-5, atol=1e-6)
    for kind in ("tp_size", "ep_size"):
        parts = [rank[f"{kind} part"] for rank in found]
        for rank in found:
            torch.testing.assert_close(rank[kind], whole, rtol=1e-5, atol=1e-6)
            assert torch.equal(rank[kind], parts[0] + parts[1])
        assert all((part - whole).abs().max() > 0.01 * whole.abs().max() for part in parts)
