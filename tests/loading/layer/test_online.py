"""Online quantization: every scheme of a full-precision layer, on the host and on a device, to the same bits."""

import dataclasses

import jax
import numpy as np
import pytest

from moe_jax import FusedMoE, Scheme
from moe_jax.loading import LayerLoader
from moe_jax.loading.layer import _layer_loader as layer_loader
from moe_jax.loading.layer import _online as online
from moe_jax.loading.layer._online import OnlineExperts, _is_traceable
from moe_jax.quantization import method_for, online_scheme
from tests.support.checkpoints.expert_tensors import BF16, PROJECTIONS, assert_same, config, filled, frozen, matrices_of
from tests.support.refusals import refuses

H, INTER, NUM = 64, 32, 2
SIZES = dict(hidden_size=H, intermediate_size=INTER, num_experts=NUM)
# Largest error of a weight, as a part of the largest weight of its scale's extent.
SCHEMES = {
    "bf16": 0.0,
    "fp8_tensor": 1 / 16,
    "fp8_channel": 1 / 16,
    "fp8_block": 1 / 16,
    "int8_w8a8": 1 / 250,
    "int8_w8a16": 1 / 250,
    "w4a16_g32": 1 / 15,
    "w4a16_g64": 1 / 15,
    "w4a16_g128": 1 / 15,
    "w4a16_channel": 1 / 15,
    "w4a16_g32_asym": 1 / 15,
    "w4a16_channel_asym": 1 / 15,
    "w8a16_channel": 1 / 250,
    "w8a16_g128": 1 / 250,
    "w4a8_int8": 1 / 15,
    "w4a8_fp8": 1 / 15,
    "nvfp4": 1 / 5.9,
    "nvfp4_a16": 1 / 5.9,
    "mxfp4": 1 / 3.9,
    "mxfp4_a16": 1 / 3.9,
    "mxfp8": 1 / 16,
}
USUAL = (
    "fp8_tensor",
    "fp8_block",
    "int8_w8a8",
    "w4a16_g32_asym",
    "w8a16_channel",
    "w4a8_int8",
    "nvfp4",
    "mxfp4",
    "mxfp8",
)
EACH = [name if name in USUAL else pytest.param(name, marks=pytest.mark.slow) for name in SCHEMES]


def tensors(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {name: (H, INTER) if name == "down_proj" else (INTER, H) for name in PROJECTIONS}
    return {
        f"experts.{expert}.{name}.weight": frozen((rng.standard_normal(shape) * (1 + expert)).astype(BF16))
        for expert in range(NUM)
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize("name", EACH)
@pytest.mark.sample(6)
def test_every_scheme(name):
    """M26: what ``--quantize`` takes. Each expert is that of its own tensors, within the format's error."""
    scheme = online_scheme(Scheme.parse(name))
    loader, stored = LayerLoader(config(scheme, **SIZES)), tensors()
    loader.load(stored.items())
    weights = loader.finish()
    assert weights.scheme == scheme and loader.staged_bytes == 0
    for (expert, projection), found in matrices_of(weights).items():
        weight = stored[f"experts.{expert}.{projection}.weight"].astype(np.float32)
        extent = np.abs(weight).max() if "channel" not in name else np.abs(weight).max(1, keepdims=True)
        assert (np.abs(found - weight) <= extent * SCHEMES[name] * 1.001).all(), projection
        assert SCHEMES[name] == 0 or np.abs(found - weight).max() > 0


@pytest.mark.parametrize(
    ("name", "is_gated"),
    [("fp8_block", True), ("int8_w8a16", False), ("w4a16_g32_asym", True), ("nvfp4_dynamic", False)],
)
@pytest.mark.sample(3)
def test_on_a_device_to_the_same_bits(monkeypatch, name, is_gated):
    """Where experts are sent in full precision and quantized into leaves that stay there."""
    options = dict(is_act_and_mul=is_gated, activation="silu" if is_gated else "relu2")
    layer = config(name, **SIZES, **options)
    stored = {n: t for n, t in tensors().items() if is_gated or "gate_proj" not in n}

    def load():
        loader = filled(layer, stored)
        return loader.finish()

    on_host = load()
    monkeypatch.setattr(layer_loader, "OnlineExperts", lambda *args: OnlineExperts(*args, on_device=True))
    assert_same(load(), on_host)


def test_a_device_finds_damage_late_and_by_name(monkeypatch):
    """It looks while it quantizes; nothing can be made of the layer then, and a layer that loads it starts over."""
    monkeypatch.setattr(layer_loader, "OnlineExperts", lambda *args: OnlineExperts(*args, on_device=True))
    good, name = tensors(), "experts.0.up_proj.weight"
    damaged = good[name].copy()
    damaged[3, 5] = np.inf
    loader = filled(config("fp8_channel", **SIZES), good | {name: damaged})
    for _ in range(2):
        refuses(ValueError, rf"{name}: 1 values are NaN or infinite, the first at \(3, 5\)", loader.finish)
    assert loader.is_invalid

    layer = FusedMoE(NUM, H, INTER, top_k=1, scheme="fp8_channel")
    layer.load_weights((good | {name: damaged}).items())
    refuses(ValueError, name, layer.process_weights_after_loading)
    layer.load_weights(good.items())
    layer.process_weights_after_loading()


def test_what_is_in_flight_is_bounded(monkeypatch):
    monkeypatch.setattr(online, "_IN_FLIGHT_BYTES", 0)
    experts = OnlineExperts(method_for("fp8_channel"), config("fp8_channel", **SIZES), on_device=True)
    shards = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    for name, tensor in tensors().items():
        _, expert, projection, _ = name.split(".")
        experts.add(int(expert), shards[projection], tensor, name)
        assert 0 < experts.pending_bytes <= 3 * H * INTER * 2
        experts.quantize_if_complete(int(expert))
    assert experts.pending_bytes == 0


def test_a_method_in_numpy_stays_on_the_host():
    @dataclasses.dataclass(frozen=True)
    class InNumpy(type(method_for("fp8_channel"))):
        def quantize_stack(self, w, param_dtype):
            return {"weight": np.asarray(w), "weight_scale": np.ones(w.shape[:-1])}

    one = config("fp8_channel", **SIZES | dict(num_experts=1), top_k=1)
    assert _is_traceable(method_for("fp8_channel"), one)
    assert not _is_traceable(InNumpy(Scheme.parse("fp8_channel")), one)
    leaves = OnlineExperts(method_for("fp8_channel"), config("fp8_channel", **SIZES), on_device=True).leaves
    assert all(isinstance(leaf, jax.Array) for leaf in leaves.values())


def test_late_biases_padding_and_repetition():
    """M25: a layer is complete when every element is there, whatever was sent how often. Biases may come last, arrays
    of another size never count, and a second copy is named instead of taken for what is missing."""
    layer = config("int8_w8a16", has_bias=True, **SIZES)
    stored = tensors()
    biases = {
        name.replace(".weight", ".bias"): frozen(np.full(tensor.shape[0], 0.5, BF16)) for name, tensor in stored.items()
    }
    loader = filled(layer, stored)
    assert set(loader.missing()) == {"w13_bias", "w2_bias"} and loader.staged_bytes == 0
    name = next(iter(biases))
    refuses(ValueError, r"expected shape \(32,\), found \(33,\)", loader.accept, name, np.ones(INTER + 1, BF16))
    loader.load(biases.items())
    expected = loader.finish()
    assert float(expected.w13_bias.min()) == 0.5

    repeated = LayerLoader(layer)
    some = dict(list(stored.items())[:3])
    for _ in range(NUM):  # as many elements as the layer has, from one expert
        repeated.load(some.items())
    assert repeated.missing()["w13_weight"] == {"w1": [1], "w3": [1]}
    refuses(ValueError, r"missing: .* of expert 1.*duplicate: experts\.0\.", repeated.finish)


def test_processed_once():
    """M18: a loader is spent after it finished; nothing quantized is quantized again."""
    loader = filled(config("int8_w8a16", **SIZES), tensors())
    loader.finish()
    for again in (loader.finish, lambda: loader.load(tensors().items())):
        refuses(ValueError, "already finished; a reload needs a new LayerLoader", again)
