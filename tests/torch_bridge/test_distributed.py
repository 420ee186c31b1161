"""Four processes of torch.distributed (gloo, CPU) in groups of two: a group shares a layer and sums over itself."""

import os
import subprocess
import sys
from pathlib import Path

import torch

# Forked after the imports, which take longer than the rest; nothing of JAX or torch runs before.
RANKS = """
import os, sys, torch
from torch import distributed
from torch_bridge import FusedMoE
store, ranks = sys.argv[1], []
for rank in range(4):
    ranks.append(os.fork())
    if ranks[-1] == 0:
        break
else:
    sys.exit(any([os.waitpid(process, 0)[1] for process in ranks]))
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
groups = [distributed.new_group([0, 1]), distributed.new_group([2, 3])]
group = groups[rank // 2]
g = torch.Generator().manual_seed(0)
pairs = [(f"mlp.experts.{e}.{w}.weight", torch.randn(shape, generator=g) * 0.1)
         for e in range(5) for w, shape in (("gate_proj", (32, 16)), ("up_proj", (32, 16)), ("down_proj", (16, 32)))]
pairs += [(f"mlp.experts.{e}.{w}.bias", torch.randn(n, generator=g))
          for e in range(5) for w, n in (("gate_proj", 32), ("up_proj", 32), ("down_proj", 16))]
x, z = torch.randn(7, 16, generator=g), torch.randn(7, 5, generator=g)

def layer(**options):
    one = FusedMoE(5, 2, 16, 32, torch.float32, has_bias=True, **options)
    one.load_weights(pairs)
    one.process_weights_after_loading()
    return one

whole = layer()
assert whole.maybe_all_reduce(x) is x
found = {"whole": whole(x, z)}
for kind in ("tp_size", "ep_size"):
    part = layer(**{kind: 2}, reduce_results=True, process_group=group)
    assert (part.tp_rank if kind == "tp_size" else part.ep_rank) == rank % 2
    assert part.w13_weight.numel() < whole.w13_weight.numel()
    found[kind] = part(x, z)
    part.reduce_results = False
    found[f"{kind} part"] = own = part(x, z)
    kept = own.clone()
    assert not torch.equal(part.maybe_all_reduce(own), own) and torch.equal(own, kept)

both = layer(tp_size=2, ep_size=2, reduce_results=True)  # all four share it
assert (both.tp_rank, both.ep_rank) == (rank % 2, rank // 2)
found["both"] = both(x, z)

shared, squared = torch.nn.Linear(16, 16, bias=False), torch.nn.Module()
shared.weight.data = torch.randn(16, 16, generator=g)
squared.forward = torch.square
options = dict(shared_experts=shared, routed_output_transform=squared)
if rank == 0:
    found["around whole"] = layer(**options)(x, z).detach()
found["around"] = layer(**options, ep_size=2, reduce_results=True, process_group=group)(x, z).detach()

def refusal(call):
    try:
        call()
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error)

found["world"] = refusal(lambda: layer(ep_size=2, reduce_results=True)(x, z))
found["size"] = refusal(lambda: layer(tp_size=2, ep_size=2, process_group=group))
found["outside"] = refusal(lambda: layer(ep_size=2, process_group=groups[1 - rank // 2]))
found["partial"] = refusal(lambda: layer(ep_size=2, routed_output_transform=squared, process_group=group))
torch.save(found, f"{store}.{rank}")
"""


def test_reduced_outputs_of_a_group_are_the_single_layers(tmp_path):
    """M107, M46: every rank gets the sum over its group, which is the whole layer's output in float32; a part is not.

    What follows the sum, a transform and shared experts, sees it once. A world that is larger than the layer is named.
    """
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(Path(__file__).parents[2])}
    env["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"  # compiling is most of the work, in each of four processes
    command = [sys.executable, "-W", "ignore", "-c", RANKS, str(tmp_path / "store")]
    ran = subprocess.run(command, env=env, stderr=subprocess.PIPE, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    found = [torch.load(tmp_path / f"store.{rank}", weights_only=True) for rank in range(4)]
    whole = found[0]["whole"]
    assert whole.abs().max() > 0 and all(torch.equal(whole, rank["whole"]) for rank in found)
    for rank in found:
        torch.testing.assert_close(rank["around"], found[0]["around whole"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(rank["both"], whole, rtol=1e-5, atol=1e-6)
        assert "over 2 ranks (tp_size=1, ep_size=2)" in rank["world"] and "found a world of 4" in rank["world"]
        assert "process_group has 2 ranks, expected tp_size * ep_size = 4" in rank["size"]
        assert "expected a torch.distributed.ProcessGroup that this rank belongs to" in rank["outside"]
        assert "routed_output_transform needs them" in rank["partial"]
    for kind in ("tp_size", "ep_size"):
        for pair in (found[:2], found[2:]):
            parts = [rank[f"{kind} part"] for rank in pair]
            for rank in pair:
                torch.testing.assert_close(rank[kind], whole, rtol=1e-5, atol=1e-6)
                assert torch.equal(rank[kind], parts[0] + parts[1])
            assert all((part - whole).abs().max() > 0.01 * whole.abs().max() for part in parts)
