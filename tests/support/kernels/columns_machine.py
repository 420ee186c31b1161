"""Kernels of ``Columns`` on NumPy threads."""

import types
from typing import Any

import pytest

from pallas_kernels.grouped_gemm import columns_sm90, vector_sm90
from tests.support.kernels.simt_machine import Machine


def on_columns_machine(monkeypatch: pytest.MonkeyPatch, api: Any, kernel: Any, *, late: bool) -> None:
    """Run a kernel module behind ``api`` in NumPy, its copies landing as late or as early as they may."""
    found = Machine(late=late)
    pl = types.SimpleNamespace(
        when=lambda condition: lambda run: run() if bool(condition) else None,
        ds=lambda start, size: slice(int(start), int(start) + size),
    )
    stubs = {
        "simt": found.namespace(),
        "lax": found.lax(),
        "row_kernel": found.row_kernel,
        "mosaic": types.SimpleNamespace(begin=lambda: None),
        "pl": pl,
        "plgpu": types.SimpleNamespace(SMEM=lambda shape, dtype: (shape, dtype), RefType=lambda: None),
        "llvm": types.SimpleNamespace(ptrtoint=lambda kind, ref: (ref, 0)),
        "mgpu": types.SimpleNamespace(utils=types.SimpleNamespace(memref_ptr=lambda ref: ref)),
        "arith": types.SimpleNamespace(
            muli=lambda a, b: a * b,
            addi=lambda place, b: (place[0], place[1] + b),
        ),
    }
    monkeypatch.setattr(vector_sm90, "pl", pl)
    monkeypatch.setattr(vector_sm90, "simt", stubs["simt"])
    for module in (columns_sm90, kernel):
        for name, stub in stubs.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, stub)
    monkeypatch.setattr(api, "hopper_sms", lambda: 132)
