"""A small model whose tokenizer knows every byte, with a chat template and a generation_config.json."""

import json
import shutil

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import moe_jax
from tests.support.cases.families import write_qwen3_5
from tests.support.checkpoints import writers

TEMPLATE = """{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and not enable_thinking %}<no>{% endif %}
{%- endif %}"""
SPECIAL = ("<|start|>", "<|end|>", "<|user|>", "<|assistant|>")
VOCAB = 256 + len(SPECIAL)
SIZES = dict(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture(autouse=True, scope="module")
def compile_quickly(quick_compilation):
    """All tests of texts."""


@pytest.fixture(scope="session")
def text_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("text") / "model"
    options = dict(head_dim=16, moe_intermediate_size=32, num_experts=4, max_position_embeddings=96)
    writers.write_model("qwen3_moe", directory, torch.float32, **SIZES, **options, eos_token_id=VOCAB - 3)
    add_texts(directory)
    (directory / "generation_config.json").unlink()
    return directory


def add_texts(directory):
    """Give a checkpoint the tokenizer and its template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1], "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


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
