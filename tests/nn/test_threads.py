"""Reloads in one thread while others call: each call has the weights, bias and slots of one version."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax import _versions
from tests.support.cases.threads import while_reloading
from tests.support.checkpoints.expert_tensors import INTER, E, H, plain_tensors

BIAS = "model.layers.0.mlp.gate.e_score_correction_bias"
X, LOGITS = jnp.ones((1, H), jnp.float32), jnp.zeros((1, E), jnp.float32)


def tensors(version):
    """All weights say which version they are of, and so does the expert that the correction bias chooses."""
    stored = {name: np.full(t.shape, (version + 1) / 64, t.dtype) for name, t in plain_tensors().items()}
    return [*stored.items(), (BIAS, np.eye(E, dtype=np.float32)[version] * 100)]


@pytest.fixture
def layer():
    options = dict(scoring_func="sigmoid", e_score_correction_bias=True, dtype=jnp.float32)
    layer = moe_jax.FusedMoE(E, H, INTER, top_k=1, **options)
    layer.load_weights(tensors(0))
    layer.process_weights_after_loading()
    return layer


def versions_of(weights, bias):
    """(version by the weights, version by the bias)"""
    leaf = np.asarray(weights.w13.data if hasattr(weights, "w13") else weights, np.float32).flat[0]
    return round(float(leaf) * 64) - 1, int(np.argmax(bias))


def by_call(layer):
    seen = []

    def run(x, logits, weights, config, routing, **options):
        seen.append(versions_of(weights, routing.correction_bias))
        return x, None

    module = sys.modules[type(layer).__module__]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "fused_moe", run)
        layer(X, LOGITS)
    return seen[0]


def by_leaves(layer):
    held = jax.tree.leaves(layer)
    bias = next(leaf for leaf in held if leaf.shape == (E,))
    return versions_of(next(leaf for leaf in held if leaf.ndim == 4), bias)


def by_split(layer):
    merged = nnx.merge(*nnx.split(layer))
    return versions_of(merged.weights.get_value(), merged.correction_bias.get_value())


@pytest.mark.parametrize("read", [by_call, by_leaves, by_split])
def test_a_call_has_weights_and_bias_of_one_version(layer, read):
    """Installing alone, without reading files, so that it happens as often as it can."""
    loaders = []
    for version in (0, 1):
        loader = layer._new_loader()
        loader.load(tensors(version))
        loaders.append((loader.finish(), loader.correction_bias))

    def both_were_seen(found):
        return {first for first, _ in found} == {0, 1}

    def install(version):
        layer.set_weights(loaders[version][0], correction_bias=loaders[version][1])

    found = while_reloading([install], lambda: read(layer), 400, both_were_seen)
    assert both_were_seen(found) and all(first == second for first, second in found)


def test_an_answer_is_that_of_one_version(layer):
    """Through jax.jit, the layer an argument, and beside it by hand."""
    run = jax.jit(lambda layer, x, z: layer(x, z))
    answers = []
    for version in (0, 1):
        layer.reload_weights(tensors(version))
        answers.append(np.asarray(run(layer, X, LOGITS)).tobytes())
    found = while_reloading(
        [lambda version: layer.reload_weights(tensors(version))],
        lambda: (run(layer, X, LOGITS), layer(X, LOGITS)),
        25,
    )
    assert {np.asarray(y).tobytes() for pair in found for y in pair} <= set(answers)
    assert run._cache_size() == 1


def test_no_reload_is_lost(layer):
    """Four threads raise the version, by experts and as a whole, while calls run beside them."""
    counts = [0, 0, 0, 0]

    def whole(thread):
        def reload(version):
            layer.reload_weights(tensors(version))
            counts[thread] += 1

        return reload

    def one_expert(thread):
        def reload(version):
            own = [(name, t) for name, t in tensors(version) if f"experts.{thread - 1}." in name]
            layer.reload_weights(own, experts=[thread - 1])
            counts[thread] += 1

        return reload

    run = jax.jit(lambda layer, x, z: layer(x, z))
    while_reloading([whole(0), one_expert(1), one_expert(2), one_expert(3)], lambda: run(layer, X, LOGITS), 20)
    assert int(layer.version.get_value()) == sum(counts) and min(counts) > 0


def test_an_interrupted_installation_changes_nothing(layer, monkeypatch):
    """Ctrl-C between two modules."""

    class Interrupted(dict):
        def update(self, changes):
            if "broken" in changes:
                raise KeyboardInterrupt
            super().update(changes)

    class Module:
        pass

    other = Module()
    other.broken = layer.version
    held = Interrupted(vars(other))
    monkeypatch.setattr(_versions, "vars", lambda m: held if m is other else vars(m), raising=False)
    before = jax.tree.leaves(layer)
    values = [(_versions.Place(layer, "version"), np.int32(7)), (_versions.Place(other, "broken"), np.int32(7))]
    with pytest.raises(KeyboardInterrupt):
        _versions.install(values)
    monkeypatch.undo()
    assert all(now is then for now, then in zip(jax.tree.leaves(layer), before, strict=True))
    assert _versions._steps % 2 == 0
    layer.reload_weights(tensors(1))
    assert by_leaves(layer) == (1, 1)
