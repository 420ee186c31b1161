"""``SamplingParams``: how the tokens of an answer are chosen and when it ends, under vLLM's names."""

import dataclasses
import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from moe_jax._arguments import boolean, integer, number, shown


class Unsaid(enum.Enum):
    """The kind of ``UNSAID``, the default of an argument that also takes None."""

    UNSAID = "unsaid"


UNSAID = Unsaid.UNSAID
_Class = TypeVar("_Class")
# What vLLM's class has and this one has not: the values that say what holds here anyway, and what to do instead.
_NOT_BUILT: dict[str, tuple[tuple[Any, ...], str]] = {
    "flat_logprobs": ((False,), ": logprobs are dicts"),
    "allowed_token_ids": ((None,), ": logit_bias can make other tokens unlikely"),
    "bad_words": ((None, []), ": logit_bias can make a token unlikely"),
    "detokenize": ((True,), ": an LLM always makes text, moe_jax.generate makes tokens alone"),
    "spaces_between_special_tokens": ((True,), ""),
    "output_kind": ((None,), ": LLM.generate gives whole answers, LLM.stream gives pieces"),
    "structured_outputs": ((None,), ""),
    "guided_decoding": ((None,), ""),
    "logits_processors": ((None, []), ""),
    "thinking_token_budget": ((None,), ""),
    "repetition_detection": ((None,), ""),
    "extra_args": ((None, {}), ""),
    "skip_clone": ((False, True), ""),
    "skip_reading_prefix_cache": ((None, False, True), ""),
    "best_of": ((None, 1), ": it is n"),
    "use_beam_search": ((False,), ""),
    "length_penalty": ((1.0,), ""),
    "early_stopping": ((False,), ""),
    "truncate_prompt_tokens": ((None,), ""),
}
_RANGES: tuple[tuple[str, str, Callable[[float], bool]], ...] = (
    ("temperature", "a number >= 0 (0 is greedy)", lambda v: 0 <= v < float("inf")),
    ("top_p", "0 < top_p <= 1", lambda v: 0 < v <= 1),
    ("min_p", "0 <= min_p <= 1", lambda v: 0 <= v <= 1),
    ("repetition_penalty", "a number above 0", lambda v: 0 < v < float("inf")),
    ("presence_penalty", "a number from -2 to 2", lambda v: -2 <= v <= 2),
    ("frequency_penalty", "a number from -2 to 2", lambda v: -2 <= v <= 2),
)


def _with_vllms_names(cls: type[_Class]) -> type[_Class]:
    """A dataclass whose constructor also takes arguments of vLLM's that say what holds anyway."""
    made: Any = cls.__init__

    @functools.wraps(made)
    def init(self: Any, **given: Any) -> None:
        for name, (holds, hint) in _NOT_BUILT.items():
            if name in given and not any(type(given[name]) is type(one) and given[name] == one for one in holds):
                raise TypeError(f"SamplingParams: {name}={shown(given[name])} is not built{hint}; leave it out")
        made(self, **{name: value for name, value in given.items() if name not in _NOT_BUILT})

    cls.__init__ = init  # pyright: ignore[reportAttributeAccessIssue]
    return cls


@_with_vllms_names
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of a row are chosen. Names, meanings and the order of steps are those of vLLM's class; its other
    names are refused.

    Steps: logit_bias, repetition_penalty, frequency_penalty, presence_penalty; then, unless greedy, temperature, min_p,
    top_k, top_p on what is left, and a draw. Among equal logits the lower token counts as the more likely one.

    Args:
        temperature: 0 takes the most likely token; above 0 samples and needs ``seed``, or ``rng`` of the call.
        top_p: keep the fewest most likely tokens that together reach this probability, at least one.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        min_p: keep tokens with at least this part of the largest probability.
        repetition_penalty: logits of tokens in the prompt or the answer are divided by it where positive, multiplied
            elsewhere; 1 changes nothing.
        presence_penalty: subtracted from the logits of tokens in the answer.
        frequency_penalty: subtracted once for each time that a token stands in the answer.
        logit_bias: token -> what is added to its logit.
        seed: of the row's own draws, which then depend on nothing else; None draws from ``rng`` and the row's index.
        stop_token_ids: end the row, besides ``eos_token_id`` of the call.
        ignore_eos: ``eos_token_id`` of the call does not end the row.
        max_tokens: tokens of the row at most; None for as many as the call and the model allow. Unsaid, an ``LLM``
            makes 16, as vLLM does.
        min_tokens: no end token is chosen, and no stop string looked for, before so many tokens are made.
        n: answers to a prompt. This and what follows is for an ``LLM``, which knows texts; ``generate`` refuses it.
        stop: a text, or texts, that end the answer.
        include_stop_str_in_output: the answer's text ends with the stop string or end token instead of before it.
        skip_special_tokens: special tokens do not show in the answer's text.
        logprobs: how many of the likeliest tokens are told with their log-probabilities beside the chosen one, for each
            token of an answer; -1 for the whole vocabulary. They are those of the model, before bias, penalties and
            temperature.
        prompt_logprobs: the same for each token of the prompt but the first.

    Raises:
        ValueError: a number out of range. TypeError: something else than a number, as said here; a name that vLLM has
            and this class has not.
    """

    temperature: float | int = 1.0
    top_p: float | int = 1.0
    top_k: int = 0
    min_p: float | int = 0.0
    repetition_penalty: float | int = 1.0
    presence_penalty: float | int = 0.0
    frequency_penalty: float | int = 0.0
    logit_bias: Mapping[int, float | int] | None = None
    seed: int | None = None
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    max_tokens: int | None | Unsaid = UNSAID
    min_tokens: int = 0
    n: int = 1
    stop: str | Sequence[str] | None = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, expected, is_right in _RANGES:
            value = number(name, getattr(self, name), expected)
            if not is_right(value):
                raise ValueError(f"{name}={value}, expected {expected}")
            object.__setattr__(self, name, value)
        object.__setattr__(self, "top_k", max(0, integer("top_k", self.top_k, minimum=-1, why=" (0 or -1 keeps all)")))
        if self.seed is not None:
            integer("seed", self.seed, minimum=0, maximum=2**32 - 1)
        if not (self.max_tokens is None or isinstance(self.max_tokens, Unsaid)):
            object.__setattr__(self, "max_tokens", integer("max_tokens", self.max_tokens, minimum=1))
        integer("n", self.n, minimum=1)
        least = integer("min_tokens", self.min_tokens, minimum=0)
        if isinstance(self.max_tokens, int) and least > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                integer(name, getattr(self, name), minimum=-1, why=" (-1 is the whole vocabulary)")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            boolean(name, getattr(self, name))
        self._check_stops()
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise TypeError(f"logit_bias has type {type(self.logit_bias).__name__}, expected token -> number")
            for token, bias in self.logit_bias.items():
                integer("logit_bias", token, minimum=0, why=", a token")
                if not np.isfinite(number(f"logit_bias[{token}]", bias, "that is finite")):
                    raise ValueError(f"logit_bias[{token}]={bias}, expected a finite number")

    def _check_stops(self) -> None:
        tokens = () if self.stop_token_ids is None else self.stop_token_ids
        if isinstance(tokens, str) or not isinstance(tokens, Sequence | np.ndarray):
            raise TypeError(f"stop_token_ids={shown(tokens)}, expected a list of tokens")
        tokens = tuple(integer("stop_token_ids", token, minimum=0, why=", a token") for token in tokens)
        texts = (self.stop,) if isinstance(self.stop, str) else () if self.stop is None else self.stop
        if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
            raise TypeError(f"stop={shown(self.stop)}, expected a text or a list of texts")
        if not all(texts):
            raise ValueError("stop holds an empty text, which would end an answer before it begins")
        object.__setattr__(self, "stop_token_ids", tokens)
        object.__setattr__(self, "stop", tuple(texts))

    @property
    def is_of_texts(self) -> bool:
        """Whether something is set that only an ``LLM`` can do."""
        only = (self.n, self.stop, self.include_stop_str_in_output, self.skip_special_tokens)
        return (*only, self.logprobs, self.prompt_logprobs) != (1, (), False, True, None, None)

    @property
    def is_penalized(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)
