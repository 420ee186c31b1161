"""Reloads of a model in one thread while others call it: all layers of an answer are of one version."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax._versions import Place, install, one_version
from moe_jax.models._compiled import split_model
from tests.fuzz.bases import write
from tests.fuzz.models import QWEN, plain_dense, plain_experts
from tests.support.cases.threads import while_reloading

IDS = np.arange(6)[None]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("versions")
    for version in (0, 1):
        rng = np.random.default_rng(version)
        write(root / str(version), plain_dense(rng, QWEN) | plain_experts(rng, QWEN), None, QWEN)
    return [root / "0", root / "1"]


def by_split(model):
    return split_model(model)[1]


def by_nnx_split(model):
    return jax.tree.leaves(nnx.split(one_version(model))[1])


@pytest.mark.parametrize("read", [jax.tree.leaves, by_split, by_nnx_split])
def test_leaves_are_of_one_version(directories, read):
    """Installing alone, as often as it can: every Variable holds the number of its version."""
    model = moe_jax.load_pretrained(directories[0], dtype=jnp.float32)
    places = [
        Place(node, name)
        for _, node in nnx.iter_modules(model)
        for name, value in vars(node).items()
        if isinstance(value, nnx.Variable)
    ]
    values = [[(p, jax.tree.map(lambda a, v=v: np.full((), v, a.dtype), p.variable.get_value())) for p in places]
              for v in (0, 1)]  # fmt: skip
    install(values[0])

    def both_were_seen(found):
        return {float(leaves[0]) for leaves in found} == {0.0, 1.0}

    found = while_reloading([lambda version: install(values[version])], lambda: read(model), 100, both_were_seen)
    assert both_were_seen(found) and all(len({float(leaf) for leaf in leaves}) == 1 for leaves in found)


@pytest.mark.slow
def test_answers_are_of_one_version(directories):
    model = moe_jax.load_pretrained(directories[0], dtype=jnp.float32)
    jitted = jax.jit(lambda model, ids: model(ids))
    calls = [model.score, model, functools.partial(jitted, model)]
    calls.append(functools.partial(moe_jax.generate, model, max_new_tokens=3))
    expected = [set() for _ in calls]
    for directory in directories:
        model.reload_weights(directory)
        for own, call in zip(expected, calls, strict=True):
            own.add(np.asarray(call(IDS)).tobytes())
    assert all(len(own) == 2 for own in expected)
    found = while_reloading(
        [lambda version: model.reload_weights(directories[version])], lambda: [call(IDS) for call in calls], 6
    )
    for answers in found:
        for own, answer in zip(expected, answers, strict=True):
            assert np.asarray(answer).tobytes() in own
    assert jitted._cache_size() == 1
