"""Processes forked from one in which JAX runs: its threads are not there, so that every call would wait for good."""

import importlib
import os

_runs_jax = False  # when this process was last forked
_is_forked = False


def check_process(name: str) -> None:
    """Raises RuntimeError, with the name of what was called, in a process in which JAX cannot run."""
    if _is_forked:
        raise RuntimeError(
            f"{name}: this process was forked from one that uses JAX, whose threads it lacks; start workers with the "
            "multiprocessing method 'spawn' or 'forkserver', or keep the layer out of them"
        )


def _before() -> None:
    global _runs_jax
    bridge = importlib.import_module("jax._src.xla_bridge")
    _runs_jax = getattr(bridge, "backends_are_initialized", lambda: True)()


def _in_child() -> None:
    global _is_forked
    _is_forked = _is_forked or _runs_jax


os.register_at_fork(before=_before, after_in_child=_in_child)
