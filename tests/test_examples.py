"""The scripts of examples/, each run at toy size."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import moe_jax
from tests.support.checkpoints import writers
from tests.support.checkpoints.texts import write_text_model

EXAMPLES = Path(__file__).parent.parent / "examples"
TINY = dict(
    vocab_size=32, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=16
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("examples") / "model"
    writers.write_model(
        "qwen3_moe", path, torch.float32, **TINY, num_experts=8, moe_intermediate_size=32, eos_token_id=None
    )
    return path


def example(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_names_hide_no_package():
    """A script's folder comes first on its path: one named like a package would import itself."""
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert len(names) >= 3 and not [name for name in names if importlib.util.find_spec(name)]


def test_one_gpu(directory, capsys):
    module = example("one_gpu")
    args = ["--quantize", "int8_w8a16", "--ids", "3,1,4", "--new-tokens", "5", "--dtype", "float32"]
    out = module.main([str(directory), *args])
    text = capsys.readouterr().out
    assert out.shape == (1, 8) and "int8_w8a16" in text and text.count("tokens/s") == 2
    model = moe_jax.load_pretrained(directory, quantize="int8_w8a16", dtype=jnp.float32)
    ids = jnp.array([[3, 1, 4]])
    logp = jax.nn.log_softmax(model.score(ids)[0])
    np.testing.assert_allclose(module.log_probabilities(model, ids)[0], [logp[0, 1], logp[1, 4]], atol=1e-4)
    expected = moe_jax.generate(model, ids, max_new_tokens=5, temperature=0.8, top_p=0.95, rng=jax.random.key(0))
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("chat", [[], ["--chat"]])
def test_ask(tmp_path, capsys, chat):
    """Answers as texts, then the chosen token of each step with the three likeliest ones."""
    write_text_model(tmp_path / "model")
    options = ["--max-tokens", "5", "--dtype", "float32", "--quantize", "int8_w8a16"]
    outputs = example("ask").main([str(tmp_path / "model"), "Rivers:", "Lakes:", *chat, *options])
    lines = capsys.readouterr().out.splitlines()
    answer = outputs[0].outputs[0]
    assert (outputs[0].prompt == "Rivers:") == (not chat) and "Lakes:" in outputs[1].prompt
    assert len(lines) == 7 and lines[0].startswith(repr(answer.text)) and "5 tokens" in lines[1]
    chosen = [found[token] for token, found in zip(answer.token_ids, answer.logprobs, strict=True)]
    assert all(line.startswith(repr(each.decoded_token)) for line, each in zip(lines[2:], chosen, strict=True))


def test_mesh(directory, capsys):
    """Experts over four simulated devices, halves of them over two more: the tokens of one device."""
    args = ["--mesh", "expert=4,tensor=2", "--ids", "3,1,4", "--new-tokens", "5", "--dtype", "float32"]
    out = example("mesh").main([str(directory), *args])
    text = capsys.readouterr().out
    assert "on 8 devices" in text and "expert" in text
    model = moe_jax.load_pretrained(directory, dtype=jnp.float32)
    np.testing.assert_array_equal(out, moe_jax.generate(model, [[3, 1, 4]], max_new_tokens=5))


def test_with_torch(directory, capsys):
    """int8 moves the logits by little, and what transformers then generates is what our own model generates."""
    out = example("with_torch").main([str(directory), "--ids", "3,1,4", "--new-tokens", "5"])
    text = capsys.readouterr().out
    assert "1 blocks run as int8_w8a16" in text and "compiled: logits within" in text
    moved = float(text.partition("logits moved by ")[2].partition("%")[0])
    assert 0 < moved < 5
    model = moe_jax.load_pretrained(directory, quantize="int8_w8a16", dtype=jnp.float32)
    np.testing.assert_array_equal(out.numpy(), moe_jax.generate(model, [[3, 1, 4]], max_new_tokens=5))


class TestFinetune:
    """Two layers of the demo's checkpoint, or one of a smaller one, on rows of several sequences."""

    @pytest.fixture(scope="class")
    @staticmethod
    def tiny(tmp_path_factory):
        """A checkpoint of one layer whose tokenizer has the words of the script's sentences."""
        from tokenizers import Tokenizer, models, pre_tokenizers

        words = sorted({word for text in example("finetune_lora").sentences(400) for word in text.split()})
        path = tmp_path_factory.mktemp("finetune") / "model"
        sizes = TINY | dict(vocab_size=len(words) + 1, num_experts=4, moe_intermediate_size=32, eos_token_id=None)
        writers.write_model("qwen3_moe", path, torch.float32, **sizes)
        tokenizer = Tokenizer(
            models.WordLevel({word: i for i, word in enumerate(["<unk>", *words])}, unk_token="<unk>")
        )
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(path / "tokenizer.json"))
        return path

    def test_rows_hold_whole_documents(self):
        module = example("finetune_lora")
        documents = [[*range(1, n + 1)] for n in (5, 7, 3, 20, 2)]
        ids, segments = module.pack(documents, 8)
        found = [list(row[number == own]) for row, number in zip(ids, segments, strict=True) for own in range(1, 9)]
        wanted = [[*range(1, 6)], [1, 2, 3], [*range(1, 8)], [*range(1, 9)], [*range(9, 17)], [17, 18, 19, 20], [1, 2]]
        assert [row for row in found if row] == wanted and (segments[ids == 0] == 0).all()
        targets = module.has_target(jnp.asarray(segments))
        assert targets.sum() == sum(len(document) - 1 for document in wanted)

    @pytest.mark.parametrize("mesh", [None, pytest.param("expert=4,data=2", marks=pytest.mark.slow)])
    def test_a_run_that_stops_goes_on_with_the_same_bits(self, tiny, tmp_path, capsys, caplog, mesh):
        """From its checkpoint of step 5: losses, adapters and what peft reads. Auxiliary losses, two batches a step.
        Each run compiles its step once."""
        module = example("finetune_lora")
        args = [str(tiny), "--quantize", "w4a16_g32", "--length", "24", "--schedule-steps", "10", "--save-every", "5"]
        args += ["--balance", "0.01", "--z-loss", "0.001", "--rank", "4", "--batch-size", "2", "--remat"]
        args += [] if mesh is None else ["--mesh", mesh]
        with jax.numpy_dtype_promotion("standard"), jax.log_compiles():  # for Adam, which divides floats by integers
            wanted, straight = module.main([*args, "--steps", "10", "--out", str(tmp_path / "straight")])
            shutil.copytree(tmp_path / "straight", tmp_path / "halves")
            shutil.rmtree(tmp_path / "halves/checkpoints/10")  # as if it had stopped before
            shutil.rmtree(tmp_path / "halves/adapter")
            found, resumed = module.main([*args, "--steps", "10", "--out", str(tmp_path / "halves")])
        assert "going on after step 5" in capsys.readouterr().out
        assert sum("Finished XLA compilation of jit(step)" in record.getMessage() for record in caplog.records) == 2
        assert found == wanted and len(wanted) == 10 and wanted[-1] < 0.9 * wanted[0]
        states = [jax.tree.leaves(nnx.state(model, moe_jax.LoRAParam)) for model in (straight, resumed)]
        assert len(states[0]) == 4 + 8
        for want, got in zip(*states, strict=True):
            np.testing.assert_array_equal(got, want)
        files = [
            (tmp_path / name / "adapter/adapter_model.safetensors").read_bytes() for name in ("straight", "halves")
        ]
        assert files[0] == files[1]

    def run(self, out, options, *directory, **env):
        """The example in a process of its own, as the documentation has it."""
        script = str(EXAMPLES / "finetune_lora.py")
        command = [sys.executable, script, *map(str, directory), "--out", str(out), *options.split()]
        inherited = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
        subprocess.run(command, env=inherited | env, check=True, stdout=subprocess.DEVNULL)

    @pytest.mark.slow
    def test_the_next_command_compiles_nothing(self, tiny, tmp_path):
        """What it compiled anew might sum in another order on a GPU."""
        quickly = dict(JAX_DISABLE_MOST_OPTIMIZATIONS="true")

        def programs():
            return {path.name: path.stat().st_mtime_ns for path in (tmp_path / "programs").glob("*-cache")}

        options = "--quantize w4a16_g32 --rank 4 --batch-size 1 --accumulate 1 --length 16 --save-every 1"
        options += " --schedule-steps 2 --steps"
        self.run(tmp_path, f"{options} 1", tiny, **quickly)
        before = programs()
        assert any(name.startswith("jit_step-") for name in before)
        self.run(tmp_path, f"{options} 2", tiny, **quickly)
        assert programs() == before

    @pytest.mark.gpu
    def test_processes_have_the_same_bits(self, tmp_path):
        """One run of four steps, and one that stops after two; both with the programs of the first."""
        env = dict(XLA_PYTHON_CLIENT_PREALLOCATE="false", JAX_COMPILATION_CACHE_DIR=str(tmp_path / "programs"))
        options = "--schedule-steps 4 --save-every 2 --batch-size 16 --length 256 --balance 0.01 --remat --steps"
        for name, steps in (("straight", 4), ("halves", 2), ("halves", 4)):
            self.run(tmp_path / name, f"{options} {steps}", **env)
        for name in ("losses.json", "adapter/adapter_model.safetensors"):
            assert (tmp_path / "straight" / name).read_bytes() == (tmp_path / "halves" / name).read_bytes(), name

    def test_a_run_goes_on_with_its_own_options_alone(self, tmp_path):
        """More steps are no other options, unless the schedule's length follows them."""
        module = example("finetune_lora")

        def check(*args, documents=("one", "two")):
            module.check_settings(tmp_path, module.parse(["--out", str(tmp_path), *args]), documents)

        check("--steps", "6")
        check("--steps", "12")  # nothing has been saved yet
        (tmp_path / "losses.json").write_text("[]")
        check("--steps", "24", "--schedule-steps", "12", "--save-every", "3")
        for other, text in (
            (["--steps", "24"], "schedule_steps=12, not 24: .*another --out"),
            (["--steps", "12", "--learning-rate", "1"], "learning_rate=0.01, not 1.0"),
            (["--steps", "12", "--seed", "1"], "seed=0, not 1"),
            (["--steps", "12", "--mesh", "data=2"], "mesh=None, not data=2"),
        ):
            with pytest.raises(SystemExit, match=text):
                check(*other)
        with pytest.raises(SystemExit, match="with documents=[0-9a-f]{16}, not [0-9a-f]{16}: .*another --out"):
            check("--steps", "12", documents=("one", "other"))
        check("--steps", "12", "--text", "moved")  # what was refused has changed nothing; the text is the same

    def test_what_cannot_be_trained_on_is_one_line(self, tmp_path, capsys):
        module = example("finetune_lora")
        for args, text in (
            (["--steps", "0"], "--steps 0: expected at least 1"),
            (["--save-every", "0"], "--save-every 0: expected at least 1"),
            (["--length", "1"], "--length 1: expected at least 2"),
        ):
            with pytest.raises(SystemExit):
                module.parse(args)
            assert text in capsys.readouterr().err
        (tmp_path / "empty").write_text("\n \n")
        (tmp_path / "binary").write_bytes(b"the caf\xe9")
        (tmp_path / "damaged").mkdir()
        (tmp_path / "damaged/losses.json").write_text("[]")
        (tmp_path / "damaged/settings.json").write_text("[1, 2]")
        text = lambda name: ["--text", str(tmp_path / name), "--out", str(tmp_path / "new")]  # noqa: E731
        for args, message in (
            (text("empty"), "empty: has no documents"),
            (text("binary"), "binary: 'utf-8' codec"),
            (text("absent"), "absent: .*No such file"),
            (["--out", str(tmp_path / "empty")], "empty: File exists"),
            (["--out", str(tmp_path / "damaged")], "settings.json: no settings of a run"),
        ):
            with pytest.raises(SystemExit, match=message):
                module.main(args)
        assert not (tmp_path / "new").exists()

    def test_rows_without_a_next_token_change_nothing(self, tmp_path):
        """One word on most lines: batches of such rows have no loss, and no NaN."""
        module = example("finetune_lora")
        (tmp_path / "text").write_text("tree\n" * 40 + "the old tree\n")
        args = [
            "--text",
            str(tmp_path / "text"),
            "--out",
            str(tmp_path / "out"),
            "--length",
            "3",
            "--targets",
            "o_proj",
        ]
        with jax.numpy_dtype_promotion("standard"):
            losses, model = module.main([*args, "--steps", "3", "--batch-size", "1", "--accumulate", "1"])
        assert 0.0 in losses and np.isfinite(losses).all()
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(nnx.state(model, moe_jax.LoRAParam)))

    @pytest.mark.slow
    @pytest.mark.parametrize("size", ["tiny", "qwen3-30b-a3b"])
    def test_a_mesh_trains_as_one_device_does(self, tmp_path, monkeypatch, size):
        """Random weights with groups of 128: losses of 8 and of 2 devices are those of one. ``--size`` of another name
        takes ``--layers``, here of small ones; its weights on one device are others, so that 2 devices are compared."""
        module = example("finetune_lora")
        monkeypatch.setitem(module.SIZES, "qwen3-30b-a3b", module.SIZES["tiny"] | dict(num_experts=8))
        args = ["--steps", "4", "--length", "32", "--targets", "w13,w2", "--size", size, "--layers", "1"]
        first = [] if size == "tiny" else ["--mesh", "data=2"]
        with jax.numpy_dtype_promotion("standard"):
            one, model = module.main([*args, "--out", str(tmp_path / "one"), *first])
            many, _ = module.main([*args, "--out", str(tmp_path / "many"), "--mesh", "expert=4,data=2"])
        assert len(model.moe_blocks()) == (2 if size == "tiny" else 1)
        np.testing.assert_allclose(many, one, rtol=1e-4)
