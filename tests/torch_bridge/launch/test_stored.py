"""Programs on disk, and ``KernelExperts`` traced for an H200 that is not here."""

import concurrent.futures
import multiprocessing
import threading

import jax
import pytest
import torch

from moe_jax import MoEConfig, Scheme
from pallas_kernels.grouped_gemm import GemmConfig
from pallas_kernels.tuning import FORMATS, Entry, LayerConfig, LayerKey, table_for, update, user_path
from tests.support.refusals import refuses
from torch_bridge._tensors import torch_dtype
from torch_bridge.launch import KernelExperts, _stored, _tracers
from torch_bridge.launch._gpu import Gpu
from torch_bridge.launch._kernel_experts import abstract_weights
from torch_bridge.launch._kernels import Kernel
from torch_bridge.launch._programs import Programs, _FirstAlone

H200 = Gpu("NVIDIA H200", 132)


def experts_of(name: str, monkeypatch, folder, **settings) -> KernelExperts:
    monkeypatch.setenv("MOE_JAX_CACHE_DIR", str(folder))
    monkeypatch.setattr("torch_bridge.launch._kernel_experts.PROGRAMS", Programs())
    config = MoEConfig(8, 2, 256, 256, Scheme.parse(name), **settings)
    weights = jax.tree.map(lambda s: torch.zeros(s.shape, dtype=torch_dtype(s.dtype)), abstract_weights(config, H200))
    return KernelExperts(config, weights, gpu=H200)


def test_a_second_process_traces_nothing(monkeypatch, tmp_path):
    made = []
    experts_of("fp8_channel", monkeypatch, tmp_path).prepare([4], entry="layer", progress=made.append)
    assert made == [True]
    files = sorted((tmp_path / "programs").iterdir())
    assert len(files) == 1
    experts_of("fp8_channel", monkeypatch, tmp_path).prepare([4], entry="layer", progress=made.append)
    assert made == [True, False]
    program = _stored.load(files[0].name)
    assert program is not None and [type(run) is Kernel for run, _, _ in program.steps].count(True) >= 4
    other = experts_of("fp8_channel", monkeypatch, tmp_path, renormalize=False)
    other.prepare([4], entry="layer", progress=made.append)
    assert made == [True, False, True]  # another configuration is another program


def test_programs_follow_the_users_own_table(monkeypatch, tmp_path):
    """What ``moe-jax autotune`` has measured since is what the next process runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    table_for.cache_clear()
    made, tiles = [], [GemmConfig(16, 64, 5, swap_ab=True)] * 2
    measured = Entry(LayerKey(8, 2, 256, 256, **FORMATS["bf16"]), 4, LayerConfig(16, *tiles), 1.0)
    for entries in ([], [measured]):
        update(user_path(H200.kind), H200.kind, entries)
        for _ in range(2):
            experts_of("bf16", monkeypatch, tmp_path).prepare([4], progress=made.append)
    table_for.cache_clear()
    assert made == [True, False, True, False]


@pytest.mark.sample(4)
@pytest.mark.parametrize("damage", ["flipped", "short", "empty", "text"])
def test_damaged_files_are_made_again(damage, monkeypatch, tmp_path):
    experts_of("bf16", monkeypatch, tmp_path).prepare([4])
    [path] = (tmp_path / "programs").iterdir()
    whole = path.read_bytes()
    place = len(whole) // 2
    path.write_bytes(
        {
            "short": whole[:-1],
            "flipped": whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :],
            "empty": b"",
            "text": b"no program",
        }[damage]
    )
    made = []
    experts_of("bf16", monkeypatch, tmp_path).prepare([4], progress=made.append)
    assert made == [True] and path.read_bytes() == whole
    assert [p.name for p in (tmp_path / "programs").iterdir()] == [path.name]  # nothing half-written beside it


def test_a_folder_that_cannot_be_written_to(monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    made = []
    experts_of("bf16", monkeypatch, blocked).prepare([4], progress=made.append)
    assert made == [True]


def test_names_tell_programs_apart(monkeypatch, tmp_path):
    experts = experts_of("bf16", monkeypatch, tmp_path)
    calls = (("experts", 4, False), ("experts", 8, False), ("layer", 4, False), ("layer", 4, True))
    dtype = experts.config.dtype
    jobs = [experts._job(entry, count, dtype, False, mask) for entry, count, mask in calls]
    assert len({Programs().make(*job)[0] for job in jobs}) == 4


@pytest.mark.slow
def test_many_programs_are_traced_by_processes(monkeypatch, tmp_path):
    """Into the same steps as in this process, which then only reads them. It is a daemon of ``multiprocessing``, as
    vLLM's workers are."""
    one, several = tmp_path / "one", tmp_path / "several"
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    monkeypatch.setattr(_tracers, "_num_processes", lambda count: 0)
    experts_of("bf16", monkeypatch, one).prepare([4, 8], entry="layer")
    monkeypatch.setattr(_tracers, "_num_processes", lambda count: count)
    monkeypatch.setattr("torch_bridge.launch._programs.KernelProgram", None)  # tracing here would fail
    made = []
    experts_of("bf16", monkeypatch, several).prepare([4, 8], entry="layer", progress=made.append)
    assert made == [True, True]
    monkeypatch.undo()
    names = [sorted(path.name for path in (root / "programs").iterdir()) for root in (one, several)]
    assert names[0] == names[1] and len(names[0]) == 2

    def steps(root, name):  # without the modules, which hold the lines that traced them
        monkeypatch.setenv("MOE_JAX_CACHE_DIR", str(root))
        program = _stored.load(name)
        assert program is not None
        whats = [(run.results if isinstance(run, Kernel) else run, read, wrote) for run, read, wrote in program.steps]
        return [*whats, program.parts[3]]

    for name in names[0]:
        assert steps(one, name) == steps(several, name)
    assert not multiprocessing.active_children()


def test_what_processes_cannot_trace_is_traced_here(monkeypatch, tmp_path):
    """A process that ends at once, and an executable that is none."""
    monkeypatch.setattr(_tracers, "_num_processes", lambda count: count)
    monkeypatch.setattr(_tracers, "_START", "import sys; sys.exit(1)")
    made = []
    experts_of("bf16", monkeypatch, tmp_path).prepare([4, 8], progress=made.append)
    assert made == [True, True] and len(list((tmp_path / "programs").iterdir())) == 2


TRACED = (
    "bf16 fp8_channel fp8_block fp8_tensor_token fp8_tensor_static int8_w8a8 int8_w8a16 w4a16_g128 w4a16_channel "
    "w4a16_g64_asym w4a16_g64_actorder w8a16_channel nvfp4_a16 mxfp4_a16 mxfp8_a16 w4a8_fp8 w4a8_int8"
).split()


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACED)
def test_kernels_of_every_format_and_bucket(name, monkeypatch, tmp_path):
    """Both entries, exact and padded sizes: nothing but kernels, views and casts between them."""
    experts, made = experts_of(name, monkeypatch, tmp_path), []
    for entry in ("layer", "experts"):
        experts.prepare([1, 24], buckets=[64, 1024], entry=entry, progress=made.append)
    assert experts.why_not_routing is None and len(made) == 8 and all(made)


def test_weights_of_another_shape_are_refused(monkeypatch, tmp_path):
    experts = experts_of("bf16", monkeypatch, tmp_path)
    wrong = jax.tree.map(lambda t: t[:4].contiguous(), experts.weights)
    refuses(ValueError, "expected", KernelExperts, experts.config, wrong, gpu=H200)
    refuses(NotImplementedError, "Hopper", KernelExperts, experts.config, experts.weights)


@pytest.mark.parametrize("fails", [False, True])
def test_the_first_kernel_of_a_process_compiles_alone(fails):
    """Others wait for it, and then run side by side. After a failure the next one is the first."""
    alone, running, failures = _FirstAlone(), 0, [True] if fails else []
    seen, lock, together = [], threading.Lock(), threading.Barrier(2)

    def compiled():
        nonlocal running
        with lock:
            running += 1
            seen.append(running)
            is_first = len(seen) <= 1 + fails
        if not is_first:
            together.wait(timeout=20)  # of two threads that are both inside
        with lock:
            running -= 1
            if failures:
                raise RuntimeError(failures.pop())

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(alone.then, compiled) for _ in range(7 + fails)]
    assert sum(future.exception() is not None for future in futures) == fails
    assert seen[: 1 + fails] == [1] * (1 + fails) and max(seen) > 1


@pytest.mark.parametrize("failures", [1, 2])
def test_what_fails_beside_others_is_compiled_once_more(failures, caplog):
    alone, left = _FirstAlone(), [RuntimeError("no reason")] * failures
    assert alone.then(lambda: "first") == "first"

    def compiled():
        if left:
            raise left.pop()
        return "second"

    if failures == 1:
        assert alone.then(compiled) == "second"
    else:
        refuses(RuntimeError, "no reason", alone.then, compiled)
    assert [record.message for record in caplog.records] == ["once more, since it failed beside others: no reason"]
