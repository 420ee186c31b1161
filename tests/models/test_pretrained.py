"""load_pretrained, load_moe, reload: dense tensors to the bit, the account of every name, and each refusal."""

import json
import shutil
from inspect import unwrap  # the tests' own checks of annotations would speak first

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from moe_jax.loading import CheckpointError, SafetensorsFile, save_safetensors
from moe_jax.models import load_moe, load_pretrained
from moe_jax.quantization import QuantizedMatrix, dequantize, quantize_weight
from tests.support.cases.models import real_weight
from tests.support.checkpoints import writers
from tests.support.refusals import refuses

FILE = "model.safetensors"
MOE_LAYER = "model.layers.0"
F32 = dict(dtype=jnp.float32)


def read_all(directory):
    """Copies of all tensors; the safetensors package has no NumPy dtypes for fp8."""
    file = SafetensorsFile(directory / FILE)
    return {name: file.read(name).copy() for name in file.infos}


def edit(directory, change):
    tensors = read_all(directory)
    change(tensors)
    save_safetensors(directory / FILE, tensors)


@pytest.fixture
def edited(case, tmp_path):
    """edited(name, change, **config): a copy of a checkpoint with changes; ... as a value drops a config key."""

    def make(name, change=None, **config):
        target = tmp_path / "edited"
        shutil.copytree(case(name).directory, target)
        if change is not None:
            edit(target, change)
        path = target / "config.json"
        changed = json.loads(path.read_text()) | config
        path.write_text(json.dumps({key: value for key, value in changed.items() if value is not ...}))
        return target

    return make


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """quantized(scheme) -> (checkpoint by compressed-tensors with every Linear quantized, what it decompresses)."""
    root = tmp_path_factory.mktemp("quantized")
    writers.write_model("qwen3_moe", root / "source", num_hidden_layers=1)
    made = {}

    def get(scheme):
        if scheme == "native":
            plain = get("FP8_BLOCK")[1]
            if not (root / "native").exists():
                writers.as_native_fp8(root / "FP8_BLOCK", root / "native")
            return root / "native", plain
        if scheme not in made:
            preset = writers.preset(scheme)
            made[scheme] = writers.quantize_with_compressed_tensors(root / "source", root / scheme, "qwen3_moe", preset)
        return root / scheme, made[scheme]

    return get


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["FP8", "FP8_DYNAMIC", "FP8_BLOCK", "W8A8", "native"])
@pytest.mark.sample(5)
def test_quantized_weights_stay_as_stored(quantized, scheme):
    """The file's own codes; bit for bit what compressed-tensors decompresses."""
    directory, plain = quantized(scheme)
    stored, expected = read_all(directory), read_all(plain)
    for model in (load_pretrained(directory, **F32), load_pretrained(directory)):
        kept = set()
        for name, module in model.dense_modules().items():
            held = module.weight.get_value()
            if isinstance(held, QuantizedMatrix):
                kept.add(name)
                np.testing.assert_array_equal(held.tensor.data[0], stored[f"{name}.weight"], err_msg=name)
                np.testing.assert_array_equal(real_weight(module), expected[f"{name}.weight"], err_msg=name)
            else:
                rounded = expected[f"{name}.weight"].astype(model.dtype)
                np.testing.assert_array_equal(held, rounded, err_msg=name)
        assert kept == {f"{MOE_LAYER}.self_attn.{p}_proj" for p in "qkvo"}
        assert {model.moe_blocks()[0].experts.weights.get_value().w13.data.dtype.name} <= {"float8_e4m3fn", "int8"}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.sample(2)
def test_half_precision(case, prompt, dtype):
    """Near the float32 logits; tokens whose experts change account for the rest."""
    case, ids = case("qwen3_linear"), prompt(2, 40)
    model = load_pretrained(case.directory, dtype=dtype)
    logits, expected = np.asarray(model.score(ids)), case.torch_logits(ids)
    assert logits.dtype == np.float32 and model.init_cache(1, 4).layers[0].arrays[0].dtype == dtype
    error = np.linalg.norm(logits - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    assert np.median(error) < 0.02


def test_hub_dialect(case, edited, prompt):
    """The keys of transformers 4 load to the same logits, to the bit."""
    rope = json.loads((case("qwen3_yarn").directory / "config.json").read_text())["rope_parameters"]
    theta = rope.pop("rope_theta")
    hub = dict(rope_parameters=..., rope_theta=theta, rope_scaling=rope, num_local_experts=..., num_experts=8)
    model = load_pretrained(edited("qwen3_yarn", dtype=..., torch_dtype="float32", **hub), **F32)
    ids = prompt(2, 40)
    np.testing.assert_array_equal(model.score(ids), case("qwen3_yarn").model.score(ids))


def test_online_quantization_touches_experts_only(case, prompt):
    case, ids = case("qwen3_dense_bias"), prompt(2, 40)
    model = load_pretrained(case.directory, quantize="fp8_channel", **F32)
    for name, module in case.model.dense_modules().items():
        np.testing.assert_array_equal(module.weight.get_value(), model.dense_modules()[name].weight.get_value())
    experts = model.moe_blocks()[0].experts
    assert experts.config.scheme.name == "fp8_channel"
    assert experts.weights.get_value().nbytes() < 0.3 * case.model.moe_blocks()[0].experts.weights.get_value().nbytes()
    error = np.asarray(model.score(ids)) - case.torch_logits(ids)
    assert 0 < np.linalg.norm(error) < 0.2 * np.linalg.norm(case.torch_logits(ids))


def test_quantizing_a_quantized_checkpoint_is_refused(quantized):
    refuses(ValueError, "fp8_channel.*int8_w8a8", load_pretrained, quantized("FP8_DYNAMIC")[0], quantize="int8_w8a8")


def test_load_moe(case, prompt):
    case = case("qwen3_dense_bias")  # layer 0 is dense
    x = np.random.default_rng(2).standard_normal((7, 64)).astype(np.float32)
    run, block = jax.jit(lambda block, x: block(x)), load_moe(case.directory, layer=1, **F32)
    np.testing.assert_array_equal(run(block, x), run(case.model.layers[1].mlp, x))
    refuses(ValueError, "layer 0 is dense; layers with experts: 1", load_moe, case.directory)
    refuses(ValueError, "layer 7 does not exist; layers with experts: 1", load_moe, case.directory, layer=7)
    for layer in (True, 1.0, "1"):
        with pytest.raises(TypeError, match=f"layer={layer!r}, expected an integer; layers with experts: 1"):
            unwrap(load_moe)(case.directory, layer=layer)


@pytest.mark.parametrize("quantize", [None, "int8_w8a16"])
@pytest.mark.sample(2)
def test_an_interrupted_load_leaves_nothing_behind(case, prompt, monkeypatch, quantize):
    """A first load that is broken off can be repeated; a reload that is leaves the model as it was."""
    directory, ids = case("mixtral").directory, prompt(2, 40)
    model = load_pretrained(directory, quantize=quantize, **F32)
    before = np.asarray(model.score(ids))
    original, reads = SafetensorsFile.read, []

    def interrupted(self, name, *selection):
        reads.append(name)
        if len(reads) == 30:
            raise KeyboardInterrupt
        return original(self, name, *selection)

    for run in (lambda: load_pretrained(directory, quantize=quantize, **F32), lambda: model.reload_weights(directory)):
        reads.clear()
        monkeypatch.setattr(SafetensorsFile, "read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run()
        monkeypatch.undo()
    np.testing.assert_array_equal(model.score(ids), before)
    np.testing.assert_array_equal(load_pretrained(directory, quantize=quantize, **F32).score(ids), before)


def test_progress(case):
    calls = []
    load_pretrained(case("qwen3_dense_bias").directory, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(1, 2), (2, 2)]


def test_max_seq_len(case):
    assert load_pretrained(case("mixtral").directory, max_seq_len=20).max_seq_len == 20
    with pytest.raises(ValueError, match="max_seq_len=65, expected an integer from 1 to 64"):
        load_pretrained(case("mixtral").directory, max_seq_len=65)


# -- the account of names ---------------------------------------------------------------------------------------------


def test_what_may_be_skipped(case, edited, prompt):
    def add(tensors):
        for name in ("rotary_emb.inv_freq", "k_scale", "v_scale", "q_scale", "k_proj.output_scale"):
            tensors[f"model.layers.0.self_attn.{name}"] = np.ones(1, np.float32)
        for name in ("eh_proj", "enorm", "mlp.experts.0.gate_proj", "mlp.gate", "shared_head.norm"):
            tensors[f"model.layers.2.{name}.weight"] = np.ones((2, 2), np.float32)

    ids = prompt(2, 40)
    model = load_pretrained(edited("qwen3", add), **F32)
    np.testing.assert_array_equal(model.score(ids), case("qwen3").model.score(ids))


def drop(name):
    return lambda tensors: tensors.pop(name)


def put(name, value):
    return lambda tensors: tensors.update({name: value})


def replace(name, function):
    return lambda tensors: tensors.update({name: function(tensors[name])})


Q_PROJ, NORM = "model.layers.1.self_attn.q_proj.weight", "model.norm.weight"
SOME = np.zeros(4, np.float32)


@pytest.mark.parametrize(
    "change, config, words",
    [
        (drop(Q_PROJ), {}, ["1 tensors missing", Q_PROJ]),
        (drop("lm_head.weight"), {}, ["missing", "lm_head.weight"]),
        (drop("model.layers.1.mlp.gate.weight"), {}, ["missing", "model.layers.1.mlp.gate.weight"]),
        (put("model.layers.0.self_attn.r_proj.weight", SOME), {}, ["1 tensors unexpected", "r_proj.weight"]),
        (put("model.layers.0.self_attn.q_proj.bias", SOME), {}, ["unexpected", "q_proj.bias"]),
        (put("model.layers.2.input_layernorm.weight", SOME), {}, ["unexpected", "model.layers.2.input_layernorm"]),
        (put("model.layers.2.mlp.experts.0.gate_proj.weight", SOME), {}, ["expert tensors in layers 2", "0-1"]),
        (put("model.layers.0.mlp.shared_expert.up_proj.weight", SOME), {}, ["unexpected", "shared_expert"]),
        (put("model.layers.0.self_attn.q_proj.weight_scale", SOME[:1]), {}, ["q_proj", "weight_scale"]),
        (replace(Q_PROJ, lambda w: w.T.copy()[:, :32]), {}, [Q_PROJ, "(64, 64)", "(64, 32)"]),
        (replace(Q_PROJ, lambda w: w.astype(np.int32)), {}, [Q_PROJ, "I32"]),
        (replace(NORM, lambda w: w.astype(np.int16)), {}, [NORM, "BF16 or F16 or F32", "I16"]),
        (replace(NORM, lambda w: w * np.float32(np.nan)), {}, ["NaN or infinite", NORM]),
        (None, dict(num_hidden_layers=3), ["missing", "model.layers.2."]),
        (None, dict(num_hidden_layers=1), ["layers 1", "layers 0"]),
        (None, dict(mlp_only_layers=[0]), ["expert tensors in layers 0", "1"]),
        (None, dict(attention_bias=True), ["8 tensors missing", "k_proj.bias"]),
        (None, dict(tie_word_embeddings=True), ["lm_head.weight", "differs", "tie_word_embeddings"]),
        (None, dict(vocab_size=97), ["model.embed_tokens.weight", "(97, 64)", "(96, 64)"]),
        (None, dict(head_dim=32), ["self_attn", "(128, 64)"]),
        (None, dict(model_type="gpt2"), ["config.json", "gpt2", "Qwen3MoeForCausalLM"]),
    ],
)
@pytest.mark.sample(2)
def test_refusals(edited, change, config, words):
    directory = edited("qwen3", change, **config)
    with pytest.raises(ValueError) as caught:
        load_pretrained(directory)
    message = str(caught.value)
    assert str(directory) in message and "\n" not in message and all(word in message for word in words), message


def test_bfloat16_and_float16_do_not_mix(edited):
    def change(tensors):
        tensors.update({name: value.astype(ml_dtypes.bfloat16) for name, value in tensors.items()})
        tensors[NORM] = tensors[NORM].astype(np.float16)

    refuses(CheckpointError, f"{NORM} is F16", load_pretrained, edited("qwen3", change))


def test_float32_beside_bfloat16_is_usual(edited):
    def change(tensors):
        experts = {name: value for name, value in tensors.items() if ".mlp.gate." not in name}
        tensors.update({name: value.astype(ml_dtypes.bfloat16) for name, value in experts.items()})

    load_pretrained(edited("qwen3", change))


O_PROJ = f"{MOE_LAYER}.self_attn.o_proj"


def test_negative_and_damaged_scales(quantized, tmp_path):
    for value, words in ((-1.0, "expected scales >= 0"), (np.nan, "NaN or infinite"), (np.inf, "NaN or infinite")):
        target = tmp_path / f"{value}"
        shutil.copytree(quantized("FP8_DYNAMIC")[0], target)
        edit(target, lambda tensors, value=value: tensors[f"{O_PROJ}.weight_scale"].__setitem__(3, value))
        refuses(CheckpointError, rf"{words}|o_proj", load_pretrained, target)


def test_missing_scale(quantized, tmp_path):
    shutil.copytree(quantized("FP8")[0], tmp_path / "a")
    edit(tmp_path / "a", lambda tensors: [tensors.pop(f"{O_PROJ}.{name}") for name in ("weight_scale", "input_scale")])
    with pytest.raises(CheckpointError, match="2 tensors missing: .*o_proj.input_scale, .*o_proj.weight_scale"):
        load_pretrained(tmp_path / "a")


def test_a_tied_head_may_be_stored_too(case, edited, prompt):
    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    ids = prompt(2, 40)
    model = load_pretrained(edited("mixtral_tied_window", add), **F32)
    np.testing.assert_array_equal(model.score(ids), case("mixtral_tied_window").model.score(ids))


# -- reload -----------------------------------------------------------------------------------------------------------


def doubled_head(tensors):
    tensors["lm_head.weight"] = 2 * tensors["lm_head.weight"]
    name = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    tensors[name] = -tensors[name]


@pytest.mark.parametrize("kind", ["directory", "pairs"])
def test_reload(case, edited, prompt, kind):
    ids, directory = prompt(2, 40), edited("mixtral", doubled_head)
    model, expected = load_pretrained(case("mixtral").directory, **F32), load_pretrained(directory, **F32).score(ids)
    before = model.score(ids)
    if kind == "directory":
        model.reload_weights(directory)
    else:  # JAX arrays under the names transformers 5 has in memory
        pairs = {name: jnp.asarray(value) for name, value in read_all(directory).items()}
        model.reload_weights((name.replace("block_sparse_moe", "mlp"), value) for name, value in pairs.items())
    np.testing.assert_array_equal(model.score(ids), expected)
    assert not np.array_equal(before, expected)
    assert [int(block.experts.version.get_value()) for block in model.moe_blocks()] == [1, 1]


def test_reload_quantizes_again(case, edited, prompt):
    ids, directory = prompt(2, 40), edited("mixtral", doubled_head)
    options = dict(quantize="int8_w8a8", **F32)
    model = load_pretrained(case("mixtral").directory, **options)
    model.reload_weights(directory)
    np.testing.assert_array_equal(model.score(ids), load_pretrained(directory, **options).score(ids))


def test_reload_of_quantized_arrays(quantized, prompt):
    """In any order; then the same model in full precision, of which the model quantizes what it holds quantized."""
    directory, ids = quantized("FP8_BLOCK")[0], prompt(2, 40)
    model = load_pretrained(directory, **F32)
    before, tensors = model.score(ids), read_all(directory)
    names = np.random.default_rng(0).permutation(list(tensors))
    report = model.reload_weights((name, tensors[name]) for name in names)
    np.testing.assert_array_equal(model.score(ids), before)
    assert 0 < report.peak_staged_bytes < sum(t.nbytes for t in tensors.values()) and report.peak_open_layers == 1
    plain = directory.with_name("source")
    model.reload_weights(read_all(plain).items())
    expected = load_pretrained(plain, quantize="fp8_block", **F32)
    for name, module in expected.dense_modules().items():
        own, w = model.dense_modules()[name], jnp.asarray(module.weight.get_value())
        if isinstance(own.weight.get_value(), QuantizedMatrix):
            data, scale = quantize_weight(w, own.weight.get_value().tensor.fmt)
            w = dequantize(data, scale, own.weight.get_value().tensor.fmt)
        np.testing.assert_array_equal(real_weight(own), w, err_msg=name)
    for ours, theirs in zip(model.moe_blocks(), expected.moe_blocks(), strict=True):
        leaves = (jax.tree.leaves(block.experts.weights.get_value()) for block in (ours, theirs))
        assert all(np.array_equal(a, b) for a, b in zip(*leaves, strict=True))
    assert np.isfinite(model.score(ids)).all()


def test_reload_reuses_a_callers_buffer(case, edited, prompt):
    """A trainer may send every tensor in one buffer: what is kept is copied."""
    ids, directory = prompt(2, 40), edited("mixtral", doubled_head)
    model = load_pretrained(case("mixtral").directory, **F32)
    tensors = read_all(directory)
    buffer = np.empty(max(tensor.size for tensor in tensors.values()), np.float32)

    def pairs():
        for name, tensor in tensors.items():
            view = buffer[: tensor.size].reshape(tensor.shape)
            view[...] = tensor
            yield name, view
        buffer[:] = np.nan

    model.reload_weights(pairs())
    np.testing.assert_array_equal(model.score(ids), load_pretrained(directory, **F32).score(ids))


def test_failed_reload_changes_nothing(case, edited, prompt):
    """The damage lies in the last layer; nothing before it may have been taken over."""
    ids, model = prompt(2, 40), load_pretrained(case("mixtral").directory, **F32)
    before = np.asarray(model.score(ids))

    def damage(tensors):
        doubled_head(tensors)
        del tensors["model.layers.1.block_sparse_moe.experts.3.w3.weight"]

    refuses(ValueError, r"missing.*w3.weight of expert 3", model.reload_weights, edited("mixtral", damage))
    np.testing.assert_array_equal(model.score(ids), before)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda tensors: [*tensors.items(), ("model.norm.weight", tensors["model.norm.weight"])], "given twice"),
        (lambda tensors: [item for item in tensors.items() if item[0] != "model.norm.weight"], "missing"),
        (lambda tensors: [*tensors.items(), ("model.extra", SOME)], "unexpected: model.extra"),
    ],
)
def test_reload_refusals(case, make, words):
    model = load_pretrained(case("mixtral").directory, **F32)
    refuses(ValueError, words, model.reload_weights, make(read_all(case("mixtral").directory)))


def test_reload_of_another_model(case):
    with pytest.raises(ValueError, match="another model"):
        load_pretrained(case("mixtral").directory).reload_weights(case("mixtral_no_groups").directory)
