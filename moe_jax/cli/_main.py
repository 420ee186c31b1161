"""The command line: ``moe-jax inspect | run | quantize | bench | autotune | demo | doctor``.

Bad input gives one line on stderr and exit code 2.
"""

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from moe_jax._signals import hold_if_ending
from moe_jax._terminal import cut, printable
from moe_jax._version import __version__
from moe_jax.cli._progress import progress_bar

EXIT_PROBLEM, EXIT_BAD_INPUT = 1, 2
EXIT_INTERRUPTED = 130  # as shells report the signal
DTYPES = ("bfloat16", "float16", "float32")
_MODEL = "a checkpoint directory, or a model on the Hugging Face hub, which is downloaded unless it is in the cache"
_REVISION = "branch, tag or commit on the hub (default main)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. argv: arguments, None takes those of the process. Returns the exit code."""
    parser = build_parser()
    try:
        args = parser.parse_args(argv)
    except SystemExit as stop:  # argparse prints its own line; 0 after --help, 2 after a usage error
        return int(stop.code or 0)
    try:
        return args.handler(args)
    except KeyboardInterrupt:
        print(f"moe-jax {args.command}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        hold_if_ending()
        return EXIT_BAD_INPUT  # nobody reads what is printed any more, as behind ``| head``
    except Exception as error:
        hold_if_ending()
        if os.environ.get("MOE_JAX_TRACEBACK"):
            raise
        # An error that nobody phrased for a reader at least says what kind it is.
        kind = (
            ""
            if isinstance(error, ValueError | NotImplementedError | OSError | ImportError)
            else f"{type(error).__name__}: "
        )
        print(f"moe-jax {args.command}: {kind}{one_line(error)}", file=sys.stderr)
        return EXIT_BAD_INPUT


def finish(code: int) -> int:
    """The exit code of the process, once what was printed has gone out; nobody reading it any more is no problem."""
    if sys.stdout is None:  # closed by whoever started the process
        return code
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter tries again at its end
        if not isinstance(error, BrokenPipeError):
            print(f"moe-jax: stdout: {one_line(error)}", file=sys.stderr)
        return EXIT_BAD_INPUT
    return code


def one_line(error: BaseException) -> str:
    """The error's text as one harmless line: white space folded to blanks, what a terminal would obey escaped."""
    text = cut(" ".join(str(error).split()))
    return printable(text) or type(error).__name__


def _file(text: str) -> Path:
    """The path of a file to write. A name that ends as one of a directory is refused; ``Path`` would drop the end."""
    if text.endswith((os.sep, f"{os.sep}.")):
        raise argparse.ArgumentTypeError(f"{printable(text)} is the name of a directory, expected that of a file")
    return Path(text)


class _Parser(argparse.ArgumentParser):
    """Says of an option or a command that does not exist which one may have been meant."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._given = [*(sys.argv[1:] if args is None else args)]
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        commands: dict[str, argparse.ArgumentParser] = {}
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                commands = dict(action.choices)
        command = next((commands[text] for text in self._given if text in commands), None)
        options = [name for action in (command or self)._actions for name in action.option_strings]
        for given in (text.partition("=")[0] for text in self._given):
            names = options if given.startswith("--") else [] if command else list(commands)
            if len(given) > 2 and not any(name.startswith(given) for name in names):
                for near in difflib.get_close_matches(given, names, 1):
                    message = f"{printable(given)}: did you mean {near}? ({message})"
        super().error(message)


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="moe-jax",
        description="Run quantized Mixture-of-Experts checkpoints in JAX. Set MOE_JAX_TRACEBACK=1 to see tracebacks.",
    )
    parser.add_argument("--version", action="version", version=f"moe-jax {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    inspect = commands.add_parser(
        "inspect",
        help="what is in a checkpoint, how it would run, and what is wrong with it",
        description="Reads config.json, headers and the scales of experts; weights are checked when they are loaded.",
    )
    inspect.add_argument("directory", metavar="DIR|ORG/NAME")
    inspect.add_argument("--revision", metavar="REV", help=_REVISION)
    inspect.set_defaults(handler=_inspect)

    _add_run(commands.add_parser("run", help="load a checkpoint and generate"))

    demo = commands.add_parser("demo", help="write a small checkpoint, run it in several schemes, compare")
    demo.add_argument("--out", type=Path, default=Path("demo_out"), metavar="DIR")
    demo.add_argument("--all", action="store_true", help="every variant of every format, which takes minutes")
    demo.set_defaults(handler=_demo)

    quantize = commands.add_parser("quantize", help="write a checkpoint in another scheme, as compressed-tensors does")
    quantize.add_argument("source", metavar="SRC", help=_MODEL)
    quantize.add_argument("--revision", metavar="REV", help=_REVISION)
    quantize.add_argument("destination", type=Path, metavar="DST", help="must not exist, or be an empty directory")
    quantize.add_argument("--scheme", required=True, metavar="SCHEME", help="such as fp8_block, w4a16_g128 or nvfp4")
    quantize.add_argument("--modules", default="experts", metavar="experts|all", help="all: attention and the like too")
    quantize.add_argument("--ignore", nargs="*", default=(), metavar="NAME|re:REGEX", help="modules to leave out")
    quantize.add_argument("--scale-search", metavar="mse", help="scales of least squared error; slow")
    quantize.set_defaults(handler=_quantize)

    bench = commands.add_parser(
        "bench",
        help="time a layer of experts beside the measured limits of this machine",
        description="Random weights and routing. What is left out is chosen for the device: small on a CPU.",
    )
    bench.add_argument("--model", metavar="SHAPE", help="such as qwen3-30b-a3b, or experts,top_k,hidden,intermediate")
    bench.add_argument("--scheme", metavar="NAME[,NAME]", help="such as bf16,fp8_channel")
    bench.add_argument("--tokens", metavar="N[,N]", help="tokens in a call, such as 1,64,1024")
    bench.add_argument("--implementation", metavar="NAME[,NAME]", help="ordered implementations to try")
    bench.add_argument("--json", type=_file, metavar="FILE", help="write the figures")
    bench.add_argument("--png", type=_file, metavar="FILE", help="write a roofline; needs matplotlib")
    bench.set_defaults(handler=_bench)

    _add_autotune(commands.add_parser("autotune", help="measure kernel configurations for a model on this GPU"))

    doctor = commands.add_parser(
        "doctor",
        help="what this machine is, what will run each scheme on it, and what is missing",
        description="Looks at versions, devices, memory, kernels and packages. Exit code 1 when it finds a problem.",
    )
    doctor.set_defaults(handler=_doctor)
    return parser


def _add_autotune(autotune: argparse.ArgumentParser) -> None:
    autotune.description = (
        "Times configurations of both products of the model's layers of experts, and keeps the fastest in a table in "
        "the user's cache folder, which is read before the tables that are shipped. What the table has is left alone."
    )
    autotune.add_argument(
        "--model", required=True, metavar="DIR|ORG/NAME|SHAPE", help=f"{_MODEL}; or a shape, as bench takes it"
    )
    autotune.add_argument("--revision", metavar="REV", help=_REVISION)
    autotune.add_argument(
        "--scheme", metavar="NAME[,NAME]", help="of a shape, or to which a checkpoint is quantized while loading"
    )
    autotune.add_argument("--tokens", default="1,16,64,256,1024,8192", metavar="N[,N]", help="tokens in a call")
    autotune.add_argument("--mesh", metavar="expert=4,tensor=2", help="measure one device's shard of each layer")
    autotune.add_argument("--dtype", choices=DTYPES[:2], default="bfloat16", help="computation dtype")
    autotune.add_argument("--again", action="store_true", help="measure what the table has as well")
    autotune.set_defaults(handler=_autotune)


def _add_run(run: argparse.ArgumentParser) -> None:
    run.add_argument("--model", required=True, metavar="DIR|ORG/NAME", help=_MODEL)
    run.add_argument("--revision", metavar="REV", help=_REVISION)
    source = run.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT")
    source.add_argument("--prompts", type=Path, metavar="FILE", help="a prompt per line, or JSON lines in FILE.jsonl")
    source.add_argument("--input-ids", metavar="1,2,3|FILE.npy")
    run.add_argument("--chat", action="store_true", help="a prompt is what a user says: apply the chat template")
    run.add_argument(
        "--chat-template-kwargs", metavar="JSON", help="""variables of the template: '{"enable_thinking": false}'"""
    )
    run.add_argument("--batch-size", type=int, default=8, metavar="N", help="prompts of a file at a time (default 8)")
    run.add_argument(
        "--num-pages",
        metavar="N|auto",
        help="keep keys and values of a file's prompts in so many pages of 64 slots (default: slots of each row's own)",
    )
    run.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="0 only scores the prompt (default: as generation_config.json says, else 32)",
    )
    run.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT|ID",
        help="end before this text, or with this id for --input-ids; may be repeated, besides the model's end tokens",
    )
    run.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="0 is greedy, above 0 samples (default: as generation_config.json says, else 0)",
    )
    run.add_argument("--top-p", type=float, metavar="P", help="sample among the likeliest tokens that reach P together")
    run.add_argument("--top-k", type=int, metavar="K", help="sample among the K likeliest tokens")
    run.add_argument(
        "--generation-config",
        choices=("auto", "vllm"),
        default="auto",
        help="vllm: choose tokens by the options alone; the end tokens of generation_config.json hold all the same",
    )
    run.add_argument("--seed", type=int, metavar="N", help="of the samples (default 0)")
    run.add_argument(
        "--quantize", metavar="SCHEME", help="quantize the experts of a full-precision checkpoint while loading"
    )
    run.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="computation dtype (default bfloat16)")
    run.add_argument("--kv-cache-dtype", choices=("auto", "fp8", *DTYPES), help="of the cache (default auto)")
    run.add_argument(
        "--max-num-batched-tokens", type=int, metavar="N", help="read longer prompts in chunks (default 8192)"
    )
    run.add_argument(
        "--pinned-tokens", type=int, metavar="N", help="N tokens at a time, so that bits depend on nothing beside a row"
    )
    run.add_argument("--implementation", metavar="NAME[,NAME]", help="ordered implementations to try")
    run.add_argument("--mesh", metavar="expert=4,tensor=2", help="devices per axis")
    run.add_argument(
        "--enable-eplb", action="store_true", help="move experts between batches, by load; needs an expert axis"
    )
    run.add_argument(
        "--num-redundant-experts", type=int, default=0, metavar="N", help="slots for copies of busy experts (default 0)"
    )
    run.add_argument(
        "--logits-out", type=_file, metavar="FILE.npy", help="write float32 (S, vocab) logits of the prompt"
    )
    run.set_defaults(handler=_run)


def _inspect(args: argparse.Namespace) -> int:
    from moe_jax.cli._inspect import inspect_checkpoint

    report = inspect_checkpoint(args.directory, revision=args.revision)
    print(report.render())
    return EXIT_BAD_INPUT if report.problems else 0


def _run(args: argparse.Namespace) -> int:
    from moe_jax.cli._run import run

    return run(args)


def _quantize(args: argparse.Namespace) -> int:
    from moe_jax.writing import quantize_checkpoint

    with progress_bar("writing", unit="B") as progress:
        written = quantize_checkpoint(
            args.source,
            args.destination,
            scheme=args.scheme,
            revision=args.revision,
            modules=args.modules,
            ignore=args.ignore,
            scale_search=args.scale_search,
            progress=progress,
        )
    where = printable(str(written.directory))
    print(f"wrote {where}: {written.scheme.name}, {len(written.files)} files, {written.nbytes / 1e9:.2f} GB")
    print(f"copied: {printable(', '.join(written.copied)) or 'nothing'}")
    for name, reason in written.left.items():
        print(printable(f"not copied: {name} ({reason})"))
    for what, kinds in (("layers of experts", written.experts), ("other matrices", written.linears)):
        if kinds:
            print(f"{what}: {', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))}")
    if written.is_lossy_twice:
        print("requantized: the source was quantized already, so the errors of both formats add up")
    return 0


def _demo(args: argparse.Namespace) -> int:
    from moe_jax.cli._demo import run_demo

    run_demo(args.out, all_schemes=args.all)
    return 0


def _bench(args: argparse.Namespace) -> int:
    from moe_jax.cli.bench._command import run_bench

    return EXIT_PROBLEM if run_bench(args) else 0


def _autotune(args: argparse.Namespace) -> int:
    from moe_jax.cli._autotune import run_autotune

    return EXIT_PROBLEM if run_autotune(args) else 0


def _doctor(args: argparse.Namespace) -> int:
    from moe_jax.cli._doctor import diagnose

    diagnosis = diagnose()
    print(diagnosis.render())
    return EXIT_PROBLEM if diagnosis.problems else 0


if __name__ == "__main__":
    sys.exit(main())
