"""Damaged checkpoints by the thousand, each refused in one line or read as what its files say.

    python tests/fuzz/run.py [ITERATIONS] [FIRST SEED] [> benchmarks/results/fuzz.txt]

Iteration i damages the base ``KINDS[i % len(KINDS)]`` with seed i and loads it. Fails are

- a crash: anything but CheckpointError, ValueError or NotImplementedError, or a message of several lines,
- a hang: over 10 s of processor time,
- a silent accept: it loaded, and weights, biases, router, top_k or the format of activations are not what ``decoder``
  reads from the same files, or are not finite, or the damage is of a class that must be refused,
- a refusal of harmless damage,
- a partial state: a layer whose reload from the damaged files failed does not have its old weights.
"""

import faulthandler
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2])]

import moe_jax
from moe_jax import MoEConfig
from moe_jax.loading import Checkpoint, ExpertReader
from moe_jax.quantization import dequantize_tensor
from tests.fuzz.bases import KINDS, PREFIX, E, H, I, write_bases
from tests.fuzz.damage import damage
from tests.fuzz.decoder import Meaningless, decode

SECONDS = 10
REFUSALS = (ValueError, NotImplementedError)  # CheckpointError is a ValueError


class Hang(BaseException):
    """Too much processor time; no handler for Exception may swallow it."""


def load(directory, kind):
    """(ExpertWeights, router kernel or None, MoEConfig or None)."""
    if kind != "gpt_oss":
        block = moe_jax.load_moe(directory, layer=0, dtype=jnp.float32)
        return block.experts.weights.get_value(), block.router.weight.get_value(), block.experts.config
    with Checkpoint(directory) as checkpoint:
        reader = ExpertReader(checkpoint)
        scheme = reader.stored_scheme(0)
        config = MoEConfig(E, 1, H, I, scheme=moe_jax.Scheme.parse(scheme), activation="swigluoai", has_bias=True)
        return reader.load(0, config), None, None


_dequantized = jax.jit(dequantize_tensor)


def disagreement(directory, weights, router, config):
    """None if what was loaded is what the files say, else a word about the first difference."""
    try:
        expected = decode(directory, E, H, I)
    except Meaningless as error:
        return f"the files do not fit each other: {error}"
    w13, w2 = np.asarray(_dequantized(weights.w13)), np.asarray(_dequantized(weights.w2))
    for expert in range(E):
        for shard, ours in (("w1", w13[expert, 0]), ("w3", w13[expert, 1]), ("w2", w2[expert])):
            difference = _difference(ours, expected[expert, shard])
            if difference:
                return f"expert {expert} {shard}: {difference}"
            if not np.isfinite(ours).all():
                return f"expert {expert} {shard}: accepted with values that are not finite"
    for (expert, shard), bias in expected["bias"].items():
        ours = weights.w2_bias[expert] if shard == "w2" else weights.w13_bias[expert, int(shard == "w3")]
        if _difference(np.asarray(ours, np.float32), bias):
            return f"expert {expert} {shard}: bias"
    if config is None:
        return None
    if router is None or _difference(np.asarray(router, np.float32), expected["router"]):
        return "router"
    return _settings_disagreement(json.loads((directory / "config.json").read_text()), config)


def _settings_disagreement(stated, config):
    found = (config.top_k, config.renormalize, config.activation)
    expected = (stated["num_experts_per_tok"], stated.get("norm_topk_prob", False), stated["hidden_act"])
    if found != expected:
        return f"top_k, renormalize, activation: {found}, expected {expected}"
    quantization, activations = stated.get("quantization_config"), config.scheme.activations
    if quantization is None or "config_groups" not in quantization:
        return None
    ((_, group),) = quantization["config_groups"].items()
    inputs = group.get("input_activations")
    if (inputs is None) != (activations is None):
        return f"activations: {activations}, stated {inputs}"
    if inputs is None:
        return None
    element = activations.element_type
    strategy = "tensor_group" if activations.global_scale else activations.strategy.value
    size = inputs.get("group_size")
    implied = "tensor" if size is None else "channel" if size == -1 else "group"
    ours = (element.bits, element.is_float, strategy, activations.symmetric, activations.group_size)
    theirs = (
        8 if inputs.get("num_bits") is None else inputs["num_bits"],
        (inputs.get("type") or "int").lower() == "float",
        (inputs.get("strategy") or implied).lower(),
        inputs.get("symmetric") is not False,
        None if size == -1 else size,
    )
    return None if ours == theirs else f"activations: {ours}, stated {theirs}"


def _difference(ours, expected):
    if ours.shape != expected.shape:
        return f"shape {ours.shape}, expected {expected.shape}"
    # XLA counts subnormal numbers as zero, among them scales; the largest code is 448
    tiny = 448 * np.finfo(np.float32).tiny
    same = (ours == expected) | (np.isnan(ours) & np.isnan(expected)) | (np.abs(ours - expected) <= tiny)
    if same.all():
        return None
    at = tuple(int(i) for i in np.argwhere(~same)[0])
    return f"{ours[at]} at {at}, expected {expected[at]}, {int((~same).sum())} differ"


class Fuzzer:
    """Bases and reloadable layers, made once. ``run(i)`` is one iteration: (outcome, description of a fail or None)."""

    def __init__(self, root: Path):
        self._root = root
        self._bases = write_bases(root / "bases")
        self._layers = {}
        for kind, directory in self._bases.items():
            weights, router, config = load(directory, kind)
            problem = disagreement(directory, weights, router, config)
            assert problem is None, f"{kind}: {problem}"
            if kind in ("bf16", "fp8_channel", "w4a16_g32_asym", "nvfp4"):
                self._layers[kind] = moe_jax.load_moe(directory, layer=0, dtype=jnp.float32).experts

    def run(self, i: int) -> tuple[str, str, str | None]:
        kind = KINDS[i % len(KINDS)]
        directory = self._root / "damaged"
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(self._bases[kind], directory)
        name, expectation = damage(directory, np.random.default_rng(i))
        problem = None
        try:
            with watchdog():
                loaded = load(directory, kind)
                outcome = "accepted"
        except REFUSALS as error:
            outcome = "refused"
            if len(str(error).splitlines()) != 1 or not str(error).isprintable():
                problem = f"message is not one line: {str(error)!r}"
            elif expectation == "harmless":
                problem = f"harmless, but refused: {error}"
            elif kind in self._layers:
                problem = self._reload_problem(kind, directory)
        except Hang:
            outcome, problem = "hang", f"over {SECONDS} s"
        except Exception as error:
            outcome, problem = "crash", f"{type(error).__name__}: {error}"
        else:
            if expectation == "refused":
                problem = "accepted, though this damage never is harmless"
            else:
                try:
                    problem = disagreement(directory, *loaded)
                except Exception as error:
                    problem = f"accepted, but the decoder fails: {type(error).__name__}: {error}"
        return f"{kind} {name}", outcome, problem

    def _reload_problem(self, kind, directory):
        """A layer that meets the damaged files keeps its weights, or has all of the new ones."""
        layer = self._layers[kind]
        before = layer.weights.get_value()
        try:
            with Checkpoint(directory) as checkpoint:
                pairs = [(n, checkpoint.read(n)) for n in checkpoint.names if n.startswith(f"{PREFIX}experts.")]
                layer.reload_weights(pairs)
        except REFUSALS:
            leaves = zip(jax.tree.leaves(layer.weights.get_value()), jax.tree.leaves(before), strict=True)
            if any(now is not then for now, then in leaves):
                return "a failed reload changed the layer"
        except Exception as error:
            return f"reload: {type(error).__name__}: {error}"
        layer.set_weights(before)
        return None


class watchdog:
    """Raises ``Hang`` after 10 s of processor time. What holds the interpreter lock ends the process after 300 s."""

    def __enter__(self):
        def stop(*_):
            raise Hang

        self._old = signal.signal(signal.SIGPROF, stop)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        faulthandler.dump_traceback_later(300, exit=True)

    def __exit__(self, *exc):
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, self._old)
        faulthandler.cancel_dump_traceback_later()


def fuzz(root: Path, seeds, log=print) -> tuple[Counter, list[str]]:
    """Run the iterations; returns ({(damage, outcome): count}, fails)."""
    fuzzer, outcomes, fails = Fuzzer(root), Counter(), []
    for i in seeds:
        what, outcome, problem = fuzzer.run(i)
        outcomes[what.split()[1].split("+")[0], outcome] += 1
        if problem:
            fails.append(f"{i} {what}: {problem}")
            log(fails[-1])
    return outcomes, fails


def main():
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    start = time.time()
    # written unoptimized, as in the tests; nothing is timed here
    jax.config.update("jax_disable_most_optimizations", True)
    with tempfile.TemporaryDirectory() as directory:
        outcomes, fails = fuzz(Path(directory), range(first, first + count), lambda line: print(line, flush=True))
    print(f"\n{'damage':<24}{'refused':>9}{'accepted':>10}{'other':>7}")
    for name in sorted({name for name, _ in outcomes}):
        refused, accepted = outcomes[name, "refused"], outcomes[name, "accepted"]
        rest = sum(n for (other, _), n in outcomes.items() if other == name) - refused - accepted
        print(f"{name:<24}{refused:>9}{accepted:>10}{rest:>7}")
    print(f"\n{count} iterations from seed {first} over {len(KINDS)} formats: {len(fails)} fails")
    versions = f"jax {jax.__version__}, moe_jax {moe_jax.__version__}"
    print(f"{versions}, {time.strftime('%Y-%m-%d')}, {time.time() - start:.0f} s")
    return 1 if fails else 0


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main())
