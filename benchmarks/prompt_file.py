"""Time ``generate`` over a file of prompts of mixed lengths, and vLLM's ``LLM.generate`` over the same ones.

    python benchmarks/prompt_file.py [--case qwen3-30b-a3b:fp8_block] [--layers 4] [--prompts 512] [--longest 1024]
        [--long 1:8192] [--shared 0] [--new 128] [--batch 64] [--attention auto] [--no-prefix-caching]
        [--num-pages N|auto] [--json FILE]
    python benchmarks/prompt_file.py --vllm [the same]            # in an environment of its own, vLLM 0.24
    JAX_PLATFORMS=cpu python benchmarks/prompt_file.py --tiny      # tries the script out anywhere

Random weights at the true sizes of a layer. Prompt lengths are uniform in the logarithm from 8 to ``--longest``, and
``--long N:LENGTH`` are long; all begin with ``--shared`` tokens alike. Each makes between a quarter and all of
``--new`` tokens, greedily, whatever they are, with ``--batch`` of them at a time. The first run compiles and is told
apart; the time is that of the second one. "padding" is the share of a prefill's slots that hold no token. "cache" is
what holds keys and values, without what a prefill without ``--num-pages`` makes for itself.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from _arguments import new_file, whole, words

SHORTEST = 8


def prompts_of(options: Any, vocab_size: int) -> tuple[list[list[int]], list[int]]:
    """(prompts, new tokens of each)."""
    rng = np.random.default_rng(0)
    count, length = options.long
    lengths = np.exp(rng.uniform(np.log(SHORTEST), np.log(options.longest), options.prompts)).astype(int)
    lengths[rng.permutation(options.prompts)[:count]] = length
    shared = rng.integers(10, vocab_size - 10, options.shared).tolist()
    prompts = [[*shared, *rng.integers(10, vocab_size - 10, length).tolist()] for length in lengths]
    return prompts, rng.integers(max(1, options.new // 4), options.new + 1, options.prompts).tolist()


def ours(options: Any) -> dict[str, Any]:
    import jax
    from generate import build

    from moe_jax.models import SamplingParams, _batches, generate

    name, scheme = options.case.split(":")
    began = time.monotonic()
    model = build(name, scheme, options)
    for layer in model.layers:
        layer.self_attn.implementation = options.attention
    prompts, new = prompts_of(options, model.config.vocab_size)
    params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=count) for count in new]
    packs: list[Any] = []

    class Packs(_batches.Packs):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            packs.append(self)

    _batches.Packs = Packs
    programs: list[str] = []

    def listen(event: str, _: float, **__: Any) -> None:
        programs.extend([event] if event == "/jax/core/compile/backend_compile_duration" else [])

    jax.monitoring.register_event_duration_secs_listener(listen)
    settings = dict(batch_size=options.batch, max_new_tokens=options.new, sampling_params=params)
    settings |= dict(enable_prefix_caching=not options.no_prefix_caching)
    if options.num_pages is not None:
        settings |= dict(num_pages=options.num_pages)
    empty, cache_bytes = _batches._loop.empty, [0]

    def counted(*args: Any) -> Any:
        state, row = empty(*args)
        caches = (state.cache.layers, None if row is None else row.layers)
        cache_bytes.append(sum(leaf.nbytes for leaf in jax.tree.leaves(caches)))
        return state, row

    _batches._loop.empty = counted
    seconds = [time.monotonic() - began]
    for _ in range(2):
        packs.clear()
        began = time.monotonic()
        answers = generate(model, prompts, **settings)
        seconds.append(time.monotonic() - began)
    assert [len(answer) - len(prompt) for answer, prompt in zip(answers, prompts, strict=True)] == new
    slots = sum(pack.num_slots for pack in packs)
    padding = 1 - sum(pack.num_read for pack in packs) / slots if slots else None
    found = dict(prompts=prompts, new=new, built_s=seconds[0], first_s=seconds[1], s=seconds[2])
    found |= dict(num_pages=options.num_pages, cache_gb=max(cache_bytes) / 1e9)
    return found | dict(programs=len(programs), padding=padding, prefill_slots=slots)


def vllms(options: Any) -> dict[str, Any]:
    import os

    from _vllm_environment import ENVIRONMENT

    os.environ |= ENVIRONMENT
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import vllm
    from vllm.model_executor.model_loader import dummy_loader

    from benchmarks import _vllm_models as models
    from benchmarks._model_configs import MODELS

    dummy_loader.initialize_dummy_weights = models.draw_weights
    name, scheme = options.case.split(":")
    folder = Path(tempfile.mkdtemp()) / name
    if options.dense == "stored" and f"{scheme}_dense" in models.QUANTIZATION:
        scheme = f"{scheme}_dense"  # attention as ours has it
    models.write_config(folder, MODELS[name], models.QUANTIZATION[scheme], options.layers)
    prompts, new = prompts_of(options, MODELS[name]["vocab_size"])
    began = time.monotonic()
    engine = vllm.LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=32768,
        max_num_seqs=options.batch,
        max_num_batched_tokens=8192,
        enable_prefix_caching=not options.no_prefix_caching,
        generation_config="vllm",
        seed=0,
    )
    seconds = [time.monotonic() - began]
    params = [
        vllm.SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=count, detokenize=False) for count in new
    ]
    for _ in range(2):
        if not options.no_prefix_caching:
            engine.reset_prefix_cache()  # no prompt of the first run serves the second
        began = time.monotonic()
        answers = engine.generate([dict(prompt_token_ids=ids) for ids in prompts], params, use_tqdm=False)
        seconds.append(time.monotonic() - began)
    assert [len(answer.outputs[0].token_ids) for answer in answers] == new
    return dict(prompts=prompts, new=new, built_s=seconds[0], first_s=seconds[1], s=seconds[2])


def long_prompts(text: str) -> tuple[int, int]:
    """COUNT:LENGTH."""
    count, _, length = text.partition(":")
    try:
        return whole(0)(count), whole(1)(length)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r}, expected COUNT:LENGTH, how many prompts and tokens") from None


def pages(text: str) -> int | str:
    return text if text == "auto" else whole(1)(text)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="qwen3-30b-a3b:fp8_block")
    parser.add_argument("--layers", type=whole(1), default=4)
    parser.add_argument("--prompts", type=whole(1), default=512)
    parser.add_argument("--longest", type=whole(SHORTEST), default=1024)
    parser.add_argument("--long", type=long_prompts, default="1:8192")
    parser.add_argument("--shared", type=whole(0), default=0)
    parser.add_argument("--new", type=whole(1), default=128)
    parser.add_argument("--batch", type=whole(1), default=64)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument("--num-pages", type=pages)
    parser.add_argument("--dense", default="stored", choices=("stored", "bf16"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument("--json", type=new_file)
    parser.set_defaults(vocabulary=0)  # the model's own
    options = parser.parse_args(argv)
    if options.tiny:
        options.case, options.layers = f"{options.case.split(':')[0]}:bf16", 1
        options.prompts, options.longest, options.long = min(options.prompts, 64), 64, (1, 200)
        options.new, options.batch = min(options.new, 16), min(options.batch, 16)
    if options.long[0] > options.prompts:
        parser.error(f"--long names {options.long[0]} of --prompts {options.prompts}")
    if not options.vllm:  # whose environment has no JAX
        from generate import ORDERS, checked_case

        try:
            checked_case(options.case)
            if len(words(ORDERS)(options.attention)) > 1:
                parser.error(f"--attention: {options.attention!r}, expected one")
        except argparse.ArgumentTypeError as error:
            parser.error(f"--case or --attention: {error}")
    found = (vllms if options.vllm else ours)(options)
    num_tokens, num_new = sum(map(len, found.pop("prompts"))), sum(found.pop("new"))
    found |= dict(engine="vllm" if options.vllm else "moe_jax", case=options.case, layers=options.layers)
    found |= dict(prompt_tokens=num_tokens, new_tokens=num_new, batch=options.batch, shared=options.shared)
    padding = f"{found['padding']:.1%} padding, " if found.get("padding") is not None else ""
    padding += f"{found['programs']} programs, cache {found['cache_gb']:.3f} GB, " if "programs" in found else ""
    print(
        f"{found['engine']} {options.case} {options.layers} layers: {options.prompts} prompts of {num_tokens} tokens, "
        f"{num_new} new: {found['s']:.2f} s, {num_new / found['s']:.0f} new tokens/s, "
        f"{(num_tokens + num_new) / found['s']:.0f} tokens/s; {padding}first run {found['first_s']:.1f} s",
        flush=True,
    )
    if options.json:
        options.json.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
