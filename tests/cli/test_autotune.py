"""``moe-jax autotune``: which layers it measures, and where the times go. No GPU: a timer that makes times up."""

import json

import pytest

from moe_jax.cli import _autotune, _demo, main
from moe_jax.quantization import Scheme
from pallas_kernels.tuning import FORMATS, PACKED_FORMATS, LayerKey, PackedLayerKey, load_table, table_for, user_path
from tests.support.cases.hopper_layers import on_hopper


def fake_timer(desc, config, key, tokens):
    return 10.0 + config.block_m + config.num_stages / 100


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(_autotune, "GpuTimer", lambda: fake_timer)
    table_for.cache_clear()
    with on_hopper():
        yield lambda *arguments: main(["autotune", *arguments])
    table_for.cache_clear()


def held():
    return load_table(user_path("NVIDIA H200")).entries


@pytest.mark.slow
def test_a_shape_in_two_schemes(run, capsys, tmp_path):
    arguments = ("--model", "8,2,512,256", "--scheme", "fp8_channel,w4a16_g128", "--tokens", "16,9")
    assert run(*arguments) == 0
    assert user_path("NVIDIA H200").is_relative_to(tmp_path / "cache" / "moe_jax")
    keys = {
        LayerKey(8, 2, 512, 256, **FORMATS["fp8_channel"]),
        PackedLayerKey(8, 2, 512, 256, **PACKED_FORMATS["int4_g128_f32"]),
    }
    assert {(entry.key, entry.tokens) for entry in held()} == {(key, tokens) for key in keys for tokens in (9, 16)}
    out = capsys.readouterr().out
    assert "8 experts of 512 x 256 in fp8_channel, 16 tokens: " in out and "4 of 4 measured on NVIDIA H200" in out
    assert run(*arguments) == 0
    assert "0 of 0 measured on NVIDIA H200; 4 were there, --again measures them anew" in capsys.readouterr().out
    assert run(*arguments, "--again") == 0
    assert "4 of 4 measured" in capsys.readouterr().out


def test_one_token_in_tiles_of_one_row(run, capsys):
    """Only where a call takes them: not with rows of another width."""
    one = ("--model", "8,2,512,256", "--scheme", "fp8_channel,w4a16_g128", "--tokens", "1")
    reason = "1 tokens: not measured: multiplied without wgmma, in tiles of one row, which no table holds"
    for _ in range(2):  # with a table of its own too
        assert run(*one) == 0
        out = capsys.readouterr().out
        for scheme in ("fp8_channel", "w4a16_g128"):
            assert f"8 experts of 512 x 256 in {scheme}, {reason}" in out
    assert run("--model", "8,2,512,336", "--scheme", "bf16", "--tokens", "1") == 0
    assert "1 of 1 measured" in capsys.readouterr().out
    assert {(type(entry.key), entry.tokens) for entry in held()} == {(LayerKey, 1)}


def test_few_tokens(run, capsys):
    """Of plain weights, and of packed ones, by their rules."""
    few = ("--model", "128,8,512,256", "--scheme", "fp8_channel,w4a16_g128", "--tokens", "4,8,9,16")
    assert run(*few) == 0
    out = capsys.readouterr().out
    for scheme, tokens in (("fp8_channel", (4, 8, 9)), ("w4a16_g128", (4, 8))):
        for count in tokens:
            line = f"in {scheme}, {count} tokens: not measured: multiplied without wgmma, in tiles of 4 rows, which no"
            assert line in out
    measured = {(type(entry.key), entry.tokens) for entry in held()}
    assert measured == {(LayerKey, 16), (PackedLayerKey, 9), (PackedLayerKey, 16)}


def test_a_shard_of_a_mesh(run):
    """Its layers pin their tiles: they have no tiles of one or four rows."""
    shape = ("--model", "8,2,512,256", "--scheme", "bf16,w4a16_g128", "--tokens", "1,2,16")
    assert run(*shape, "--mesh", "expert=4,tensor=2") == 0
    keys = (
        LayerKey(2, 2, 512, 128, **FORMATS["bf16"]),
        PackedLayerKey(2, 2, 512, 128, **PACKED_FORMATS["int4_g128_f32"]),
    )
    assert {(entry.key, entry.tokens) for entry in held()} == {(key, tokens) for key in keys for tokens in (1, 2, 16)}


def test_the_layers_of_a_checkpoint(run, tmp_path, checkpoint):
    assert run("--model", str(checkpoint), "--tokens", "64") == 0
    (entry,) = held()
    config = json.loads((checkpoint / "config.json").read_text())
    assert entry.key == LayerKey(
        config["num_experts"],
        config["num_experts_per_tok"],
        config["hidden_size"],
        config["moe_intermediate_size"],
        **FORMATS["bf16"],
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("demo")
    _demo.write_checkpoint(directory)
    return directory


def test_what_was_measured_is_used(run):
    import moe_jax
    from moe_jax.experts.hopper import _plan
    from moe_jax.quantization import method_for

    config = moe_jax.MoEConfig(128, 8, 2048, 768, scheme=Scheme.parse("fp8_channel"))
    weights = method_for(config.scheme).abstract_weights(config)
    assert _plan.make_plan(config, weights, 64).source == "measured for 64 tokens"
    assert run("--model", "qwen3-30b-a3b", "--scheme", "fp8_channel", "--tokens", "64") == 0
    plan = _plan.make_plan(config, weights, 64)
    assert plan.source == "measured for 64 tokens here" and plan.block_m == 8


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("--model", "8,2,512,256"), "say with --scheme"),
        (("--model", "8,2,512,256", "--scheme", "fp9"), "fp9"),
        (("--model", "8,2,512,256", "--scheme", "bf16", "--tokens", "1,x"), "--tokens '1,x'"),
        (("--model", "8,2,512,256", "--scheme", "bf16", "--mesh", "data=2"), "--mesh 'data=2': expected AXIS=DEVICES"),
        (("--model", "8,2,512,256", "--scheme", "bf16", "--mesh", "expert=2,expert=4"), "expert, tensor at most once"),
        (("--model", "8,2,512,256", "--scheme", "bf16", "--mesh", ""), "--mesh '': expected AXIS=DEVICES"),
        (("--model", "8,2,512,256", "--scheme", "bf16", "--mesh", "tensor=3"), "tensor=3 does not divide"),
        (("--model", "8,2,512,256", "--scheme", "bf16", "--mesh", "expert=8"), "fewer than top_k=2"),
        (("--model", "8,2,512,256", "--scheme", "bf16", "--token", "1", "--modle", "x"), "did you mean --model?"),
    ],
)
def test_bad_input_is_one_line(run, arguments, match, capsys):
    assert run(*arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert match in error
    assert not user_path("NVIDIA H200").exists()


def test_without_a_gpu(capsys):
    assert main(["autotune", "--model", "8,2,512,256", "--scheme", "bf16"]) == 2
    assert "needs a Hopper GPU" in capsys.readouterr().err


def test_a_table_that_cannot_be_extended(run, capsys):
    path = user_path("NVIDIA H200")
    path.parent.mkdir(parents=True)
    path.write_text("{")
    assert run("--model", "8,2,512,256", "--scheme", "bf16") == 2
    assert "not JSON" in capsys.readouterr().err and path.read_text() == "{"
