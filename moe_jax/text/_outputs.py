"""What ``LLM`` gives back, under vLLM's names."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Logprob:
    """logprob: log-probability of a token. rank: 1 for the likeliest. decoded_token: its text, decoded alone."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """One answer, or in a stream what is new of it.

    Args:
        index: which of the ``n`` answers to its prompt it is.
        text: without what ended it, unless ``include_stop_str_in_output``.
        token_ids: all tokens that were made, end token included.
        finish_reason: "stop" for an end token or a stop string, "length" for max_tokens or the model's own limit; None
            while more may come.
        stop_reason: the stop string, or the token of ``stop_token_ids``; None for the model's own end tokens.
        cumulative_logprob: sum over all tokens of the answer so far; None unless ``logprobs`` are asked for, and so:
        logprobs: for each of ``token_ids`` a dict from tokens, the chosen one first, to their ``Logprob``.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None

    def finished(self) -> bool:
        """Whether no more comes."""
        return self.finish_reason is not None


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """The answers to one prompt.

    Args:
        request_id: the number of the prompt, counted by the ``LLM``.
        prompt: its text, after the chat template; None for a prompt of tokens.
        prompt_token_ids: its tokens.
        outputs: an answer for each of ``n``, in the order of their indices. In a stream those that have something new.
        finished: whether all answers are.
        prompt_logprobs: for each token of the prompt a dict as in ``CompletionOutput.logprobs``, None for the first
            token; None unless they are asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
