"""Skewed routing on eight devices: how evenly load lies before and after ``rebalance``, and what moving experts costs.

    JAX_PLATFORMS=cpu python benchmarks/eplb.py [--experts 256] [--redundant 32] [--out FILE]

Experts are as popular as a power of their rank, ``rank ** -skew``, in another order in every layer. A window of steps
is recorded in an ``EplbState``, a plan is made from it, and OTHER tokens of the same popularity measure what it gained:

    balancedness   mean over maximum of the rows per device, summed over layers, as vLLM logs it; 1 is even
    peak           rows of the busiest device over the mean: how much longer a step takes than it would if even, as all
                   devices wait for the busiest one
    gain           peak before over peak after

Devices are simulated on the CPU, so times of calls would say nothing about balance; rows do. The last lines move the
experts of one small layer between the simulated devices and check its output bit for bit.
"""

import argparse
import datetime
import platform
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import moe_jax
from moe_jax.parallel import EplbState, Placement, balancedness, rearrange_expert_weights, rebalance

DEVICES = 8
jax.config.update("jax_num_cpu_devices", DEVICES)

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--experts", type=int, default=256)
parser.add_argument("--redundant", type=int, default=32)
parser.add_argument("--nodes", type=int, default=2, help="of the hierarchical policy")
parser.add_argument("--groups", type=int, default=8, help="of experts, under the hierarchical policy")
parser.add_argument("--top-k", type=int, default=8)
parser.add_argument("--layers", type=int, default=8)
parser.add_argument("--tokens", type=int, default=1024, help="of one step")
parser.add_argument("--steps", type=int, default=8, help="in the window")
parser.add_argument("--skews", default="0,0.25,0.5,0.75,1")
parser.add_argument("--out", type=Path)
args = parser.parse_args()

lines = []


def say(text: str = "") -> None:
    print(text, flush=True)
    lines.append(text)


def popularity(skew: float, seed: int = 0) -> jax.Array:
    """(layers, E) logits of the experts' shares."""
    rng = np.random.default_rng(seed)
    ranks = np.stack([rng.permutation(args.experts) for _ in range(args.layers)])
    return jnp.asarray(-skew * np.log1p(ranks), jnp.float32)


@jax.jit
def load_of_slots(key: jax.Array, popularity: jax.Array, placement: Placement) -> jax.Array:
    """(S,) rows that each slot of one layer serves in a step: top-k of noisy popularity, without a repeated expert."""
    noise = jax.random.gumbel(key, (args.tokens, args.experts), jnp.float32)
    _, ids = jax.lax.top_k(popularity + noise, args.top_k)
    slots = placement.to_physical(ids.astype(jnp.int32)).reshape(-1)
    return jnp.zeros(placement.num_slots, jnp.int32).at[slots].add(1)


def serve(state: EplbState, shares: jax.Array, seed: int) -> tuple[EplbState, np.ndarray]:
    """Steps of tokens; the state and the rows of all slots, (layers, S)."""
    placements = [state.placement(layer) for layer in range(args.layers)]
    total = 0
    for key in jax.random.split(jax.random.key(seed), args.steps):
        keys = jax.random.split(key, args.layers)
        load = jnp.stack([load_of_slots(*of_layer) for of_layer in zip(keys, shares, placements, strict=True)])
        state, total = state.record(load).next_step(), total + np.asarray(load)
    return state, total


def peak(load: np.ndarray) -> float:
    per_device = load.reshape(args.layers, DEVICES, -1).sum(axis=2)
    return float((per_device.max(axis=1) / per_device.mean(axis=1)).mean())


def table(redundant: int, num_nodes: int = 1) -> None:
    """num_nodes: above 1 the hierarchical policy, under which a group of experts stays on one node."""
    say(f"\n{args.experts} experts, {redundant} redundant, {DEVICES} devices, {args.layers} layers, top_k {args.top_k}")
    if num_nodes > 1:
        say(f"hierarchical: {args.groups} groups of experts, each on one of {num_nodes} nodes")
    say(f"{'skew':>6}{'balancedness':>22}{'peak':>18}{'gain':>8}{'layers':>8}{'moved':>8}{'plan ms':>9}")
    say(f"{'':>6}{'before':>12}{'after':>10}{'before':>10}{'after':>8}")
    for skew in map(float, args.skews.split(",")):
        shares = popularity(skew)
        linear = Placement.create(args.experts, DEVICES, num_redundant_experts=redundant)
        state, before = serve(EplbState.create(args.layers, linear, window_size=args.steps), shares, seed=1)
        start = time.perf_counter()
        plan = rebalance(state, num_nodes=num_nodes, num_groups=args.groups if num_nodes > 1 else 1)
        plan_ms = 1e3 * (time.perf_counter() - start)
        old = np.asarray(state.physical_to_logical)
        for layer in plan.layers:
            state = state.with_placement(layer, plan.placement(layer))
        _, after = serve(state, shares, seed=2)
        moved = (old != plan.physical_to_logical).mean()
        values = [float(balancedness(jnp.asarray(load), DEVICES)) for load in (before, after)]
        say(
            f"{skew:>6}{values[0]:>12.3f}{values[1]:>10.3f}{peak(before):>10.2f}{peak(after):>8.2f}"
            f"{peak(before) / peak(after):>7.2f}x{len(plan.layers):>8}{moved:>7.0%} {plan_ms:>8.0f}"
        )


def move_one_layer() -> None:
    experts, redundant, hidden, intermediate = 24, 8, 256, 256
    layer = moe_jax.FusedMoE(
        experts,
        hidden,
        intermediate,
        top_k=2,
        scheme="fp8_block",
        dtype=jnp.float32,
        mesh=jax.make_mesh((DEVICES,), ("expert",)),
        expert_axis="expert",
        dispatch="all_to_all",  # sums a token's rows where the token lives: the same bits wherever its experts lie
        enable_eplb=True,
        num_redundant_experts=redundant,
        rngs=nnx.Rngs(0),
    )
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((64, hidden)), jnp.float32)
    logits = jnp.asarray(rng.standard_normal((64, experts)) - 0.2 * np.arange(experts), jnp.float32)
    run = jax.jit(lambda layer: layer(x, logits, return_stats=True))
    y, stats = run(layer)
    state = EplbState.create(1, layer.placement.get_value(), window_size=1).record(stats.load[None]).next_step()
    plan, old = rebalance(state), layer.placement.get_value()
    times = []
    for _ in range(5):
        for placement in (plan.placement(0), old):
            start = time.perf_counter()
            rearrange_expert_weights(layer, placement)
            jax.block_until_ready(jax.tree.leaves(layer.weights.get_value()))
            times.append(1e3 * (time.perf_counter() - start))
    rearrange_expert_weights(layer, plan.placement(0))
    again, moved_stats = run(layer)
    assert (np.asarray(again) == np.asarray(y)).all() and run._cache_size() == 1
    found = [float(balancedness(load[None], DEVICES)) for load in (stats.load, moved_stats.load)]
    size = layer.weights.get_value().nbytes()
    say(f"\none layer, {experts} + {redundant} experts of {hidden} x {intermediate}, fp8_block, {size} bytes")
    say(f"  balancedness {found[0]:.3f} -> {found[1]:.3f}, outputs equal bit for bit, no new program")
    say(f"  experts moved between simulated devices: {times[0]:.0f} ms at first, then {np.median(times[2:]):.1f} ms")


say(
    f"benchmarks/eplb.py, {datetime.datetime.now(datetime.UTC):%Y-%m-%d}, jax {jax.__version__}, {platform.machine()}, "
    f"{DEVICES} simulated CPU devices, {args.steps} steps of {args.tokens} tokens"
)
for redundant in dict.fromkeys((0, args.redundant)):
    table(redundant)
table(args.redundant, args.nodes)
move_one_layer()
if args.out:
    args.out.write_text("\n".join(lines) + "\n")
