"""A small model whose tokenizer knows every byte, with a chat template."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.support.checkpoints import writers

TEMPLATE = """{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and not enable_thinking %}<no>{% endif %}
{%- endif %}"""
SPECIAL = ("<|start|>", "<|end|>", "<|user|>", "<|assistant|>")
VOCAB = 256 + len(SPECIAL)
SIZES = dict(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)


def write_text_model(directory: Path, **options: Any) -> None:
    """A Qwen3-MoE without generation_config.json. options: of its config."""
    sizes = dict(head_dim=16, moe_intermediate_size=32, num_experts=4, max_position_embeddings=96)
    writers.write_model(
        "qwen3_moe", directory, torch.float32, **SIZES, **{**sizes, "eos_token_id": VOCAB - 3, **options}
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1], "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").unlink()
