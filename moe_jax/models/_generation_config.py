"""generation_config.json: how the makers of a checkpoint want its tokens chosen."""

import dataclasses
from pathlib import Path
from typing import Any

from moe_jax.loading import CheckpointError
from moe_jax.loading._errors import listed, read_json, shown
from moe_jax.models._sampling_params import SamplingParams

NAME = "generation_config.json"
MAX_BYTES = 1 << 20
# Names of the file and of SamplingParams; the others that vLLM applies besides end tokens are the same.
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# Say nothing about which tokens follow from a prompt.
_OTHER = {
    *("_from_model_config", "transformers_version", "bos_token_id", "pad_token_id", "decoder_start_token_id"),
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size", "low_memory"),
    *("disable_compile", "compile_config", "continuous_batching_config", "return_dict_in_generate", "is_assistant"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "remove_invalid_values"),
    *("chat_format", "max_window_size", "do_sample", "eos_token_id", "max_new_tokens", "use_mtp"),
}
# Change nothing where they have these values.
_NEUTRAL: dict[str, Any] = {"num_beams": 1, "num_return_sequences": 1, "num_beam_groups": 1, "typical_p": 1.0}
_NEUTRAL |= {"length_penalty": 1.0, "encoder_repetition_penalty": 1.0, "diversity_penalty": 0.0, "penalty_alpha": 0.0}
_NEUTRAL |= {"epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "min_length": 0, "no_repeat_ngram_size": 0}
_NEUTRAL |= {"encoder_no_repeat_ngram_size": 0}


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """What the file says.

    eos_token_id: tokens that end an answer; None where it names none, and config.json decides. sampling: arguments of
    ``SamplingParams`` that it states. left: keys that would change tokens and are not built.
    """

    eos_token_id: tuple[int, ...] | None = None
    sampling: dict[str, Any] = dataclasses.field(default_factory=dict)
    left: tuple[str, ...] = ()

    @classmethod
    def read(cls, directory: Path) -> "GenerationConfig":
        """Of a checkpoint; nothing is stated where it has no such file.

        Sampling is taken as vLLM takes it, whether or not do_sample stands beside it; ``"do_sample": false`` is greedy.

        Raises:
            CheckpointError: a damaged file, or a value that cannot be used.
        """
        path = directory / NAME
        if not path.is_file():
            return cls()
        found = {key: value for key, value in read_json(path, max_bytes=MAX_BYTES).items() if value is not None}
        sampling = {name: found.pop(name) for name in _SAMPLING if name in found}
        if "max_new_tokens" in found:
            sampling["max_tokens"] = found["max_new_tokens"]
        if found.get("do_sample") is False:
            sampling["temperature"] = 0.0
        elif found.get("do_sample") is True:
            sampling.setdefault("temperature", 1.0)
        try:
            SamplingParams(**sampling)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: {error}") from None
        left = [key for key, value in found.items() if key not in _OTHER and value not in (_NEUTRAL.get(key), False)]
        return cls(_tokens(found.get("eos_token_id"), path), sampling, tuple(left))

    def not_applied(self) -> str:
        """``not applied: num_beams`` for people; "" where all is."""
        return f"not applied: {listed(list(self.left))}" if self.left else ""


def _tokens(found: Any, path: Path) -> tuple[int, ...] | None:
    if found is None:
        return None
    tokens = found if isinstance(found, list) else [found]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in tokens):
        raise CheckpointError(f"{path}: eos_token_id is {shown(found)}, expected an integer or a list of integers")
    return tuple(tokens)
