"""Attention by cuDNN and whole models with the kernels between their products, on a GPU.

They lie here since the machine of a GPU may lack what tests of checkpoints import.
"""

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax import _began
from moe_jax.models import _loop, generate, read_family
from moe_jax.models._layers import Linear
from moe_jax.models.attention._attention import AttentionInputs, attend, attend_xla
from moe_jax.nn import QuantizedParam
from moe_jax.quantization import QuantizedMatrix, Scheme, method_for
from tests.support.chunks import in_chunks


def operands(queries, slots, starts, lengths, first, width=8, value_width=8):
    rng = np.random.default_rng(1)
    q = jnp.asarray(rng.standard_normal((2, queries, 2, 3, width)), jnp.float32)
    k, v = (jnp.asarray(rng.standard_normal((2, 2, slots, w)), jnp.float32) for w in (width, value_width))
    starts, lengths, first = (jnp.asarray(places, jnp.int32) for places in (starts, lengths, first))
    positions = first[:, None] - starts[:, None] + jnp.arange(queries, dtype=jnp.int32)
    return q, k, v, AttentionInputs(None, None, starts, lengths, first, positions, None)


def quantize(module, scheme, implementation):
    module.dtype, module.implementation = jnp.dtype(jnp.bfloat16), implementation
    matrix = method_for(scheme).quantize_matrix(module.weight[...].astype(jnp.float32))
    module.weight = QuantizedParam(QuantizedMatrix(matrix, scheme), eager_sharding=False)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("width", "value_width"), [(64, 64), (128, 128), (192, 128)])
@pytest.mark.parametrize(
    "places", [([0, 0], [256, 200], [0, 0]), ([0, 3], [256, 256], [0, 0]), ([0, 2], [400, 290], [144, 34])]
)
def test_cudnn(places, width, value_width, window):
    """Beside float32; the last row of a call that has tokens of an earlier one, too."""
    q, k, v, inputs = operands(256, 512, *places, width=width, value_width=value_width)
    narrow = [a.astype(jnp.bfloat16) for a in (q, k, v)]
    options = dict(scale=width**-0.5, window=window)
    expected = attend_xla(*(a.astype(jnp.float32) for a in narrow), inputs, **options)
    by_cudnn = jax.jit(functools.partial(attend, **options, implementation="cudnn"))
    assert "cudnn" in by_cudnn.lower(*narrow, inputs).as_text()
    found = by_cudnn(*narrow, inputs)
    own = inputs.first_slots[:, None] + jnp.arange(256)
    is_token = np.asarray((own >= inputs.starts[:, None]) & (own < inputs.lengths[:, None]))
    np.testing.assert_allclose(np.asarray(found, np.float32)[is_token], np.asarray(expected)[is_token], atol=0.02)


IDS = np.random.default_rng(0).integers(0, 640, (3, 131)).astype(np.int32)


def make_model(attention, dtype, projections, experts, pinned=None):
    sizes = dict(hidden_size=512, num_hidden_layers=3, num_attention_heads=16, num_key_value_heads=4, head_dim=128)
    sizes |= dict(
        moe_intermediate_size=256, num_experts=8, num_experts_per_tok=2, vocab_size=640, model_type="qwen3_moe"
    )
    sizes |= dict(architectures=["Qwen3MoeForCausalLM"], intermediate_size=512, norm_topk_prob=True, rope_theta=1e6)
    sizes |= dict(rms_norm_eps=1e-6, max_position_embeddings=1024, hidden_act="silu", tie_word_embeddings=False)
    family, config = read_family(sizes)
    config = dataclasses.replace(config, pinned_tokens=pinned)
    made = family(config, dtype=jnp.bfloat16, attention=attention, implementation=experts, rngs=nnx.Rngs(0))
    if dtype == "bfloat16":
        for module in [m for layer in made.layers for m in layer.self_attn.dense_modules().values()]:
            if projections is not None and isinstance(module, Linear):
                quantize(module, Scheme.parse(projections), ("xla",) if attention == "xla" else None)
        return made
    wide = family(config, dtype=dtype, attention="xla", implementation="xla", rngs=nnx.Rngs(0))
    nnx.update(wide, jax.tree.map(lambda a: a.astype(dtype) if a.dtype == jnp.bfloat16 else a, nnx.state(made)))
    return wide


def logits(model, ids, rows):
    """Of a prefill and three decode steps of some rows."""
    mask = np.arange(128) >= np.asarray([0, 5, 0])[rows, None]
    read = jax.jit(lambda model, ids, mask, cache: model(ids, attention_mask=mask, cache=cache))
    step = jax.jit(lambda model, ids, cache: model(ids, cache=cache))
    ids = ids[rows]
    found, cache = read(model, ids[:, :128], mask, model.init_cache(len(rows), 136))
    parts = [np.asarray(found)[:, -1:]]
    for at in range(128, 131):
        found, cache = step(model, ids[:, at : at + 1], cache)
        parts.append(np.asarray(found))
    return np.concatenate(parts, axis=1)


@functools.cache
def by_xla(dtype, projections):
    """Logits of all rows; compiling them takes longer than all else."""
    return logits(make_model("xla", dtype, projections, "xla"), IDS, [0, 1, 2])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("attention", "projections", "experts"),
    [
        ("auto", None, "xla"),
        ("cudnn", None, "xla"),
        ("auto", "fp8_block", "xla"),
        ("auto", "fp8_channel", "xla"),
        ("auto", None, "hopper"),
        ("auto", "fp8_block", "hopper"),
    ],
)
def test_models(attention, projections, experts):
    """Logits of a prefill and three decode steps in bfloat16, of three rows and of one: no farther from float32's than
    XLA's. NaN in one row.

    projections: the scheme of attention's weights; float32 has them as they were before. experts: their backend; the
    Hopper one leaves rows of three tokens to the next norm."""
    model, expected = make_model(attention, "bfloat16", projections, experts), by_xla("float32", None)
    error = np.abs(by_xla("bfloat16", projections) - expected)
    assert error.mean() < (0.2 if projections is None else 0.6)
    for rows in ([0, 1, 2], [1]):
        assert np.abs(logits(model, IDS, rows) - expected[rows]).mean() < 1.5 * error[rows].mean()
    found = logits(model, np.where(np.arange(3)[:, None] == 1, 999, IDS), [0, 1, 2])
    assert np.isnan(found[1]).all() and np.isfinite(found[[0, 2]]).all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("attention", "projections", "experts", "pinned"),
    [
        ("auto", None, "hopper", 48),
        ("auto", None, "hopper", 1),
        ("auto", "fp8_block", "hopper", 64),
        ("auto", "fp8_channel", "xla", 48),
        ("xla", None, "xla", 48),
        ("cudnn", "fp8_channel", "hopper", 256),
    ],
)
def test_pinned_tokens(attention, projections, experts, pinned):
    """Logits have the same bits in a call of three rows and of one, in chunks of any size, and after other caches; and
    are no farther from float32's than XLA's."""
    model = make_model(attention, "bfloat16", projections, experts, pinned)
    whole = in_chunks(model, IDS[[0, 1, 2]], [131], 200)
    np.testing.assert_array_equal(in_chunks(model, IDS[[0, 1, 2]], (1, 2, 3, 70, 131), 136), whole)
    np.testing.assert_array_equal(in_chunks(model, IDS[[2]], [131], 131), whole[2:])
    np.testing.assert_array_equal(in_chunks(model, IDS[[1]], [60, *range(61, 70)], 1000), whole[1:2, :69])
    np.testing.assert_array_equal(in_chunks(model, IDS[[1]], [20, *range(21, 30)], 30), whole[1:2, :29])
    expected = by_xla("float32", None)[[0, 2]]
    error = np.abs(by_xla("bfloat16", projections)[[0, 2]] - expected)
    assert np.abs(whole[[0, 2], 127:] - expected).mean() < 1.5 * error.mean()


@pytest.mark.gpu
@pytest.mark.parametrize("experts", ["xla", "hopper"])
def test_kept_programs(experts, tmp_path, monkeypatch):
    """Tokens of programs that are exported, and found again, are those of plain ones; the kernels are in the files."""
    model, ids = make_model("auto", "bfloat16", "fp8_channel", experts), IDS[:, :100]
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setattr(_began, "TIME", time.time() + 60)

    def tokens(place):
        for program in (_loop.start, _loop.proceed):
            program.jitted.clear_cache()
        jax.config.update("jax_compilation_cache_dir", place)
        try:
            return np.asarray(generate(model, ids, max_new_tokens=20))
        finally:
            jax.config.update("jax_compilation_cache_dir", before)

    plain = tokens(None)
    for _ in range(2):
        np.testing.assert_array_equal(tokens(str(tmp_path)), plain)
    files = [path.read_bytes() for path in (tmp_path / "moe_jax").iterdir()]
    assert len(files) == 2 and all(b"mosaic_gpu" in file for file in files)
