"""A small model whose tokenizer knows every byte, with a chat template and a generation_config.json."""

import json
import shutil

import pytest

import moe_jax
from tests.support.checkpoints.texts import write_text_model


@pytest.fixture(autouse=True, scope="module")
def compile_quickly(quick_compilation):
    """All tests of texts."""


@pytest.fixture(scope="session")
def text_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("text") / "model"
    write_text_model(directory)
    return directory


@pytest.fixture(scope="session")
def llm(text_dir):
    return moe_jax.LLM(text_dir, dtype="float32", max_num_seqs=4)


@pytest.fixture
def with_config(text_dir, tmp_path):
    """with_config(settings) -> a copy of the model whose generation_config.json states them."""

    def directory(settings):
        copy = shutil.copytree(text_dir, tmp_path / f"model{len(list(tmp_path.iterdir()))}")
        (copy / "generation_config.json").write_text(json.dumps(settings))
        return copy

    return directory
