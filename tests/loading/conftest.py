"""Checkpoints written by the real tools, made once per run and shared by the loading tests."""

import pytest

from tests.support.checkpoints import writers

PRESETS = {"fp8_tensor_static": "FP8", "fp8_channel": "FP8_DYNAMIC", "fp8_block": "FP8_BLOCK", "int8_w8a8": "W8A8"}


@pytest.fixture(autouse=True, scope="module")
def compile_quickly(quick_compilation):
    """All tests of loading."""


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """written(family, kind) -> directory. kind: "bf16" (transformers), "fused" (3-D), "native" (DeepSeek's FP8 blocks),
    or the name of a scheme (compressed-tensors)."""
    root = tmp_path_factory.mktemp("written")

    def directory(family, kind):
        target = root / f"{family}-{kind}"
        if target.exists():
            return target
        if kind == "bf16":
            writers.write_model(family, target)
        elif kind == "fused":
            writers.as_fused(directory(family, "bf16"), target)
        elif kind == "native":
            writers.as_native_fp8(directory(family, "fp8_block"), target)
        else:
            scheme = writers.preset(PRESETS[kind])
            writers.quantize_with_compressed_tensors(directory(family, "bf16"), target, family, scheme)
        return target

    return directory
