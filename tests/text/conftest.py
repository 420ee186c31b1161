"""A small model whose tokenizer knows every byte, with a chat template and a generation_config.json."""

import json
import shutil

import pytest

import moe_jax
from tests.support.cases.families import write_qwen3_5
from tests.support.checkpoints.texts import VOCAB, add_texts, write_text_model


@pytest.fixture(scope="session")
def text_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("text") / "model"
    write_text_model(directory)
    return directory


@pytest.fixture(scope="session")
def hybrid_dir(tmp_path_factory):
    """Qwen3.5-MoE as published: linear attention in a layer, a vision model beside."""
    directory = tmp_path_factory.mktemp("hybrid") / "model"
    write_qwen3_5(directory, vocab_size=VOCAB, eos_token_id=VOCAB - 3, max_position_embeddings=96)
    add_texts(directory)
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
