"""How the portable backend's layers and products lower for CUDA, without a GPU: ``plgpu.mma`` needs jax 0.11."""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import pytest

from moe_jax import fused_experts
from moe_jax.experts._backend import Problem
from moe_jax.experts._choice import BACKENDS
from pallas_kernels.common import device
from pallas_kernels.common.targets import Target
from pallas_kernels.grouped_gemm.portable.config import BLOCK_MS, MmaConfig, config_error
from pallas_kernels.grouped_gemm.problem import GemmDesc
from tests.support.cases.gpu_layers import WITH_KERNELS, has_kernels, layer

if jax.__version_info__ < (0, 11):
    pytest.skip("plgpu.mma needs jax 0.11", allow_module_level=True)

HOPPER, ADA, AMPERE = Target(9, 0), Target(8, 9), Target(8, 0)
SIZES = dict(hidden_size=128, intermediate_size=160)
PORTABLE = BACKENDS["portable"]
KINDS_OF_GPU = {
    "NVIDIA H200": HOPPER,
    "NVIDIA L40S": ADA,
    "NVIDIA A100-SXM4-80GB": AMPERE,
    "NVIDIA B200": Target(10, 0),
}


# Of 3 tokens, which are not moved, and of 300.
LAUNCHES = {"bf16": (4, 5), "int8_w8a8": (6, 6), "w4a16_g128": (4, 5)}


@contextlib.contextmanager
def abstract_gpu(kind="NVIDIA H200"):
    """A device for which calls can be lowered."""
    gpu = jax.sharding.AbstractDevice(device_kind=kind, platform="gpu", num_cores=132)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=gpu)):
        yield


def launches(scheme, tokens, dtype="bfloat16"):
    """How many kernels the lowered layer has, which the backend takes."""
    config, _, packed = layer(scheme, dtype, implementation="portable", **SIZES)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), packed)
    slots = (tokens, config.top_k)
    x = jax.ShapeDtypeStruct((tokens, config.hidden_size), config.dtype)
    topk = jax.ShapeDtypeStruct(slots, jnp.float32), jax.ShapeDtypeStruct(slots, jnp.int32)
    with abstract_gpu():
        assert PORTABLE.refusal(Problem(config, shapes, tokens, "gpu")) is None
        run = jax.jit(functools.partial(fused_experts, config=config)).trace(x, *topk, shapes)
        return run.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu_v2")


@pytest.mark.sample(8)
@pytest.mark.parametrize("tokens", [3, 300])
@pytest.mark.parametrize("scheme", WITH_KERNELS)
def test_lowers(scheme, tokens):
    """Alignment, both products and combine are kernels, and what moves or quantizes rows that it can."""
    found = launches(scheme, tokens)
    few = LAUNCHES.get(scheme, (4, 4))[tokens > 3]
    assert found == few if scheme in LAUNCHES else found >= few


@pytest.mark.sample(16)
@pytest.mark.parametrize("tokens", [1, 129, 2048])
@pytest.mark.parametrize("scheme", [name for name in WITH_KERNELS if has_kernels(name, "float16")])
def test_lowers_float16(scheme, tokens):
    """The first product is float32 where another launch quantizes it: its range is larger than float16's."""
    assert launches(scheme, tokens, "float16") >= 4


FORMS = {
    "bfloat16": {},
    "float16": {},
    "int8": dict(lhs_scale="row", rhs_scale="channel"),
    "float8_e4m3fn": dict(lhs_scale="group", rhs_scale="block"),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", FORMS)
def test_every_tile_lowers(dtype, out_dtype):
    """What config_error lets pass has a way through shared memory without bank conflicts."""
    from pallas_kernels.grouped_gemm.portable.kernel_mma import grouped_gemm_mma

    lowered = []
    for block_m, block_n in itertools.product(BLOCK_MS, (64, 128)):
        desc = GemmDesc(rows=block_m, n=128, k=256, num_experts=2, dtype=dtype, out_dtype=out_dtype, **FORMS[dtype])
        config = MmaConfig(block_m, block_n, 2, target=HOPPER)
        if config_error(desc, config) is not None:
            assert (block_m, block_n) == (16, 64)
            continue
        shapes = dict(
            x=((block_m, 256), dtype), w=((2, 128, 256), dtype), tile_expert=((1,), "int32"), num_tiles=((1,), "int32")
        )
        if dtype == "int8":
            shapes |= dict(x_scale=((block_m,), "float32"), w_scale=((2, 128), "float32"))
        elif dtype == "float8_e4m3fn":
            shapes |= dict(x_scale=((2, block_m), "float32"), w_scale=((2, 1, 2), "float32"))
        operands = {name: jax.ShapeDtypeStruct(*shape) for name, shape in shapes.items()}
        with abstract_gpu():
            jax.jit(grouped_gemm_mma(desc, config)).trace(operands).lower(lowering_platforms=("cuda",))
        lowered.append((block_m, block_n))
    assert len(lowered) == 7


def test_knows_devices_that_are_not_here():
    for kind, target in KINDS_OF_GPU.items():
        with abstract_gpu(kind):
            assert device.portable_target() == target
