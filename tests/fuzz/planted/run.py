"""Does the fuzz find faults that are known to be there?

    python tests/fuzz/planted/run.py [NAME ...] [> benchmarks/results/fuzz_planted.txt]

Plants each fault of ``faults``, or those that are named, into the library and fuzzes until an iteration fails, 1,040 at
most. A line says how it was found. The exit code is 1 if one was not found. Run it after a change of ``bases``,
``damage`` or ``decoder``: a fault that stays hidden is a hole in them. A crash finds nothing: every fault accepts too
much, so what crashes is its patch or the decoder.
"""

import contextlib
import os
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[3])]
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"  # for meshes

import jax

from tests.fuzz.planted.faults import FAULTS
from tests.fuzz.run import Fuzzer

ITERATIONS = 1040
CRASHES = ("reload: ", "accepted, but the decoder fails")


def found(fault, root: Path, iterations: int = ITERATIONS) -> tuple[bool, str]:
    """Whether a planted fault was found, and how, or what went wrong instead."""
    with contextlib.ExitStack() as patches:
        for patch in fault():
            patches.enter_context(patch)
        try:
            fuzzer = Fuzzer(root)
        except AssertionError as error:
            return True, f"by {error}"
        for i in range(iterations):
            what, outcome, problem = fuzzer.run(i)
            if problem:
                is_crash = outcome in ("crash", "hang") or problem.startswith(CRASHES)
                return not is_crash, f"by iteration {i}, {what}: {problem}"
    return False, "by no iteration"


def main() -> int:
    jax.config.update("jax_disable_most_optimizations", True)
    chosen = [fault for fault in FAULTS if fault.__name__ in sys.argv[1:] or not sys.argv[1:]]
    hidden = 0
    for fault in chosen:
        with tempfile.TemporaryDirectory() as root:
            is_found, how = found(fault, Path(root))
        hidden += not is_found
        print(f"{fault.__name__}: {'found' if is_found else 'NOT FOUND'} {how}"[:200], flush=True)
    print(f"{len(chosen) - hidden} of {len(chosen)} found within {ITERATIONS} iterations")
    return 1 if hidden else 0


if __name__ == "__main__":
    sys.exit(main())
