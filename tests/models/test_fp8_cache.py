"""The key-value cache in FP8: transformers with a cache that rounds to e4m3, who asks for it, scales of checkpoints.

The reference rounds keys and values to multiples of the scale that e4m3 has, by NumPy, before transformers attends to
them: in calls of several tokens too, as vLLM's attention reads its cache.
"""

import dataclasses
import functools
import json
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from transformers import DynamicCache

import moe_jax
from moe_jax.loading import CheckpointError, SafetensorsFile, save_safetensors
from moe_jax.models import load_pretrained
from moe_jax.models._kv_cache_dtype import resolve
from moe_jax.models.attention import _hopper
from moe_jax.models.attention._attention import AttentionInputs, attend
from tests.models.test_partition import mesh_of
from tests.support.cases.models import VOCAB, assert_logits_close, run, slow
from tests.support.refusals import refuses

FP8 = dict(num_bits=8, type="float", strategy="tensor", dynamic=False, symmetric=True)
# Of keys and values of each layer. Some keys are above 448 of the last one: they saturate.
SCALES = ((0.0123, 0.0077), (0.0031, 0.0009), (0.0007, 0.02))
ATTENTION = "model.layers.{}.self_attn"
F32 = dict(dtype=jnp.float32)


def rounded(x, scale):
    """Multiples of the scale in float32, by NumPy."""
    codes = np.clip(x.astype(np.float32) / np.float32(scale), -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return codes, codes.astype(np.float32) * np.float32(scale)


class RoundedCache(DynamicCache):
    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        both = zip((key_states, value_states), SCALES[layer_idx], strict=True)
        new = [torch.from_numpy(rounded(part.numpy(), scale)[1]) for part, scale in both]
        return super().update(*new, layer_idx, *args, **kwargs)


def with_scales(source, target, names=("k_scale", "v_scale"), layers=None, **config):
    """A copy of a checkpoint with SCALES under these names."""
    shutil.copytree(source, target)
    file = SafetensorsFile(target / "model.safetensors")
    tensors = {name: file.read(name).copy() for name in file.infos}
    described = json.loads((target / "config.json").read_text())
    for layer in range(described["num_hidden_layers"]) if layers is None else layers:
        for name, scale in zip(names, SCALES[layer], strict=True):
            tensors[f"{ATTENTION.format(layer)}.{name}"] = np.array([scale], np.float32)
    save_safetensors(target / "model.safetensors", tensors)
    (target / "config.json").write_text(json.dumps(described | config))
    return target


def answers(model, ids, mask, splits):
    """Logits of a call for each part of the columns, on one cache, and the cache."""
    cache, parts = model.init_cache(len(ids), ids.shape[1] + 3), []
    for begin, end in zip(splits, splits[1:], strict=False):
        part, cache = run(model, ids[:, begin:end], attention_mask=mask[:, begin:end], cache=cache)
        parts.append(np.asarray(part))
    return np.concatenate(parts, axis=1), cache


# Sinks, windows and biases; one window of all layers; norms of heads.
@pytest.mark.parametrize("name", ["gpt_oss", *slow("mixtral_tied_window", "qwen3")])
def test_transformers(case, tmp_path, name):
    """Prompts with padding in chunks, then steps of one token; the codes of the first layer to the bit."""
    of = case(name)
    model = load_pretrained(with_scales(of.directory, tmp_path / "scaled"), kv_cache_dtype="fp8", **F32)
    ids = np.random.default_rng(0).integers(0, VOCAB, (2, 13)).astype(np.int32)
    mask = np.arange(13) >= [[0], [3]]
    found, cache = answers(model, ids, mask, (0, 7, 12, 13))
    for row, first in ((1, 3), (0, 0)):
        held = RoundedCache(config=of.torch_model.config)
        expected = of.torch_logits(ids[row : row + 1, first:13], past_key_values=held)
        assert_logits_close(found[row, first:], expected[0], 2e-5)
    of_first = held.layers[0].keys, held.layers[0].values
    for codes, numbers, scale in zip(cache.layers[0].arrays, of_first, SCALES[0], strict=True):
        assert codes.dtype == jnp.float8_e4m3fn
        latest = codes[0, :, 13 - numbers.shape[2] : 13].astype(np.float32)
        np.testing.assert_allclose(latest * np.float32(scale), numbers[0], rtol=1e-6)
    unquantized = of.torch_logits(ids[:1, :13])[0]
    assert np.abs(unquantized - found[0]).max() > 1e-3 * np.ptp(unquantized)  # it would see a cache of numbers
    # ``generate`` goes on from the cache that its prompt filled.
    token, tokens = expected[0, -1].argmax(), []
    for _ in range(2):
        tokens.append(int(token))
        token = of.torch_logits(np.array([[token]]), past_key_values=held)[0, -1].argmax()
    made = moe_jax.generate(model, ids[:1, :13], max_new_tokens=2)
    assert made[0, -2:].tolist() == tokens


@pytest.mark.parametrize("mesh", [("tensor=2", "Auto"), pytest.param(("expert=2", "Explicit"), marks=pytest.mark.slow)])
def test_mesh(case, tmp_path, mesh):
    directory = with_scales(case("mixtral").directory, tmp_path / "scaled")
    alone = load_pretrained(directory, kv_cache_dtype="fp8", **F32)
    spread = load_pretrained(directory, kv_cache_dtype="fp8", mesh=mesh_of(*mesh), **F32)
    codes = spread.init_cache(2, 8).layers[0].arrays[0]
    assert codes.dtype == jnp.float8_e4m3fn and not codes.sharding.is_fully_replicated
    assert spread.layers[0].self_attn.k_scale[...].sharding.is_fully_replicated
    ids = np.random.default_rng(0).integers(0, VOCAB, (2, 9)).astype(np.int32)
    made = [moe_jax.generate(model, ids, max_new_tokens=3).tolist() for model in (spread, alone)]
    assert made[0] == made[1]


@pytest.mark.parametrize("kind", ["chunk", "window, sinks", "sequences"])
def test_prefills_by_the_kernel(monkeypatch, kind):
    """64 queries behind 40 slots, contiguous and in pages whose table names any page behind a row's last slot; XLA's
    answer. Pages and slots of nobody hold NaN."""
    monkeypatch.setattr(_hopper, "OLDEST_JAX", (0, 10))
    monkeypatch.setattr(_hopper, "hopper_sms", lambda: 132)
    kernels, real = [], _hopper.prefill

    def by_reference(*arguments, implementation, **options):
        kernels.append(implementation)
        return real(*arguments, implementation="reference", **options)

    monkeypatch.setattr(_hopper, "prefill", by_reference)
    jax.clear_caches()
    rng, heads = np.random.default_rng(0), (2, 2)
    q = jnp.asarray(rng.standard_normal((2, 64, *heads, 64)), jnp.bfloat16)
    cached = [rng.standard_normal((2, 2, 192, 64)).astype(jnp.float8_e4m3fn) for _ in range(2)]
    lengths = np.array([104, 96])
    for array in cached:
        array[:, :, 104:] = np.nan
    slots = 40 + np.broadcast_to(np.arange(64, dtype=np.int32), (2, 64))
    numbers = [jnp.asarray(a, jnp.int32) for a in ([0, 3], lengths, [40, 40])]
    inputs = AttentionInputs(jnp.zeros(0), jnp.zeros(0), *numbers, jnp.asarray(slots - [[0], [3]], jnp.int32), None)
    options: Any = dict(scale=0.3, scales=(jnp.float32(0.2), jnp.float32(3)))
    if kind == "window, sinks":
        options |= dict(window=20, sinks=jnp.asarray([0.5, -1, 2, 0]))
    if kind == "sequences":
        firsts = jnp.asarray(np.where(slots < 70, 40, 70), jnp.int32)
        inputs = dataclasses.replace(inputs, segment_starts=firsts, shared=jnp.asarray([40, 30]), is_counted=True)
    table = np.array([[3, 0, 7], [5, 6, 2]], np.int32)
    pools = [np.full((8, 2, 64, 64), np.nan, jnp.float8_e4m3fn) for _ in range(2)]
    for pool, array in zip(pools, cached, strict=True):
        pool[table] = array.reshape(2, 2, 3, 64, 64).swapaxes(1, 2)
    table[:, 2] = 4  # which is nobody's
    paged = dataclasses.replace(inputs, page_table=jnp.asarray(table))
    whole = [jnp.asarray(np.where(np.isnan(array), 0, array).astype(array.dtype)) for array in cached]
    expected = np.asarray(attend(q, *whole, inputs, implementation="xla", **options), np.float32)
    is_query = slots < lengths[:, None]
    for one, arrays in ((inputs, cached), (paged, pools)):
        found = np.asarray(attend(q, *map(jnp.asarray, arrays), one, implementation="hopper", **options), np.float32)
        np.testing.assert_allclose(found[is_query], expected[is_query], atol=0.03 * np.abs(expected[is_query]).max())
    assert kernels == ["hopper"] * (1 if kind == "sequences" else 2)  # whose rows have one shape
    jax.clear_caches()


# -- scales of checkpoints --------------------------------------------------------------------------------------------


def scales_of(model):
    both = [(layer.self_attn.k_scale, layer.self_attn.v_scale) for layer in model.layers]
    return [tuple(float(scale[...]) for scale in pair) for pair in both]


SPELLINGS = {
    "compressed-tensors": ("k_scale", "v_scale"),
    "compressed-tensors before": ("k_proj.output_scale", "v_proj.output_scale"),
    "ModelOpt": ("k_proj.k_scale", "v_proj.v_scale"),
    "as vLLM's modules": ("attn.k_scale", "attn.v_scale"),
}


@pytest.mark.parametrize("names", SPELLINGS.values(), ids=SPELLINGS)
def test_names_of_scales(case, tmp_path, names):
    directory = with_scales(case("mixtral").directory, tmp_path / "scaled", names)
    model = load_pretrained(directory, kv_cache_dtype="fp8", **F32)
    np.testing.assert_allclose(scales_of(model), SCALES[:2])
    assert load_pretrained(directory, **F32).config.kv_cache_dtype is None  # nobody asks for it


def test_one_scale_for_both(case, tmp_path):
    source = SafetensorsFile(case("mixtral").directory / "model.safetensors")
    tensors = {name: source.read(name).copy() for name in source.infos}
    shutil.copytree(case("mixtral").directory, tmp_path / "scaled")
    tensors |= {f"{ATTENTION.format(i)}.kv_scale": np.float32(SCALES[i][0]).reshape(()) for i in range(2)}
    save_safetensors(tmp_path / "scaled" / "model.safetensors", tensors)
    model = load_pretrained(tmp_path / "scaled", kv_cache_dtype="fp8", **F32)
    np.testing.assert_allclose(scales_of(model), [[SCALES[i][0]] * 2 for i in range(2)])


def test_wrong_scales(case, tmp_path, monkeypatch):
    source = case("mixtral").directory
    directory = with_scales(source, tmp_path / "some", layers=[1])
    load = functools.partial(load_pretrained, kv_cache_dtype="fp8", **F32)
    refuses(
        CheckpointError, "scales of the cache are missing: model.layers.0.self_attn.k_scale, model", load, directory
    )
    for value in (0.0, -1.0, np.nan, np.inf):
        monkeypatch.setitem(globals(), "SCALES", ((0.1, value), (0.1, 0.1)))
        directory = with_scales(source, tmp_path / str(value))
        refuses(CheckpointError, "layers.0.self_attn.v_scale: .*, expected one number above 0", load, directory)


def test_no_scales_are_one_and_reload(case, tmp_path):
    directory = case("mixtral").directory
    model = load_pretrained(directory, kv_cache_dtype="fp8", **F32)
    assert scales_of(model) == [(1.0, 1.0)] * 2
    model.reload_weights(with_scales(directory, tmp_path / "scaled"))
    np.testing.assert_allclose(scales_of(model), SCALES[:2])
    model.reload_weights(directory)  # without scales: those of before
    np.testing.assert_allclose(scales_of(model), SCALES[:2])


# -- who asks ---------------------------------------------------------------------------------------------------------


def test_a_checkpoint_states_it(case, tmp_path):
    stated = dict(quant_method="compressed-tensors", config_groups={}, kv_cache_scheme=FP8)
    directory = with_scales(case("mixtral").directory, tmp_path / "scaled", quantization_config=stated)
    for asked in (None, "auto"):
        model = load_pretrained(directory, kv_cache_dtype=asked, **F32)
        assert model.init_cache(1, 4).layers[0].arrays[0].dtype == jnp.float8_e4m3fn
    np.testing.assert_allclose(scales_of(model), SCALES[:2])
    plain = load_pretrained(directory, kv_cache_dtype="float32", **F32)
    assert plain.layers[0].self_attn.k_scale is None and plain.init_cache(1, 4).layers[0].arrays[0].dtype == jnp.float32


@pytest.mark.parametrize(
    ("stated", "is_e4m3"),
    [
        (dict(kv_cache_scheme=FP8), True),
        (dict(kv_cache_scheme=dict(num_bits=8, type="float", dynamic=False)), True),
        (dict(kv_cache_quant_algo="FP8"), True),
        (dict(quantization=dict(kv_cache_quant_algo="FP8")), True),
        (dict(kv_cache_scheme=None), None),
        (dict(kv_cache_quant_algo="NVFP4"), False),
        (dict(kv_cache_scheme=FP8 | dict(strategy="attn_head")), False),
        (dict(kv_cache_scheme=FP8 | dict(dynamic=True)), False),
        (dict(kv_cache_scheme=FP8 | dict(num_bits=4)), False),
        (dict(kv_cache_scheme=FP8 | dict(type="int")), False),
        (dict(kv_cache_scheme=FP8 | dict(symmetric=False)), False),
    ],
    ids=str,
)
def test_what_checkpoints_state(stated, is_e4m3):
    class Stated:
        config_path, quantization_config = "dir/config.json", dict(quant_method="any") | stated

    bfloat16 = jnp.dtype(jnp.bfloat16)
    if is_e4m3 is False:
        refuses(
            NotImplementedError,
            "dir/config.json: kv_cache_.* is .*: the cache is held",
            resolve,
            Stated,
            None,
            bfloat16,
        )
    else:
        assert resolve(Stated, None, bfloat16) == ("float8_e4m3fn" if is_e4m3 else None)
    assert resolve(Stated, "bfloat16", bfloat16) is None


def test_names_of_the_dtype(case):
    class Bare:
        config_path, quantization_config = "config.json", None

    float32 = jnp.dtype(jnp.float32)
    for name in ("fp8", "fp8_e4m3", "float8_e4m3fn", jnp.float8_e4m3fn):
        assert resolve(Bare, name, float32) == "float8_e4m3fn"
    assert resolve(Bare, "auto", float32) is None and resolve(Bare, jnp.float32, float32) is None
    refuses(NotImplementedError, "kv_cache_dtype='fp8_e5m2': .*'fp8_e4m3'", resolve, Bare, "fp8_e5m2", float32)
    refuses(
        NotImplementedError, "kv_cache_dtype=bfloat16: .*the model's is float32", resolve, Bare, "bfloat16", float32
    )
    refuses(ValueError, "kv_cache_dtype='fp9', expected 'auto', 'fp8'", resolve, Bare, "fp9", float32)
    latent = case("deepseek_v3").directory
    refuses(NotImplementedError, "multi-head latent attention", load_pretrained, latent, kv_cache_dtype="fp8", **F32)


def test_another_cache_is_refused(case):
    model = load_pretrained(case("mixtral").directory, kv_cache_dtype="fp8", **F32)
    plain = case("mixtral").model.init_cache(1, 8)
    refuses(
        ValueError, "cache was made for another model: .*float32.*float8", model, np.ones((1, 2), np.int32), cache=plain
    )
