"""Arguments of vLLM's ``LLM`` and its methods that are not built: each is refused by its name."""

from collections.abc import Mapping
from typing import Any

from moe_jax._arguments import shown

# Argument -> what to do instead; "" where nothing can be done.
_MESH = "give mesh=jax.make_mesh((N,), ('data',)), or other axes"
_CONSTRUCTOR = {
    "allowed_local_media_path": "",
    "block_size": "pages have 64 slots, and num_pages says how many there are",
    "compilation_config": "",
    "cpu_offload_gb": "",
    "data_parallel_size": _MESH,
    "disable_custom_all_reduce": "",
    "disable_log_stats": "no statistics are logged",
    "enable_lora": "",
    "enforce_eager": "programs are always compiled",
    "gpu_memory_utilization": "XLA_PYTHON_CLIENT_MEM_FRACTION in the environment is JAX's share of the memory",
    "hf_overrides": "change config.json",
    "hf_token": "set HF_TOKEN in the environment",
    "kv_cache_memory_bytes": "",
    "limit_mm_per_prompt": "only text is read",
    "load_format": "safetensors are read",
    "mm_processor_kwargs": "only text is read",
    "num_gpu_blocks_override": "num_pages says how many pages of 64 slots there are",
    "override_generation_config": "give sampling_params",
    "override_pooler_config": "",
    "pipeline_parallel_size": _MESH,
    "quantization": "quantize= quantizes while loading; the format of a checkpoint is found by itself",
    "seed_everything": "",
    "skip_tokenizer_init": "moe_jax.generate works without a tokenizer",
    "speculative_config": "",
    "swap_space": "",
    "task": "",
    "runner": "",
    "tokenizer": "the checkpoint's tokenizer.json is used",
    "tokenizer_mode": "the checkpoint's tokenizer.json is used",
    "tokenizer_revision": "the checkpoint's tokenizer.json is used",
    "trust_remote_code": "code of a checkpoint is never run",
}
_METHODS = {
    "add_special_tokens": "the chat template writes them",
    "chat_template_content_format": "the content of a message is a text",
    "continue_final_message": "",
    "lora_request": "",
    "mm_processor_kwargs": "only text is read",
    "priority": "prompts are sorted by length",
    "prompt_token_ids": 'give prompts=[{"prompt_token_ids": [...]}]',
    "tokenization_kwargs": "",
    "truncate_prompt_tokens": "",
}
_LATER = ("sleep", "wake_up", "encode", "embed", "classify", "score", "reward", "beam_search", "apply_model")
_LATER += ("collective_rpc", "reset_prefix_cache", "start_profile", "stop_profile", "get_metrics", "llm_engine")
_LATER += ("set_tokenizer", "enqueue", "wait_for_completion", "preprocess_chat")
# Values that say what holds here anyway.
_HOLDS = {
    "data_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "continue_final_message": False,
    "enable_lora": False,
    "enforce_eager": False,
    "skip_tokenizer_init": False,
    "trust_remote_code": False,
    "chat_template_content_format": "auto",
    "disable_log_stats": True,
    "load_format": "auto",
    "tokenizer_mode": "auto",
    "runner": "auto",
    "add_special_tokens": False,
    "priority": [],
}


def refuse_constructor(given: Mapping[str, Any]) -> None:
    """Raises TypeError for arguments of vLLM's ``LLM`` that ours has not, and for unknown ones."""
    _refuse("LLM", given, _CONSTRUCTOR)


def refuse_method(name: str, given: Mapping[str, Any]) -> None:
    """The same for a method."""
    _refuse(f"LLM.{name}", given, _METHODS)


def no_attribute(name: str) -> AttributeError:
    """Of an ``LLM``: which of vLLM's methods are not built."""
    why = ": vLLM's class has it, it is not built" if name in _LATER else ""
    return AttributeError(f"LLM has no attribute {name!r}{why}")


def _refuse(where: str, given: Mapping[str, Any], known: Mapping[str, str]) -> None:
    for name, value in given.items():
        if name not in known:
            raise TypeError(f"{where}: no argument {name}")
        if value is None or (name in _HOLDS and type(value) is type(_HOLDS[name]) and value == _HOLDS[name]):
            continue
        hint = f"; {known[name]}" if known[name] else ""
        raise TypeError(f"{where}: {name}={shown(value)} is not built{hint}")
