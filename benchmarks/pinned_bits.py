"""Whether tokens of whole models with ``pinned_tokens`` keep their bits beside other rows, in chunks and in answers.

    python benchmarks/pinned_bits.py --case qwen3-30b-a3b:fp8_channel [--layers 2] [--pinned 64] [--prompt 300]
        [--new 20] [--plain]
    JAX_PLATFORMS=cpu python benchmarks/pinned_bits.py --case qwen3-30b-a3b:bf16 --tiny

Random weights at true sizes, made by generate.py. Prompts of four lengths are read and continued in several ways, each
in programs of its own. Of every token of the answers the token, its log-probability and the eight largest are compared
with those of the first way, and those of the prompts read once more with their answers. ``--plain`` also says how many
values differ without ``pinned_tokens``.
"""

import argparse
import dataclasses
import sys

import jax
import numpy as np
from _arguments import whole
from _timing import header
from generate import build, checked_case

from moe_jax.models import SamplingParams
from moe_jax.models._generate import generate_each, stream_with_logprobs
from moe_jax.models._logprobs import TokenLogprobs, prompt_logprobs

_TOPS = 8


def joined(parts: list[TokenLogprobs]) -> TokenLogprobs:
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def at_once(model, prompts, params, key):
    """As a batch of rows of one length, of prompts that are cut to the shortest."""
    cut = [prompt[: min(map(len, prompts))] for prompt in prompts]
    options = dict(max_new_tokens=params[0].max_tokens, tokens_at_once=4, sampling_params=params, rng=key)
    parts = list(stream_with_logprobs(model, cut, **options))
    tokens = np.concatenate([part.tokens for part in parts], axis=1)
    return [
        (prompt, tokens[row], joined([part.logprobs.part(row) for part in parts])) for row, prompt in enumerate(cut)
    ]


def in_rows(model, prompts, params, key, batch_size):
    """Prompts of any lengths, whose rows are refilled."""
    made = {index: [] for index in range(len(prompts))}
    found = {index: [] for index in range(len(prompts))}

    def hear(new):
        for index, tokens in new.items():
            made[index] += tokens.tolist()
        return ()

    generate_each(
        model,
        prompts,
        hear,
        batch_size,
        params[0].max_tokens,
        (0.0, 1.0, 0, params),
        None,
        key,
        hear_logprobs=lambda index, new: found[index].append(new),
    )
    return [(prompt, np.array(made[index]), joined(found[index])) for index, prompt in enumerate(prompts)]


def differing(found, expected) -> str:
    counts = [0, 0]
    for (_, tokens, logprobs), (_, wanted, wanted_logprobs) in zip(found, expected, strict=True):
        counts[0] += int((tokens != wanted).sum())
        both = zip(jax.tree.leaves(logprobs), jax.tree.leaves(wanted_logprobs), strict=True)
        counts[1] += sum(int((np.asarray(a) != np.asarray(b)).sum()) for a, b in both)
    return f"{counts[0]} tokens and {counts[1]} of their values differ"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", type=checked_case, default="qwen3-30b-a3b:fp8_channel")
    parser.add_argument("--layers", type=whole(1), default=2)
    parser.add_argument("--pinned", type=whole(1), default=64)
    parser.add_argument("--prompt", type=whole(8), default=300, help="tokens of the longest prompt")
    parser.add_argument("--new", type=whole(1), default=20, help="tokens to add")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    options.vocabulary, options.dense = 0, "stored"
    model = build(*options.case.split(":"), options)
    rng, key = np.random.default_rng(0), jax.random.key(3)
    lengths = [options.prompt, options.prompt // 2, options.prompt // 2 + 1, options.prompt // 8 or 1]
    prompts = [rng.integers(0, model.config.vocab_size, length).tolist() for length in lengths]
    # Greedy rows and rows that draw; seeds are their own, so that a row's draws do not follow its index.
    settings = [dict(), dict(temperature=1.0, top_p=0.9), dict(temperature=0.7, top_k=50), dict(temperature=1.0)]
    options_of = dict(max_tokens=options.new, logprobs=_TOPS, ignore_eos=True)
    params = [SamplingParams(**options_of, **own, seed=row) for row, own in enumerate(settings)]
    print(header(), options.case, f"{options.layers} layers", flush=True)
    is_right = True
    for pinned in (options.pinned, None) if options.plain else (options.pinned,):
        model.config = dataclasses.replace(model.config, pinned_tokens=pinned)
        for block in model.moe_blocks():
            block.experts.config = dataclasses.replace(block.experts.config, pinned_tokens=pinned)
        model.max_num_batched_tokens = 8192
        expected = in_rows(model, prompts, params, key, len(prompts))
        cut = at_once(model, prompts, params, key)
        ways = {"two rows that are refilled": lambda: in_rows(model, prompts, params, key, 2)}
        alone = lambda: [in_rows(model, [p], [s], key, 1)[0] for p, s in zip(prompts, params, strict=True)]  # noqa: E731
        ways |= {"each prompt alone": alone}
        for name, way in ways.items():
            print(f"pinned_tokens={pinned}: {name}: {(said := differing(way(), expected))}", flush=True)
            is_right &= pinned is None or said.startswith("0 tokens and 0 ")
        model.max_num_batched_tokens = 64
        said = differing(at_once(model, prompts, params, key), cut)
        print(f"pinned_tokens={pinned}: chunks of 16 tokens a row: {said}", flush=True)
        is_right &= pinned is None or said.startswith("0 tokens and 0 ")
        model.max_num_batched_tokens = 8192
        wrong = 0
        for prompt, tokens, logprobs in expected:
            again = prompt_logprobs(model, [*prompt, *tokens.tolist()], _TOPS)
            for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(logprobs), strict=True):
                wrong += int((np.asarray(a)[len(prompt) - 1 :] != np.asarray(b)).sum())
        print(f"pinned_tokens={pinned}: the answer read as a prompt: {wrong} values differ", flush=True)
        is_right &= pinned is None or wrong == 0
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
