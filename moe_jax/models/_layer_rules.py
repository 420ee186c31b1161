"""Which layers have experts and how they are grouped, by the keys that several families share."""

from moe_jax.models._config import ConfigReader


def layers_by_step(reader: ConfigReader) -> tuple[int, ...]:
    """Qwen: every ``decoder_sparse_step``-th layer, counted from 1, but for ``mlp_only_layers``."""
    step, dense = reader.integer("decoder_sparse_step", default=1), reader.integers("mlp_only_layers")
    return tuple(i for i in range(reader.integer("num_hidden_layers")) if i not in dense and (i + 1) % step == 0)


def layers_after_dense(reader: ConfigReader) -> tuple[int, ...]:
    """DeepSeek and GLM: from ``first_k_dense_replace`` on, every ``moe_layer_freq``-th layer, counted from 0."""
    first = reader.integer("first_k_dense_replace", minimum=0, default=0)
    step = reader.integer("moe_layer_freq", default=1)
    return tuple(i for i in range(first, reader.integer("num_hidden_layers")) if i % step == 0)


def expert_groups(reader: ConfigReader) -> dict[str, int]:
    """``n_group`` and ``topk_group`` as arguments of ``FusedMoE``; none where one group holds all experts."""
    groups, kept = (reader.integer(key, default=1) for key in ("n_group", "topk_group"))
    return {} if groups == 1 else {"num_expert_group": groups, "topk_group": kept}


def shared_experts_size(reader: ConfigReader) -> int:
    """``n_shared_experts`` experts of the size of a routed one, side by side."""
    return reader.integer("n_shared_experts", minimum=0, default=0) * reader.integer("moe_intermediate_size")
