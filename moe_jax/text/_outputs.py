"""What ``LLM`` gives back, under vLLM's names."""

import dataclasses

_NO_PROBABILITIES = "no probabilities are kept; model.score gives the logits of a text"
_NOT_BUILT = dict.fromkeys(("cumulative_logprob", "logprobs", "prompt_logprobs"), _NO_PROBABILITIES)


class _Refuses:
    """Attributes that vLLM's class has and this one has not say why."""

    def __getattr__(self, name: str) -> object:
        why = f": it is not built: {_NOT_BUILT[name]}" if name in _NOT_BUILT else ""
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{why}")


@dataclasses.dataclass(frozen=True)
class CompletionOutput(_Refuses):
    """One answer, or in a stream what is new of it.

    Args:
        index: which of the ``n`` answers to its prompt it is.
        text: without what ended it, unless ``include_stop_str_in_output``.
        token_ids: all tokens that were made, end token included.
        finish_reason: "stop" for an end token or a stop string, "length" for max_tokens or the model's own limit; None
            while more may come.
        stop_reason: the stop string, or the token of ``stop_token_ids``; None for the model's own end tokens.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether no more comes."""
        return self.finish_reason is not None


@dataclasses.dataclass(frozen=True)
class RequestOutput(_Refuses):
    """The answers to one prompt.

    Args:
        request_id: the number of the prompt, counted by the ``LLM``.
        prompt: its text, after the chat template; None for a prompt of tokens.
        prompt_token_ids: its tokens.
        outputs: an answer for each of ``n``, in the order of their indices. In a stream those that have something new.
        finished: whether all answers are.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
