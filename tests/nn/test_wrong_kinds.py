"""Arguments of another kind than annotated, refused in one line by name.

The tests' own checks of annotations would speak first, so that the cases run in a process without them: this file.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2])]
    os.environ |= dict(JAX_PLATFORMS="cpu", JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import moe_jax
from moe_jax.parallel import ParallelConfig
from moe_jax.quantization import ExpertWeights

H = 32
IN_CONFIG = ("is_act_and_mul", "renormalize", "use_grouped_topk", "apply_routed_scale_to_output", "has_bias")
BOOLEANS = (*IN_CONFIG, "apply_router_weight_on_input", "reduce_results", "enable_eplb")


def layer(**options):
    return moe_jax.FusedMoE(**dict(num_experts=4, hidden_size=H, intermediate_size=H, top_k=2) | options)


def config(**options):
    return moe_jax.MoEConfig(**dict(num_experts=4, hidden_size=H, intermediate_size=H, top_k=2) | options)


def parallel(**options):
    return ParallelConfig(jax.make_mesh((2,), ("expert",)), expert_axis="expert", **options)


def call(change=lambda layer, x, z: (x, z), *, modules=None, **options):
    """A call of a layer of two experts per token, with three tokens."""
    made = layer(rngs=nnx.Rngs(0), **modules or {})
    return made(*change(made, jnp.ones((3, H), jnp.bfloat16), jnp.zeros((3, 4))), **options)


def functional(**options):
    made = layer(rngs=nnx.Rngs(0))
    named = dict(x=jnp.ones((3, H), jnp.bfloat16), router_logits=jnp.zeros((3, 4)), config=made.config)
    weights: ExpertWeights = made.weights.get_value()
    return moe_jax.fused_moe(**dict(named, weights=weights) | options)


def block(experts=None, router=lambda x: x[..., :4], shared_experts=None, **options):
    made = moe_jax.MoEBlock(layer(rngs=nnx.Rngs(0)), router, shared_experts)
    return made(jnp.ones((3, H), jnp.bfloat16), **options)


# name -> (call, error, pattern of its message)
CASES = {
    f"{made.__name__}-{name}-{value}": (
        lambda made=made, name=name, value=value: made(**{name: value}),
        "TypeError",
        f"^{name}={value!r}, expected True or False$",
    )
    for made, names in ((layer, BOOLEANS), (config, IN_CONFIG), (parallel, ("reduce_results",)))
    for name in names
    for value in ("False", 0, None)
}
MODULE = "expected None, or a module or function that can be called$"
CASES |= {
    "factor-text": (
        lambda: layer(routed_scaling_factor="2"),
        "TypeError",
        "^routed_scaling_factor='2', expected a num",
    ),
    "factor-bool": (lambda: config(routed_scaling_factor=True), "TypeError", "^routed_scaling_factor=True, expected"),
    "limit": (lambda: layer(swiglu_limit="7"), "TypeError", "^swiglu_limit='7', expected a number"),
    "name": (lambda: layer(name=5), "TypeError", "^name=5, expected a string"),
    "bias": (
        lambda: layer(e_score_correction_bias="yes"),
        "TypeError",
        "^e_score_correction_bias='yes', expected an ar",
    ),
    "table": (
        lambda: layer(hash_indices_table={}),
        "TypeError",
        "^hash_indices_table={}, expected an array of numbers",
    ),
    "mapping": (lambda: layer(expert_mapping="w1"), "TypeError", "^expert_mapping='w1', expected rows of make_expert"),
    "rows": (lambda: layer(expert_mapping=[("a", "b", "c", "d")]), "TypeError", "^expert_mapping=.*, expected rows"),
    "groups": (lambda: layer(num_expert_group="x"), "ValueError", "^num_expert_group='x', expected an integer$"),
    "topk_group": (lambda: layer(topk_group=2.5), "ValueError", "^topk_group=2.5, expected an integer$"),
    "routing": (lambda: layer(custom_routing_function=5), "ValueError", "^custom_routing_function=5, expected a call"),
    "size": (lambda: layer(hidden_size=np.ones((2, 2))), "ValueError", "^hidden_size is array.*integer of at least 1$"),
    "router": (lambda: layer(router=5), "TypeError", f"^router=5, {MODULE}"),
    "shared": (lambda: layer(shared_experts="x"), "TypeError", f"^shared_experts='x', {MODULE}"),
    "output": (lambda: layer(routed_output_transform=1), "TypeError", f"^routed_output_transform=1, {MODULE}"),
    "block": (lambda: block(router=5), "TypeError", f"^router=5, {MODULE}"),
    "mesh": (lambda: layer(mesh=parallel(), reduce_results=False), "ValueError", "^reduce_results=False beside mesh="),
    "call-stats": (lambda: call(return_stats="no"), "TypeError", "^return_stats='no', expected True or False$"),
    "block-stats": (lambda: block(return_stats=1), "TypeError", "^return_stats=1, expected True or False$"),
    "fused-stats": (lambda: functional(return_stats=1), "TypeError", "^return_stats=1, expected True or False$"),
    "logits": (
        lambda: call(lambda layer, x, z: (x, np.zeros((), np.float32))),
        "ValueError",
        r"^router_logits has shape \(\), expected \(3, 4\)",
    ),
    "fused-config": (lambda: functional(config=5), "TypeError", "^config has type int, expected moe_jax.MoEConfig$"),
    "fused-routing": (lambda: functional(routing={}), "TypeError", "^routing has type dict, expected moe_jax.routing"),
    "fused-ids": (
        lambda: functional(token_ids="x"),
        "TypeError",
        "^token_ids has type str, expected a JAX or NumPy ar",
    ),
    "fused-shared": (lambda: functional(shared_output=5), "TypeError", "^shared_output has type int, expected a JAX"),
    "fused-integers": (
        lambda: functional(shared_output=np.zeros((3, H), np.int32)),
        "TypeError",
        "^shared_output has dtype int32, expected floating",
    ),
    # jax.jit hashes a config, which an array cannot be
    "numpy": (lambda: hash(config(routed_scaling_factor=np.array(2.5), renormalize=np.True_)), "accepted", "^$"),
    # a sum or a product would spread them over the rows
    "shared-width": (
        lambda: call(modules=dict(shared_experts=lambda x: x[:, :1], routed_output_transform=lambda y: y)),
        "ValueError",
        r"^output of shared_experts has shape \(3, 1\), expected \(3, 32\)$",
    ),
    "gate-axis": (
        lambda: call(modules=dict(shared_experts=lambda x: x, shared_expert_gate=lambda x: x[:, 0])),
        "ValueError",
        r"^output of shared_expert_gate has shape \(3,\), expected \(3, 1\)$",
    ),
    "block-shared": (
        lambda: block(shared_experts=lambda x: x[..., :1]),
        "ValueError",
        r"^output of shared_experts has shape \(3, 1\), expected \(3, 32\)$",
    ),
}


@pytest.fixture(scope="module")
def outcomes():
    run = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=300, check=True)
    return json.loads(run.stdout)


@pytest.mark.parametrize("name", CASES)
def test_wrong_kinds(outcomes, name):
    _, error, pattern = CASES[name]
    found, message = outcomes[name]
    assert found == error and re.search(pattern, message) and "\n" not in message, (found, message)


def main():
    outcomes = {}
    for name, (attempt, _, _) in CASES.items():
        try:
            attempt()
            outcomes[name] = "accepted", ""
        except Exception as error:
            outcomes[name] = type(error).__name__, str(error)
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
