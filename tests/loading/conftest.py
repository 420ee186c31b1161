"""Checkpoints written by the real tools, made once per run and shared by the loading tests."""

import pytest

from tests.support.checkpoints import writers


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """written(family, kind) -> directory. kind: "bf16" (transformers), "fused" (3-D), "native" (DeepSeek's FP8 blocks),
    or the name of a scheme (compressed-tensors)."""
    root = tmp_path_factory.mktemp("written")

    def directory(family, kind):
        target = root / f"{family}-{'fp8_block-native' if kind == 'native' else kind}"
        if target.exists():
            return target
        if kind == "bf16":
            writers.write_model(family, target)
        elif kind == "fused":
            writers.as_fused(directory(family, "bf16"), target)
        elif kind == "native":
            writers.as_native_fp8(directory(family, "fp8_block"), target)
        else:
            scheme = writers.preset(writers.PRESETS[kind])
            writers.quantize_with_compressed_tensors(directory(family, "bf16"), target, family, scheme)
        return target

    return directory
