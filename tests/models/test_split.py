"""``split_model`` remembers what a model is apart from its arrays; a change of anything else must be seen."""

import jax
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.models import _compiled
from moe_jax.models._compiled import merge_model, split_model
from tests.support.cases.models import run


def fresh(model):
    graphdef, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    return _compiled.Structure(graphdef, treedef), leaves


def counted(monkeypatch):
    calls = []
    split = nnx.split
    monkeypatch.setattr(_compiled.nnx, "split", lambda *args: calls.append(1) or split(*args))
    return calls


@pytest.fixture
def model(case):
    return nnx.clone(case("qwen3_tied_window").model)


def test_a_second_split_is_remembered(model, monkeypatch):
    structure, leaves = split_model(model)
    calls = counted(monkeypatch)
    again, same = split_model(model)
    assert again is structure and not calls
    assert len(same) == len(leaves) and all(a is b for a, b in zip(same, leaves, strict=True))


def test_new_values_are_read_without_a_split(model, monkeypatch):
    split_model(model)
    calls = counted(monkeypatch)
    model.norm.weight[...] = model.norm.weight[...] + 1
    _, leaves = split_model(model)
    assert not calls
    assert sum(leaf is model.norm.weight.get_value() for leaf in leaves) == 1


def set_attribute(model):
    model.max_num_batched_tokens = 7


def set_deep_attribute(model):
    model.norm.eps = 0.5


def set_metadata(model):
    model.norm.weight.set_metadata(tag="other")


def share_a_variable(model):
    model.layers[1].attention_norm.weight = model.layers[0].attention_norm.weight


def replace_a_module(model):
    model.layers[0], model.layers[1] = model.layers[1], model.layers[0]


def add_adapters(model):
    moe_jax.lora(model, rank=2, targets=("attention",), rngs=nnx.Rngs(0))


CHANGES = (set_attribute, set_deep_attribute, set_metadata, share_a_variable, replace_a_module, add_adapters)


@pytest.mark.parametrize("change", CHANGES, ids=[change.__name__ for change in CHANGES])
def test_other_changes_are_seen(model, change):
    before, _ = split_model(model)
    change(model)
    structure, leaves = split_model(model)
    wanted, arrays = fresh(model)
    assert structure == wanted and hash(structure) == hash(wanted)
    assert all(a is b for a, b in zip(leaves, arrays, strict=True))
    if change is not replace_a_module:  # of layers that are alike
        assert structure != before


def test_merged_models_compute_the_same(model):
    ids = np.arange(6)[None] + 1
    np.testing.assert_array_equal(run(merge_model(*split_model(model)), ids), run(model, ids))


def param(value):
    return nnx.Param(np.full(2, value, np.float32))


def module(**attributes):
    made = nnx.Module()
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def shared_module():
    """Set in another order than that of nnx, which sorts names."""
    inner = module(weight=param(1))
    return module(z=inner, a=inner)


def listed_variables():
    return module(entries=nnx.List([param(value) for value in range(12)]))


def variables_in_a_tuple():
    return module(pair=nnx.data((param(1), param(2))), weight=param(3))


@pytest.mark.parametrize("make", [shared_module, listed_variables, variables_in_a_tuple])
def test_any_module_is_split(make):
    made = make()
    for _ in range(2):
        (structure, leaves), (wanted, arrays) = split_model(made), fresh(made)
        assert structure == wanted and all(a is b for a, b in zip(leaves, arrays, strict=True))


def test_what_changes_in_place_is_seen():
    made = module(weight=param(1), held=nnx.data({"a": param(2)}))
    split_model(made)
    made.held["b"] = param(3)
    assert len(split_model(made)[1]) == 3
    del made.held["a"], made.held["b"]
    split_model(made)
    made.held["b"] = param(3)
    assert len(split_model(made)[1]) == 2
