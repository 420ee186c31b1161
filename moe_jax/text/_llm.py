"""``LLM``: prompts and conversations in, texts out, under vLLM's names."""

import dataclasses
import itertools
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax._arguments import boolean, integer, shown
from moe_jax._typing import DTypeLike, Json
from moe_jax.loading import checkpoint_directory
from moe_jax.loading._errors import read_json
from moe_jax.models import CausalLM, SamplingParams, load_pretrained
from moe_jax.models._generate import generate_each, params_of_each, stream_with_logprobs
from moe_jax.models._generation_config import NAME, GenerationConfig
from moe_jax.models._logprobs import TokenLogprobs, prompt_logprobs
from moe_jax.models._pages import NumPages, checked_num_pages
from moe_jax.models._reader import Progress
from moe_jax.models._sampling_params import Unsaid
from moe_jax.models.attention._choice import AttentionImplementation
from moe_jax.quantization import Scheme
from moe_jax.text._answer import Answer
from moe_jax.text._chat_template import MAX_CONFIG_BYTES, ChatTemplate
from moe_jax.text._outputs import CompletionOutput, Logprob, RequestOutput
from moe_jax.text._refused import no_attribute, refuse_constructor, refuse_method
from moe_jax.text._tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16  # vLLM's
_TOKENS_AT_ONCE = 4  # between looks at the text, where a stop string may end an answer


@dataclasses.dataclass(frozen=True)
class _Request:
    """prompt: None for one of tokens. limit: new tokens at most."""

    id: str
    prompt: str | None
    ids: list[int]
    params: SamplingParams
    limit: int

    def rows(self) -> list[SamplingParams]:
        """What ``generate`` does for each of the n answers; seeded ones draw from seed, seed + 1, ..."""
        plain: dict[str, Any] = dict(n=1, stop=(), include_stop_str_in_output=False, skip_special_tokens=True)
        plain |= dict(max_tokens=self.limit, min_tokens=min(self.params.min_tokens, self.limit), prompt_logprobs=None)
        seeds = [None if self.params.seed is None else (self.params.seed + i) % 2**32 for i in range(self.params.n)]
        return [dataclasses.replace(self.params, **plain, seed=seed) for seed in seeds]


class LLM:
    """A model with its tokenizer: prompts in, texts out. Names and meanings are those of vLLM's class.

    What vLLM has and this class has not is refused by name.

    >>> llm = moe_jax.LLM("Qwen/Qwen3-30B-A3B", quantize="fp8_channel")  # doctest: +SKIP
    >>> llm.generate(["The capital of France is"], SamplingParams(temperature=0))[0].outputs[0].text  # doctest: +SKIP
    ' Paris. The capital of Germany is'

    Args:
        model: a checkpoint directory with tokenizer.json, or Kimi's tiktoken.model; or the name of a model on the
            Hugging Face hub.
        revision, quantize, mesh, enable_eplb, num_redundant_experts, implementation, attention, dtype, kv_cache_dtype,
            max_seq_len, max_num_batched_tokens, pinned_tokens, progress: as for ``load_pretrained``.
        generation_config: "auto" takes temperature, top_p, top_k, min_p, repetition_penalty and max_new_tokens of the
            checkpoint's generation_config.json where a call gives no ``SamplingParams``; "vllm" takes vLLM's defaults.
            The file's end tokens hold with both.
        max_num_seqs: most answers that are made at a time.
        max_model_len, tensor_parallel_size, enable_expert_parallel: vLLM's names: of max_seq_len, and of a mesh of so
            many devices whose axis is "expert" or "tensor".
        enable_prefix_caching: prompts of one call that begin alike read that once, as ``generate`` says; no cache
            outlives a call.
        num_pages: keep keys and values of ``generate`` and ``chat`` in so many pages of 64 slots, as ``generate`` says.
            ``stream`` and ``stream_chat`` run one prompt, whose rows have slots of their own.
        seed: of the draws of rows without a seed of their own.

    Attributes:
        model: the ``CausalLM``.

    Raises:
        ImportError: tokenizers is not installed. ValueError, CheckpointError: files that cannot be used, and as
            ``load_pretrained`` says. TypeError: an argument that is not built.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        revision: str | None = None,
        quantize: str | Scheme | Json | None = None,
        mesh: Any = None,
        enable_eplb: bool = False,
        num_redundant_experts: int = 0,
        implementation: Any = None,
        attention: AttentionImplementation = "auto",
        dtype: DTypeLike = jnp.bfloat16,
        kv_cache_dtype: DTypeLike | None = None,
        max_seq_len: int | None = None,
        max_num_batched_tokens: int | None = None,
        pinned_tokens: int | None = None,
        progress: Progress | None = None,
        generation_config: str = "auto",
        max_num_seqs: int = 64,
        max_model_len: int | None = None,
        tensor_parallel_size: int = 1,
        enable_expert_parallel: bool = False,
        enable_prefix_caching: bool = True,
        num_pages: NumPages = None,
        seed: int | None = 0,
        **refused: Any,
    ):
        refuse_constructor(refused)
        if max_model_len is not None:
            if max_seq_len not in (None, max_model_len):
                raise ValueError(f"{max_model_len=} and {max_seq_len=} are two names of one number; give one of them")
            max_seq_len = max_model_len
        mesh = _mesh(mesh, tensor_parallel_size, enable_expert_parallel)
        if generation_config not in ("auto", "vllm"):
            raise ValueError(f'generation_config={shown(generation_config)}, expected "auto" or "vllm"')
        self._is_shared = boolean("enable_prefix_caching", enable_prefix_caching)
        self._batch_size = integer("max_num_seqs", max_num_seqs, minimum=1)
        self._key = jax.random.key(integer("seed", 0 if seed is None else seed, minimum=0, maximum=2**32 - 1))
        self._directory = checkpoint_directory(model, revision=revision)
        self._tokenizer = Tokenizer(self._directory)
        if isinstance(dtype, str) and dtype == "auto":
            dtype = _stated_dtype(self._directory)
        stated = GenerationConfig.read(self._directory) if generation_config == "auto" else GenerationConfig()
        self._default_params = SamplingParams(**stated.sampling)
        if stated.left:
            warnings.warn(f"{self._directory / NAME}: {stated.not_applied()}", stacklevel=2)
        bound: dict[str, Any] = {}
        if max_num_batched_tokens is not None:
            bound["max_num_batched_tokens"] = max_num_batched_tokens
        self.model: CausalLM = load_pretrained(
            self._directory,
            quantize=quantize,
            mesh=mesh,
            enable_eplb=enable_eplb,
            num_redundant_experts=num_redundant_experts,
            implementation=implementation,
            attention=attention,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            max_seq_len=max_seq_len,
            pinned_tokens=pinned_tokens,
            progress=progress,
            **bound,
        )
        self._num_pages: NumPages = checked_num_pages(num_pages, self.model)
        self._templates: dict[str | None, ChatTemplate] = {}
        self._request_ids, self._calls = itertools.count(), itertools.count()

    def __getattr__(self, name: str) -> Any:
        raise no_attribute(name)

    def get_tokenizer(self) -> Any:
        """The ``tokenizers.Tokenizer``."""
        return self._tokenizer.backend

    def get_default_sampling_params(self) -> SamplingParams:
        """Those of a call that gives none: what generation_config.json states, over vLLM's defaults."""
        return self._default_params

    def generate(
        self,
        prompts: Any,
        sampling_params: Any = None,
        *,
        use_tqdm: Any = False,
        **refused: Any,
    ) -> list[RequestOutput]:
        """Continue prompts, ``max_num_seqs`` answers at a time.

        Args:
            prompts: texts, lists of tokens, ``{"prompt": text}`` or ``{"prompt_token_ids": tokens}``; one of them, or
                a list.
            sampling_params: ``SamplingParams`` of all prompts, or a list with one for each; None for
                ``get_default_sampling_params``.
            use_tqdm: draw a bar of finished prompts on stderr; needs tqdm.

        Returns:
            The answers to each prompt, in the order given.

        Raises:
            ValueError: a prompt that is empty or leaves no room for an answer; otherwise as ``generate``. TypeError: an
                argument of another kind, or one that is not built.
        """
        refuse_method("generate", refused)
        return self._answer(self._requests(_checked_prompts(prompts), sampling_params), use_tqdm)

    def chat(
        self,
        messages: Any,
        sampling_params: Any = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Json] | None = None,
        chat_template_kwargs: Json | None = None,
        use_tqdm: Any = False,
        **refused: Any,
    ) -> list[RequestOutput]:
        """Answer conversations.

        Args:
            messages: a conversation, ``{"role": ..., "content": ...}`` oldest first, or a list of conversations.
            sampling_params, use_tqdm: as for ``generate``.
            chat_template: in place of the checkpoint's.
            add_generation_prompt: the template ends with what opens the model's answer.
            tools: JSON schemas of functions, which the template shows to the model.
            chat_template_kwargs: variables that the template reads, such as ``{"enable_thinking": False}``.

        Raises:
            ImportError: jinja2 is not installed. ValueError: the checkpoint has no template; the template refuses a
                conversation, or reads no such variable. Otherwise as ``generate``.
        """
        refuse_method("chat", refused)
        options = (chat_template, add_generation_prompt, tools, chat_template_kwargs)
        is_single = not _is_list_of_lists(messages)
        conversations: Any = [messages] if is_single else messages
        prompts = [self._rendered(conversation, *options) for conversation in conversations]
        return self._answer(self._requests(prompts, sampling_params), use_tqdm)

    def stream(
        self, prompt: Any, sampling_params: SamplingParams | None = None, **refused: Any
    ) -> Iterator[RequestOutput]:
        """Continue one prompt and give what is new while it is made: texts and tokens in their order, which together
        are those of ``generate``. Arguments and errors are those of ``generate``; errors come before the first token.

        >>> for part in llm.stream("The capital of France is"):  # doctest: +SKIP
        ...     print(part.outputs[0].text, end="", flush=True)
        """
        refuse_method("stream", refused)
        (request,) = self._requests([prompt], sampling_params)
        return self._stream(request)

    def stream_chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Json] | None = None,
        chat_template_kwargs: Json | None = None,
        **refused: Any,
    ) -> Iterator[RequestOutput]:
        """``stream`` for one conversation; arguments and errors are those of ``chat``."""
        refuse_method("stream_chat", refused)
        prompt = self._rendered(messages, chat_template, add_generation_prompt, tools, chat_template_kwargs)
        (request,) = self._requests([prompt], sampling_params)
        return self._stream(request)

    def _rendered(self, messages: Any, template: str | None, opens: bool, tools: Any, variables: Any) -> Json:
        if template not in self._templates:
            self._templates[template] = ChatTemplate(self._directory, template)
        options = dict(tools=tools, add_generation_prompt=opens)
        text = self._templates[template].render(messages, dict(variables or {}), **options)
        # The template has written the special tokens.
        ids = self._tokenizer.encode(text, "the text of the chat template", add_special_tokens=False)
        return {"prompt": text, "prompt_token_ids": ids}

    def _requests(self, prompts: Sequence[Any], sampling_params: Any) -> list[_Request]:
        given = self._default_params if sampling_params is None else sampling_params
        requests = []
        for index, (prompt, params) in enumerate(zip(prompts, params_of_each(given, len(prompts)), strict=True)):
            if params.n > 1 and params.temperature == 0:
                raise ValueError(f"n={params.n} with temperature=0: all answers would be the same; n=1 is one of them")
            text, ids = self._read_prompt(prompt, f"prompt {index}")
            if outside := [token for token in ids if not 0 <= token < self.model.config.vocab_size]:
                expected = f"expected 0 to {self.model.config.vocab_size - 1}"
                raise ValueError(f"prompt {index} has the token {outside[0]}, {expected}")
            room = self.model.max_seq_len - len(ids)
            if room < 1:
                raise ValueError(
                    f"prompt {index} of {len(ids)} tokens leaves no room for an answer, the model takes "
                    f"max_seq_len={self.model.max_seq_len}"
                )
            wanted = DEFAULT_MAX_TOKENS if isinstance(params.max_tokens, Unsaid) else params.max_tokens
            limit = room if wanted is None else min(wanted, room)
            requests.append(_Request("", text, ids, params, limit))
        return [dataclasses.replace(request, id=str(next(self._request_ids))) for request in requests]

    def _read_prompt(self, prompt: Any, where: str) -> tuple[str | None, list[int]]:
        """(text, tokens)."""
        if isinstance(prompt, str):
            return prompt, self._tokenizer.encode(prompt, where)
        if not isinstance(prompt, Mapping):
            return None, _checked_ids(prompt, where)
        if unknown := sorted(prompt.keys() - {"prompt", "prompt_token_ids"}):
            raise ValueError(f"{where} has the key {shown(unknown[0])}, expected prompt or prompt_token_ids")
        text = prompt.get("prompt")
        if text is not None and not isinstance(text, str):
            raise TypeError(f"{where} has prompt={shown(text)}, expected a text")
        if prompt.get("prompt_token_ids") is not None:
            return text, _checked_ids(prompt["prompt_token_ids"], where)
        if text is None:
            raise ValueError(f"{where} is {shown(dict(prompt))}, expected prompt or prompt_token_ids")
        return text, self._tokenizer.encode(text, where)

    def _answers(self, request: _Request) -> list[Answer]:
        params = request.params
        end = [*(() if params.ignore_eos else self.model.eos_token_id), *(params.stop_token_ids or ())]
        stop = (params.stop,) if isinstance(params.stop, str) else tuple(params.stop or ())
        return [
            Answer(
                self._tokenizer.detokenizer(skip_special_tokens=params.skip_special_tokens),
                end,
                stop,
                includes_stop=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )
            for _ in range(params.n)
        ]

    def _answer(self, requests: list[_Request], use_tqdm: Any) -> list[RequestOutput]:
        bar = _bar(use_tqdm, len(requests))
        if not requests:
            return []
        answers = [self._answers(request) for request in requests]
        flat = [answer for each in answers for answer in each]
        params = [row for request in requests for row in request.rows()]
        limits = [request.limit for request in requests for _ in range(request.params.n)]
        logprobs: dict[int, list[TokenLogprobs]] = {row: [] for row in range(len(flat))}

        def hear(made: dict[int, np.ndarray]) -> list[int]:
            for row, tokens in made.items():
                flat[row].add(tokens.tolist())
            if bar is not None:
                whole = sum(answer.is_over or len(answer.ids) == n for answer, n in zip(flat, limits, strict=True))
                bar.update(whole * len(requests) // len(flat) - bar.n)
            return [row for row in made if flat[row].is_over]

        generate_each(
            self.model,
            [request.ids for request in requests for _ in range(request.params.n)],
            hear,
            self._batch_size,
            max(request.limit for request in requests),
            (0.0, 1.0, 0, params),
            self.model.eos_token_id,
            self._next_key(),
            tokens_at_once=_TOKENS_AT_ONCE if any(request.params.stop for request in requests) else None,
            hear_logprobs=lambda row, part: logprobs[row].append(part),
            is_shared=self._is_shared,
            num_pages=self._num_pages,
        )
        if bar is not None:
            bar.close()
        parts = iter(logprobs.values())
        return [self._output(request, each, parts) for request, each in zip(requests, answers, strict=True)]

    def _output(self, request: _Request, answers: list[Answer], parts: Iterator[list[TokenLogprobs]]) -> RequestOutput:
        """parts: log-probabilities of the answers that come next."""
        outputs = []
        for index, answer in enumerate(answers):
            answer.finish()
            told = self._logprobs(request.params.logprobs, answer.ids, next(parts))
            total = None if told is None else _total(answer.ids, told)
            outputs.append(CompletionOutput(index, answer.text, answer.ids, *self._end(request, answer), total, told))
        prompt = self._prompt_logprobs(request)
        return RequestOutput(request.id, request.prompt, request.ids, outputs, True, prompt)

    def _logprobs(
        self, number: int | None, ids: Sequence[int], parts: Sequence[TokenLogprobs]
    ) -> list[dict[int, Logprob]] | None:
        """Of the first tokens of ``parts``, which are ``ids``; None where nobody asks."""
        if number is None:
            return None
        tokens = ((part, at) for part in parts for at in range(len(part.chosen)))
        k = self.model.config.vocab_size if number == -1 else number
        texts: dict[int, str] = {}

        def entry(token: int, logprob: Any, rank: int) -> Logprob:
            if token not in texts:
                texts[token] = self._tokenizer.decode([token], skip_special_tokens=False)
            return Logprob(float(logprob), rank, texts[token])

        told = []
        for token, (part, at) in zip(ids, tokens, strict=False):
            found = {token: entry(token, part.chosen[at], int(part.rank[at]))}
            tops = zip(part.top_ids[at, :k].tolist(), part.top[at, :k], strict=True)
            for rank, (other, logprob) in enumerate(tops, start=1):
                found.setdefault(other, entry(other, logprob, rank))
            told.append(found)
        return told

    def _prompt_logprobs(self, request: _Request) -> list[dict[int, Logprob] | None] | None:
        number = request.params.prompt_logprobs
        if number is None:
            return None
        vocab_size = self.model.config.vocab_size
        k = vocab_size if number == -1 else min(number, vocab_size)
        told = self._logprobs(number, request.ids[1:], [prompt_logprobs(self.model, request.ids, k)])
        return [None, *(told or [])]

    def _end(self, request: _Request, answer: Answer) -> tuple[str | None, int | str | None]:
        """(finish_reason, stop_reason)."""
        if answer.is_over:
            own = () if request.params.ignore_eos else self.model.eos_token_id
            return "stop", None if answer.stop_reason in own else answer.stop_reason
        return ("length" if len(answer.ids) >= request.limit else None), None

    def _stream(self, request: _Request) -> Iterator[RequestOutput]:
        answers, params = self._answers(request), request.rows()
        parts = stream_with_logprobs(
            self.model,
            [request.ids] * len(answers),
            max_new_tokens=request.limit,
            tokens_at_once=_TOKENS_AT_ONCE,
            sampling_params=params,
            rng=self._next_key(),
        )

        def outputs() -> Iterator[RequestOutput]:
            going, totals = list(range(len(answers))), [0.0] * len(answers)
            prompt = self._prompt_logprobs(request)
            for tokens, logprobs, _ in parts:
                new = []
                for index in going:
                    answer = answers[index]
                    before = len(answer.ids)
                    text = answer.add(tokens[index].tolist())
                    finish_reason, stop_reason = self._end(request, answer)
                    text += answer.finish() if finish_reason else ""
                    # The rest may have held a stop string.
                    finish_reason, stop_reason = self._end(request, answer)
                    made = answer.ids[before:]
                    of_row = [] if logprobs is None else [logprobs.part(index)]
                    told = self._logprobs(request.params.logprobs, made, of_row)
                    totals[index] += _total(made, told or ())
                    total = None if told is None else totals[index]
                    new.append(CompletionOutput(index, text, made, finish_reason, stop_reason, total, told))
                going = [output.index for output in new if not output.finished()]
                yield RequestOutput(request.id, request.prompt, request.ids, new, not going, prompt)
                if not going:
                    return

        return outputs()

    def _next_key(self) -> jax.Array:
        return jax.random.fold_in(self._key, next(self._calls))


def _total(ids: Sequence[int], told: Sequence[Mapping[int, Logprob]]) -> float:
    return sum((found[token].logprob for token, found in zip(ids, told, strict=False)), 0.0)


def _mesh(mesh: Any, size: Any, is_of_experts: Any) -> Any:
    """The mesh given, or the one that vLLM's arguments describe."""
    boolean("enable_expert_parallel", is_of_experts)
    if integer("tensor_parallel_size", size, minimum=1) == 1:
        return mesh
    if mesh is not None:
        raise ValueError(f"tensor_parallel_size={size} and mesh= both say how many devices; give one of them")
    if size > jax.device_count():
        raise ValueError(f"tensor_parallel_size={size}, and JAX sees {jax.device_count()} devices")
    return jax.make_mesh((size,), ("expert" if is_of_experts else "tensor",), devices=jax.devices()[:size])


def _stated_dtype(directory: Path) -> str:
    """float16 where config.json says so, else bfloat16, as vLLM chooses for bfloat16 and float32."""
    config = read_json(directory / "config.json", max_bytes=MAX_CONFIG_BYTES)
    return "float16" if config.get("dtype", config.get("torch_dtype")) == "float16" else "bfloat16"


def _bar(use_tqdm: Any, total: int) -> Any:
    """A bar of ``total`` prompts; use_tqdm may be a function that makes one, as in vLLM."""
    if not use_tqdm:
        return None
    if callable(use_tqdm):
        return use_tqdm(total=total, desc="Processed prompts")
    boolean("use_tqdm", use_tqdm)
    try:
        from tqdm.auto import tqdm
    except ImportError:
        raise ImportError("use_tqdm=True needs the package tqdm: pip install tqdm") from None
    return tqdm(total=total, desc="Processed prompts", dynamic_ncols=True)


def _is_list_of_lists(messages: Any) -> bool:
    return isinstance(messages, Sequence) and bool(messages) and isinstance(messages[0], list | tuple)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _checked_prompts(prompts: Any) -> Sequence[Any]:
    """A list of prompts, of one that stands alone too."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, np.ndarray | jax.Array):
        prompts = np.asarray(prompts).tolist()
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        raise TypeError(f"prompts has type {type(prompts).__name__}, expected texts or lists of tokens")
    return [prompts] if prompts and all(map(_is_integer, prompts)) else prompts


def _checked_ids(ids: Any, where: str) -> list[int]:
    if isinstance(ids, np.ndarray | jax.Array):
        ids = np.asarray(ids).tolist()
    if not isinstance(ids, Sequence) or isinstance(ids, bytes | bytearray) or not all(map(_is_integer, ids)):
        raise TypeError(f"{where} is {shown(ids)}, expected a text or a list of tokens")
    if not ids:
        raise ValueError(f"{where} is empty, expected at least one token")
    return [int(token) for token in ids]
