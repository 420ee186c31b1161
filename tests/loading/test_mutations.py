"""Five hundred damaged checkpoints through the command's entry point: refused in one line, or unchanged to the bit."""

import os
import resource
import shutil
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from moe_jax import cli
from tests.support.checkpoints import mutations, writers

TINY = dict(
    vocab_size=32,
    hidden_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
IDS = "3,1,4,1,5,9,2,6"
BASES = {
    "qwen3_moe-bf16": ("qwen3_moe", None, []),
    "mixtral-bf16": ("mixtral", None, []),
    "qwen3_moe-fp8_channel": ("qwen3_moe", "FP8_DYNAMIC", mutations.SCALED + mutations.COMPRESSED_TENSORS),
    "mixtral-int8": ("mixtral", "W8A8", mutations.SCALED + mutations.COMPRESSED_TENSORS),
    "qwen3_moe-native_fp8": ("qwen3_moe", "native", mutations.SCALED + mutations.NATIVE_FP8),
}


def cases():
    for base, (_, _, extra) in BASES.items():
        for name, expectation, mutate, count in mutations.COMMON + extra:
            # random bit flips hit most often where the most header bytes are; one base gets the larger share
            for seed in range(count if base == "qwen3_moe-bf16" or count < 4 else max(1, count // 2)):
                yield base, f"{name}-{seed}", expectation, mutate, seed


CASES = list(cases())


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """{base: (directory, float32 logits of the undamaged checkpoint)}"""
    root = tmp_path_factory.mktemp("bases")
    made = {}
    for base, (family, scheme, _) in BASES.items():
        inter = {"moe_intermediate_size": 48} if family == "qwen3_moe" else {"intermediate_size": 48}
        source = root / f"{family}-source"
        if not source.exists():
            writers.write_model(family, source, **TINY, **inter)
        directory = root / base
        if scheme is None:
            shutil.copytree(source, directory)
        elif scheme == "native":
            blocks = root / "blocks"
            writers.quantize_with_compressed_tensors(source, blocks, family, writers.preset("FP8_BLOCK"))
            writers.as_native_fp8(blocks, directory)
        else:
            writers.quantize_with_compressed_tensors(source, directory, family, writers.preset(scheme))
        logits = root / f"{base}.npy"
        assert cli.main(run_args(directory, logits)) == 0
        made[base] = directory, np.load(logits)
    return made


def run_args(directory, logits):
    common = ["--input-ids", IDS, "--max-new-tokens", "0", "--dtype", "float32"]
    return ["run", "--model", str(directory), *common, "--logits-out", str(logits)]


def test_there_are_five_hundred():
    assert len(CASES) >= 500


@pytest.mark.parametrize("base", BASES)
@pytest.mark.sample(5)
def test_mutations_in_process(base, bases, tmp_path, capsys):
    source, expected = bases[base]
    failures = []
    for _, name, expectation, mutate, seed in (case for case in CASES if case[0] == base):
        directory, logits = tmp_path / "mutated", tmp_path / "logits.npy"
        shutil.copytree(source, directory)
        mutate(directory, np.random.default_rng(seed))
        start = time.process_time()  # so that a busy machine does not count
        try:
            code = cli.main(run_args(directory, logits))
        except BaseException as error:
            code = repr(error)
        seconds = time.process_time() - start
        problem = verdict(code, capsys.readouterr().err, logits, expectation, expected, seconds)
        if problem:
            failures.append(f"{name}: {problem}")
        shutil.rmtree(directory)
        logits.unlink(missing_ok=True)
    assert not failures, f"{len(failures)} mutations:\n" + "\n".join(failures)


def verdict(code, stderr, logits, expectation, expected, seconds):
    """None when the outcome is allowed, else what is wrong with it."""
    if seconds > 10:
        return f"took {seconds:.1f} s"
    if code == 2:
        if expectation == "harmless":
            return f"refused a harmless change: {stderr.strip()}"
        lines = stderr.splitlines()
        if len(lines) != 1 or "Traceback" in stderr:
            return f"expected one line on stderr, found {lines}"
        return "left a partial result" if logits.exists() else None
    if code != 0:
        return f"exit code {code}: {stderr.strip()[-200:]}"
    if expectation == "refused":
        return "was accepted"
    return None if np.array_equal(np.load(logits), expected) else "was accepted with other logits"


@pytest.mark.slow
@pytest.mark.parametrize("count", [4, 20])
def test_real_command(count, bases, tmp_path):
    """Cases from all over the list through the command in a process of its own."""
    chosen = CASES[:: len(CASES) // count][:count]
    assert len(chosen) == count
    failures = []
    # as tests/conftest.py: programs compiled in another way round differently
    environment = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    if jax.__version_info__ < (0, 11):
        environment["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
    for base, name, expectation, mutate, seed in chosen:
        source, expected = bases[base]
        directory, logits = tmp_path / "mutated", tmp_path / "logits.npy"
        shutil.copytree(source, directory)
        mutate(directory, np.random.default_rng(seed))
        command = [sys.executable, "-m", "moe_jax", *run_args(directory, logits)]
        # processor time, so that a busy machine does not count; it includes the start of Python and JAX
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        problem = verdict(done.returncode, done.stderr, logits, expectation, expected, seconds)
        if problem:
            failures.append(f"{base} {name}: {problem}")
        shutil.rmtree(directory)
        logits.unlink(missing_ok=True)
    assert not failures, "\n".join(failures)
