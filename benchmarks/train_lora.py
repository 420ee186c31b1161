"""Time and peak memory of a LoRA step beside 4-bit experts, and of transformers + peft at the same shape.

    python benchmarks/train_lora.py --out DIR [--model qwen3-30b-a3b] [--layers 2] [--rows 4,16] [--length 1024]
        [--scheme w4a16_g128] [--rank 16] [--no-head] [--sides ours,peft,bitsandbytes] [--seconds 225]
    JAX_PLATFORMS=cpu python benchmarks/train_lora.py --tiny --out DIR       # tries the script out anywhere

Random weights at the true sizes of a layer, made on the device, as many layers as ``--layers`` says; embedding and head
included. One step: forward, backward, and AdamW over adapters of rank ``--rank`` on all experts and projections of
attention. Layers are computed again in the backward pass (``remat``, gradient checkpointing). Ours holds experts in
``--scheme``. peft runs beside experts in bfloat16 (``target_parameters``; transformers' ``grouped_mm`` where it runs).
``load_in_4bit`` of transformers 5 leaves these as they are: it replaces ``nn.Linear``, and its experts are one
parameter a layer (bitsandbytes issue 1849). Side "bitsandbytes" therefore quantizes them to nf4 by
``bitsandbytes.nn.parametrize.replace_parameter_4bit``, which dequantizes a layer's experts whole in each use.

Each cell runs in a process of its own, which ends when its share of ``--seconds`` is over; results are written as they
come, to DIR/train_lora.jsonl.

Peak memory is compared with what the math needs, ``needed_activations``: (peak - weights - adapters, gradients of these
and AdamW's state) / needed. Goal: at most 1.3. Our peak is that of XLA's plan of the step: arguments + outputs -
aliased + temporary, each in ``plan``; ``device_peak`` is that of the process, making the weights included.

At the size of a few layers the logits decide the peak. With ``--no-head`` the loss is a product of the last hidden
states with a vector, so that a layer's activations decide it; the head's weights stay where they are.
"""

import argparse
import functools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from _model_configs import MODELS
from _workers import ENVIRONMENT

_TINY = dict(hidden_size=256, intermediate_size=128, moe_intermediate_size=128, num_attention_heads=2, vocab_size=512)
_TINY |= dict(num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, head_dim=64)
_WARM, _STEPS = 2, 5
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")


def sizes_of(options: Any) -> dict[str, Any]:
    return MODELS[options.model] | (_TINY if options.tiny else {}) | {"num_hidden_layers": options.layers}


def needed_activations(
    sizes: dict[str, Any], rows: int, length: int, rank: int, itemsize: int = 2, *, has_head: bool = True
) -> dict[str, int]:
    """Bytes that a step must hold at once when layers are computed again in the backward pass.

    Two moments compete. In the backward pass of the head: the inputs of all layers, logits and their cotangent in
    float32; without it the last hidden states and theirs. In that of a layer: the inputs of all layers, and what is
    inside of one. Softmax weights count once in float32, with their cotangent; rows of experts count without copies of
    their input.
    """
    t, h, d = rows * length, sizes["hidden_size"], sizes["head_dim"]
    queries, keys = sizes["num_attention_heads"] * d, sizes["num_key_value_heads"] * d
    inner, k, e = sizes["moe_intermediate_size"], sizes["num_experts_per_tok"], sizes["num_experts"]
    inputs = (sizes["num_hidden_layers"] + 1) * t * h * itemsize
    head = 2 * t * sizes["vocab_size"] * 4 if has_head else 2 * t * h * itemsize
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

    family, config = read_family(sizes_of(options), options.model)
    schemes = dict.fromkeys(range(options.layers), moe_jax.Scheme.parse(options.scheme))
    dtype = jnp.float32 if options.tiny else jnp.bfloat16  # some bfloat16 products do not run on a CPU
    model = family(config, schemes=schemes, max_seq_len=32768, dtype=dtype, rngs=nnx.Rngs(0))
    model = moe_jax.lora(model, options.rank, 2 * options.rank, ("w13", "w2", "attention"), rngs=nnx.Rngs(1))
    print(model.moe_blocks()[0].experts.explain(num_tokens=rows * options.length), file=sys.stderr)
    structure, adapters, frozen = nnx.split(model, moe_jax.LoRAParam, ...)
    optimizer = optax.adamw(1e-4)
    opt_state = optimizer.init(adapters)
    direction = jax.random.normal(jax.random.key(3), (config.hidden_size,), dtype)

    def step(adapters, opt_state, frozen, ids):
        def loss(adapters):
            model = nnx.merge(structure, adapters, frozen)
            if options.no_head:
                return (model.hidden_states(ids, remat=True)[0] @ direction).astype(jnp.float32).mean()
            logits = model(ids, remat=True)
            return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:]).mean()

        value, grads = jax.value_and_grad(loss)(adapters)
        updates, opt_state = optimizer.update(grads, opt_state, adapters)
        return optax.apply_updates(adapters, updates), opt_state, value

    ids = jax.random.randint(jax.random.key(2), (rows, options.length), 0, config.vocab_size)
    start = time.perf_counter()
    # The head's weights count among the arguments without a head too.
    program = jax.jit(step, donate_argnums=(0, 1), keep_unused=True)
    compiled = program.lower(adapters, opt_state, frozen, ids).compile()
    compile_s = time.perf_counter() - start
    memory: Any = compiled.memory_analysis()
    states = nbytes((adapters, opt_state))
    plan = dict(
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
    )
    found = dict(
        weights=nbytes(frozen),
        trained=states + nbytes(adapters),
        plan=plan,
        peak=plan["arguments"] + plan["outputs"] - plan["aliased"] + plan["temporary"],
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
    return found | dict(
        seconds=seconds, device_peak=stats.get("peak_bytes_in_use"), losses=[float(losses[0]), float(losses[-1])]
    )


# -- transformers and peft -------------------------------------------------------------------------------------------


def in_4_bits(model: Any) -> tuple[int, str]:
    """Quantizes a model's experts. Returns bytes of their scales, which are no parameters, and the version."""
    import bitsandbytes  # pyright: ignore[reportMissingImports]
    from bitsandbytes.nn.parametrize import (  # pyright: ignore[reportMissingImports]
        Bnb4bitParametrization,
        replace_parameter_4bit,
    )

    for path, _ in list(model.named_parameters()):
        if path.endswith(EXPERTS):
            module, _, name = path.rpartition(".")
            replace_parameter_4bit(model.get_submodule(module), name, quant_type="nf4")
    scales = [part.quant_state.absmax for part in model.modules() if isinstance(part, Bnb4bitParametrization)]
    return sum(scale.nbytes for scale in scales), f", bitsandbytes {bitsandbytes.__version__}"


def theirs(options: Any, rows: int, *, quantizes: bool = False) -> dict[str, Any]:
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
    matrices = [name for name, _ in model.named_parameters() if name.endswith(EXPERTS)]
    scales, version = in_4_bits(model) if quantizes else (0, "")
    weights = scales + sum(parameter.nbytes for parameter in model.parameters())
    lora = peft.LoraConfig(
        r=options.rank,
        lora_alpha=2 * options.rank,
        target_modules=list(PROJECTIONS),
        target_parameters=matrices,  # whole names, which alone peft finds where parameters are quantized
    )
    model = peft.get_peft_model(model, lora)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    model.enable_input_require_grads()
    model.train()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    of_experts = sum(".experts." in name for name in trained)
    if of_experts != 2 * len(matrices):
        raise RuntimeError(f"peft gave the experts {of_experts} matrices to train, expected {2 * len(matrices)}")
    parameters = list(trained.values())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    ids = torch.randint(0, config.vocab_size, (rows, options.length), device=device)
    direction = torch.randn(config.hidden_size, device=device, dtype=torch.bfloat16)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def loss_of() -> Any:
        if options.no_head:
            hidden = model.get_base_model().model(ids, use_cache=False).last_hidden_state
            return (hidden @ direction).float().mean()
        return model(ids, labels=ids, use_cache=False).loss

    losses = []
    start = time.perf_counter()
    for count in range(_WARM + _STEPS):
        if count == _WARM:
            wait()
            start = time.perf_counter()
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
        loss = loss_of()
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
        versions=f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}"
        + version,
    )


SIDES = {"ours": ours, "peft": theirs, "bitsandbytes": functools.partial(theirs, quantizes=True)}


def measured(options: Any) -> dict[str, Any]:
    """One cell, in this process."""
    rows = int(options.rows)
    cell = SIDES[options.side](options, rows)
    itemsize = 4 if options.tiny and options.side == "ours" else 2
    head: Any = dict(has_head=not options.no_head)
    needed = needed_activations(sizes_of(options), rows, options.length, options.rank, itemsize, **head)
    tokens = rows * options.length
    cell |= dict(side=options.side, model=options.model, layers=options.layers, rows=rows, length=options.length)
    cell |= head | dict(needed=needed, tokens_per_s=tokens / cell["seconds"], rank=options.rank)
    if cell["peak"] is not None:
        cell["activations"] = cell["peak"] - cell["weights"] - cell["trained"]
        cell["ratio"] = cell["activations"] / needed["peak"]
    return cell


def line(cell: dict[str, Any]) -> str:
    gib = 2**30
    start = f"{cell['side']:12s} rows={cell['rows']:3d} x {cell['length']}"
    if "seconds" not in cell:
        return f"{start}  {cell['why']}"
    start += "" if cell["has_head"] else " without head"
    text = f"{start}  {cell['seconds'] * 1e3:9.1f} ms a step  {cell['tokens_per_s']:9.0f} tokens/s"
    if cell["peak"] is None:
        return text
    text = (
        f"{text}  peak {cell['peak'] / gib:6.2f} GiB = weights {cell['weights'] / gib:.2f} + trained "
        f"{cell['trained'] / gib:.2f} + {cell['activations'] / gib:.2f}, needed {cell['needed']['peak'] / gib:.2f}: "
        f"ratio {cell['ratio']:.2f}"
    )
    if "plan" not in cell:
        return text
    parts = ", ".join(f"{name} {size / gib:.2f}" for name, size in cell["plan"].items())
    device_peak = "unknown" if cell["device_peak"] is None else f"{cell['device_peak'] / gib:.2f}"
    return f"{text}; plan: {parts}; peak of the device {device_peak}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rows", default="4,16", help="rows of a batch, one cell each")
    parser.add_argument("--length", type=int, default=1024, help="tokens in a row")
    parser.add_argument("--scheme", default="w4a16_g128")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=225, help="for all cells together")
    parser.add_argument("--no-head", action="store_true", help="a loss of the last hidden states")
    parser.add_argument("--sides", default="ours,peft", help=f"of {', '.join(SIDES)}")
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
    found = []
    for index, (side, rows) in enumerate(cells):
        limit = (deadline - time.monotonic()) / (len(cells) - index) * (1.5 if index + 1 < len(cells) else 1)
        command = [sys.executable, __file__, *sys.argv[1:], "--side", side, "--rows", rows]
        why = f"left out: not done within {limit:.0f} s"
        try:
            run = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=max(limit, 1))
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
        others = [c for c in found if c["side"] != "ours" and c["rows"] == mine["rows"] and "seconds" in c]
        for other in others if mine["side"] == "ours" and "seconds" in mine else ():
            faster = other["seconds"] / mine["seconds"]
            print(f"rows={mine['rows']}: ours {faster:.2f} times as fast as {other['side']}")


if __name__ == "__main__":
    main()
