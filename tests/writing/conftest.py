"""Small sources for the writer, made once: transformers saves them."""

import json

import pytest

from tests.support.checkpoints import writers

TINY = dict(vocab_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=64)
SIZES = {"ragged": (160, 96), "even": (128, 256)}  # hidden and intermediate: 160 and 96 leave ragged 128 x 128 blocks


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """source(sizes="ragged", family="qwen3_moe", **config) -> a bf16 checkpoint with a tokenizer's file beside it."""
    root = tmp_path_factory.mktemp("sources")

    def directory(sizes="ragged", family="qwen3_moe", **config):
        target = root / "-".join([family, sizes, *map(str, config.values())])
        if not target.exists():
            hidden, intermediate = SIZES[sizes]
            key = "moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"
            count = {"num_experts" if family == "qwen3_moe" else "num_local_experts": 3}
            writers.write_model(family, target, **TINY | {"hidden_size": hidden, key: intermediate} | count | config)
            (target / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 64}))
        return target

    return directory
