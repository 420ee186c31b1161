"""``generate`` and ``generate_stream``: the token loop as a compiled program over a static key-value cache."""

import collections
import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_jax._arguments import boolean, integer, shown
from moe_jax._typing import AnyArray, Array, ArrayArg
from moe_jax.models import _batches, _loop
from moe_jax.models._compiled import bucket, padded_prompt, split_model
from moe_jax.models._decoder import CausalLM
from moe_jax.models._logprobs import TokenLogprobs
from moe_jax.models._pages import NumPages, checked_num_pages
from moe_jax.models._prefill import Prefill
from moe_jax.models._sampling import Sampler
from moe_jax.models._sampling_params import SamplingParams
from moe_jax.nn._lora import LoRAChoice

EndTokens = int | Sequence[int] | Literal["model"] | None
if TYPE_CHECKING:
    from typing import Required, Unpack

    Prompts = Sequence[Sequence[int] | ArrayArg]

    class Options(TypedDict, total=False):
        """What ``generate`` and ``generate_stream`` share."""

        max_new_tokens: Required[int]
        temperature: float
        top_p: float
        top_k: int
        eos_token_id: EndTokens
        rng: jax.Array | np.ndarray | None
        sampling_params: SamplingParams | Sequence[SamplingParams] | None
        attention_mask: ArrayArg | None

    class StreamOptions(Options, total=False):
        tokens_at_once: int
        progress: Callable[[int, int], None] | None


@overload
def generate(
    model: CausalLM,
    input_ids: ArrayArg,
    *,
    batch_size: None = None,
    return_load: Literal[False] = False,
    **options: "Unpack[Options]",
) -> Array: ...


@overload
def generate(
    model: CausalLM,
    input_ids: "ArrayArg | Prompts",
    *,
    batch_size: int,
    enable_prefix_caching: bool = True,
    num_pages: NumPages = None,
    return_load: Literal[False] = False,
    **options: "Unpack[Options]",
) -> list[list[int]]: ...


@overload
def generate(
    model: CausalLM,
    input_ids: "ArrayArg | Prompts",
    *,
    batch_size: int | None = None,
    enable_prefix_caching: bool = True,
    num_pages: NumPages = None,
    return_load: Literal[False] = False,
    **options: "Unpack[Options]",
) -> Array | list[list[int]]: ...


@overload
def generate(
    model: CausalLM,
    input_ids: "ArrayArg | Prompts",
    *,
    batch_size: int | None = None,
    enable_prefix_caching: bool = True,
    num_pages: NumPages = None,
    return_load: bool,
    **options: "Unpack[Options]",
) -> Array | list[list[int]] | tuple[Array | list[list[int]], AnyArray]: ...


def generate(
    model: CausalLM,
    input_ids: Any,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    eos_token_id: EndTokens = "model",
    rng: Any = None,
    sampling_params: Any = None,
    attention_mask: ArrayArg | None = None,
    batch_size: int | None = None,
    enable_prefix_caching: bool = True,
    num_pages: NumPages = None,
    return_load: bool = False,
) -> Array | list[list[int]] | tuple[Array | list[list[int]], AnyArray]:
    """Continue prompts. Programs are compiled per batch size and bucket of lengths, one for the prompt and one for the
    loop; later calls reuse them.

    Prompts of any lengths, however many, run ``batch_size`` at a time: sorted by length, and the row of a prompt that
    has ended is filled with the next one. Several prompts are read in one row of a call, without padding between them,
    where the model can: not with linear attention, nor with a rotary embedding that changes with the length. At most 8
    programs are compiled for one call.

    Args:
        model: a loaded model.
        input_ids: (B, S) int prompts, an array or nested lists; or a list of prompts of any lengths.
        max_new_tokens: tokens to add at most, >= 0.
        temperature: 0 takes the most likely token; above 0 samples and needs ``rng``.
        top_p: keep the most likely tokens that together reach this probability.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        eos_token_id: token or tokens that end a row; "model" takes those of the checkpoint (generation_config.json,
            else config.json), None never ends early. A row that has ended is filled with the first one, with -1 where
            it has none.
        rng: a key of ``jax.random.key``, used only when sampling. A row's draws follow from it, the row's index and
            the number of its tokens, not from other rows.
        sampling_params: ``SamplingParams`` of all rows, or one for each, instead of temperature, top_p and top_k.
        attention_mask: (B, S) bool or 0/1, False for padding, on the left or on the right; what stands in padding is
            ignored. Lists of unequal length need none.
        batch_size: most prompts at a time; None runs a (B, S) array at once, and lists of unequal length 64 at a time.
        enable_prefix_caching: read what prompts of this call begin with alike once, where that saves at least 1024
            tokens. Rounding may differ in the last bits from what each prompt gets alone. It speaks of prompts that run
            ``batch_size`` at a time.
        num_pages: keep keys and values in so many pages of 64 slots, for prompts that run ``batch_size`` at a time. A
            prompt takes pages for its own tokens as it enters a row and more as it grows, gives them back as it ends,
            and waits while too few are free; prompts that begin alike hold the same pages. "auto": as many as let no
            prompt wait. None gives each of ``batch_size`` rows slots for the longest prompt.
        return_load: also return the rows that each slot of each layer served, ``MoEStats.load``, for ``EplbState``.

    Returns:
        (B, S + max_new_tokens) int32: the prompt as given, then the new tokens. The answer to a padded prompt is the
        one it gets alone. With ``batch_size`` or lists of unequal length: for each prompt, in the order given, a list
        of its ids and the new ones up to its end token. With ``return_load`` the pair of that and (layers, slots)
        int32.

    Raises:
        ValueError: a value out of range, an id or end token outside the vocabulary, an empty prompt, or prompt and new
            tokens exceed ``max_seq_len``. TypeError: an argument of another kind than said here; nothing is rounded or
            parsed. NotImplementedError: num_pages for a model with linear attention, with a rotary embedding that
            changes with the length, or over a mesh with Explicit axes.
    """
    settings = (temperature, top_p, top_k, sampling_params)
    is_shared = boolean("enable_prefix_caching", enable_prefix_caching)
    if batch_size is not None or (attention_mask is None and _is_ragged(input_ids)):
        if attention_mask is not None:
            raise ValueError("batch_size takes prompts without padding; leave attention_mask out")
        made: dict[int, list[int]] = collections.defaultdict(list)

        def hear(new: dict[int, np.ndarray]) -> tuple[int, ...]:
            for index, tokens in new.items():
                made[index] += tokens.tolist()
            return ()

        size = 64 if batch_size is None else batch_size
        ending = (eos_token_id, rng)
        options: Any = dict(has_load=return_load, is_shared=is_shared, num_pages=num_pages)
        load = generate_each(model, input_ids, hear, size, max_new_tokens, settings, *ending, **options)
        answers = [[*map(int, prompt), *made[index]] for index, prompt in enumerate(input_ids)]
        return (answers, load) if return_load else answers
    if num_pages is not None:
        raise ValueError(f"num_pages={shown(num_pages)} for rows that run at once: give batch_size, or leave it out")
    run = _Run(model, input_ids, max_new_tokens, settings, eos_token_id, rng, attention_mask, has_load=return_load)
    prompt = jnp.asarray(input_ids).astype(jnp.int32)
    if run.max_new_tokens == 0:
        return (prompt, run.no_load) if return_load else prompt
    state = run.until(run.start(), run.max_new_tokens)
    tokens, load = run.free(state.tokens[:, : run.max_new_tokens]), run.free(state.load)
    tokens = jnp.concatenate([prompt, tokens], axis=1)
    return (tokens, load) if return_load else tokens


@overload
def generate_stream(
    model: CausalLM,
    input_ids: "ArrayArg | Prompts",
    *,
    return_load: Literal[False] = False,
    **options: "Unpack[StreamOptions]",
) -> Iterator[np.ndarray]: ...


@overload
def generate_stream(
    model: CausalLM,
    input_ids: "ArrayArg | Prompts",
    *,
    return_load: Literal[True],
    **options: "Unpack[StreamOptions]",
) -> Iterator[tuple[np.ndarray, np.ndarray]]: ...


@overload
def generate_stream(
    model: CausalLM,
    input_ids: "ArrayArg | Prompts",
    *,
    return_load: bool,
    **options: "Unpack[StreamOptions]",
) -> Iterator[np.ndarray] | Iterator[tuple[np.ndarray, np.ndarray]]: ...


def generate_stream(
    model: CausalLM,
    input_ids: Any,
    *,
    max_new_tokens: int,
    tokens_at_once: int = 4,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    eos_token_id: EndTokens = "model",
    rng: Any = None,
    sampling_params: Any = None,
    attention_mask: ArrayArg | None = None,
    return_load: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[np.ndarray] | Iterator[tuple[np.ndarray, np.ndarray]]:
    """What ``generate`` adds, while it is made: arrays (B, n) int32, the first of one token, later ones of up to
    ``tokens_at_once``. It ends after ``max_new_tokens``, or when every row has ended. Arguments and errors are those of
    ``generate``, and so are the tokens. With ``return_load`` pairs of tokens and the load so far.

    progress: called as ``progress(done, total)`` with tokens of the prompts, after each chunk of prompts that are read
    in several (``max_num_batched_tokens`` of the model).
    """
    settings = (temperature, top_p, top_k, sampling_params)
    run = _Run(model, input_ids, max_new_tokens, settings, eos_token_id, rng, attention_mask, has_load=return_load)
    parts = run.parts(integer("tokens_at_once", tokens_at_once, minimum=1), progress)
    if return_load:
        return ((part.tokens, part.load) for part in parts)
    return (part.tokens for part in parts)


def stream_with_logprobs(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    tokens_at_once: int,
    sampling_params: Sequence[SamplingParams],
    rng: Any,
) -> "Iterator[Part]":
    """``generate_stream`` with the log-probabilities that sampling_params ask for."""
    settings = (0.0, 1.0, 0, sampling_params)
    ending = (model.eos_token_id, rng, None)
    run = _Run(model, prompts, max_new_tokens, settings, *ending, has_load=False, has_logprobs=True)
    return run.parts(tokens_at_once)


def generate_each(
    model: CausalLM,
    prompts: Any,
    hear: Callable[[dict[int, np.ndarray]], Collection[int]],
    batch_size: int,
    max_new_tokens: int,
    settings: Any,
    eos_token_id: Any,
    rng: Any,
    *,
    tokens_at_once: int | None = None,
    has_load: bool = False,
    hear_logprobs: Callable[[int, TokenLogprobs], None] | None = None,
    is_shared: bool = True,
    num_pages: NumPages = None,
) -> np.ndarray:
    """``generate`` for prompts of any lengths that tells tokens as they are made; see ``_batches.run`` for ``hear``,
    hear_logprobs, tokens_at_once, is_shared and num_pages. settings: temperature, top_p, top_k, sampling_params.

    Returns the load."""
    most, end, no_load = _checked(model, max_new_tokens, eos_token_id, has_load)
    if nnx.state(model, LoRAChoice):  # rows change hands
        raise NotImplementedError("adapters are chosen for the rows of one array of prompts; leave batch_size out")
    size = integer("batch_size", batch_size, minimum=1)
    num_pages = checked_num_pages(num_pages, model)
    vocab_size = model.config.vocab_size
    checked = _batches.checked_prompts(prompts, vocab_size)
    params = _params(settings, len(checked), has_logprobs=hear_logprobs is not None)
    sampler = Sampler.create(params, rng, vocab_size=vocab_size, max_new_tokens=most, eos_token_ids=end)
    _batches.check_lengths(checked, sampler.limits, model.max_seq_len)
    if not most:
        return no_load
    options: dict[str, Any] = dict(batch_size=size, max_new_tokens=most, tokens_at_once=tokens_at_once)
    options |= dict(is_shared=is_shared, num_pages=num_pages)
    return _batches.run(model, checked, sampler, hear, **options, no_load=no_load, hear_logprobs=hear_logprobs)


def _is_ragged(prompts: Any) -> bool:
    if not isinstance(prompts, list | tuple):
        return False
    rows = [p for p in prompts if (isinstance(p, Sequence) and not isinstance(p, str | bytes)) or getattr(p, "ndim", 0)]
    return len(set(map(len, rows))) > 1


def _checked(model: Any, max_new_tokens: Any, eos_token_id: Any, has_load: Any) -> tuple[int, list[int], np.ndarray]:
    """(most new tokens, end tokens, zeros of the load)."""
    if not isinstance(model, CausalLM):
        raise TypeError(f"model has type {type(model).__name__}, expected what moe_jax.load_pretrained returns")
    has_load = boolean("return_load", has_load)
    most = integer("max_new_tokens", max_new_tokens, minimum=0)
    end = list(model.eos_token_id) if _is_model(eos_token_id) else _end_tokens(eos_token_id, model.config.vocab_size)
    layers = [block.experts for block in model.moe_blocks()] if has_load else []
    slots = [experts.num_slots for experts in layers]
    return most, end, np.zeros((len(slots), max(slots, default=0)), np.int32)


class Part(NamedTuple):
    """What is new of each row: tokens (B, n) int32, their ``TokenLogprobs`` (B, n) where somebody asks; and the load so
    far."""

    tokens: np.ndarray
    logprobs: TokenLogprobs | None
    load: np.ndarray


class _Run:
    """One call's checked arguments."""

    def __init__(
        self,
        model: Any,
        input_ids: Any,
        max_new_tokens: Any,
        settings: Any,
        eos_token_id: Any,
        rng: Any,
        attention_mask: Any,
        *,
        has_load: Any,
        has_logprobs: bool = False,
    ):
        self.max_new_tokens, end, self.no_load = _checked(model, max_new_tokens, eos_token_id, has_load)
        vocab_size = model.config.vocab_size
        self._ids, self._mask = padded_prompt(input_ids, attention_mask, vocab_size)
        params = _params(settings, len(self._ids), has_logprobs=has_logprobs)
        self._sampler = Sampler.create(
            params, rng, vocab_size=vocab_size, max_new_tokens=self.max_new_tokens, eos_token_ids=end
        )
        longest = int((self._mask.sum(axis=1) + self._sampler.limits).max())
        if longest > model.max_seq_len:
            raise ValueError(
                f"the prompt and max_new_tokens={max_new_tokens} make {longest} tokens, "
                f"the model takes max_seq_len={model.max_seq_len}"
            )
        self._model = model
        self._structure, self._leaves = split_model(model) if self.max_new_tokens else (None, [])

    def start(self, progress: Callable[[int, int], None] | None = None) -> _loop.State:
        """The state after the prompt, with the first new token."""
        room = bucket(self.max_new_tokens)
        prompt = Prefill(self._model, self._ids, self._mask, progress)
        reading = prompt.read(self._structure, self._leaves, self._ids.shape[1] + room, self.no_load)
        cache = None
        if reading is not None:
            reading, cache = dataclasses.replace(reading, cache=None), reading.cache
        whole = (prompt.ids, prompt.mask, self.no_load)
        state = _loop.start(self._structure, room, prompt.chunk, self._leaves, reading, cache, whole, self._sampler)
        prompt.done(state)
        return state

    def free(self, result: Array) -> Array:
        """A result of a program, as free as the weights to go to another device."""
        if self._leaves[0].committed or not result.committed:
            return result
        return jnp.asarray(np.asarray(result))

    def parts(self, at_once: int, progress: Callable[[int, int], None] | None = None) -> Iterator[Part]:
        """The first token of all rows, then up to ``at_once`` at a time."""
        made, state = 0, self.start(progress) if self.max_new_tokens else None
        while state is not None:
            step = int(state.step)
            logprobs = None if state.logprobs is None else state.logprobs.part(slice(None), slice(made, step))
            # copies: the state is donated
            yield Part(np.array(state.tokens[:, made:step]), logprobs, np.array(state.load))
            is_over = step == self.max_new_tokens or bool(state.is_done.all())
            made, state = step, None if is_over else self.until(state, min(step + at_once, self.max_new_tokens))

    def until(self, state: _loop.State, limit: int) -> _loop.State:
        """The state, which is used up, after ``limit`` new tokens, or fewer when all rows have ended."""
        batch = len(self._ids)
        none = np.zeros(batch, bool)
        counts = (none, none, np.int32(limit), np.int32(batch))
        return _loop.proceed(self._structure, self._leaves, state, *counts, self._sampler)


def _params(settings: Any, num_rows: int, *, has_logprobs: bool) -> list[SamplingParams]:
    """Of each row, from ``generate``'s temperature, top_p, top_k and sampling_params."""
    temperature, top_p, top_k, given = settings
    if given is None:
        given = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k)
    elif (temperature, top_p, top_k) != (0.0, 1.0, 0):
        raise ValueError("temperature, top_p and top_k stand in sampling_params; give one or the other")
    each = params_of_each(given, num_rows)
    if any(params.is_of_texts for params in each) and not has_logprobs:
        raise ValueError("sampling_params: n, stop, logprobs and what shows in a text need texts: use moe_jax.LLM")
    return each


def params_of_each(given: Any, num_prompts: int) -> list[SamplingParams]:
    """One ``SamplingParams`` for all prompts, or a list with one for each, as a list."""
    if isinstance(given, SamplingParams):
        return [given] * num_prompts
    if not isinstance(given, list | tuple) or not all(isinstance(each, SamplingParams) for each in given):
        raise TypeError("sampling_params: expected SamplingParams, or a list with one for each prompt")
    if len(given) != num_prompts:
        raise ValueError(f"sampling_params has {len(given)} entries, expected one for each of {num_prompts} prompts")
    return list(given)


def _is_model(eos_token_id: Any) -> bool:
    if isinstance(eos_token_id, str) and eos_token_id != "model":
        raise TypeError(f'eos_token_id={shown(eos_token_id)}, expected tokens, "model" or None')
    return isinstance(eos_token_id, str)


def _end_tokens(eos_token_id: Any, vocab_size: int) -> list[int]:
    is_list = isinstance(eos_token_id, list | tuple | np.ndarray | jax.Array) and getattr(eos_token_id, "ndim", 1)
    given = [] if eos_token_id is None else list(eos_token_id) if is_list else [eos_token_id]
    why = ", a token of the vocabulary"
    return [integer("eos_token_id", token, minimum=0, maximum=vocab_size - 1, why=why) for token in given]
