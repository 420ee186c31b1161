"""Dataclasses of arrays: what they print, without a look at values, and what serialized programs say of them."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import moe_jax
from moe_jax import _pytrees
from moe_jax._pytrees import by_shape
from moe_jax.experts import MoEStats
from moe_jax.models._cache import KVCache
from moe_jax.models._layer_cache import SlotCache
from moe_jax.parallel import EplbState, Placement
from moe_jax.quantization import SCHEMES, ExpertWeights, QuantizedTensor, method_for
from moe_jax.routing import RoutedExperts
from pallas_kernels.common import WeightLayout


class Unreadable:
    """An array whose values nobody may ask for."""

    shape, dtype, ndim = (4, 2), jnp.dtype(jnp.bfloat16), 2

    def __repr__(self):
        raise AssertionError("read")

    __array__ = __iter__ = __str__ = __repr__


def test_shapes_and_dtypes_and_no_values():
    weights = method_for(SCHEMES["w4a16_g32"]).abstract_weights(
        moe_jax.MoEConfig(8, 2, 64, 32, scheme=SCHEMES["w4a16_g32"], dtype="float32")
    )
    assert repr(weights) == (
        "ExpertWeights(w13=QuantizedTensor(data=int32[8, 2, 32, 8], scale=float32[8, 2, 32, 2], fmt=int4 static per "
        "group 32, num_columns=64), w2=QuantizedTensor(data=int32[8, 64, 4], scale=float32[8, 64, 1], fmt=int4 static "
        "per group 32, num_columns=32), scheme=w4a16_g32)"
    )
    unreadable: Any = Unreadable()
    tensor = QuantizedTensor(unreadable, layout=WeightLayout("tiled", (8, 8)))
    assert repr(tensor) == "QuantizedTensor(data=bfloat16[4, 2], layout=tiled)"
    assert repr(MoEStats(jnp.zeros(8, jnp.int32), jnp.zeros((3, 2), jnp.int32))) == (
        "MoEStats(load=int32[8], topk_ids=int32[3, 2])"
    )
    layer = SlotCache((jnp.zeros((1, 2, 8, 4)), jnp.zeros((1, 2, 8, 4))))
    numbers, flags = jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.bool)
    assert repr(KVCache((layer,) * 48, numbers, numbers, None, flags, 8)) == (
        "KVCache(layers=(48 x SlotCache(arrays=(2 x float32[1, 2, 8, 4]))), starts=int32[1], lengths=int32[1], "
        "is_damaged=bool[1], num_slots=8)"
    )


def test_what_else_stands_in_such_trees():
    assert by_shape(jax.random.key(0)) == "key<fry>[]"
    assert by_shape(jax.ShapeDtypeStruct((2,), jnp.int8)) == "int8[2]"
    assert by_shape(PartitionSpec("x")) == repr(PartitionSpec("x"))
    assert by_shape((None, 3)) == "(None, 3)"
    seen = []
    jax.jit(lambda tensor: seen.append(repr(tensor)) or tensor.data)(QuantizedTensor(jnp.zeros((2, 3))))
    assert seen == ["QuantizedTensor(data=float32[2, 3])"]


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=str)
def test_static_fields_survive_serialization(scheme):
    layouts = (WeightLayout(), WeightLayout("tiled", (64, 128), (2, 48, 64)))
    for values in ((scheme,), (scheme.weights, scheme.activations), (*layouts, None, 3, True, 0.5, (1, ("a", ())))):
        text = json.dumps(_pytrees._encoded(values))
        again = _pytrees._decoded(json.loads(text))
        assert again == values and repr(again) == repr(values) and hash(again) == hash(values)


def test_every_public_one_can_be_exported():
    routed = RoutedExperts.create(num_tokens=3, num_layers=1, num_experts=8, top_k=2)
    tree = [routed, EplbState.create(1, Placement.create(8, 2)), MoEStats(jnp.ones(2), jnp.ones(2))]
    arrays = jax.tree.map(jnp.asarray, tree)
    exported = jax.export.export(jax.jit(lambda tree: jax.tree.map(lambda a: a + 1, tree)))(arrays)
    found = jax.export.deserialize(exported.serialize()).call(arrays)
    assert jax.tree.structure(found) == jax.tree.structure(arrays)
    for actual, before in zip(jax.tree.leaves(found), jax.tree.leaves(arrays), strict=True):
        np.testing.assert_array_equal(actual, before + 1)
    assert isinstance(found[1], EplbState) and ExpertWeights.__name__ not in repr(found)
