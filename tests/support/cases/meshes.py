"""Layers over meshes of simulated CPU devices: layouts, hostile logits, and the answer of a single device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from moe_jax import fused_moe as on_one_device
from moe_jax.parallel import ParallelConfig, Placement, fused_moe, place_weights
from tests.support.cases.experts import make_config, make_stored_weights, make_tokens

# name -> (mesh shape by axis, arguments of ParallelConfig). "e", "t", "d" and "s" are the caller's names.
LAYOUTS = {
    "ep2": (dict(e=2), dict(expert_axis="e")),
    "ep4": (dict(e=4), dict(expert_axis="e")),
    "ep8": (dict(e=8), dict(expert_axis="e")),
    "tp2": (dict(t=2), dict(tensor_axis="t")),
    "tp4": (dict(t=4), dict(tensor_axis="t")),
    "ep2-tp2": (dict(t=2, e=2), dict(expert_axis="e", tensor_axis="t")),
    "ep4-tp2": (dict(e=4, t=2), dict(expert_axis="e", tensor_axis="t")),
    "dp2-ep4": (dict(d=2, e=4), dict(expert_axis="e", data_axis="d")),
    "dp4": (dict(d=4), dict(data_axis="d")),
    "dp=ep4": (dict(e=4), dict(expert_axis="e", data_axis="e")),
    "sp2-ep2-tp2": (dict(s=2, e=2, t=2), dict(expert_axis="e", tensor_axis="t", sequence_axis="s")),
    "sp=tp2-ep2-dp2": (dict(d=2, t=2, e=2), dict(expert_axis="e", tensor_axis="t", data_axis="d", sequence_axis="t")),
    "unused": (dict(u=2, e=2), dict(expert_axis="e")),
}
EXPERTS, TOP_K, HIDDEN, INNER = 6, 2, 64, 40


def marked(cases, quick):
    """pytest parameters, all but the ``quick`` ones, by their number, marked slow."""
    return [
        case if number in quick else pytest.param(case, marks=pytest.mark.slow) for number, case in enumerate(cases)
    ]


@functools.cache
def case_config(scheme, **options):
    """6 experts, which no mesh of 4 or 8 divides; I = 40, which no group or block divides; tiles as for 32 tokens,
    since the bits of a product may depend on the height of a tile."""
    sizes = dict(num_experts=EXPERTS, top_k=TOP_K, hidden_size=HIDDEN, intermediate_size=INNER, pinned_tokens=32)
    return make_config(scheme, **(sizes | options))


def make_parallel(layout, axis_type="Auto", **options):
    shape, axes = LAYOUTS[layout]
    mesh = jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType[axis_type],) * len(shape))
    return ParallelConfig(mesh, **axes, **options)


def make_logits(routing, num_tokens, config, seed=3):
    """(T, E) float32. "random", or hostile: "one" sends every token to the same experts, "last" only to the last ones,
    "ties" has equal logits everywhere, "skewed" favours the first experts strongly; "each" sends token t to expert
    t, modulo their number, and then to the next."""
    rng = np.random.default_rng(seed)
    z = rng.standard_normal((num_tokens, config.num_experts))
    match routing:
        case "one":
            z[:, 1:3] += 20.0
        case "last":
            z[:, -config.top_k :] += 20.0
        case "ties":
            z[:] = 0.0
        case "skewed":
            z -= 2.0 * np.arange(config.num_experts)
        case "each":
            token = np.arange(num_tokens)
            z[token, token % config.num_experts] += 20.0
            z[token, (token + 1) % config.num_experts] += 10.0
    return jnp.asarray(z, jnp.float32)


@functools.cache
def reference(config, num_tokens, routing):
    """((x, logits), weights, the answer of one device, its statistics)."""
    weights = make_stored_weights(config)
    x, logits = make_tokens(max(num_tokens, 1), config)[:num_tokens], make_logits(routing, num_tokens, config)
    y, stats = on_one_device(x, logits, weights, config, return_stats=True)
    return (x, logits), weights, np.asarray(y), jax.tree.map(np.asarray, stats)


def run(parallel, config, num_tokens, routing, *, placement="linear", redundant=0, **options):
    """(y, statistics) over the mesh, as NumPy arrays, and the placement."""
    (x, logits), weights, _, _ = reference(config, num_tokens, routing)
    placement = Placement.create(config.num_experts, parallel.expert_size, placement, num_redundant_experts=redundant)
    placed = place_weights(weights, config, placement, parallel)
    y, stats = fused_moe(x, logits, placed, config, parallel, placement=placement, return_stats=True, **options)
    return np.asarray(y), jax.tree.map(np.asarray, stats), placement


def nonzero_bytes(array):
    return np.count_nonzero(np.ascontiguousarray(array).view(np.uint8))


def unplaced(weights, like, placement):
    """Placed weights as one device holds them: slots to experts, padding cut off after checking that it is zeros."""

    def leaf(placed, wanted):
        placed = np.asarray(placed)
        if placed.ndim == 0:
            return placed
        rows = placed[placement.logical_to_physical[:, 0]]
        kept = rows[tuple(slice(0, n) for n in wanted.shape)]
        assert nonzero_bytes(rows) == nonzero_bytes(kept)
        assert not nonzero_bytes(placed[placement.physical_to_logical < 0])
        return kept

    return [leaf(a, b) for a, b in zip(jax.tree.leaves(weights), jax.tree.leaves(like), strict=True)]


def assert_same_experts(block, expected):
    """A block over a mesh holds, in its slots and shares, the bits of ``expected``, all experts of one device."""
    found = unplaced(block.experts.weights.get_value(), expected, block.experts.placement.get_value())
    for a, b in zip(found, jax.tree.leaves(expected), strict=True):
        assert a.tobytes() == np.asarray(b).tobytes()
