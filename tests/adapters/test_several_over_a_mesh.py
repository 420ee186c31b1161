"""Several adapters over meshes, chosen by token: layers and models compute what they do on one device."""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import moe_jax
from moe_jax import checkpointing
from moe_jax.experts._choice import BACKENDS
from moe_jax.nn._lora import held_expert_lora
from moe_jax.quantization import LowRank
from tests.adapters.test_lora_of_models import filled, load
from tests.adapters.test_lora_over_a_mesh import NAMES, as_one_device_has_it
from tests.adapters.test_several import ADAPTERS, directories
from tests.support.cases.layers import E, H, I, K, inputs
from tests.support.cases.meshes import make_parallel
from tests.support.cases.models import assert_logits_close
from tests.support.oracles.experts import experts_numpy
from tests.support.oracles.tolerances import assert_rows_close, tolerance
from tests.support.refusals import refuses

__all__ = ["directories"]

RANKS, ALPHAS = (4, 2, 3), (8.0, 1.0, 6.0)
GRADIENTS = nnx.DiffState(0, moe_jax.LoRAParam)


def make_arrays(targets=("w13", "w2")):
    rng, rank = np.random.default_rng(3), sum(RANKS)
    shapes = dict(w13_a=(E, 1, rank, H), w13_b=(E, 2, I, rank), w2_a=(E, rank, I), w2_b=(E, H, rank))
    arrays = {name: (rng.standard_normal(shape) * 0.3).astype(np.float32) for name, shape in shapes.items()}
    return {name: array for name, array in arrays.items() if name.rpartition("_")[0] in targets}


def make_layer(scheme, parallel=None, targets=("w13", "w2"), dtype=jnp.float32, **options) -> Any:
    """With three adapters, the same over every mesh."""
    options |= dict(scheme=scheme, mesh=parallel, dtype=dtype, has_bias=True, rngs=nnx.Rngs(0))
    layer: Any = moe_jax.FusedMoE(E, H, I, top_k=K, **options)
    placement = None if parallel is None else layer.placement.get_value()
    held: Any = dict(ranks=RANKS, alphas=ALPHAS, names=("a", "b", "c"))
    arrays = {name: jnp.asarray(array) for name, array in make_arrays(targets).items()}
    layer.set_lora(held_expert_lora(arrays, layer.config, placement, layer.parallel, **held))
    return layer


def make_choice(num_tokens):
    """(T,) int32 with all three and none."""
    return np.random.default_rng(num_tokens).integers(-1, 3, num_tokens).astype(np.int32)


def run(layer, x, z, choice):
    return jax.jit(lambda layer, choice: moe_jax.select_lora(layer, choice)(x, z))(layer, choice)


LAYOUTS: list[Any] = [("dp=ep4", dispatch) for dispatch in ("all_to_all", "all_gather", "replicate")]
LAYOUTS += [(name, None) for name in ("ep2", "tp2", "ep2-tp2", "dp4", "dp2-ep4", "sp2-ep2-tp2", "sp=tp2-ep2-dp2")]
CASES = [
    pytest.param(*layout, scheme, targets, id=f"{'-'.join(filter(None, layout))}-{scheme}-{'-'.join(targets)}")
    for scheme, targets in (("w4a16_g8", ("w13", "w2")), ("bf16", ("w2",)), ("fp8_channel", ("w13", "w2")))
    for layout in LAYOUTS
]


@pytest.mark.parametrize(("layout", "dispatch", "scheme", "targets"), CASES)
@pytest.mark.sample(15)
def test_values_and_gradients(layout, dispatch, scheme, targets):
    """17 tokens, which no mesh divides."""
    (x, z), choice = inputs(17), make_choice(17)
    cotangent = jnp.asarray(np.random.default_rng(8).standard_normal(x.shape), jnp.float32)
    one = make_layer(scheme, targets=targets)
    many = make_layer(scheme, make_parallel(layout, dispatch=dispatch), targets)

    def loss(layer, x, choice):
        y = moe_jax.select_lora(layer, choice)(x, z)
        return jnp.sum(cotangent * y), y

    gradients = nnx.jit(nnx.value_and_grad(loss, argnums=(GRADIENTS, 1), has_aux=True))
    ((_, want), (wanted, want_x)), ((_, y), (found, dx)) = (gradients(layer, x, choice) for layer in (one, many))
    tol = tolerance(moe_jax.Scheme.parse(scheme), "float32")
    assert_rows_close(y, want, tol)
    tol = dataclasses.replace(tol, ulps=256.0)
    assert_rows_close(dx, want_x, tol, row_scale=float(np.abs(want_x).max()))
    for name in NAMES:
        if name not in make_arrays(targets):
            continue
        expected, got = wanted["lora"][name][...], found["lora"][name][...]
        assert got.sharding == getattr(many.lora, name).get_value().sharding
        assert_rows_close(as_one_device_has_it(got, name, many), expected, tol, row_scale=float(np.abs(expected).max()))


@pytest.mark.parametrize("scheme", ["bf16", "w4a16_g8"])
@pytest.mark.sample(2)
def test_against_float64(scheme):
    """Values, and slopes of a weighted sum of them, against NumPy."""
    (x, z), choice = inputs(17), make_choice(17)
    layer, rng = make_layer(scheme, make_parallel("ep2-tp2")), np.random.default_rng(5)
    weights, config = make_layer(scheme).weights.get_value(), layer.config
    ids = np.argsort(-np.asarray(z), axis=1)[:, :K]
    p = np.exp(np.take_along_axis(np.asarray(z, np.float64), ids, axis=1))
    p /= p.sum(axis=1, keepdims=True)
    owner = np.repeat(np.arange(3), RANKS)
    scale = np.repeat(np.asarray(ALPHAS) / RANKS, RANKS)

    def of_numpy(arrays: Any, x: Any) -> Any:
        y = np.zeros(x.shape)
        for adapter in range(-1, 3):
            rows, own = choice == adapter, cast(Any, np.tile(scale * (owner == adapter), (E, 1)))
            loras = [LowRank(arrays[f"{name}_a"], arrays[f"{name}_b"], own) for name in ("w13", "w2")]
            y[rows] = experts_numpy(x[rows], p[rows], ids[rows], weights.adapted(*loras), config)
        return y

    arrays, wide_x = make_arrays(), np.asarray(x, np.float64)
    want = of_numpy(arrays, wide_x)
    assert_rows_close(run(layer, x, z, choice), want, tolerance(moe_jax.Scheme.parse(scheme), "float32"))
    cotangent = rng.standard_normal(x.shape)
    loss = nnx.jit(
        nnx.grad(
            lambda layer, x: jnp.sum(moe_jax.select_lora(layer, choice)(x, z) * cotangent.astype("float32")),
            argnums=(GRADIENTS, 1),
        )
    )
    grads, dx = loss(layer, x)
    found: dict[str, Any] = {name: as_one_device_has_it(grads["lora"][name][...], name, layer) for name in NAMES}
    for name, gradient in (found | dict(x=dx)).items():
        value = wide_x if name == "x" else arrays[name].astype(np.float64)
        step = rng.standard_normal(value.shape) * 1e-4
        moved = [(arrays | dict(x=wide_x)) | {name: value + way * step} for way in (1, -1)]
        ends = [of_numpy(values, values["x"]) for values in moved]
        slope = np.sum(cotangent * (ends[0] - ends[1])) / 2
        got = np.sum(np.asarray(gradient, np.float64) * step)
        size = np.linalg.norm(np.asarray(gradient)) * np.linalg.norm(step)
        assert abs(got - slope) < 1e-5 * size, name


@pytest.mark.parametrize("tokens", [400, 5])
@pytest.mark.sample(2)
def test_rows_that_go_in_rounds(tokens):
    """More rows for a device than one round of all_to_all takes, all to the same experts."""
    (x, z), choice = inputs(tokens), make_choice(tokens)
    z = z.at[:, :K].add(20.0)
    many = make_layer("bf16", make_parallel("dp=ep4", dispatch="all_to_all"))
    assert_rows_close(run(many, x, z, choice), run(make_layer("bf16"), x, z, choice), tolerance("bf16", "float32"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("layout", ["dp2-ep4", "dp=ep4", "tp2"])
def test_rows_of_a_batch_and_any_sharding(layout, kind):
    (x, z), choice = inputs(24), np.asarray([2, -1, 0, 1], np.int32)
    x, z = x.reshape(4, 6, H), z.reshape(4, 6, E)
    parallel = make_parallel(layout, kind)
    want, many = run(make_layer("bf16"), x, z, choice), make_layer("bf16", parallel)
    specs = [PartitionSpec(), PartitionSpec(parallel.data_axis)]
    for of_tokens in specs:
        for of_choice in specs:
            places = [NamedSharding(parallel.mesh, spec) for spec in (of_tokens, of_tokens, of_choice)]
            own_x, own_z, own_choice = map(jax.device_put, (x, z, choice), places)
            found = moe_jax.select_lora(many, own_choice)(own_x, own_z)
            assert_rows_close(found.reshape(24, H), want.reshape(24, H), tolerance("bf16", "float32"))
            assert_rows_close(
                run(many, own_x, own_z, own_choice).reshape(24, H), want.reshape(24, H), tolerance("bf16", "float32")
            )


@pytest.mark.slow
def test_partial_sums_and_load_balancing():
    (x, z), choice = inputs(17), make_choice(17)
    want = run(make_layer("bf16"), x, z, choice)
    parts = run(make_layer("bf16", make_parallel("ep2-tp2", reduce_results=False)), x, z, choice)
    assert parts.shape == (4, 17, H)
    balanced = run(make_layer("bf16", make_parallel("ep2"), enable_eplb=True), x, z, choice)
    for found in (parts.sum(axis=0), balanced):
        assert_rows_close(found, want, tolerance("bf16", "float32"))


MESHES: list[Any] = [dict(expert=2, tensor=2), dict(expert=2), dict(tensor=2), dict(data=2), dict(data=2, expert=2)]
MODELS = [
    pytest.param(shape, kind, scheme, id=f"{'-'.join(shape)}-{kind}-{scheme}")
    for scheme in ("w4a16_g32", None, "fp8_channel")
    for kind in ("Auto", "Explicit")
    for shape in MESHES
]


@pytest.mark.parametrize(("shape", "kind", "scheme"), MODELS)
@pytest.mark.sample(30)
def test_models(case, prompt, directories, shape, kind, scheme):
    """Experts and attention, whose adapters have other ranks, scales and targets."""
    mesh = jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType[kind],) * len(shape))
    one, many = (
        moe_jax.load_lora(load(case("qwen3").directory, quantize=scheme, mesh=own), directories) for own in (None, mesh)
    )
    ids, names = jnp.asarray(prompt(4, 16)), ["code", None, "story", "chat"]
    choice = np.asarray([-1 if name is None else list(ADAPTERS).index(name) for name in names], np.int32)
    forward: Any = jax.jit(lambda model, ids, choice: moe_jax.select_lora(model, choice)(ids))
    for own in (choice, make_choice(ids.size).reshape(ids.shape)):  # of rows, and of tokens
        assert_logits_close(forward(many, ids, own), np.asarray(forward(one, ids, own)), 3e-5)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [None, "fp8_channel"])
def test_texts_and_gradients_of_models(case, prompt, directories, scheme):
    mesh = jax.make_mesh((2, 2), ("expert", "tensor"), axis_types=(AxisType.Auto,) * 2)
    one, many = (
        moe_jax.load_lora(load(case("qwen3").directory, quantize=scheme, mesh=own), directories) for own in (None, mesh)
    )
    ids, names = prompt(4, 20), ["code", None, "story", "chat"]
    want, found = (moe_jax.select_lora(model, names) for model in (one, many))
    assert_logits_close(found.score(ids), np.asarray(want.score(ids)), 3e-5)
    texts = [moe_jax.generate(model, ids[:, :9], max_new_tokens=6) for model in (want, found)]
    np.testing.assert_array_equal(texts[0], texts[1])

    @nnx.jit
    def gradients(model):
        return nnx.grad(lambda model: jnp.sum(model(ids) ** 2), argnums=GRADIENTS)(model)

    pairs = zip(*(nnx.to_flat_state(gradients(model)) for model in (want, found)), strict=True)
    for (path, ours), (_, theirs) in pairs:
        expected = np.asarray(ours.get_value())
        assert np.abs(expected).max() > 0, path
        np.testing.assert_allclose(np.asarray(theirs.get_value()), expected, rtol=0, atol=3e-4 * np.abs(expected).max())


def test_two_adapters_go_to_disk_and_back(case, prompt, tmp_path):
    """Made over expert=4, data=2 and saved from there; then held together, there and on one device."""
    mesh = jax.make_mesh((4, 2), ("expert", "data"), axis_types=(AxisType.Auto,) * 2)
    base, ids, names = case("qwen3").directory, prompt(4, 16), ("story", "code")
    quantized: Any = dict(quantize="w4a16_g32")
    saved, again = ({name: tmp_path / of / name for name in names} for of in ("saved", "again"))
    alone = {}
    for seed, name in enumerate(names):
        model = moe_jax.lora(load(base, mesh=mesh, **quantized), rngs=nnx.Rngs(seed), **ADAPTERS[name])
        moe_jax.save_lora(filled(model, seed, size=0.3), saved[name])
        alone[name] = np.asarray(model.score(ids))
        moe_jax.save_lora(moe_jax.load_lora(load(base, mesh=mesh, **quantized), saved[name]), again[name])
        for file in ("adapter_model.safetensors", "adapter_config.json"):
            assert (saved[name] / file).read_bytes() == (again[name] / file).read_bytes()
    one, many = (moe_jax.load_lora(load(base, mesh=own, **quantized), saved) for own in (None, mesh))
    held = many.moe_blocks()[0].experts.lora
    assert held.names == names and held.w13_b.get_value().sharding.spec[0] == "expert"
    forward: Any = jax.jit(lambda model, ids, choice: moe_jax.select_lora(model, choice)(ids))
    rows = np.asarray([1, 0, -1, 0], np.int32)
    of_rows = np.asarray(forward(many, jnp.asarray(ids), rows))
    for row, place in enumerate(rows):
        if place >= 0:
            assert_logits_close(of_rows[row], alone[names[place]][row], 3e-5)
    of_tokens = np.random.default_rng(6).integers(-1, 2, ids.shape).astype(np.int32)
    for choice, found in ((rows, of_rows), (of_tokens, forward(many, jnp.asarray(ids), of_tokens))):
        assert_logits_close(found, np.asarray(forward(one, jnp.asarray(ids), choice)), 3e-5)


def test_a_layer_with_several_is_saved_and_restored(tmp_path):
    (x, z), choice = inputs(17), make_choice(17)
    layer, other = (make_layer("w4a16_g8", make_parallel("dp2-ep4")) for _ in range(2))
    want = np.asarray(run(layer, x, z, choice))
    checkpointing.save(layer, tmp_path)
    nnx.update(other, jax.tree.map(jnp.zeros_like, nnx.state(other, moe_jax.LoRAParam)))
    assert (np.asarray(run(other, x, z, choice)) != want).any()
    checkpointing.restore(other, tmp_path)
    np.testing.assert_array_equal(run(other, x, z, choice), want)


def test_refusals(monkeypatch):
    layer = make_layer("bf16", make_parallel("ep2"))
    x, z = inputs(8)
    refuses(ValueError, "adapters a, b, c are held; choose by moe_jax.select_lora", layer, x, z)
    refuses(ValueError, "chosen for 3 rows, the call has", moe_jax.select_lora(layer, ["a", "b", None]), x, z)
    for place in (2**32, 3, -2):  # the first is 0 in int32
        choice = np.asarray([0, place])
        refuses(ValueError, f"adapters has {place}, expected -1 for none to 2", moe_jax.select_lora, layer, choice)
    copies: Any = dict(enable_eplb=True, num_redundant_experts=2)
    refuses(NotImplementedError, "redundant slots take no adapters", make_layer, "bf16", make_parallel("ep2"), **copies)
    left = r"the devices .4. do not divide the experts .6.: it fills slots"
    refuses(NotImplementedError, left, make_layer, "bf16", make_parallel("ep4"), enable_eplb=True)
    make_layer("bf16", make_parallel("ep4"))  # without it they stay empty
    monkeypatch.setattr("moe_jax.parallel._experts.choose_dispatch", lambda *arguments: "nvlink_dispatch")
    monkeypatch.setattr("moe_jax.parallel._experts.choose", lambda problem: (BACKENDS["hopper"], ()))
    layer = make_layer("bf16", make_parallel("ep2", dispatch="nvlink_dispatch"))
    reason = "rows that arrive take no adapters .LoRA.; use 'all_gather' or 'all_to_all'"
    refuses(NotImplementedError, reason, moe_jax.select_lora(layer, make_choice(8)), x, z)
