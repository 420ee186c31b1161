"""Signals of the program: one line, the exit code that shells know, nothing left behind, at any moment."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.fuzz import bases

LINES = {
    signal.SIGINT: "moe-jax: interrupted\n",
    signal.SIGTERM: "moe-jax: ended by SIGTERM\n",
    signal.SIGHUP: "moe-jax: ended by SIGHUP\n",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("plain") / "model"
    bases.write(directory, bases.plain(np.random.default_rng(0)))
    return directory


@pytest.fixture
def start():
    """The program, once it has seen to its signals; before that only the interpreter has run.

    It would ignore what the tests ignore: SIGHUP under nohup, SIGINT in the background of a script.
    """
    processes, ignored = [], [number for number in LINES if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)

    def process(*arguments, program=("-m", "moe_jax"), **options):
        command = [sys.executable, "-W", "ignore", *program, *map(str, arguments)]
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, **options))
        wait_for(lambda: is_blocked(processes[-1].pid))
        return processes[-1]

    yield process
    for each in processes:
        each.kill()
        each.wait()
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


def is_blocked(pid):
    mask = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigBlk"))
    return int(mask.split()[1], 16) >> signal.SIGTERM - 1 & 1


def wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def check_ended(process, number):
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (-number, "", LINES[number])


@pytest.mark.parametrize("delay", [0, 0.1, 0.2])
def test_while_the_program_is_imported(start, model, delay):
    process = start("run", "--model", model, "--input-ids", "1,2")
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    check_ended(process, signal.SIGINT)


# The program, held at one call of the system; a file says that it has got there.
STOPPED = """
import os, sys, time
from moe_jax import _signals
_signals.end_on_signals("moe-jax")
from moe_jax.cli import main
name, count, flag, *arguments = sys.argv[1:]
real, calls = getattr(os, name), []
def patched(*args, **kwargs):
    calls.append(1)
    if len(calls) == int(count):
        open(flag, "w").close()
        while name == "pwrite":
            pass
        time.sleep(100)
    return real(*args, **kwargs)
setattr(os, name, patched)
sys.exit(main(arguments))
"""


@pytest.mark.parametrize("delay", [0.4, 0.8, 1.2, 1.6])
@pytest.mark.sample(2)
def test_while_a_model_is_opened(start, model, tmp_path, delay):
    """Still importing, or held where it opens the model, so that it cannot end by itself on a fast machine."""
    arguments = ("open", "1", tmp_path / "flag", "run", "--model", model, "--input-ids", "1,2")
    process = start(*arguments, program=("-c", STOPPED))
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    check_ended(process, signal.SIGINT)


@pytest.mark.parametrize("number", LINES)
@pytest.mark.parametrize("place", ["pwrite:1", "pwrite:4", "fsync:1", "rename:1"])
@pytest.mark.sample(4)
def test_while_a_checkpoint_is_written(start, model, tmp_path, number, place):
    """Busy in Python, or asleep in the system: the directory vanishes, and the process with it."""
    flag, target = tmp_path / "flag", tmp_path / "new" / "out"
    arguments = (*place.split(":"), flag, "quantize", model, target, "--scheme", "bf16")
    process = start(*arguments, program=("-c", STOPPED))
    wait_for(flag.exists)
    assert any(path.name.startswith(".out.partial-") for path in target.parent.iterdir())
    process.send_signal(number)
    check_ended(process, number)
    assert [path.name for path in tmp_path.iterdir()] == ["flag"]


def test_a_signal_that_is_to_be_ignored_stays_so(start, model, tmp_path):
    """As nohup does."""
    process = start(
        "quantize", model, tmp_path / "out", "--scheme", "bf16",
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )  # fmt: skip
    process.send_signal(signal.SIGHUP)
    assert process.wait(120) == 0 and (tmp_path / "out" / "config.json").is_file()


def test_a_pipe_that_nobody_reads_is_no_traceback(start, model):
    process = start("inspect", model)
    process.stdout.close()
    assert process.wait(120) == 2 and process.stderr.read() == ""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_behind_stdout_is_one_line(model, unbuffered):
    """Whether printing fails, or what was printed goes out when all is done."""
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "moe_jax", "inspect", str(model)]
        environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, env=environment)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("moe-jax") and done.stderr.endswith(f": [Errno 28] {os.strerror(28)}\n")
