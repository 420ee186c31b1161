"""Time and peak memory of a LoRA step beside 4-bit experts, and of transformers + peft at the same shape.

    python benchmarks/train_lora.py --out DIR [--model qwen3-30b-a3b] [--layers 2] [--rows 4,16] [--length 1024]
        [--scheme w4a16_g128] [--rank 16] [--seconds 225]
    JAX_PLATFORMS=cpu python benchmarks/train_lora.py --tiny --out DIR       # tries the script out anywhere

Random weights at the true sizes of a layer, made on the device, as many layers as ``--layers`` says; embedding and head
included. One step: forward, backward, and AdamW over adapters of rank ``--rank`` on all experts and projections of
attention. Layers are computed again in the backward pass (``remat``, gradient checkpointing). Ours holds experts in
``--scheme``. peft has no adapters on fused experts of 4 bits: its experts are dequantized, in bfloat16
(``target_parameters``; transformers' ``grouped_mm`` where it runs). Each cell runs in a process of its own, which ends
when its share of ``--seconds`` is over; results are written as they come, to DIR/train_lora.jsonl.

Peak memory is compared with what the math needs, ``needed_activations``: (peak - weights - adapters, gradients of these
and AdamW's state) / needed. Goal: at most 1.3.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from _model_configs import MODELS

_TINY = dict(hidden_size=256, intermediate_size=128, moe_intermediate_size=128, num_attention_heads=2, vocab_size=512)
_TINY |= dict(num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, head_dim=64)
_WARM, _STEPS = 2, 5
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def sizes_of(options: Any) -> dict[str, Any]:
    return MODELS[options.model] | (_TINY if options.tiny else {}) | {"num_hidden_layers": options.layers}


def needed_activations(sizes: dict[str, Any], rows: int, length: int, rank: int, itemsize: int = 2) -> dict[str, int]:
    """Bytes that a step must hold at once when layers are computed again in the backward pass.

    Two moments compete. In the backward pass of the head: the inputs of all layers, logits and their cotangent in
    float32. In that of a layer: the inputs of all layers, and what is inside of one. Softmax weights count once in
    float32, with their cotangent; rows of experts count without copies of their input.
    """
    t, h, d = rows * length, sizes["hidden_size"], sizes["head_dim"]
    queries, keys = sizes["num_attention_heads"] * d, sizes["num_key_value_heads"] * d
    inner, k, e = sizes["moe_intermediate_size"], sizes["num_experts_per_tok"], sizes["num_experts"]
    inputs = (sizes["num_hidden_layers"] + 1) * t * h * itemsize
    head = 2 * t * sizes["vocab_size"] * 4
    attention = (
        t
        * (h + 2 * (queries + keys) + keys + queries + 4 * rank)
        * itemsize  # normed x; q, k before and after; v; output
        + 2 * rows * sizes["num_attention_heads"] * length**2 * 4
    )
    experts = (
        t * (2 * h + e * 2) * itemsize  # x after attention, normed; router logits in float32
        + t * k * (2 * inner + inner + h + 2 * rank) * itemsize  # gate and up, hidden, output of w2
        + t * k * (2 * inner + inner + h) * itemsize  # their cotangents
    )
    layer = attention + experts
    return dict(inputs=inputs, head=head, attention=attention, experts=experts, peak=inputs + max(head, layer))


# -- ours ------------------------------------------------------------------------------------------------------------


def ours(options: Any, rows: int) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    import moe_jax
    from moe_jax.models import read_family

    def nbytes(tree: Any) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))

    built: Any = read_family(sizes_of(options), options.model)
    family, config = built
    schemes = dict.fromkeys(range(options.layers), moe_jax.Scheme.parse(options.scheme))
    dtype = jnp.float32 if options.tiny else jnp.bfloat16  # some bfloat16 products do not run on a CPU
    model = family(config, schemes=schemes, max_seq_len=32768, dtype=dtype, rngs=nnx.Rngs(0))
    model = moe_jax.lora(model, options.rank, 2 * options.rank, ("w13", "w2", "attention"), rngs=nnx.Rngs(1))
    print(model.moe_blocks()[0].experts.explain(num_tokens=rows * options.length), file=sys.stderr)
    structure, adapters, frozen = nnx.split(model, moe_jax.LoRAParam, ...)
    optimizer = optax.adamw(1e-4)
    opt_state = optimizer.init(adapters)

    def step(adapters, opt_state, frozen, ids):
        def loss(adapters):
            logits = nnx.merge(structure, adapters, frozen)(ids, remat=True)
            return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:]).mean()

        value, grads = jax.value_and_grad(loss)(adapters)
        updates, opt_state = optimizer.update(grads, opt_state, adapters)
        return optax.apply_updates(adapters, updates), opt_state, value

    ids = jax.random.randint(jax.random.key(2), (rows, options.length), 0, config.vocab_size)
    start = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(adapters, opt_state, frozen, ids).compile()
    compile_s = time.perf_counter() - start
    memory: Any = compiled.memory_analysis()
    arguments, states = memory.argument_size_in_bytes, nbytes((adapters, opt_state))
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    found = dict(
        weights=nbytes(frozen),
        trained=states + nbytes(adapters),
        peak=arguments + outputs + memory.temp_size_in_bytes,
        compile_s=compile_s,
        device=jax.devices()[0].device_kind,
        versions=f"jax {jax.__version__}",
    )
    losses = []
    for count in range(_WARM + _STEPS):
        if count == _WARM:
            jax.block_until_ready(adapters)
            start = time.perf_counter()
        adapters, opt_state, value = compiled(adapters, opt_state, frozen, ids)
        losses.append(value)
    jax.block_until_ready(adapters)
    seconds = (time.perf_counter() - start) / _STEPS
    stats = jax.devices()[0].memory_stats() or {}
    process_peak = stats.get("peak_bytes_in_use")  # of the process, so that making the weights counts too
    return found | dict(seconds=seconds, process_peak=process_peak, losses=[float(losses[0]), float(losses[-1])])


# -- transformers and peft -------------------------------------------------------------------------------------------


def theirs(options: Any, rows: int) -> dict[str, Any]:
    import peft  # pyright: ignore[reportMissingImports]
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = ("architectures", "model_type")
    fields = {name: value for name, value in sizes_of(options).items() if name not in names}
    config = transformers.AutoConfig.for_model(sizes_of(options)["model_type"], **fields)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    torch.set_default_dtype(torch.float32)
    implementation = "eager"
    if device == "cuda":
        try:
            model.set_experts_implementation("grouped_mm")
            implementation = "grouped_mm"
        except (AttributeError, ValueError, ImportError) as error:
            print(f"transformers' grouped_mm is not available: {error}", file=sys.stderr)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    lora = peft.LoraConfig(
        r=options.rank,
        lora_alpha=2 * options.rank,
        target_modules=list(PROJECTIONS),
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    model = peft.get_peft_model(model, lora)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    model.enable_input_require_grads()
    model.train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    ids = torch.randint(0, config.vocab_size, (rows, options.length), device=device)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    losses = []
    start = time.perf_counter()
    for count in range(_WARM + _STEPS):
        if count == _WARM:
            wait()
            start = time.perf_counter()
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
        loss = model(ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    wait()
    seconds = (time.perf_counter() - start) / _STEPS
    return dict(
        weights=weights,
        trained=4 * sum(parameter.nbytes for parameter in parameters),
        peak=torch.cuda.max_memory_allocated() if device == "cuda" else None,
        seconds=seconds,
        losses=[float(losses[0]), float(losses[-1])],
        implementation=implementation,
        device=torch.cuda.get_device_name() if device == "cuda" else "cpu",
        versions=f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}",
    )


SIDES = {"ours": ours, "peft": theirs}


def measured(options: Any) -> dict[str, Any]:
    """One cell, in this process."""
    rows = int(options.rows)
    cell = SIDES[options.side](options, rows)
    needed = needed_activations(sizes_of(options), rows, options.length, options.rank, 4 if options.tiny else 2)
    tokens = rows * options.length
    cell |= dict(side=options.side, model=options.model, layers=options.layers, rows=rows, length=options.length)
    cell |= dict(needed=needed, tokens_per_s=tokens / cell["seconds"], rank=options.rank)
    if cell["peak"] is not None:
        cell["activations"] = cell["peak"] - cell["weights"] - cell["trained"]
        cell["ratio"] = cell["activations"] / needed["peak"]
    return cell


def line(cell: dict[str, Any]) -> str:
    gib = 2**30
    head = f"{cell['side']:5s} rows={cell['rows']:3d} x {cell['length']}"
    if "seconds" not in cell:
        return f"{head}  {cell['why']}"
    text = f"{head}  {cell['seconds'] * 1e3:9.1f} ms a step  {cell['tokens_per_s']:9.0f} tokens/s"
    if cell["peak"] is None:
        return text
    return (
        f"{text}  peak {cell['peak'] / gib:6.2f} GiB = weights {cell['weights'] / gib:.2f} + trained "
        f"{cell['trained'] / gib:.2f} + {cell['activations'] / gib:.2f}, needed {cell['needed']['peak'] / gib:.2f}: "
        f"ratio {cell['ratio']:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rows", default="4,16", help="rows of a batch, one cell each")
    parser.add_argument("--length", type=int, default=1024, help="tokens in a row")
    parser.add_argument("--scheme", default="w4a16_g128")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=225, help="for all cells together")
    parser.add_argument("--sides", default="ours,peft")
    parser.add_argument("--side", choices=SIDES, help="measure one cell here and print it as JSON")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.side is not None:
        print(json.dumps(measured(options)))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.seconds
    cells = [(side, rows) for rows in options.rows.split(",") for side in options.sides.split(",")]
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    found = []
    for index, (side, rows) in enumerate(cells):
        limit = (deadline - time.monotonic()) / (len(cells) - index) * (1.5 if index + 1 < len(cells) else 1)
        command = [sys.executable, __file__, *sys.argv[1:], "--side", side, "--rows", rows]
        why = f"left out: not done within {limit:.0f} s"
        try:
            run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=max(limit, 1))
            (options.out / f"{side}_{rows}.log").write_text(run.stderr)
            why = f"failed: {(run.stderr.strip().splitlines() or [''])[-1][:300]}"
            cell = json.loads(run.stdout.strip().splitlines()[-1]) if run.returncode == 0 else None
        except subprocess.TimeoutExpired:
            cell = None
        cell = cell or dict(side=side, rows=int(rows), length=options.length, why=why)
        found.append(cell)
        with (options.out / "train_lora.jsonl").open("a") as file:
            file.write(json.dumps(cell) + "\n")
        print(line(cell), flush=True)
    for mine in found:
        other = next((c for c in found if c["side"] == "peft" and c["rows"] == mine["rows"] and "seconds" in c), None)
        if mine["side"] == "ours" and "seconds" in mine and other is not None:
            print(f"rows={mine['rows']}: ours {other['seconds'] / mine['seconds']:.2f} times as fast as peft")


if __name__ == "__main__":
    main()
