"""Every kernel of a layer first waits for the one before it and then lets the next one in, as ``mosaic.begin`` says;
and every kernel has a name.
"""

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import moe_jax
import pallas_kernels
from moe_jax.benchmarking import random_weights
from moe_jax.quantization import Scheme
from pallas_kernels.common import mosaic
from tests.support.kernels import cases as kernel_cases
from tests.support.kernels.traces import equations

WAIT, LAUNCH = "griddepcontrol_wait", "griddepcontrol_launch_dependents"
MARK = "mosaic_gpu.uses_pdl"  # jax 0.10 has it not
KINDS = ("gemm", "cluster", "packed", "permute", "gather", "combine", "align", "route", "quantizing_route")
KINDS += ("multiply_heads",)
KERNEL_CALL = "mosaic_gpu_v2"


def case_of(kind):
    return next(iter(getattr(kernel_cases, f"{kind}_cases")()))


def traced(case):
    structs = [jax.ShapeDtypeStruct(*shape) for shape in case.shapes]
    return jax.jit(lambda *arrays: case.function(*arrays)).trace(*structs)


def effects_of(kind):
    """Names of what a kernel does beside arithmetic, in order."""
    found = equations(traced(case_of(kind)).jaxpr.jaxpr)
    return [e.primitive.name for e in found if e.effects and e.primitive.name != "axis_index"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_wait_comes_before_all_that_touches_memory(kind):
    names = effects_of(kind)
    assert names[:2] == [WAIT, LAUNCH] and len(names) > 4
    assert names.count(WAIT) == names.count(LAUNCH) == 1


def test_both_kernels_of_the_router():
    names = {case.name.split()[0].removesuffix(","): case for case in kernel_cases.route_cases()}
    assert set(names) == {"route", "route_and_align"}
    for case in names.values():
        first = next(equation for equation in equations(traced(case).jaxpr.jaxpr) if equation.effects)
        assert first.primitive.name == WAIT


def test_a_launch_is_marked(monkeypatch):
    """By jax 0.11; and neither instruction nor mark is there once it is switched off."""
    case, marks = case_of("combine"), jax.__version_info__ >= (0, 11)
    lowered = traced(case).lower(lowering_platforms=("cuda",)).as_text()
    assert "griddepcontrol.wait;" in lowered and "griddepcontrol.launch_dependents;" in lowered
    assert (MARK in lowered) == marks
    monkeypatch.setattr(mosaic, "USES_PDL", False)
    jax.clear_caches()
    lowered = traced(case_of("combine")).lower(lowering_platforms=("cuda",)).as_text()
    assert KERNEL_CALL in lowered and "griddepcontrol" not in lowered and MARK not in lowered


def under_control_flow(function):
    """x -> function(x) in a branch in a loop of every kind."""

    def step(x):
        return jax.lax.cond(x[0, 0] > 0, function, lambda x: x, x)

    def run(x):
        x = jax.lax.fori_loop(0, 3, lambda _, x: step(x), x)
        x, _ = jax.lax.scan(lambda x, _: (step(x), None), x, None, 2)
        return jax.lax.while_loop(lambda x: x[0, 0] > 0, step, x)

    return run


def lowered_in_shards(function, *structs):
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
    mesh = AbstractMesh((2,), ("d",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        shards = jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        trace = jax.jit(shards).trace(*structs)
        assert not trace.jaxpr.effects
        return trace.lower(lowering_platforms=("cuda",)).as_text()


def test_a_kernel_under_control_flow_in_shards():
    """The marks of a body stay inside it: loops, branches and shards see a call without effects."""
    case = case_of("combine")
    x, *rest = [jax.ShapeDtypeStruct(*shape) for shape in case.shapes]
    run = lambda x, *rest: under_control_flow(lambda x: x.at[:64].set(case.function(x, *rest)))(x)  # noqa: E731
    assert KERNEL_CALL in lowered_in_shards(run, x, *rest)


@pytest.mark.slow
def test_a_layer_under_control_flow_in_shards():
    config = moe_jax.MoEConfig(8, 2, 256, 128, scheme=Scheme.parse("fp8_channel"), implementation=("hopper",))
    weights = jax.eval_shape(lambda: random_weights(config))
    x, z = jax.ShapeDtypeStruct((4, 256), jnp.bfloat16), jax.ShapeDtypeStruct((4, 8), jnp.float32)
    run = lambda x, z, weights: under_control_flow(lambda x: moe_jax.fused_moe(x, z, weights, config))(x)  # noqa: E731
    assert lowered_in_shards(run, x, z, weights).count(KERNEL_CALL) >= 5


def test_every_kernel_has_a_name():
    """In a profile the others would all be "anonymous"."""
    calls = [
        node
        for path in Path(pallas_kernels.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "plgpu.kernel"
    ]
    assert len(calls) > 8
    for call in calls:
        assert "kernel_name" in [keyword.arg for keyword in call.keywords], ast.unparse(call)
