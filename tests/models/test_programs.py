"""Programs that ``generate`` keeps beside JAX's compilation cache: what a later process finds, and what it must not."""

import functools
import os
import subprocess
import sys
import warnings
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import moe_jax
from moe_jax.models import CausalLM, SamplingParams, _loop, _programs, generate
from moe_jax.models._compiled import split_model
from moe_jax.models._logprobs import prompt_logprobs
from tests.support.cases.models import FAMILY_CASES, write_checkpoint

PROGRAMS = _loop.read, _loop.start, _loop.admit, _loop.admit_pack, _loop.proceed
IDS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]
KEYS = """
import sys
import jax
import moe_jax
from moe_jax.models import _loop, _programs
from moe_jax.models._compiled import split_model
for directory in sys.argv[1:]:
    structure, leaves = split_model(moe_jax.load_pretrained(directory, dtype="float32"))
    def ask(*arrays):
        print(_programs._path(_programs.Path(""), _loop.proceed, [structure], arrays).name)
    jax.eval_shape(ask, leaves)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where programs are kept, under a cache that is on for one test."""
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.delenv("MOE_JAX_PROGRAM_CACHE", raising=False)
    _programs._is_kept.cache_clear()
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path / "moe_jax"
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()
    _programs._is_kept.cache_clear()


@pytest.fixture
def traced(monkeypatch):
    """Names of models that were traced."""
    found, forward = [], CausalLM.hidden_states
    monkeypatch.setattr(CausalLM, "hidden_states", lambda *a, **k: found.append(type(a[0])) or forward(*a, **k))
    return found


def forget():
    """As a process that has just begun."""
    for program in PROGRAMS:
        program.jitted.clear_cache()


def names(folder):
    return sorted(path.name.partition("-")[0] for path in folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "qwen3_next"])
@pytest.mark.sample(2)
def test_a_later_process_traces_nothing(case, folder, traced, name):
    """Prompts at once and in rows that are refilled, sampled and penalized: bits as without kept programs."""
    model = case(name).model
    sampled = SamplingParams(temperature=0.8, repetition_penalty=1.2)
    calls: list[dict[str, Any]] = [
        dict(max_new_tokens=6),
        dict(max_new_tokens=6, sampling_params=sampled, rng=jax.random.key(3)),
        dict(max_new_tokens=4, batch_size=1),
    ]

    def answers():
        return [np.asarray(generate(model, IDS, **options)) for options in calls]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_programs, "_folder", lambda weights: None)
        wanted = answers()
    assert not folder.exists()
    forget()
    first, kept = answers(), names(folder)
    of_prompts = "admit" if model.segments_refusal() else "admit_pack"
    assert {*kept} == {"start", "proceed", of_prompts} and len(kept) >= 5
    forget()
    traced.clear()
    second = answers()
    assert not traced and names(folder) == kept
    for one, two, three in zip(wanted, first, second, strict=True):
        np.testing.assert_array_equal(one, two)
        np.testing.assert_array_equal(one, three)


def test_scores_and_logprobs_are_kept(case, folder, traced):
    model = case("mixtral").model

    def both():
        return model.score(IDS), prompt_logprobs(model, IDS[0], 2)

    before = both()
    assert names(folder) == ["_of_prompt", "_score"]
    sys.modules["moe_jax.models._decoder"]._score.jitted.clear_cache()
    sys.modules["moe_jax.models._logprobs"]._of_prompt.jitted.clear_cache()
    traced.clear()
    jax.tree.map(np.testing.assert_array_equal, before, both())
    assert not traced


def test_memory_of_donated_arguments_is_used_up(case, folder):
    model = case("mixtral").model
    structure, leaves = split_model(model)
    for _ in range(2):
        forget()
        load = np.zeros((0, 0), np.int32)
        reading = _loop.unread(model.config, 1, 32, model.dtype, load)
        chunk = (np.ones((1, 8), np.int32), np.ones((1, 8), bool), np.full(1, 16, np.int32))
        after = _loop.read(structure, leaves, reading, chunk)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(reading.cache.layers))
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(after))
    assert names(folder) == ["read"]


def keys(folder, model, **options):
    """Names of the programs of a call, which is traced."""
    forget()
    for path in folder.iterdir() if folder.exists() else ():
        path.unlink()
    generate(model, IDS, **(dict(max_new_tokens=3) | options))
    return frozenset(path.name for path in folder.iterdir())


def sources_but_one(other, sources=_programs._sources):
    """With a newline more in the eighth."""
    found = list(sources())
    other.write_bytes(found[7][1].read_bytes() + b"\n")
    return [*found[:7], (found[7][0], other), *found[8:]]


def test_what_else_is_traced_has_another_key(case, folder, monkeypatch):
    """Each of these changes what a program is, or may; values of weights and of settings do not."""
    name, found = "mixtral", []
    model = case(name).model
    found.append(keys(folder, model))
    model.reload_weights(case(name).directory)
    assert keys(folder, model, eos_token_id=2) == found[0]
    found.append(keys(folder, model, temperature=0.5, rng=jax.random.key(0)))
    found.append(keys(folder, moe_jax.load_pretrained(case(name).directory, dtype="bfloat16")))
    found.append(keys(folder, moe_jax.load_pretrained(case(name).directory, dtype="float32", quantize="int8_w8a16")))
    changed = moe_jax.load_pretrained(case(name).directory, dtype="float32")
    changed.layers[1].self_attn.implementation = "xla"
    found.append(keys(folder, changed))
    changed.norm.eps *= 2
    found.append(keys(folder, changed))
    with jax.default_matmul_precision("bfloat16"):
        found.append(keys(folder, model))
    for about in ("sources", "tables", "environment"):
        with monkeypatch.context() as patch:
            _programs._fixed.cache_clear()
            if about == "sources":
                patch.setattr(_programs, "_sources", functools.partial(sources_but_one, folder.parent / "other.py"))
            elif about == "tables":
                patch.setattr(_programs, "hopper_gpu", lambda: "a GPU")
                patch.setattr(_programs, "table_for", lambda gpu: f"table of {gpu}")
            else:
                patch.setenv("MOE_JAX_PDL", "0")
            found.append(keys(folder, model))
    _programs._fixed.cache_clear()
    assert all(len(one) == 2 for one in found)
    assert len(frozenset.union(*found)) == 2 * len(found)


def test_keys_are_the_same_in_every_process(tmp_path):
    """Whatever strings hash to, for each family."""
    directories = []
    for name in FAMILY_CASES:
        directories.append(str(tmp_path / name))
        (tmp_path / name).mkdir()
        write_checkpoint(name, tmp_path / name)

    def names_of(seed):
        environment = os.environ | dict(PYTHONHASHSEED=seed, JAX_PLATFORMS="cpu")
        command = [sys.executable, "-c", KEYS, *directories]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.split()

    first = names_of("1")
    assert len({*first}) == len(directories) and first == names_of("2")


class Foreign(moe_jax.models.families.mixtral.MixtralForCausalLM):
    """A class whose source nobody has put into the key."""


def test_models_of_other_packages_are_traced_each_time(case, folder):
    model = moe_jax.load_pretrained(case("mixtral").directory, dtype="float32")
    wanted = np.asarray(generate(model, IDS, max_new_tokens=3))
    for path in folder.iterdir():
        path.unlink()
    model.__class__ = Foreign
    np.testing.assert_array_equal(generate(model, IDS, max_new_tokens=3), wanted)
    assert names(folder) == []


def test_nothing_is_kept(case, folder, monkeypatch):
    """Without a cache, with a cache elsewhere, over a mesh, where the environment says so, and by a process whose
    sources have changed since it began."""
    model = case("mixtral").model

    def kept():
        forget()
        _programs._is_kept.cache_clear()
        generate(model, IDS, max_new_tokens=3)
        return names(folder)

    with monkeypatch.context() as patch:
        patch.setenv("MOE_JAX_PROGRAM_CACHE", "0")
        assert kept() == []
    with monkeypatch.context() as patch:
        patch.setattr(_programs, "_BEGAN", 0.0)
        assert kept() == []
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = moe_jax.load_pretrained(case("mixtral").directory, dtype="float32", mesh=mesh)
    generate(spread, IDS, max_new_tokens=3)
    assert names(folder) == []
    jax.config.update("jax_compilation_cache_dir", None)
    assert kept() == []
    jax.config.update("jax_compilation_cache_dir", str(folder.parent))
    assert kept() == ["proceed", "start"]


def test_damaged_files_are_traced_anew(case, folder):
    model = case("mixtral").model
    forget()
    wanted = np.asarray(generate(model, IDS, max_new_tokens=3))
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for path, stored in before.items():
        path.write_bytes(stored[:-5] if path.name.startswith("start") else stored[:-5] + b"wrong")
    forget()
    with pytest.warns(UserWarning, match="is damaged; the program is traced anew") as found:
        np.testing.assert_array_equal(generate(model, IDS, max_new_tokens=3), wanted)
    assert len(found) == 2
    assert {path.name for path in before} == {path.name for path in folder.iterdir()}
    forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(generate(model, IDS, max_new_tokens=3), wanted)


def test_a_folder_that_cannot_be_written(case, folder):
    folder.write_text("a file")
    forget()
    with pytest.warns(UserWarning, match="the program is not kept"):
        assert generate(case("mixtral").model, IDS, max_new_tokens=3).shape == (2, 8)


def test_what_cannot_be_exported_runs(case, folder, monkeypatch):
    """And an error of the function's own is that error."""
    model = case("mixtral").model
    wanted = np.asarray(generate(model, IDS, max_new_tokens=3))
    for path in folder.iterdir():
        path.unlink()

    def refuse(*_, **__):
        raise ValueError("cannot be exported")

    forget()
    with monkeypatch.context() as patch:
        patch.setattr(_programs.export, "export", refuse)
        with pytest.warns(UserWarning, match="is not kept: cannot be exported"):
            np.testing.assert_array_equal(generate(model, IDS, max_new_tokens=3), wanted)
    assert names(folder) == []
    forget()
    with monkeypatch.context() as patch:
        patch.setattr(CausalLM, "hidden_states", refuse)
        with pytest.raises(ValueError, match="cannot be exported"), warnings.catch_warnings():
            warnings.simplefilter("error")
            generate(model, IDS, max_new_tokens=3)
    forget()
