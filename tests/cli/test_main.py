"""The command line: results, exit codes and one-line errors."""

import json
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import moe_jax
from moe_jax import cli
from tests.support.checkpoints import writers

TINY = dict(
    vocab_size=32, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("cli") / "qwen3_moe"
    writers.write_model("qwen3_moe", directory, **TINY, moe_intermediate_size=48, eos_token_id=None)
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(32)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def run(model_dir, *args):
    return cli.main(["run", "--model", str(model_dir), *args])


def test_run_prints_what_generate_returns(model_dir, capsys):
    assert run(model_dir, "--input-ids", "3,1,4", "--max-new-tokens", "5", "--dtype", "float32") == 0
    printed = [int(token) for token in capsys.readouterr().out.strip().split(",")]
    model = moe_jax.load_pretrained(model_dir, dtype=jnp.float32)
    out = moe_jax.generate(model, jnp.array([[3, 1, 4]]), max_new_tokens=5)
    np.testing.assert_array_equal(printed, out[0, 3:])


def test_run_reads_ids_from_npy_and_writes_logits(model_dir, tmp_path):
    np.save(tmp_path / "ids.npy", np.array([[3, 1, 4]], np.int64))
    out = tmp_path / "logits.npy"
    args = ("--max-new-tokens", "0", "--logits-out", str(out), "--dtype", "float32", "--quantize", "int8_w8a16")
    assert run(model_dir, "--input-ids", str(tmp_path / "ids.npy"), *args) == 0
    logits = np.load(out)
    assert logits.shape == (3, 32) and logits.dtype == np.float32
    exact = np.asarray(moe_jax.load_pretrained(model_dir, dtype=jnp.float32)(jnp.array([[3, 1, 4]]))[0])
    assert 0 < np.abs(logits - exact).max() < 0.1 * (exact.max() - exact.min()), (
        "quantized, and close to the unquantized"
    )


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY\x01\x00", b"PK\x03\x04"])
def test_damaged_npy_is_one_line(model_dir, tmp_path, capsys, content):
    (tmp_path / "ids.npy").write_bytes(content)
    assert run(model_dir, "--input-ids", str(tmp_path / "ids.npy")) == 2
    assert "ids.npy" in (line := capsys.readouterr().err) and len(line.splitlines()) == 1


def test_run_with_a_prompt(model_dir, capsys):
    assert run(model_dir, "--prompt", "w3 w1 w4", "--max-new-tokens", "4", "--dtype", "float32") == 0
    text = capsys.readouterr().out.strip()
    assert run(model_dir, "--input-ids", "3,1,4", "--max-new-tokens", "4", "--dtype", "float32") == 0
    assert text.split() == [f"w{i}" for i in capsys.readouterr().out.strip().split(",")]


def test_scoring_prints_log_probabilities(model_dir, capsys):
    assert run(model_dir, "--input-ids", "3,1,4", "--max-new-tokens", "0", "--dtype", "float32") == 0
    printed = [float(v) for v in capsys.readouterr().out.strip().split(",")]
    logits = np.asarray(moe_jax.load_pretrained(model_dir, dtype=jnp.float32)(jnp.array([[3, 1, 4]]))[0], np.float64)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(printed, [logp[0, 1], logp[1, 4]], atol=1e-3)


@pytest.mark.parametrize(
    "args, words",
    [
        (["--input-ids", "1,x"], ["--input-ids", "integers"]),
        (["--input-ids", ""], ["--input-ids"]),
        (["--input-ids", "1,99"], ["99", "vocabulary", "31"]),
        (["--input-ids", "-1"], ["-1", "vocabulary"]),
        (["--input-ids", "99999999999"], ["32 bits"]),
        (["--input-ids", "9" * 30], ["--input-ids"]),
        (["--input-ids", "missing.npy"], ["missing.npy"]),
        (["--input-ids", "1", "--logits-out", "/tmp"], ["/tmp", "directory"]),
        (["--input-ids", "1", "--quantize", "fp9"], ["fp9", "fp8_channel"]),
        (["--input-ids", "1", "--implementation", "fpga"], ["fpga", "reference"]),
        (["--input-ids", "1", "--mesh", "expert=4096"], ["--mesh", "4096 devices, found 8"]),
        (["--input-ids", "1", "--max-new-tokens", "-3"], ["-3"]),
        (["--input-ids", "1", "--logits-out", "/no/such/place/x.npy"], ["/no/such/place"]),
    ],
)
def test_bad_input_is_one_line(model_dir, capsys, args, words):
    assert run(model_dir, *args) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1
    for word in words:
        assert word in captured.err, captured.err


def test_inspect(model_dir, capsys):
    assert cli.main(["inspect", str(model_dir)]) == 0
    text = capsys.readouterr().out
    for word in ("qwen3_moe", "6", "bf16"):
        assert word in text
    assert cli.main(["inspect", str(model_dir / "nothing")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_module_entry_point(model_dir):
    done = subprocess.run([sys.executable, "-m", "moe_jax", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "inspect" in done.stdout and "demo" in done.stdout
    done = subprocess.run([sys.executable, "-m", "moe_jax", "inspect", "/nowhere"], capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_demo(tmp_path, capsys, monkeypatch):
    from moe_jax.cli import _demo

    small = dict(
        _demo.CONFIG, num_hidden_layers=1, num_experts=4, hidden_size=64, moe_intermediate_size=48, vocab_size=64
    )
    monkeypatch.setattr(_demo, "CONFIG", small)
    monkeypatch.setattr(_demo, "NEW_TOKENS", 4)
    assert cli.main(["demo", "--out", str(tmp_path)]) == 0
    rows = {row["scheme"]: row for row in json.loads((tmp_path / "demo.json").read_text())["rows"]}
    assert {"bf16", "fp8_tensor", "fp8_channel", "fp8_block", "int8_w8a8", "int8_w8a16"} <= rows.keys()
    assert rows["fp8_channel"]["expert_bytes"] < 0.6 * rows["bf16"]["expert_bytes"]
    assert rows["bf16"]["logit_error"] < rows["int8_w8a16"]["logit_error"] < rows["fp8_channel"]["logit_error"] < 0.2
    assert (tmp_path / "demo.png").read_bytes()[:4] == b"\x89PNG"
    out = capsys.readouterr().out
    assert all(scheme in out for scheme in rows)


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ("run --modle x --prompt y", "--modle: did you mean --model?"),
        ("run --model x --input-ids 1 --top_k 3", "--top_k: did you mean --top-k?"),
        ("quantise a b", "quantise: did you mean quantize?"),
        ("quantize a b --shceme=int4", "--shceme: did you mean --scheme?"),
    ],
)
def test_misspelt_arguments(arguments, meant, capsys):
    assert cli.main(arguments.split()) == 2
    assert meant in capsys.readouterr().err


@pytest.mark.parametrize("arguments", ["bogus", "run --model x", "run --model x --prompt --modle"])
def test_nothing_is_guessed_of_what_is_right_or_like_nothing(arguments, capsys):
    assert cli.main(arguments.split()) == 2
    assert ("did you mean" in capsys.readouterr().err) == ("modle" in arguments)
