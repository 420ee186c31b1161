"""Programs that ``generate`` keeps beside JAX's compilation cache: what a later process finds, and what it must not."""

import functools
import importlib.metadata
import itertools
import os
import subprocess
import sys
import time
import types
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.xla_metadata import set_xla_metadata

import moe_jax
from moe_jax import _began
from moe_jax.models import CausalLM, SamplingParams, _loop, _programs, generate
from moe_jax.models._compiled import split_model
from moe_jax.models._logprobs import _of_prompt, prompt_logprobs
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
    """Where programs are kept, under a cache that is on for one test. No source is too new."""
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setattr(_began, "TIME", time.time() + 60)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    forget()
    yield tmp_path / "moe_jax"
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()
    forget()


@pytest.fixture
def traced(monkeypatch):
    """Names of models that were traced."""
    found, forward = [], CausalLM.hidden_states
    monkeypatch.setattr(CausalLM, "hidden_states", lambda *a, **k: found.append(type(a[0])) or forward(*a, **k))
    return found


def forget():
    """As a process that has just begun."""
    for program in (*PROGRAMS, _of_prompt):
        program.jitted.clear_cache()


def names(folder):
    return sorted(path.name.partition("-")[0] for path in folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "qwen3_next"])
@pytest.mark.sample(3)
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


def test_logprobs_are_kept(case, folder, traced):
    model = case("mixtral").model
    before = prompt_logprobs(model, IDS[0], 2)
    assert names(folder) == ["_of_prompt"] and traced
    forget()
    traced.clear()
    jax.tree.map(np.testing.assert_array_equal, before, prompt_logprobs(model, IDS[0], 2))
    assert not traced


@pytest.mark.parametrize("options", [dict(most=16), dict(batch_size=2), dict(batch_size=2, num_pages="auto")])
@pytest.mark.sample(2)
def test_programs_are_compiled_once(case, folder, prompt, monkeypatch, options):
    """A state that nobody has run yet is like one that a program has made; and results go to any device."""
    model = moe_jax.load_pretrained(case("mixtral").directory, dtype="float32")
    model.max_num_batched_tokens = options.pop("most", 8192)
    prompts = prompt(8, 50).tolist() if options else prompt(2, 50)

    def sizes():
        found = generate(model, prompts, max_new_tokens=3, **options)
        if not options:
            assert not found.committed
            assert (found + jax.device_put(np.zeros((2, 53), np.int32), jax.devices()[1])).devices() == {
                jax.devices()[1]
            }
        return [program.jitted._cache_size() for program in PROGRAMS]

    kept = sizes()
    assert names(folder)
    forget()
    assert sizes() == kept  # found
    forget()
    jax.config.update("jax_compilation_cache_dir", None)
    assert sizes() == kept and max(kept) == 1


def test_results_of_committed_weights_are_committed(case, folder):
    model = moe_jax.load_pretrained(case("mixtral").directory, dtype="float32")
    nnx.update(model, jax.device_put(nnx.state(model), jax.devices()[0]))
    assert generate(model, IDS, max_new_tokens=3).committed and names(folder) == ["proceed", "start"]


def added(factor, leaves, state, x, row):
    """Of arrays; state and row are used up."""
    return {name: value + factor * x + leaves[0] for name, value in state.items()}, row + x


def test_arguments_are_used_up(folder, monkeypatch):
    """As in plain ``jax.jit``, whether a program is made or found."""
    monkeypatch.setattr(_programs, "_KNOWN", {*_programs._KNOWN, "tests"})
    for _ in range(2):
        run = _programs.program(num_static=1, donated=[2, 4])(added)
        state, row = dict(a=jnp.ones(3), b=jnp.zeros(3)), jnp.ones(3)
        for _ in range(3):
            before = [*state.values(), row]
            x = jnp.arange(3.0)
            state, row = run(2, [jnp.ones(3)], state, x, row)
            assert [a.is_deleted() for a in before] == [True] * 3 and not x.is_deleted()
        np.testing.assert_array_equal(state["a"], 1 + 3 * (2 * np.arange(3) + 1))
        assert run.jitted._cache_size() == 1
    assert names(folder) == ["added"]


def key(static, *arrays, function=_loop.proceed):
    """Of a program of these arguments; None where it would not be kept."""
    found = []
    jax.eval_shape(lambda *arrays: found.append(_programs._path(Path(""), function, static, arrays)), *arrays)
    return found[0]


def test_arguments_are_part_of_the_key():
    weak = jax.ShapeDtypeStruct((3,), "float32", weak_type=True)
    packs = [_loop.PackPages(np.zeros(3, np.float32), np.zeros(3, np.float32), flag) for flag in (True, False)]
    calls = [
        ([2, "a"], np.zeros(3, np.float32)),
        ([3, "a"], np.zeros(3, np.float32)),
        ([2, "b"], np.zeros(3, np.float32)),
        ([2.0, "a"], np.zeros(3, np.float32)),
        ([2, np.dtype("int8")], np.zeros(3, np.float32)),
        ([2, (moe_jax.Scheme.parse("int8_w8a16"),)], np.zeros(3, np.float32)),
        ([2, (moe_jax.Scheme.parse("int8_w8a8"),)], np.zeros(3, np.float32)),
        ([2, "a"], np.zeros(4, np.float32)),
        ([2, "a"], np.zeros(3, np.int32)),
        ([2, "a"], weak),
        ([2, "a"], [np.zeros(3, np.float32)]),
        ([2, "a"], packs[0]),
        ([2, "a"], packs[1]),
        ([2, functools.partial(generate, max_new_tokens=3)], np.zeros(3, np.float32)),
        ([2, functools.partial(generate, max_new_tokens=4)], np.zeros(3, np.float32)),
    ]
    found = [key(*call) for call in calls] + [key(*calls[0], function=_loop.start)]
    assert None not in found and len({*found}) == len(found)
    assert [key(*call) for call in calls] == found[:-1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("jax_enable_x64", True),
        ("jax_default_matmul_precision", "bfloat16"),
        ("jax_numpy_dtype_promotion", "standard"),
        ("jax_threefry_partitionable", False),
        ("jax_default_prng_impl", "rbg"),
    ],
)
def test_settings_are_part_of_the_key(name, value):
    before, own = getattr(jax.config, name), key([1], np.zeros(3, np.float32))
    jax.config.update(name, value)
    try:
        assert key([1], np.zeros(3, np.float32)) not in (own, None)
    finally:
        jax.config.update(name, before)
    assert key([1], np.zeros(3, np.float32)) == own


def replaced(which, other, sources=_programs._sources):
    """Sources, of which one has another content."""
    for name, file in sources():
        if name == which:
            other.write_bytes(file.read_bytes() + b"\n")
            file = other
        yield name, file


@pytest.mark.parametrize(
    "which",
    [
        "moe_jax/routing/_route.py",
        "pallas_kernels/grouped_gemm/config.py",
        "pallas_kernels/tuning/tuned/nvidia_h200.json",
    ],
)
def test_sources_are_part_of_the_key(folder, which, monkeypatch, tmp_path):
    assert which in {name for name, _ in _programs._sources()}
    own = key([1], np.zeros(3, np.float32))
    monkeypatch.setattr(_programs, "_sources", functools.partial(replaced, which, tmp_path / "other"))
    _programs._fixed.cache_clear()
    assert key([1], np.zeros(3, np.float32)) not in (own, None)
    _programs._fixed.cache_clear()


def test_machines_are_part_of_the_key(monkeypatch):
    """Versions of what traces, the device, and the tuning table of a GPU."""
    own, version, device = key([1], np.zeros(3, np.float32)), importlib.metadata.version, jax.local_devices()[0]
    changes = [
        *(
            (importlib.metadata, "version", lambda n, name=name: "0" if n == name else version(n))
            for name in ("jax", "flax")
        ),
        (sys, "version", "4.0"),
        (jax, "local_devices", lambda: [types.SimpleNamespace(device_kind="other", client=device.client)]),
        (_programs, "hopper_gpu", lambda: "a GPU"),
    ]
    found = [own]
    monkeypatch.setattr(_programs, "table_for", lambda gpu: f"table of {gpu}")
    for place, name, value in changes:
        with monkeypatch.context() as patch:
            patch.setattr(place, name, value)
            _programs._fixed.cache_clear()
            found.append(key([1], np.zeros(3, np.float32)))
    _programs._fixed.cache_clear()
    assert None not in found and len({*found}) == len(found)
    with monkeypatch.context() as patch:  # another table of the same GPU, while the process runs
        patch.setattr(_programs, "hopper_gpu", lambda: "a GPU")
        patch.setattr(_programs, "table_for", lambda gpu: f"newer table of {gpu}")
        assert key([1], np.zeros(3, np.float32)) not in found


def test_what_is_not_in_the_key_is_not_kept(monkeypatch, tmp_path):
    """Foreign functions and classes, JAX's contexts, memory of the host, a changed environment, new sources."""
    arrays = np.zeros(3, np.float32)
    assert key([moe_jax.fused_moe], arrays) is not None
    for foreign in (
        added,
        functools.partial(added, 2),
        lambda: 1,
        Foreign,
        np.zeros(3),
        object(),
        jax.jit(moe_jax.fused_moe),
    ):
        assert key([foreign], arrays) is None
    contexts = [
        jax.default_matmul_precision("bfloat16"),
        set_xla_metadata(foo="bar"),
        jax.set_mesh(jax.make_mesh((1,), ("x",))),
    ]
    for context in contexts:
        with context:
            assert key([1], arrays) is None
    with monkeypatch.context() as patch:
        patch.setenv("MOE_JAX_PDL", "0")
        assert key([1], arrays) is None
    for seconds in (0, time.time() + 3600):  # replaced by an older file, changed just now
        with monkeypatch.context() as patch:
            source = tmp_path / "source.py"
            source.write_text("")
            os.utime(source, (seconds, seconds))
            patch.setattr(_programs, "_sources", lambda source=source: [("source.py", source)])
            patch.setattr(_began, "TIME", time.time() - 60)
            assert key([1], arrays) is None
            source.unlink()
            assert key([1], arrays) is None
    with monkeypatch.context() as patch:
        patch.setattr(_programs, "_sources", list)  # in an archive
        assert key([1], arrays) is None
    found = []

    def ask(x):
        for place in (jax.memory.Space.Device, jax.memory.Space.Host):
            found.append(_programs._path(Path(""), _loop.proceed, [1], [jax.device_put(x, place)]))

    jax.eval_shape(ask, arrays)
    assert found[0] is not None and found[1] is None


def test_models_are_part_of_the_key(case):
    """Each of these changes what a program is; values of weights do not."""
    directory, model = case("mixtral").directory, case("mixtral").model

    def of(model):
        return key([split_model(model)[0]], np.zeros(3, np.float32))

    found = [of(model)]
    model.reload_weights(directory)
    assert of(model) == found[0]
    found.append(of(moe_jax.load_pretrained(directory, dtype="bfloat16")))
    found.append(of(moe_jax.load_pretrained(directory, dtype="float32", quantize="int8_w8a16")))
    changed = moe_jax.load_pretrained(directory, dtype="float32")
    changed.layers[1].self_attn.implementation = "xla"
    found.append(of(changed))
    changed.norm.eps *= 2
    found.append(of(changed))
    assert None not in found and len({*found}) == len(found)


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
    """Without a cache, with one that is off or elsewhere, on other devices, and where the environment says so."""
    model = case("mixtral").model

    def place(model=model):
        return _programs._folder(jax.tree.leaves(nnx.state(model)))

    assert place() == folder
    with monkeypatch.context() as patch:
        patch.setenv("MOE_JAX_PROGRAM_CACHE", "0")
        assert place() is None
    with monkeypatch.context() as patch:
        patch.setattr(_programs, "_can_be_written", lambda: False)
        assert place() is None
    changes = [("jax_enable_compilation_cache", False)]
    changes += [("jax_compilation_cache_dir", value) for value in (None, "", "gs://bucket")]
    for name, value in changes:
        before = getattr(jax.config, name)
        jax.config.update(name, value)
        assert place() is None
        jax.config.update(name, before)
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    assert place(moe_jax.load_pretrained(case("mixtral").directory, dtype="float32", mesh=mesh)) is None
    other = moe_jax.load_pretrained(case("mixtral").directory, dtype="float32")
    nnx.update(other, jax.device_put(nnx.state(other), jax.devices()[1]))
    assert place(other) is None
    with monkeypatch.context() as patch:  # changed while it was traced
        checks = itertools.cycle([True, False])
        patch.setattr(_programs, "_are_sources_unchanged", lambda: next(checks))
        generate(model, IDS, max_new_tokens=3)
    assert names(folder) == []


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


def test_a_program_is_written_whole_or_not_at_all(case, folder, monkeypatch):
    def full(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(UserWarning, match="the disk is full; the program is not kept"):
        generate(case("mixtral").model, IDS, max_new_tokens=3)
    assert names(folder) == []


@pytest.mark.parametrize("what", ["export", "serialize"])
def test_what_cannot_be_exported_runs(case, folder, monkeypatch, what):
    """And an error of the function's own is that error."""
    model = case("mixtral").model
    wanted = np.asarray(generate(model, IDS, max_new_tokens=3))
    for path in folder.iterdir():
        path.unlink()

    def refuse(*_, **__):
        raise ValueError("cannot be exported")

    forget()
    with monkeypatch.context() as patch:
        patch.setattr(_programs.export if what == "export" else _programs.export.Exported, what, refuse)
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
