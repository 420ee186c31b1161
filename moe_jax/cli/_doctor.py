"""``diagnose``: what this machine is, what will run each scheme on it, and what is missing."""

import dataclasses
import functools
import os
import platform
import re
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from moe_jax._compat import installed_version
from moe_jax._config import MoEConfig
from moe_jax._terminal import size, table
from moe_jax._version import __version__
from moe_jax.experts._backend import Problem
from moe_jax.experts._choice import BACKENDS, choose, preferred_layout
from moe_jax.models.attention._choice import choose as choose_attention
from moe_jax.models.attention._choice import in_words
from moe_jax.quantization import SCHEMES, method_for

REQUIRED = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes", "packaging", "safetensors", "absl-py", "flatbuffers")
# distribution: what needs it
OPTIONAL = {
    "torch": "torch_bridge: layers as torch modules",
    "huggingface_hub": "models by their name on the hub",
    "tokenizers": "moe-jax run --prompt",
    "jinja2": "moe-jax run --chat",
    "matplotlib": "the pictures of moe-jax demo and bench",
    "rich": "colors in the table of moe-jax bench",
    "tqdm": "progress bars",
    "orbax-checkpoint": "moe_jax.checkpointing: save and restore",
}
# distribution: the oldest NVIDIA driver that runs its CUDA
_CUDA_PLUGINS = {"jax-cuda13-plugin": 580, "jax-cuda12-plugin": 525}
_DRIVER = Path("/proc/driver/nvidia/version")
# A layer of Qwen3-30B-A3B: (experts, top_k, hidden, intermediate), and a number of tokens to ask for.
LAYER, NUM_TOKENS = (128, 8, 2048, 768), 64
HEADS = (32, 128, 4)  # query heads, their width, key heads


@dataclasses.dataclass(frozen=True)
class SchemeRun:
    """What would run one scheme. implementation: its name, None where nothing can. how: in a few words."""

    scheme: str
    implementation: str | None
    how: str


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What ``diagnose`` found.

    versions: distribution -> version, None when it is not installed. devices: one line each. memory: what JAX does with
    the memory of the devices. runs: one for each scheme; empty when JAX has no device. attention: what attends, a line
    for prefills and one for decode steps. skipped: "implementation:
    reason" -> the schemes it does not run for that reason. missing: optional distributions that are not installed.
    problems: what will not work as somebody would expect, one line each with a way out.
    """

    versions: Mapping[str, str | None]
    devices: tuple[str, ...]
    memory: str
    runs: tuple[SchemeRun, ...]
    skipped: Mapping[str, tuple[str, ...]]
    missing: tuple[str, ...]
    problems: tuple[str, ...]
    attention: tuple[str, ...] = ()

    def render(self) -> str:
        """The diagnosis as text for a terminal."""
        lines = ["versions", *_indented(table([(name, found or "missing") for name, found in self.versions.items()]))]
        lines += ["", "devices", *_indented(self.devices or ("none",)), *_indented([self.memory])]
        if self.runs:
            rows = [(run.scheme, run.implementation or "nothing", run.how) for run in self.runs]
            sizes = "{} experts, top {}, {} x {}".format(*LAYER)
            lines += [
                "",
                f"schemes, for a layer of {sizes}, bfloat16",
            ]
            lines += _indented(table([("scheme", "runs on", "how"), *rows]))
        for reason, schemes in self.skipped.items():
            which = "every scheme" if len(schemes) == len(self.runs) else ", ".join(schemes)
            lines += [f"  not on {reason} ({which})"]
        if self.attention:
            lines += ["", "attention, for {} heads of {}, {} for keys and values, bfloat16".format(*HEADS)]
            lines += _indented(self.attention)
        lines += ["", "optional packages"]
        rows = [
            (
                name,
                "missing" if name in self.missing else "installed",
                f"for {need}",
                f"pip install {name}" if name in self.missing else "",
            )
            for name, need in OPTIONAL.items()
        ]
        lines += _indented(table(rows))
        lines += ["", *(["problems:", *_indented(self.problems)] if self.problems else ["no problems found"])]
        return "\n".join(lines)


def _indented(lines) -> list[str]:
    return [f"  {line}" for line in lines]


def diagnose() -> Diagnosis:
    """Look at the versions, the devices JAX sees, its memory settings, and what would run each scheme. Runs nothing."""
    versions: dict[str, str | None] = {"moe-jax": __version__, "Python": platform.python_version()}
    versions |= {name: installed_version(name) for name in REQUIRED}
    versions |= {name: found for name in _CUDA_PLUGINS if (found := installed_version(name)) is not None}
    problems = [f"{name} is not installed: pip install {name}" for name in REQUIRED if versions[name] is None]
    problems += out_of_range(metadata.requires("moe-jax") or ()) if installed_version("moe-jax") is not None else []
    problems += [
        f"{name} is {versions[name]} and jaxlib {versions['jaxlib']}, expected one version: "
        f"{_install(name.split('-')[1], versions)}"
        for name in _CUDA_PLUGINS
        if name in versions and versions[name] != versions["jaxlib"]
    ]
    problems += _of_the_driver(versions)
    runs, skipped, lines, memory, attention = (), {}, (), "no memory to manage", ()
    try:
        devices, backend = jax.devices(), jax.default_backend()
    except RuntimeError as error:
        wanted = os.environ.get("JAX_PLATFORMS")
        way = f"; JAX_PLATFORMS is {wanted!r}, unset it or set it to cpu" if wanted else ""
        problems.append(f"JAX has no device: {' '.join(str(error).split())}{way}")
    else:
        lines, memory = tuple(map(_describe, devices)), _memory(backend)
        runs, skipped = scheme_runs(backend)
        attention = (_attention("prefill", 2048), _attention("decode step", 1))
        problems += [f"nothing can run scheme {run.scheme}: {run.how}" for run in runs if run.implementation is None]
        if backend == "cpu" and has_nvidia_gpu():
            problems.append(_why_on_the_cpu(versions))
    return Diagnosis(
        versions=versions,
        devices=lines,
        memory=memory,
        runs=runs,
        skipped=skipped,
        missing=tuple(name for name in OPTIONAL if installed_version(name) is None),
        problems=tuple(problems),
        attention=attention,
    )


def out_of_range(requirements: Iterable[str]) -> list[str]:
    """One line for each distribution that is installed in a version that a requirement refuses.

    requirements: as in the metadata of a distribution, those of extras included. Markers count. What only developers
    need is left out.
    """
    problems, names = [], {canonicalize_name(name): name for name in (*REQUIRED, *OPTIONAL)}
    for requirement in map(Requirement, requirements):
        name, marker = names.get(canonicalize_name(requirement.name)), requirement.marker
        found = None if name is None else installed_version(name)
        extras = re.findall(r"extra == ['\"]([^'\"]+)", str(marker)) or [""]
        applies = marker is None or any(marker.evaluate({"extra": extra}) for extra in extras)
        if found and applies and not requirement.specifier.contains(found, prereleases=True):
            wanted = requirement.specifier
            problems.append(f"{name} is {found}, expected {wanted}: pip install '{name}{wanted}'")
    return list(dict.fromkeys(problems))


def scheme_runs(platform: str) -> tuple[tuple[SchemeRun, ...], dict[str, tuple[str, ...]]]:
    """What would run every scheme on ``platform`` ("cpu" or "gpu"), and which implementations are skipped, and why.

    Where there are kernels each is asked by tracing it. See ``Diagnosis`` for what is returned.
    """
    refusals = {name: reason for name, backend in BACKENDS.items() if (reason := backend.device_refusal()) is not None}
    runs, skipped = [], {f"{name}: {reason}": tuple(SCHEMES) for name, reason in refusals.items()}
    for name, scheme in SCHEMES.items():
        config = MoEConfig(*LAYER, scheme=scheme, dtype="bfloat16")
        weights = method_for(scheme).abstract_weights(config)
        if (backend := preferred_layout(config, weights, platform)) is not None:  # as loading leaves them
            weights = jax.eval_shape(functools.partial(backend.kernel_layout, config=config), weights)
        problem = Problem(config, weights, NUM_TOKENS, platform)
        chosen, reasons = choose(problem)
        if chosen is None:
            how = "; ".join(f"{which}: {reason}" for which, reason in reasons)
            runs.append(SchemeRun(name, None, how))
            continue
        runs.append(SchemeRun(name, chosen.name, chosen.in_brief(problem)))
        for which, reason in reasons:
            if which not in refusals:
                skipped[f"{which}: {reason}"] = (*skipped.get(f"{which}: {reason}", ()), name)
    return tuple(runs), skipped


def _attention(call: str, num_queries: int) -> str:
    """What ``attention="auto"`` takes for a call, and why it does not take what is asked before."""
    num_heads, width, kv_heads = HEADS
    q = jax.ShapeDtypeStruct((1, num_queries, kv_heads, num_heads // kv_heads, width), "bfloat16")
    k = jax.ShapeDtypeStruct((1, kv_heads, 4096, width), "bfloat16")
    return f"{call}: {in_words(*choose_attention('auto', q, k, k, scale=width**-0.5, window=None))}"


def has_nvidia_gpu() -> bool:
    """Whether the operating system shows an NVIDIA GPU, whatever JAX says."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def driver_version() -> tuple[int, ...] | None:
    """Of the NVIDIA driver that is loaded, such as (580, 95, 5). None where there is none, or it does not say."""
    try:
        found = re.search(r"Kernel Module\b.*?\b(\d+(?:\.\d+)+)", _DRIVER.read_text())
    except OSError:
        return None
    return tuple(map(int, found[1].split("."))) if found else None


def _of_the_driver(versions: Mapping[str, str | None]) -> list[str]:
    """What is wrong with the CUDA plugins that are installed: two under one name, or a driver that is too old."""
    found, driver = [name for name in _CUDA_PLUGINS if name in versions], driver_version()
    if len(found) > 1:
        return [f"{' and '.join(found)} are both installed, expected one: pip uninstall {found[-1]}"]
    if not found or driver is None or driver[0] >= _CUDA_PLUGINS[found[0]]:
        return []
    wanted, older = _CUDA_PLUGINS[found[0]], _CUDA_PLUGINS["jax-cuda12-plugin"]
    way = f"; or pip uninstall {found[0]} and {_install('cuda12', versions)}" if wanted > driver[0] >= older else ""
    shown = ".".join(map(str, driver))
    return [f"the NVIDIA driver is {shown}, expected {wanted} or newer for {found[0]}: update the driver{way}"]


def _install(cuda: str, versions: Mapping[str, str | None]) -> str:
    return f"pip install 'jax[{cuda}]=={versions['jax']}'"


def _why_on_the_cpu(versions: Mapping[str, str | None]) -> str:
    wanted = os.environ.get("JAX_PLATFORMS")
    if wanted:
        return f"there is an NVIDIA GPU, but JAX_PLATFORMS is {wanted!r}: unset it to use the GPU"
    if not any(name in versions for name in _CUDA_PLUGINS):
        driver = driver_version()
        cuda = "cuda12" if driver is not None and driver[0] < _CUDA_PLUGINS["jax-cuda13-plugin"] else "cuda13"
        return f"there is an NVIDIA GPU, but JAX has no CUDA plugin: {_install(cuda, versions)}"
    return "there is an NVIDIA GPU, but JAX does not use it: python -c 'import jax; jax.devices(\"cuda\")' says why"


def _describe(device: Any) -> str:
    stats = device.memory_stats() or {}
    parts = [f"{device.platform}:{device.id}", device.device_kind]
    if capability := getattr(device, "compute_capability", None):
        parts.append(f"compute capability {capability}")
    if limit := stats.get("bytes_limit"):
        parts.append(f"{size(limit)} for JAX, {size(stats.get('bytes_in_use', 0))} in use")
    return ", ".join(parts)


def _memory(backend: str) -> str:
    """What JAX does with the memory of the devices, in the words of its environment variables."""
    if backend != "gpu":
        return "memory: allocated as needed (JAX preallocates on GPUs only)"
    preallocate = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE")
    fraction = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or os.environ.get("XLA_CLIENT_MEM_FRACTION")
    allocator = os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR")
    if allocator == "platform":
        return "memory: allocated and freed one by one, which is slow (XLA_PYTHON_CLIENT_ALLOCATOR=platform)"
    if preallocate is not None and preallocate.lower() in ("false", "0"):
        return f"memory: allocated as needed (XLA_PYTHON_CLIENT_PREALLOCATE={preallocate})"
    share = f"XLA_PYTHON_CLIENT_MEM_FRACTION={fraction}" if fraction else "75%"
    return (
        f"memory: preallocated, {share} of each GPU at the first use; set XLA_PYTHON_CLIENT_PREALLOCATE=false to share "
        "a GPU with torch or another process"
    )
