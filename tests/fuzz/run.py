"""Damaged checkpoints by the thousand, each refused in one line or read as what its files say.

    python tests/fuzz/run.py [ITERATIONS] [FIRST SEED] [> benchmarks/results/fuzz.txt]

Iteration i damages the base ``KINDS[i % len(KINDS)]`` with seed i and loads it: one layer, one layer over a mesh, or a
whole model. Fails are

- a crash: anything but CheckpointError, ValueError or NotImplementedError, or a message of several lines,
- a hang: over 10 s of processor time,
- a silent accept: it loaded, and weights, biases, static activation scales, dense parameters, settings or the format of
  activations are not what ``decoder`` reads from the same files, or are not finite, or the damage is of a class that
  must be refused,
- a refusal of harmless damage,
- a partial state: a layer or model whose reload from the damaged files failed does not have its old weights.
"""

import faulthandler
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"  # for meshes

import jax
import numpy as np
from flax import nnx

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2])]

import moe_jax
from moe_jax.loading import Checkpoint
from tests.fuzz.bases import E, H, I, write_layers
from tests.fuzz.damage import damage
from tests.fuzz.decoder import Meaningless, decode_dense, decode_layer, read
from tests.fuzz.entries import KINDS, load, matrices
from tests.fuzz.models import dense_names, write_models

SECONDS = 10
REFUSALS = (ValueError, NotImplementedError)  # CheckpointError is a ValueError
RELOADED = ("bf16", "fp8_channel", "w4a16_g32_asym", "nvfp4", "mesh_experts", "model_tied", "model_deepseek")


class Hang(BaseException):
    """Too much processor time; no handler for Exception may swallow it."""


def disagreement(directory, loaded):
    """None if what was loaded is what the files say, else a word about the first difference."""
    try:
        config, tensors = read(directory)
        for layer, (weights, settings) in loaded.layers.items():
            expected = decode_layer(config, tensors, layer, E, H, I)
            problem = _layer_disagreement(weights, expected) or _settings_disagreement(config, settings)
            if problem:
                return f"layer {layer}: {problem}"
        for name, ours in loaded.dense.items():
            problem = _difference(ours, decode_dense(config, tensors, name, ours.shape))
            if problem or not np.isfinite(ours).all():
                return f"{name}: {problem or 'accepted with values that are not finite'}"
    except Meaningless as error:
        return f"the files do not fit each other: {error}"
    if loaded.config is None:
        return None
    if set(dense_names(config)) != set(loaded.dense):
        return f"parameters: {sorted(set(dense_names(config)) ^ set(loaded.dense))}"
    return _model_disagreement(config, tensors, loaded.config)


def _layer_disagreement(weights, expected):
    ours = matrices(weights)
    for (expert, shard), values in ((key, value) for key, value in ours.items() if key != "bias"):
        difference = _difference(values, expected[expert, shard])
        if difference:
            return f"expert {expert} {shard}: {difference}"
        if not np.isfinite(values).all():
            return f"expert {expert} {shard}: accepted with values that are not finite"
    if set(ours["bias"]) != set(expected["bias"]):
        return "biases of some experts"
    for key, bias in expected["bias"].items():
        if _difference(ours["bias"][key], bias):
            return f"{key}: bias"
    for product in ("w13", "w2"):
        found, stated = getattr(weights, product).input_scale, expected[product]
        if (found is None) != (stated is None) or (found is not None and np.float32(found) != stated):
            return f"{product}: input scale {found}, expected {stated}"
    return None


def _settings_disagreement(stated, config):
    if config is None:
        return None
    is_deepseek = stated["model_type"] == "deepseek_v3"
    found = (config.top_k, config.renormalize, config.activation, config.routed_scaling_factor)
    norm, factor = stated.get("norm_topk_prob"), stated.get("routed_scaling_factor")
    norm = is_deepseek if norm is None else norm
    factor = (2.5 if factor is None else factor) if is_deepseek else 1.0
    expected = (stated["num_experts_per_tok"], norm, stated["hidden_act"], factor)
    if found != expected:
        return f"top_k, renormalize, activation, routed_scaling_factor: {found}, expected {expected}"
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


def _model_disagreement(stated, tensors, config):
    names = dict(vocab_size="vocab_size", num_hidden_layers="num_layers", rms_norm_eps="rms_norm_eps")
    names |= dict(num_attention_heads="num_heads", num_key_value_heads="num_kv_heads", hidden_size="hidden_size")
    for key, name in names.items():
        if stated.get(key) is not None and stated[key] != getattr(config, name):
            return f"{name}={getattr(config, name)}, stated {key}={stated[key]}"
    if config.tie_word_embeddings != bool(stated.get("tie_word_embeddings")):
        return "tie_word_embeddings"
    head, table = tensors.get("lm_head.weight"), tensors["model.embed_tokens.weight"]
    if config.tie_word_embeddings and head is not None and head[1].tobytes() != table[1].tobytes():
        return "a tied head that differs"
    return None


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
    """Bases and what can be reloaded, made once. ``run(i)`` is one iteration: (outcome, description of a fail or
    None)."""

    def __init__(self, root: Path):
        self._root = root
        write_layers(root / "bases")
        write_models(root / "bases")
        self._modules = {}
        for kind in KINDS:
            loaded = load(root / "bases" / kind, kind)
            problem = disagreement(root / "bases" / kind, loaded)
            if problem is not None:
                raise AssertionError(f"{kind}: the undamaged base: {problem}")
            if kind in RELOADED:
                self._modules[kind] = loaded.module

    def run(self, i: int) -> tuple[str, str, str | None]:
        kind = KINDS[i % len(KINDS)]
        directory = self._root / "damaged"
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(self._root / "bases" / kind, directory)
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
            elif kind in self._modules:
                problem = self._reload_problem(self._modules[kind], directory)
        except Hang:
            outcome, problem = "hang", f"over {SECONDS} s"
        except Exception as error:
            outcome, problem = "crash", f"{type(error).__name__}: {error}"
        else:
            if expectation == "refused":
                problem = "accepted, though this damage never is harmless"
            else:
                try:
                    problem = disagreement(directory, loaded)
                except Exception as error:
                    problem = f"accepted, but the decoder fails: {type(error).__name__}: {error}"
        return f"{kind} {name}", outcome, problem

    def _reload_problem(self, module, directory):
        """What meets the damaged files keeps its weights, or has all of the new ones."""
        state = nnx.state(module)
        leaves = jax.tree.leaves(state)
        try:
            with watchdog():
                if isinstance(module, moe_jax.FusedMoE):
                    with Checkpoint(directory) as checkpoint:
                        names = [name for name in checkpoint.names if ".experts." in name]
                        module.reload_weights([(name, checkpoint.read(name)) for name in names])
                else:
                    module.reload_weights(directory)
        except REFUSALS:
            now = jax.tree.leaves(nnx.state(module))
            if any(new is not old for new, old in zip(now, leaves, strict=True)):
                return "a failed reload changed the layer"
            return None
        except Hang:
            return f"reload: over {SECONDS} s"
        except Exception as error:
            return f"reload: {type(error).__name__}: {error}"
        nnx.update(module, state)
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
    sys.exit(main())
