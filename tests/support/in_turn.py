"""Cases in turn inside a process, for judges whose start is dear: one that fails, hangs or dies takes no other with it.

``judge_in_turn`` runs in the process, a ``Slice`` watches it from beside. A case has a folder under the slice's root:
log.txt says that the case began, found.json what was found. After a failure a new process takes the rest (or a new
fork the next case), so that no case runs in what a failed one left behind.
"""

import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn


def judge_in_turn(
    names: Iterable[str], root: Path, judge: Callable[[str, Path], dict[str, Any]], forks: bool = False
) -> NoReturn:
    """``judge(name, folder)`` for each name, its output in a log of its own, up to the first failure; ends the process.

    forks: each case in a fork of this process, which has started no more than what all of them need.
    Nothing at exit runs: that, too, may hang.
    """
    faulthandler.register(signal.SIGUSR1)  # by which a slice asks where a case hangs
    for name in names:
        if forks and (process := os.fork()):
            if code := os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]):
                os._exit(abs(code))
            continue
        (root / name).mkdir(parents=True, exist_ok=True)
        with open(root / name / "log.txt", "w") as log:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
                os.dup2(log.fileno(), stream.fileno())
        began = time.monotonic()
        try:
            found = judge(name, root / name)
        except Exception as error:
            traceback.print_exc()
            found = dict(error=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        part = root / name / "found.part"
        part.write_text(json.dumps(found | dict(seconds=time.monotonic() - began)))
        part.rename(root / name / "found.json")
        if forks or "error" in found:
            break
    sys.stdout.flush()
    os._exit(0)


class Slice:
    """Cases that one process after another judges, each up to a limit of seconds, its start as well.

    Args:
        command: whose process calls ``judge_in_turn`` with the names that are appended, commas between them, and root.
        root: of the cases' folders; slices that have no case in common may share it.
    """

    def __init__(
        self, command: Sequence[str], names: Sequence[str], root: Path, limit: float, environment: Mapping[str, str]
    ):
        self.left = list(names)
        self.starts: list[float] = []  # seconds of each process up to its first case
        self.root, self._command, self._limit, self._environment = root, [*command], limit, environment
        self._process: subprocess.Popen[bytes] | None = None

    def _start(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        self._log = self.root / f"{self.left[0]}_start.txt"
        with open(self._log, "w") as log:
            self._process = subprocess.Popen(
                [*self._command, ",".join(self.left)],
                env=self._environment,
                stdout=log,
                stderr=log,
                start_new_session=True,  # stop() ends its workers with it
            )
        self._since, self._case, self._is_first = time.monotonic(), "", True  # of what runs now: a start, or a case

    def poll(self) -> list[tuple[str, dict[str, Any]]]:
        """Cases that ended since the last call, with what ``judge`` gave and "seconds"; for a failure "error" is there.

        A process that ends before its first case begins fails all of them.
        """
        found = []
        if self.left and self._process is None:
            self._start()
        has_ended = self._process is not None and self._process.poll() is not None  # asked before files are looked at
        while self.left and (self.root / self.left[0] / "found.json").exists():
            self._begin()
            name = self.left.pop(0)
            result = json.loads((self.root / name / "found.json").read_text())
            found.append((name, self._with_log(result, self.root / name / "log.txt")))
            self._since, self._case = time.monotonic(), ""
        if self.left and (self.root / self.left[0] / "log.txt").exists():
            self._begin()
        seconds = time.monotonic() - self._since if self._process is not None else 0.0
        if has_ended or seconds > self._limit:
            failed = self.left[: len(self.left) if self._is_first else len(self._case) > 0]
            code = self.stop(asks_where=True)
            error = f"its process ended with {code}" if has_ended else f"{self._limit:.0f} s are over"
            log = self.root / self._case / "log.txt" if self._case else self._log
            error = error if self._case else f"{error} before the first case"
            found += [(name, self._with_log(dict(error=error, seconds=seconds), log)) for name in failed]
            self.left = self.left[len(failed) :]
        elif not self.left:
            self.stop()
        return found

    def _begin(self) -> None:
        if self._case:
            return
        now = time.monotonic()
        if self._is_first:
            self.starts.append(now - self._since)
        self._since, self._case, self._is_first = now, self.left[0], False

    def _with_log(self, found: dict[str, Any], log: Path) -> dict[str, Any]:
        """An error with the last two other lines about errors from a log."""
        if "error" in found:
            lines = [line.strip()[:200] for line in log.read_text(errors="replace").splitlines()]
            said = dict.fromkeys(line for line in lines if "Error" in line and "_C" not in line)
            found["error"] = " | ".join([found["error"], *[line for line in said if line != found["error"]][-2:]])
        return found

    def stop(self, asks_where: bool = False) -> int | None:
        """End the process and what it started. Gives its exit code if it had ended by itself.

        asks_where: stacks of its threads, and those of its forks, go to the log first.
        """
        if self._process is None:
            return None
        process, self._process = self._process, None
        code = process.poll()
        if code is None and asks_where:
            os.killpg(process.pid, signal.SIGUSR1)
            time.sleep(0.3)  # for the stacks to be written
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
        return code


def run(slices: Sequence[Slice], total: float | None = None) -> Iterator[tuple[Slice, str, dict[str, Any]]]:
    """(slice, name, found) of each case as it ends, of all slices side by side; none later than ``total`` seconds."""
    end = float("inf") if total is None else time.monotonic() + total
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which leaves no process behind either
    try:
        while any(one.left for one in slices) and time.monotonic() < end:
            for one in slices:
                for name, found in one.poll():
                    yield one, name, found
            time.sleep(0.1)
    finally:
        for one in slices:
            one.stop()
        signal.signal(signal.SIGTERM, before)


def gpus_of_slices(jobs: int, count: int = 1) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each slice: ``count`` of the GPUs of this process, in turn."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
        visible = ",".join(str(index) for index in range(len(found.splitlines())))
    gpus = visible.split(",")
    groups = [",".join(gpus[first : first + count]) for first in range(0, len(gpus) - count + 1, count)]
    if not groups:
        raise SystemExit(f"{count} GPUs are needed for an engine, this process sees {len(gpus)}: {visible}")
    return [groups[index % len(groups)] for index in range(jobs)]


def summary(names: Sequence[str], verdicts: Mapping[str, str], slices: Sequence[Slice]) -> int:
    """Prints how many cases have which verdict, and how long processes started. Gives 1 where any is FAIL, else 0."""
    counts = [f"{list(verdicts.values()).count(verdict)} {verdict}" for verdict in ("PASS", "FAIL", "LEFT", "NEITHER")]
    missed = [name for name in names if name not in verdicts]
    starts = [seconds for one in slices for seconds in one.starts]
    print(f"{', '.join(counts)}, {len(missed)} not reached{':' if missed else ''} {', '.join(missed)}".rstrip())
    print(f"{len(starts)} processes started, in {max(starts, default=0):.0f} s at most", flush=True)
    return int("FAIL" in verdicts.values())
