"""Training that stops and goes on: Orbax for adapters and optimizer, and saves of whole modules."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import moe_jax
from moe_jax import checkpointing
from tests.adapters.test_lora import adapted, filled
from tests.adapters.test_lora_over_a_mesh import make_layer as layer_over_mesh
from tests.support.cases.layers import call, inputs, make_layer
from tests.support.cases.meshes import make_parallel
from tests.support.refusals import refuses

TRAINED = (moe_jax.LoRAParam, nnx.optimizer.OptState)


def run_of(layer):
    """(optimizer, function that takes one step)."""
    optimizer = nnx.Optimizer(layer, optax.adam(1e-2), wrt=moe_jax.LoRAParam)
    x, z = inputs(16)

    @nnx.jit
    def step(layer, optimizer):
        grads = nnx.grad(lambda layer: jnp.mean((layer(x, z) - 1) ** 2), argnums=nnx.DiffState(0, moe_jax.LoRAParam))(
            layer
        )
        optimizer.update(layer, grads)

    def steps(count):
        with jax.numpy_dtype_promotion("standard"):
            for _ in range(count):
                step(layer, optimizer)

    return optimizer, steps


def on_mesh_of(layer, tree):
    """Targets; over a mesh a scalar of the optimizer, which lies on no mesh before the first step, is whole on it."""

    def target(leaf):
        sharding = leaf.sharding
        if layer.parallel is not None and not isinstance(sharding, NamedSharding):
            sharding = NamedSharding(layer.parallel.mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(target, tree)


@pytest.mark.parametrize("mesh", [True, False])
@pytest.mark.sample(2)
def test_a_run_goes_on_with_the_same_bits(tmp_path, mesh):
    def make():
        return layer_over_mesh("w4a16_g8", make_parallel("ep2-tp2")) if mesh else adapted(make_layer("w4a16_g8"))

    layer = make()
    optimizer, steps = run_of(layer)
    steps(3)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.to_pure_dict(nnx.state((layer, optimizer), TRAINED)))
    steps(2)
    other = make()
    other_optimizer, other_steps = run_of(other)
    target = nnx.state((other, other_optimizer), TRAINED)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "state", on_mesh_of(other, nnx.to_pure_dict(target)))
    nnx.replace_by_pure_dict(target, restored)
    nnx.update((other, other_optimizer), target)
    other_steps(2)
    states = (nnx.state((one, of), TRAINED) for one, of in ((layer, optimizer), (other, other_optimizer)))
    wanted, found = (jax.tree.leaves(state) for state in states)
    assert len(wanted) == 4 + 2 * 4 + 2
    for want, got in zip(wanted, found, strict=True):
        np.testing.assert_array_equal(want, got)
        assert want.sharding.is_equivalent_to(got.sharding, want.ndim)


@pytest.mark.parametrize("scheme", ["fp8_block", "bf16"])
def test_saves_of_a_whole_layer(tmp_path, scheme):
    layer = filled(adapted(make_layer(scheme)))
    checkpointing.save(layer, tmp_path)
    other = adapted(make_layer(scheme, seed=3), rngs=nnx.Rngs(8))
    checkpointing.restore(other, tmp_path)
    x, z = inputs(5)
    np.testing.assert_array_equal(call(other, x, z), call(layer, x, z))
    refuses(ValueError, "was saved from another module: .*lora", checkpointing.restore, make_layer(scheme), tmp_path)


def test_experts_in_other_places_are_refused(tmp_path):
    parallel = make_parallel("ep2")
    checkpointing.save(layer_over_mesh("int8_w8a16", parallel), tmp_path)
    other = layer_over_mesh("int8_w8a16", parallel, placement="round_robin")
    refuses(ValueError, "restores only with experts in the same places", checkpointing.restore, other, tmp_path)
