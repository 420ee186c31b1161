"""FusedMoE: loading, reload, saving."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax import checkpointing
from tests.support.cases.layers import E, H, abstract_layer, call, checkpoint_pairs, inputs, loaded_layer, make_layer
from tests.support.refusals import refuses


def test_load_process_and_idempotence():
    layer = abstract_layer()
    used = layer.load_weights(checkpoint_pairs())
    assert used == {name for name, _ in checkpoint_pairs()}
    layer.process_weights_after_loading()
    before = layer.weights.get_value()
    layer.process_weights_after_loading()
    assert layer.weights.get_value().w13.data is before.w13.data
    stored = dict(checkpoint_pairs())
    for expert in range(E):
        prefix = f"model.layers.0.mlp.experts.{expert}."
        np.testing.assert_array_equal(before.w13.data[expert, 0], stored[prefix + "gate_proj.weight"])
        np.testing.assert_array_equal(before.w13.data[expert, 1], stored[prefix + "up_proj.weight"])
        np.testing.assert_array_equal(before.w2.data[expert], stored[prefix + "down_proj.weight"])


def test_loading_in_several_calls_and_any_order():
    pairs = list(checkpoint_pairs())
    np.random.default_rng(0).shuffle(pairs)
    layer = abstract_layer()
    layer.load_weights(pairs[:5])
    refuses(ValueError, "missing", layer.process_weights_after_loading)
    layer.load_weights(pairs[5:])
    layer.process_weights_after_loading()
    whole = loaded_layer().weights.get_value()
    same = jax.tree.map(lambda a, b: bool((a == b).all()), layer.weights.get_value(), whole)
    assert all(jax.tree.leaves(same))


def test_processing_without_loading_names_what_is_missing():
    with pytest.raises(ValueError, match="gate_proj.weight of all 6 experts"):
        abstract_layer().process_weights_after_loading()


def test_second_load_is_refused():
    layer = make_layer("bf16")
    with pytest.raises(ValueError, match="reload_weights"):
        layer.load_weights(checkpoint_pairs())


def test_a_failed_load_can_be_repeated():
    layer, pairs = abstract_layer(), list(checkpoint_pairs())
    for bad in (pairs[0][1][:, 1:], np.where(np.arange(H) == 3, np.nan, pairs[0][1]).astype(pairs[0][1].dtype)):
        with pytest.raises(ValueError, match=r"experts\.0\.gate_proj|experts\.5\.down_proj"):
            layer.load_weights([*pairs[1:], (pairs[0][0], bad)])
    layer.load_weights([*pairs, pairs[0]])
    refuses(ValueError, "duplicate", layer.process_weights_after_loading)
    layer.load_weights(pairs)
    layer.process_weights_after_loading()


def test_correction_bias_is_loaded():
    bias = np.arange(E, dtype=np.float32)
    pairs = [*checkpoint_pairs(), ("model.layers.0.mlp.gate.e_score_correction_bias", bias)]
    layer = loaded_layer(pairs, e_score_correction_bias=True, scoring_func="sigmoid")
    np.testing.assert_array_equal(layer.correction_bias.get_value(), bias)
    missing = abstract_layer(e_score_correction_bias=True)
    missing.load_weights(checkpoint_pairs())
    refuses(ValueError, "e_score_correction_bias", missing.process_weights_after_loading)


def test_reload_changes_values_without_recompiling():
    layer, (x, z), traces = loaded_layer(), inputs(), []

    @jax.jit
    def run(layer, x, z):
        traces.append(1)
        return layer(x, z)

    closure = jax.jit(lambda x, z: layer(x, z))
    first, frozen = run(layer, x, z), closure(x, z)
    layer.reload_weights(checkpoint_pairs(1))
    second = run(layer, x, z)
    assert len(traces) == 1 and "weights version: 1" in layer.explain(7)
    np.testing.assert_array_equal(second, run(loaded_layer(checkpoint_pairs(1)), x, z))
    assert np.abs(np.asarray(second - first)).max() > 0.1
    # what the documentation warns of: a closure keeps the weights it was compiled with
    np.testing.assert_array_equal(closure(x, z), frozen)


@pytest.mark.parametrize(
    "method",
    [lambda m: m.reload_weights(checkpoint_pairs()), lambda m: m.explain(3), lambda m: checkpointing.save(m, "x")],
)
def test_what_needs_values_is_refused_inside_jit(method):
    """A reload in there would change a copy and be lost without a word."""
    with pytest.raises(TypeError, match="(reload_weights|explain|save) inside jax.jit.*call it outside"):
        jax.eval_shape(method, make_layer("bf16"))


def test_calls_outside_jit_compile_once(monkeypatch):
    """The loop over tiles is a program of its own; made anew by each call it would also stay in memory."""
    from moe_jax.experts.xla import _experts as _experts_xla

    layer, (x, z), traces = make_layer("fp8_block"), inputs(5), []
    tile_gemm = _experts_xla.tile_gemm
    monkeypatch.setattr(_experts_xla, "tile_gemm", lambda *a: traces.append(1) or tile_gemm(*a))
    first = layer(x, z)
    num_traces = len(traces)
    np.testing.assert_array_equal(layer(x, z), first)
    assert len(traces) == num_traces > 0


def test_failed_reload_leaves_the_old_weights():
    layer = loaded_layer()
    before = layer.weights.get_value()
    with pytest.raises(ValueError, match="missing"):
        layer.reload_weights(list(checkpoint_pairs(1))[:-1])
    assert layer.weights.get_value().w13.data is before.w13.data and "weights version: 0" in layer.explain(1)


# -- saving -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["bf16", "fp8_block", "int8_w8a16"])
@pytest.mark.sample(3)
def test_orbax_round_trip(scheme, tmp_path):
    layer, (x, z) = make_layer(scheme, has_bias=True), inputs()
    checkpointing.save(layer, tmp_path / "saved")
    fresh = abstract_layer(scheme, has_bias=True)
    checkpointing.restore(fresh, tmp_path / "saved")
    for a, b in zip(jax.tree.leaves(nnx.state(layer)), jax.tree.leaves(nnx.state(fresh)), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    np.testing.assert_array_equal(call(fresh, x, z), call(layer, x, z))


def test_orbax_refuses_another_scheme_and_broken_saves(tmp_path):
    checkpointing.save(make_layer("fp8_channel"), tmp_path / "saved")
    for other in ("fp8_tensor", "int8_w8a8"):
        with pytest.raises(ValueError, match="saved from another module"):
            checkpointing.restore(abstract_layer(other), tmp_path / "saved")
    with pytest.raises(ValueError, match="holds a saved module already"):
        checkpointing.save(make_layer("fp8_channel"), tmp_path / "saved")
    for options, words in (
        (dict(activation="gelu"), "activation: saved 'silu', expected 'gelu'"),
        (dict(routed_scaling_factor=2.5), "routed_scaling_factor: saved 1.0, expected 2.5"),
        (dict(custom_routing_function=lambda **_: None), "custom_routing_function: saved None, expected a function"),
        (dict(router_logits_dtype=jnp.bfloat16), "router_logits_dtype: saved None, expected bfloat16"),
    ):
        with pytest.raises(ValueError, match=words):
            checkpointing.restore(abstract_layer("fp8_channel", **options), tmp_path / "saved")
    (tmp_path / "saved" / checkpointing.RECORD_NAME).unlink()
    with pytest.raises(ValueError, match="no complete save"):
        checkpointing.restore(abstract_layer("fp8_channel"), tmp_path / "saved")
    with pytest.raises(ValueError, match="not loaded"):
        checkpointing.save(abstract_layer(), tmp_path / "empty")


def test_saves_keep_the_record_that_they_had_before(tmp_path):
    """Another text in the record is a refusal of every save that exists."""
    checkpointing.save(make_layer("fp8_channel"), tmp_path)
    record = json.loads((tmp_path / checkpointing.RECORD_NAME).read_text())
    weights, activations = (
        f"QuantFormat(element='e4m3', strategy={strategy}, group_size=None, block_shape=None, dynamic={dynamic}, "
        f"packing=None, symmetric=True, actorder=False, scale='float32', global_scale=None, amax_bound=None, "
        f"approximate=False, group_scale_dtype='float32')"
        for strategy, dynamic in (("<Strategy.CHANNEL: 'channel'>", False), ("<Strategy.TOKEN: 'token'>", True))
    )
    plain = {"name": "plain", "tile": None, "shape": None}
    expected = {"weights": weights, "activations": activations, "w13": plain, "w2": plain}
    assert json.loads(record["weights"]["['weights']"]) == expected
    assert " ".join(sorted(record["settings"])) == (
        "activation apply_routed_scale_to_output apply_router_weight_on_input custom_routing_function has_bias "
        "hidden_size intermediate_size is_act_and_mul num_expert_group num_experts pinned_tokens renormalize "
        "routed_scaling_factor router_logits_dtype scoring_func swiglu_alpha swiglu_beta swiglu_limit top_k topk_group "
        "use_grouped_topk zero_expert_type"
    )


def test_orbax_refuses_a_scheme_of_the_same_shapes(tmp_path):
    """A global scale that divides, restored as one that multiplies, would be wrong numbers without an error."""
    checkpointing.save(make_layer("nvfp4_a16"), tmp_path / "saved")
    with pytest.raises(ValueError, match="saved from another module"):
        checkpointing.restore(abstract_layer("nvfp4_a16_modelopt"), tmp_path / "saved")


def test_damaged_and_interrupted_saves(tmp_path):
    layer, path = make_layer("fp8_channel"), tmp_path / "saved"
    record = path / checkpointing.RECORD_NAME
    checkpointing.save(layer, path)
    written = record.read_text()
    for damaged, words in (
        (written[: len(written) // 2], "not valid JSON"),
        ("[1]", "expected a JSON object"),
        ("{}", "'settings' is missing or damaged"),
        ('{"settings": {}, "weights": {}, "leaves": 3}', "'leaves' is missing or damaged"),
        ('{"settings": {}, "weights": {}, "leaves": {}}', "saved from another module"),
        (written.replace("plain", "packed_bfloat16"), "packed_bfloat16.* on device and version: load their checkpoint"),
    ):
        record.write_text(damaged)
        with pytest.raises(ValueError, match=words) as caught:
            checkpointing.restore(abstract_layer("fp8_channel"), path)
        assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    record.unlink()  # as an interruption leaves it
    checkpointing.save(layer, path)
    assert record.read_text() == written
    shutil.rmtree(path / checkpointing.STATE_NAME)
    with pytest.raises(ValueError, match="cannot be restored, the save is damaged") as caught:
        checkpointing.restore(abstract_layer("fp8_channel"), path)
    assert "\n" not in str(caught.value)
    record.unlink()
    (path / checkpointing.STATE_NAME).mkdir()
    (path / checkpointing.STATE_NAME / "notes").write_text("not ours")
    refuses(ValueError, "in the way and was not written by save", checkpointing.save, layer, path)
    assert (path / checkpointing.STATE_NAME / "notes").exists()
    refuses(ValueError, "is a file", checkpointing.save, layer, path / checkpointing.STATE_NAME / "notes")
