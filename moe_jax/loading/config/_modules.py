"""What a module's name says: other spellings of it, its class, and whether it is normally left unquantized."""

from moe_jax.loading.layer._names import is_expert_name

_CONTAINER = ".block_sparse_moe."
_CONTAINER_IN_MEMORY = ".mlp."
_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_RESPELT = _PROJECTIONS | {word: letter for letter, word in _PROJECTIONS.items()}
_EXPERTS, _FUSED = ".experts", ("gate_up_proj", "down_proj")
_EMBEDDINGS = ("embed_tokens", "wte")
_OF_INDEXER = "weights_proj"
_NORMALLY_PLAIN = ("gate", "router", "shared_expert_gate", "lm_head", _OF_INDEXER, *_EMBEDDINGS)


def spellings(module: str) -> tuple[str, ...]:
    """The name and its aliases: a config may spell Mixtral's modules as transformers 5 holds them in memory.

    There ``block_sparse_moe`` is ``mlp`` and w1, w3, w2 are gate_proj, up_proj, down_proj; on disk every mixture of the
    two has been seen. Weights of all experts in one tensor ("experts.gate_up_proj") are parameters of one module,
    "experts". Otherwise families are spelt alike in both places.
    """
    head, _, last = module.rpartition(".")
    if head.endswith(_EXPERTS) and last in _FUSED:
        return (module, head)
    if _CONTAINER not in module:
        return (module,)
    names = [module]
    if last in _RESPELT:
        names.append(f"{head}.{_RESPELT[last]}")
    return (*names, *(name.replace(_CONTAINER, _CONTAINER_IN_MEMORY) for name in names))


def classes_of(module: str) -> tuple[str, ...]:
    """Class names that a config may use for a module, the most specific first; () for what no config quantizes."""
    components = module.split(".")
    last = components[-1]
    if last.endswith("norm"):
        return ()
    if last in _EMBEDDINGS:
        return ("Embedding",)
    if is_expert_name(module):
        return ("RoutedExperts", "FusedMoE", "Linear")
    return ("Linear",)


def is_normally_plain(module: str) -> bool:
    """Routers, the shared expert's gate, the weights of index heads, embeddings and the head stay in 16 bits even where
    ``ignore`` forgets them."""
    return module.rpartition(".")[2] in _NORMALLY_PLAIN or module.endswith(".router.layer")
