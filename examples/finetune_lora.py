"""Train low-rank adapters beside 4-bit experts: packed sequences, gradient accumulation, checkpoints, a loss curve.

python examples/finetune_lora.py [DIR] [--steps 50] [--out runs/lora]       # DIR: a checkpoint; random weights if none
python examples/finetune_lora.py --size qwen3-30b-a3b --layers 4             # true sizes, random weights, one GPU
python examples/finetune_lora.py --size qwen3-30b-a3b --layers 2 --mesh expert=2      # the same on two GPUs
XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu \\
    python examples/finetune_lora.py --mesh expert=4,data=2                  # simulated devices

Run the same command again to go on where --out has stopped: the bits are those of a run that never stopped. To stop
early on purpose, give --schedule-steps the whole length and --steps less, and --steps more in the next command.

Its compiled programs lie in --out, too, unless JAX_COMPILATION_CACHE_DIR is set, to a place or to "" for none: on a GPU
XLA times algorithms for its products, and a process that compiled them again might choose others, which sum in another
order.
"""

import argparse
import hashlib
import json
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import moe_jax
from moe_jax.cli import _demo
from moe_jax.models import read_family
from moe_jax.parallel import parse_mesh

QWEN3_30B_A3B = _demo.CONFIG | dict(
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    max_position_embeddings=40960,
)
SIZES = {"tiny": _demo.CONFIG, "qwen3-30b-a3b": QWEN3_30B_A3B}
FREE = ("out", "steps", "save_every", "text")  # options that may change where a run goes on


def keep_programs(out):
    """Compile into ``out``, where the next command finds what this one ran. For a process that has compiled nothing."""
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(Path(out).absolute() / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)  # the small ones as well
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


# -- data ------------------------------------------------------------------------------------------------------------


def sentences(count, seed=0):
    """Documents of one to four sentences, so that there is something to learn; their words are those of the demo."""
    rng = np.random.default_rng(seed)
    things = "bird boat child cloud fish flower horse king moon queen river road school ship star tree".split()
    looks = "black bright cold dark good great little long old quiet silver small strong warm white young".split()
    deeds = "hear light meet open paint read see show sing take tell watch".split()
    deeds = [word for word in deeds if word in _demo.vocabulary()]

    def sentence():
        first, second = rng.choice(len(things), 2)
        deed = deeds[first % len(deeds)]  # what a thing does and looks like follows from the thing
        return f"the {looks[first]} {things[first]} can {deed} the {looks[second]} {things[second]} ."

    return [" ".join(sentence() for _ in range(rng.integers(1, 5))) for _ in range(count)]


def pack(documents, length):
    """Lists of token ids -> (ids, segment_ids), both (rows, length): the first row with room takes a document.

    segment_ids count the documents of a row from 1; 0 is padding. Longer documents are cut into pieces.
    """
    rows = []
    for document in documents:
        for start in range(0, len(document), length):
            piece = document[start : start + length]
            row = next((row for row in rows if sum(map(len, row)) + len(piece) <= length), None)
            if row is None:
                rows.append(row := [])
            row.append(piece)
    ids, segments = np.zeros((2, len(rows), length), np.int32)
    for index, row in enumerate(rows):
        joined = [(token, number) for number, piece in enumerate(row, 1) for token in piece]
        ids[index, : len(joined)], segments[index, : len(joined)] = zip(*joined, strict=True)
    return ids, segments


def batch_of(step, ids, segments, options, mesh):
    """What a step sees depends on its number and the seed alone: (accumulation steps, batch, length) each."""
    rng = np.random.default_rng([options.seed, step])
    rows = rng.integers(0, len(ids), (options.accumulate, options.batch_size))
    batch = dict(ids=ids[rows], segments=segments[rows])
    if mesh is None:
        return batch
    splits = "data" in mesh.shape and options.batch_size % mesh.shape["data"] == 0
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec(None, "data" if splits else None)))


# -- model and step --------------------------------------------------------------------------------------------------


def sizes_of(options):
    """config.json of random weights."""
    layers = {} if options.size == "tiny" else dict(num_hidden_layers=options.layers)
    return SIZES[options.size] | layers


def load(options, mesh):
    """(model with adapters, function from text to token ids)."""
    settings = dict(dtype=jnp.dtype(options.dtype), attention=options.attention)
    words = _demo.vocabulary()
    encode = lambda text: [words.get(word, 0) for word in text.split()]  # noqa: E731
    if options.directory is not None:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(Path(options.directory) / "tokenizer.json"))
        encode = lambda text: tokenizer.encode(text).ids  # noqa: E731
        model = moe_jax.load_pretrained(options.directory, quantize=options.quantize, mesh=mesh, **settings)
    elif options.size == "tiny" or mesh is not None:
        with tempfile.TemporaryDirectory() as folder:  # each device of a mesh reads its share
            _demo.write_checkpoint(Path(folder) / "random", options.seed, sizes_of(options))
            model = moe_jax.load_pretrained(f"{folder}/random", quantize=options.quantize, mesh=mesh, **settings)
    else:  # made on the device
        family, config = read_family(sizes_of(options), options.size)
        schemes = dict.fromkeys(config.moe_layers, moe_jax.Scheme.parse(options.quantize))
        model = family(config, schemes=schemes, rngs=nnx.Rngs(options.seed), **settings)
    targets = options.targets.split(",")
    model = moe_jax.lora(model, options.rank, options.alpha, targets, rngs=nnx.Rngs(options.seed + 1))
    return model, encode


def losses_of(model, ids, segments, options):
    """(sum of cross entropy over the tokens that have a next one in their sequence, auxiliary losses)."""
    logits, stats = model(ids, segment_ids=segments, remat=options.remat, return_stats=True)
    entropy = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:])
    entropy = jnp.where(has_target(segments), entropy, 0.0).sum()
    auxiliary = jnp.zeros((), jnp.float32)
    if options.balance:
        auxiliary += options.balance * moe_jax.load_balancing_loss(stats)
    if options.z_loss:
        auxiliary += options.z_loss * moe_jax.router_z_loss(stats)
    return entropy, auxiliary


def has_target(segments):
    """(..., S) -> (..., S - 1) bool: the next token belongs to the same sequence."""
    return (segments[..., 1:] == segments[..., :-1]) & (segments[..., 1:] != 0)


def make_optimizer(options):
    warmup = max(1, options.schedule_steps // 10)
    schedule = optax.warmup_cosine_decay_schedule(
        options.learning_rate / warmup, options.learning_rate, warmup, max(options.schedule_steps, warmup + 1)
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))


def make_step(structure, optimizer, options):
    """One update: gradients of all parts of a batch are added before it. Only the adapters have gradients."""

    def step(adapters, opt_state, frozen, batch):
        count = jnp.maximum(has_target(batch["segments"]).sum(), 1).astype(jnp.float32)  # rows may have no next token

        def loss(adapters, part):
            model = nnx.merge(structure, adapters, frozen)
            entropy, auxiliary = losses_of(model, part["ids"], part["segments"], options)
            value = entropy / count
            return value + auxiliary / options.accumulate, value

        def add(total, part):
            (_, value), grads = jax.value_and_grad(loss, has_aux=True)(adapters, part)
            return jax.tree.map(jnp.add, total, (grads, value)), None

        start = (jax.tree.map(jnp.zeros_like, adapters), jnp.zeros((), jnp.float32))
        (grads, value), _ = jax.lax.scan(add, start, batch)
        updates, opt_state = optimizer.update(grads, opt_state, adapters)
        return optax.apply_updates(adapters, updates), opt_state, value

    return step


# -- the run ---------------------------------------------------------------------------------------------------------


def laid_out(tree, mesh):
    """Every array with a place of its own, as a step returns it: without one, the second step would compile again. What
    lies on no mesh yet, as the optimizer's counters do, is whole on every device."""
    if mesh is None:
        return jax.device_put(tree, jax.devices()[0])
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda a: a if isinstance(a.sharding, NamedSharding) else jax.device_put(a, whole), tree)


def curve(losses, width=60, height=10):
    """The losses as lines of text."""
    chosen = np.interp(np.linspace(0, len(losses) - 1, min(width, len(losses))), range(len(losses)), losses)
    low, high = min(losses), max(losses)
    levels = np.round((chosen - low) / max(high - low, 1e-9) * (height - 1)).astype(int)
    lines = ["".join("*" if level == row else " " for level in levels) for row in range(height)][::-1]
    return "\n".join(
        f"{high if i == 0 else low:8.3f} |{line}" if i in (0, height - 1) else f"         |{line}"
        for i, line in enumerate(lines)
    )


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", help="checkpoint with tokenizer.json (default: small random weights)")
    parser.add_argument("--size", choices=SIZES, default="tiny", help="of random weights, without a directory")
    parser.add_argument("--layers", type=int, default=4, help="with --size other than tiny")
    parser.add_argument("--quantize", default="w4a16_g128", help="scheme for the experts (default: %(default)s)")
    parser.add_argument("--mesh", help="devices per axis, as expert=4,data=2 (default: one device)")
    parser.add_argument("--text", help="file with a document on each line (default: made-up sentences)")
    parser.add_argument("--out", default="runs/finetune_lora", help="checkpoints, losses and the adapter go here")
    parser.add_argument("--steps", type=int, default=50, help="stop after this many, those of earlier runs counted")
    parser.add_argument("--schedule-steps", type=int, help="length of the learning-rate schedule (default: --steps)")
    parser.add_argument("--save-every", type=int, default=25)
    parser.add_argument("--batch-size", type=int, default=4, help="rows that pass the model at once")
    parser.add_argument("--accumulate", type=int, default=2, help="batches whose gradients make one update")
    parser.add_argument("--length", type=int, default=64, help="tokens in a row")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--alpha", type=float, default=16)
    parser.add_argument("--targets", default="w13,w2,attention")
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--balance", type=float, default=0.0, help="factor of the load-balancing loss")
    parser.add_argument("--z-loss", type=float, default=0.0, help="factor of the router z-loss")
    parser.add_argument("--remat", action="store_true", help="compute layers again instead of keeping activations")
    parser.add_argument("--attention", default="xla")
    parser.add_argument("--dtype", default="float32" if jax.default_backend() == "cpu" else "bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    for name in ("steps", "save_every", "batch_size", "accumulate", "rank", "layers"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: expected at least 1")
    if options.length < 2:
        parser.error(f"--length {options.length}: expected at least 2, a token and the next one")
    options.schedule_steps = options.schedule_steps or options.steps
    return options


def read_documents(options):
    """The texts to train on. Raises SystemExit for a file that cannot be read or has none."""
    if options.text is None:
        return sentences(400, options.seed)
    try:
        documents = [line for line in Path(options.text).read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"--text {options.text}: {error}") from None
    if not documents:
        raise SystemExit(f"--text {options.text}: has no documents, expected one on each line")
    return documents


def check_settings(out, options, documents):
    """Options that decide what a step computes, and a hash of the documents, lie in settings.json: a run goes on with
    those that it began with."""
    settings = {name: value for name, value in vars(options).items() if name not in FREE}
    settings["documents"] = hashlib.sha256("\n".join(documents).encode()).hexdigest()[:16]
    path = out / "settings.json"
    if path.exists() and (out / "losses.json").exists():
        try:
            before = dict(json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise SystemExit(f"{path}: no settings of a run ({error}); give another --out") from None
        changed = [name for name in settings if settings[name] != before.get(name)]
        if changed:
            name = changed[0]
            raise SystemExit(
                f"{out} holds a run with {name}={before.get(name)}, not {settings[name]}: it goes on with the options "
                "that it began with, where --steps alone may grow (--schedule-steps stays); else give another --out"
            )
    try:
        out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings, indent=2))
    except OSError as error:
        raise SystemExit(f"--out {out}: {error.strerror}") from None


def main(argv=None):
    """Train and return (losses of all steps, the model)."""
    options = parse(argv)
    mesh = parse_mesh(options.mesh) if options.mesh else None
    out = Path(options.out).absolute()
    documents = read_documents(options)
    check_settings(out, options, documents)
    model, encode = load(options, mesh)
    ids, segments = pack([tokens for tokens in map(encode, documents) if tokens], options.length)
    if not has_target(segments).any():
        raise SystemExit("no document has two tokens: there is nothing to learn")
    filled = (segments > 0).mean()
    print(f"{len(documents)} documents in {len(ids)} rows of {options.length} tokens, {filled:.0%} of them filled")
    print(model.moe_blocks()[0].experts.explain(num_tokens=options.batch_size * options.length))

    structure, adapters, frozen = nnx.split(model, moe_jax.LoRAParam, ...)
    optimizer = make_optimizer(options)
    state = laid_out(dict(adapters=adapters, opt_state=optimizer.init(adapters)), mesh)
    places = jax.tree.map(lambda a: a.sharding, state)
    step = jax.jit(
        make_step(structure, optimizer, options),
        donate_argnums=(0, 1),
        out_shardings=(places["adapters"], places["opt_state"], None),
    )
    trained = sum(leaf.size for leaf in jax.tree.leaves(adapters))
    print(f"{trained:,} trained numbers on {1 if mesh is None else mesh.size} devices")

    losses, seconds = [], []
    with ocp.CheckpointManager(out / "checkpoints", options=ocp.CheckpointManagerOptions(max_to_keep=2)) as manager:
        done = manager.latest_step() or 0
        if done:
            state = manager.restore(done, args=ocp.args.StandardRestore(state))
            losses = json.loads((out / "losses.json").read_text())[:done]
            print(f"going on after step {done}")
        for number in range(done, options.steps):
            start = time.perf_counter()
            batch = batch_of(number, ids, segments, options, mesh)
            adapters, opt_state, loss = step(state["adapters"], state["opt_state"], frozen, batch)
            state = dict(adapters=adapters, opt_state=opt_state)
            losses.append(float(loss))
            seconds.append(time.perf_counter() - start)
            if number % 10 == 0 or number == options.steps - 1:
                print(f"step {number + 1:5d}  loss {losses[-1]:.4f}")
            if (number + 1) % options.save_every == 0 or number == options.steps - 1:
                (out / "losses.new").write_text(json.dumps(losses))
                (out / "losses.new").replace(out / "losses.json")  # whole, whenever the run is killed
                manager.save(number + 1, args=ocp.args.StandardSave(state))
    print(curve(losses))
    if len(seconds) > 1:
        tokens = options.accumulate * options.batch_size * options.length
        step_s = float(np.median(seconds[1:]))
        print(f"first step {seconds[0]:.1f} s, the others {step_s * 1e3:.1f} ms: {tokens / step_s:.0f} tokens/s")
    nnx.update(model, state["adapters"])
    moe_jax.save_lora(model, out / "adapter", base_model=options.directory or options.size)
    print(f"wrote {out / 'losses.json'}, checkpoints, and {out / 'adapter'} for peft")
    return losses, model


if __name__ == "__main__":
    keep_programs(parse().out)
    main()
