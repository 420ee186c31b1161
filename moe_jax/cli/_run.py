"""``moe-jax run``: prompts from arguments or a file, tokens as they are made, and how fast that was."""

import argparse
import dataclasses
import io
import itertools
import json
import os
import sys
import time
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_jax._arguments import shown
from moe_jax._kept import folder
from moe_jax._output import check_output, write_output
from moe_jax._terminal import printable
from moe_jax._typing import Json
from moe_jax.cli._progress import announced, bars_hidden, notice, progress_bar
from moe_jax.models import SamplingParams
from moe_jax.models._generation_config import NAME, GenerationConfig
from moe_jax.models._pages import NumPages
from moe_jax.text._answer import Answer, Detokenizer
from moe_jax.text._chat_template import ChatTemplate
from moe_jax.text._tokenizer import Tokenizer

Ids = list[int]
COMPILING = "compiling ..."


@dataclasses.dataclass(frozen=True)
class Prompt:
    """shown: what the user gave, for the results of a file. ids: its tokens."""

    shown: Any
    ids: Ids


class Text:
    """Text in, text out, through the checkpoint's tokenizer and, with ``is_chat``, its chat template.

    variables: what the template reads besides the conversation.

    Raises:
        ValueError: files that cannot be used. ImportError: a package that is not installed.
    """

    def __init__(self, directory: Path, is_chat: bool, variables: Json):
        self._tokenizer, self._variables = Tokenizer(directory), variables
        self._chat = ChatTemplate(directory) if is_chat else None

    def prompt(self, given: str | list[Any], where: str) -> Prompt:
        """given: a text, or with ``is_chat`` also a list of messages."""
        if self._chat is None:
            if not isinstance(given, str):
                raise ValueError(f"{where}: messages need --chat")
            return Prompt(given, self._tokenizer.encode(given, where))
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
        # The template has written the special tokens.
        text, where = self._chat.render(messages, self._variables), f"{where} in the chat template"
        return Prompt(given, self._tokenizer.encode(text, where, add_special_tokens=False))

    def answer(self, end: Sequence[int], stop: Sequence[str]) -> Answer:
        return Answer(self._tokenizer.detokenizer(), end, stop)

    def stop(self, given: str) -> str | int:
        """A text to end before; the id of a special token, which never shows in a text."""
        if not given:
            raise ValueError("--stop is empty, expected a text")
        token = self._tokenizer.token_id(given)
        return given if token is None or self._tokenizer.decode([token]) else token


class Numbers:
    """Ids in, ids out, for checkpoints without a tokenizer."""

    def prompt(self, given: str, where: str) -> Prompt:
        return Prompt(given, parse_input_ids(given, where).tolist())

    def answer(self, end: Sequence[int], stop: Sequence[str]) -> Answer:
        return Answer(Detokenizer(lambda ids: ",".join(map(str, ids))), end, stop, includes_stop=True)

    def stop(self, given: str) -> int:
        if not given.isdecimal():
            raise ValueError(f"--stop {given!r}: with --input-ids expected the id of a token")
        return int(given)


def run(args: argparse.Namespace) -> int:
    """The command. Raises ValueError and the like for bad input, one line each, before the model is loaded."""
    import jax.numpy as jnp

    from moe_jax.loading import checkpoint_directory
    from moe_jax.models import load_pretrained
    from moe_jax.parallel import parse_mesh

    _check_options(args)
    keep_programs()
    directory = checkpoint_directory(args.model, revision=args.revision)
    if args.logits_out is not None:
        _check_is_no_input(args.logits_out, directory, args.input_ids)
    is_ids = args.input_ids is not None
    medium: Any = Numbers() if is_ids else Text(directory, args.chat, _template_variables(args))
    if args.prompts is not None:
        prompts = [medium.prompt(given, where) for where, given in read_prompts(args.prompts)]
    else:
        given, where = (args.input_ids, "--input-ids") if is_ids else (args.prompt, "--prompt")
        prompts = [medium.prompt(given, where)]
    stops = [medium.stop(given) for given in args.stop]
    stop_ids, stop_texts = [s for s in stops if isinstance(s, int)], [s for s in stops if isinstance(s, str)]
    stated = GenerationConfig.read(directory)
    params, max_new_tokens, choice = _choice(args, stated)
    with progress_bar("loading", before="loading ...") as progress:
        model = load_pretrained(
            directory,
            quantize=args.quantize,
            mesh=None if args.mesh is None else parse_mesh(args.mesh, "--mesh"),
            enable_eplb=args.enable_eplb,
            num_redundant_experts=args.num_redundant_experts,
            implementation=None if args.implementation is None else tuple(args.implementation.split(",")),
            dtype=jnp.dtype(args.dtype),
            kv_cache_dtype=args.kv_cache_dtype,
            max_seq_len=max(len(prompt.ids) for prompt in prompts) + max_new_tokens,  # too many are refused before
            pinned_tokens=args.pinned_tokens,
            progress=progress,
            **({} if args.max_num_batched_tokens is None else dict(max_num_batched_tokens=args.max_num_batched_tokens)),
        )
    model.max_seq_len = model.config.rope.max_seq_len  # which programs depend on: other lengths find the same ones
    vocab = model.config.vocab_size
    end = sorted({*model.eos_token_id, *stop_ids})
    for name, ids in [("input id", prompt.ids) for prompt in prompts] + [("end token", end)]:
        if bad := [token for token in ids if not 0 <= token < vocab]:
            raise ValueError(f"{name} {bad[0]} is outside the vocabulary, expected 0 to {vocab - 1}")
    if args.logits_out is not None or max_new_tokens == 0:
        _score(model, prompts[0].ids, args.logits_out, args.model)
    if max_new_tokens:
        print(choice, file=sys.stderr)
        clock = Clock(parts=2 if args.prompts is None else 1)
        balancer = Balancer(model) if args.enable_eplb else None
        answers = [medium.answer(end, stop_texts) for _ in prompts]
        options = dict(max_new_tokens=max_new_tokens, eos_token_id=end or None, sampling_params=params)
        if args.prompts is None:
            _answer(model, prompts[0].ids, answers[0], options | dict(rng=_key(args, 0)), clock, balancer)
        else:
            with progress_bar("answers", unit="answer", before=COMPILING) as progress:
                _answer_file(model, prompts, answers, args, options, clock, balancer, progress)
        print(clock.line(sum(len(prompt.ids) for prompt in prompts)), file=sys.stderr)
        if balancer is not None:
            print(f"experts were moved in {balancer.num_moves} layers", file=sys.stderr)
    return 0


def keep_programs() -> None:
    """Have JAX keep what it compiles for a GPU among the user's caches, where nobody has said where."""
    import jax

    place = folder("jax")
    if place and jax.config.values["jax_compilation_cache_dir"] is None and jax.default_backend() == "gpu":
        jax.config.update("jax_compilation_cache_dir", str(place))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # small ones, too


class Clock:
    """Tokens and seconds. parts: what compiles, which is kept apart: the prompt and the first turns of the loop, told
    one by one or together."""

    def __init__(self, parts: int):
        self._compiling = parts
        self._began = time.perf_counter()
        self._warm: tuple[float, int] | None = None
        self.num_tokens, self._parts = 0, 0

    def count(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self._parts += 1
        if self._parts == self._compiling:
            self._warm = time.perf_counter(), self.num_tokens

    def line(self, num_prompt_tokens: int) -> str:
        """For people: what was done, and the speed without compilation where there was any."""
        now = time.perf_counter()
        text = f"{num_prompt_tokens} prompt tokens, {self.num_tokens} new tokens in {now - self._began:.2f} s"
        if self._warm is None or self._warm[1] == self.num_tokens:
            return f"{text}, compilation included"
        then, count = self._warm
        rate = (self.num_tokens - count) / (now - then)
        return f"{text}; {rate:.1f} tokens/s after the first {count} and compilation ({then - self._began:.2f} s)"


class Balancer:
    """Load balancing of a model's experts between batches."""

    def __init__(self, model: Any):
        from moe_jax.parallel import EplbState

        self._layers = [block.experts for block in model.moe_blocks()]
        first = self._layers[0]
        self._state = EplbState.create(len(self._layers), first.placement.get_value(), mesh=first.parallel)
        self.num_moves = 0

    def rebalance(self, load: np.ndarray) -> None:
        """Take the load of a batch, (layers, S), into account, and move experts where that gains."""
        import jax.numpy as jnp

        from moe_jax.parallel import rebalance

        self._state = self._state.record(jnp.asarray(load)).next_step()
        plan = rebalance(self._state)
        for layer in plan.layers:
            self._state = plan.apply(layer, self._layers[layer], self._state)
        self.num_moves += len(plan.layers)


def _choice(args: argparse.Namespace, stated: GenerationConfig) -> tuple[SamplingParams, int, str]:
    """How tokens are chosen, how many at most, and both in a line for people.

    Options decide, then generation_config.json, and without either it is greedy and 32.
    """
    names = ("temperature", "top_p", "top_k")
    given: dict[str, Any] = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.max_new_tokens is not None:
        given["max_tokens"] = args.max_new_tokens
    of_file = stated.sampling if args.generation_config == "auto" else {}
    settings: dict[str, Any] = {"temperature": 0.0, "max_tokens": 32} | of_file | given
    most = settings.pop("max_tokens")
    params = SamplingParams(**settings)
    idle = [flag for flag in ("top_p", "top_k", "seed") if getattr(args, flag) is not None]
    if params.temperature == 0 and idle:
        raise ValueError(f"--{idle[0].replace('_', '-')} has no effect on greedy choice; add --temperature T")
    if params.temperature == 0:
        settings = {"greedy": True} | {name: settings[name] for name in ("repetition_penalty",) if name in settings}
    shown = ["greedy" if name == "greedy" else f"{name}={value}" for name, value in settings.items()]
    taken = [name for name in of_file if name not in given] + ["end tokens"] * (stated.eos_token_id is not None)
    parts = [", ".join([*shown, f"at most {most} tokens"])]
    parts += [f"from {NAME}: {', '.join(taken)}"] if taken else []
    parts += [stated.not_applied()] if stated.left else []
    return params, most, f"choosing tokens: {'; '.join(parts)}"


def _key(args: argparse.Namespace, part: int) -> Any:
    import jax

    return jax.random.fold_in(jax.random.key(0 if args.seed is None else args.seed), part)


def _answer(model, ids, answer, options, clock, balancer) -> None:
    """Fill the answer to one prompt and show its pieces. options: of ``generate_stream``. balancer: None, or the one
    that moves experts after it."""
    from moe_jax.models import generate_stream

    load = None
    with progress_bar("reading", unit="token", before=COMPILING) as progress:
        parts = generate_stream(model, [ids], return_load=balancer is not None, **options, progress=progress)
        first = next(parts)
    for part in itertools.chain([first], announced(parts, COMPILING, count=1)):
        tokens, load = (part, None) if balancer is None else part
        before = len(answer.ids)
        _show(answer.add(tokens[0].tolist()))
        clock.count(len(answer.ids) - before)
        if answer.is_over:
            break
    if balancer is not None:
        balancer.rebalance(load)
    _show(answer.finish() + "\n")


def _answer_file(model, prompts, answers, args, options, clock, balancer, progress) -> None:
    """Fill the answers to all prompts, and show a line of each as soon as those before it are shown. With a balancer
    experts move after each batch of prompts, else all prompts are one call."""
    from moe_jax.models._generate import generate_each

    shown = 0
    part = len(prompts) if balancer is None else args.batch_size
    for start in range(0, len(prompts), part):

        def hear(made: dict[int, np.ndarray], start: int = start) -> list[int]:
            nonlocal shown
            before = sum(len(answers[start + index].ids) for index in made)
            for index, tokens in made.items():
                answers[start + index].add(tokens.tolist())
            clock.count(sum(len(answers[start + index].ids) for index in made) - before)
            if progress is not None:
                progress(sum(_is_whole(answer, options["max_new_tokens"]) for answer in answers), len(answers))
            while shown < len(answers) and _is_whole(answers[shown], options["max_new_tokens"]):
                answers[shown].finish()
                line = {"prompt": prompts[shown].shown, "completion": answers[shown].text}
                _show(json.dumps(line, ensure_ascii=False) + "\n")
                shown += 1
            return [index for index in made if answers[start + index].is_over]

        load = generate_each(
            model,
            [prompt.ids for prompt in prompts[start : start + part]],
            hear,
            args.batch_size,
            options["max_new_tokens"],
            (0.0, 1.0, 0, options["sampling_params"]),
            options["eos_token_id"],
            _key(args, start // part),
            tokens_at_once=4 if args.stop else None,
            has_load=balancer is not None,
            num_pages=_num_pages(args),
        )
        if balancer is not None:
            balancer.rebalance(load)


def _is_whole(answer: Answer, max_new_tokens: int) -> bool:
    return answer.is_over or len(answer.ids) == max_new_tokens


def _show(piece: str) -> None:
    """To files and pipes as it is; a terminal would obey what the model writes."""
    if sys.stdout.isatty():
        piece = "".join(printable(c) if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in piece)
    with bars_hidden():
        sys.stdout.write(piece)
        sys.stdout.flush()


def _score(model: Any, ids: Ids, out: Path | None, where: str) -> None:
    """Write the prompt's logits to ``out``, or print the log probabilities of its tokens."""
    with notice(COMPILING):
        logits = np.asarray(model.score(np.asarray([ids], np.int32))[0], np.float32)
    if not np.isfinite(logits).all():
        position = int(np.argmin(np.isfinite(logits).all(axis=-1)))
        raise ValueError(f"{where}: logits at prompt position {position} are not finite; the weights are damaged")
    if out is not None:
        _write_npy(out, logits)
    else:
        chosen = np.exp(logits[:-1] - logits[:-1].max(-1, keepdims=True))
        chosen = chosen[np.arange(len(ids) - 1), ids[1:]] / chosen.sum(-1)
        print(",".join(f"{np.log(p):.4f}" for p in chosen))


def _check_options(args: argparse.Namespace) -> None:
    """What can be known without reading anything."""
    if args.max_new_tokens is not None and args.max_new_tokens < 0:
        raise ValueError(f"--max-new-tokens is {args.max_new_tokens}, expected 0 or more")
    if args.max_num_batched_tokens is not None and args.max_num_batched_tokens < 1:
        raise ValueError(f"--max-num-batched-tokens is {args.max_num_batched_tokens}, expected 1 or more")
    if args.pinned_tokens is not None and args.pinned_tokens < 1:
        raise ValueError(f"--pinned-tokens is {args.pinned_tokens}, expected 1 or more")
    if args.batch_size < 1:
        raise ValueError(f"--batch-size is {args.batch_size}, expected 1 or more")
    if args.num_pages is not None:
        if args.prompts is None:
            raise ValueError("--num-pages is for a file of prompts; add --prompts FILE, or leave it out")
        _num_pages(args)
    if args.temperature is not None and not 0 <= args.temperature < float("inf"):
        raise ValueError(f"--temperature is {args.temperature}, expected 0 (greedy) or more")
    if args.top_p is not None and not 0 < args.top_p <= 1:
        raise ValueError(f"--top-p is {args.top_p}, expected a number above 0 and up to 1")
    if args.top_k is not None and args.top_k < 0:
        raise ValueError(f"--top-k is {args.top_k}, expected 0 (all) or more")
    if args.seed is not None and not 0 <= args.seed < 2**32:
        raise ValueError(f"--seed is {args.seed}, expected an integer from 0 to {2**32 - 1}")
    if args.num_redundant_experts and not args.enable_eplb:
        raise ValueError("--num-redundant-experts needs --enable-eplb")
    if args.num_redundant_experts < 0:
        raise ValueError(f"--num-redundant-experts is {args.num_redundant_experts}, expected 0 or more")
    if args.enable_eplb and (args.mesh is None or "expert" not in args.mesh):
        raise ValueError("--enable-eplb balances the devices of an expert axis; add --mesh expert=N")
    if args.chat and args.input_ids is not None:
        raise ValueError("--chat needs text: give --prompt or --prompts instead of --input-ids")
    if args.prompts is not None and (args.logits_out is not None or args.max_new_tokens == 0):
        raise ValueError("--prompts generates; --logits-out and --max-new-tokens 0 score a single prompt")
    if args.logits_out is not None:
        check_output(args.logits_out, "--logits-out")


def _num_pages(args: argparse.Namespace) -> NumPages:
    """--num-pages."""
    if args.num_pages is None:
        return None
    if args.num_pages == "auto":
        return "auto"
    if not args.num_pages.isdecimal() or not int(args.num_pages):
        raise ValueError(f"--num-pages is {shown(args.num_pages)}, expected 1 or more, or auto")
    return int(args.num_pages)


def _template_variables(args: argparse.Namespace) -> Json:
    """--chat-template-kwargs."""
    given = args.chat_template_kwargs
    if given is None:
        return {}
    if not args.chat:
        raise ValueError("--chat-template-kwargs needs --chat")
    try:
        variables = json.loads(given)
    except (ValueError, RecursionError):
        variables = None
    if not isinstance(variables, dict):
        example = """'{"enable_thinking": false}'"""
        raise ValueError(f"--chat-template-kwargs is {shown(given)}, expected a JSON object such as {example}")
    return variables


def _check_is_no_input(out: Path, model: Path, input_ids: str | None) -> None:
    """Raises ValueError when ``out`` would replace the ids or a file of the checkpoint."""
    if not out.is_file():
        return
    if input_ids is not None and os.path.exists(input_ids) and out.samefile(input_ids):
        raise ValueError(f"--logits-out {out}: is the file of --input-ids; give another path")
    if out.suffix != ".npy" and os.path.realpath(out.parent) == os.path.realpath(model):
        raise ValueError(f"--logits-out {out}: is a file of the checkpoint; give another path")


def read_prompts(path: Path) -> Iterator[tuple[str, Any]]:
    """(place, prompt) for each line that is not blank. A file that ends in .jsonl holds texts, or objects with a
    "prompt" or with "messages"; any other holds one text per line.

    Raises:
        ValueError: no such file, no prompt in it, or a line that is none of these.
    """
    if not path.is_file():
        raise ValueError(f"--prompts {path}: no such file")
    try:
        # not splitlines: a text may hold other separators than line breaks
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompts {path}: not UTF-8: {error}") from None
    found = [(f"{path}, line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ValueError(f"--prompts {path}: no prompt in it")
    for where, line in found:
        yield where, _prompt_of(line, where) if path.suffix == ".jsonl" else line


def _prompt_of(line: str, where: str) -> Any:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON: {error}") from None
    if isinstance(value, dict) and len(value.keys() & {"prompt", "messages"}) == 1:
        value = value.get("prompt", value.get("messages"))
    is_messages = isinstance(value, list) and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in value)
    if not (isinstance(value, str) or (is_messages and value)):
        raise ValueError(f'{where}: expected a text, {{"prompt": text}} or {{"messages": [{{"role": ...}}, ...]}}')
    return value


def parse_input_ids(text: str, where: str = "--input-ids") -> np.ndarray:
    """``1,2,3`` or the path of an .npy file with integers -> (S,) int32. Raises ValueError naming what is wrong."""
    if text.endswith(".npy"):
        with open(text, "rb") as file:
            try:
                ids = np.load(file, allow_pickle=False)
            except Exception as error:  # NumPy raises whatever its parsers meet
                raise ValueError(f"{where} {text}: not a readable .npy file: {' '.join(str(error).split())}") from None
        if not isinstance(ids, np.ndarray):
            raise ValueError(f"{where} {text}: an archive of several arrays, expected one .npy array")
        if ids.ndim == 2 and ids.shape[0] == 1:
            ids = ids[0]
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(
                f"{where} {text}: found {ids.dtype} {ids.shape}, expected integers of shape (S,) or (1, S)"
            )
    else:
        try:
            ids = np.asarray([int(part) for part in text.split(",")], np.int64)
        except (ValueError, OverflowError):
            raise ValueError(
                f"{where} {text!r}: expected 32 bit integers separated by commas, or a path ending in .npy"
            ) from None
    if ids.size == 0:
        raise ValueError(f"{where} {text}: no ids")
    limit = np.iinfo(np.int32)
    if ids.min() < limit.min or ids.max() > limit.max:
        raise ValueError(f"{where} {text}: an id does not fit in 32 bits")
    return ids.astype(np.int32)


def _write_npy(path: Path, array: np.ndarray) -> None:
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, np.lib.format.header_data_from_array_1_0(array))
    write_output(path, [head.getvalue(), np.ascontiguousarray(array).data], "--logits-out")
