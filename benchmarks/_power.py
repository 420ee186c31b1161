"""What nvidia-smi sees of a GPU while something runs: clock, power, and whether the power cap lowers the clock."""

import contextlib
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

_QUERY = "clocks.sm,power.draw.instant,clocks_event_reasons.active"
_POWER_CAP = 4  # of clocks_event_reasons.active
_CHUNK_S = 0.15


class Samples:
    """One entry for each sample, every 20 ms; the first third is left out. clocks: MHz. reasons: bits."""

    def __init__(self) -> None:
        self.clocks: list[float] = []
        self.watts: list[float] = []
        self.reasons: list[int] = []

    def read(self, text: str) -> None:
        rows = [line.split(", ") for line in text.splitlines() if line.count(",") == 2]
        for clock, watts, reasons in rows[len(rows) // 3 :]:
            self.clocks.append(float(clock))
            self.watts.append(float(watts))
            self.reasons.append(int(reasons, 16))

    @property
    def at_power_cap(self) -> float:
        """The fraction of samples whose clock the power cap lowers."""
        return statistics.mean(bool(reasons & _POWER_CAP) for reasons in self.reasons)


@contextlib.contextmanager
def watched(gpu: str) -> Iterator[Samples]:
    """Samples of a GPU, by nvidia-smi's own number or UUID; filled when the block ends, empty without nvidia-smi."""
    samples = Samples()
    if shutil.which("nvidia-smi") is None:
        yield samples
        return
    with tempfile.TemporaryFile("w+") as log:
        command = ["nvidia-smi", "-i", gpu, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits", "-lms", "20"]
        smi = subprocess.Popen(command, stdout=log)
        try:
            yield samples
        finally:
            smi.kill()
            smi.wait()
        log.seek(0)
        samples.read(log.read())


def own_gpu() -> str:
    """The first GPU that this process may use."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"


def sustained(run: Callable[[int], None], seconds: float, call_s: float) -> dict[str, Any]:
    """Calls without a rest for so many seconds, in chunks of 0.15 s.

    run: makes so many calls and waits for them. call_s: seconds of one call, about.

    Returns ``sustained_ms``, the median of a call in the later half of the chunks; and of the samples meanwhile the
    medians ``watts`` and ``sm_mhz`` and ``at_power_cap``, the fraction of them at the power cap; None without samples.
    """
    count, until, times = max(1, int(_CHUNK_S / call_s)), time.perf_counter() + seconds, []
    with watched(own_gpu()) as samples:
        while time.perf_counter() < until or not times:
            start = time.perf_counter()
            run(count)
            times.append((time.perf_counter() - start) / count)
    found: dict[str, Any] = dict(sustained_ms=round(statistics.median(times[len(times) // 2 :]) * 1e3, 3))
    if not samples.clocks:
        return found | dict(watts=None, sm_mhz=None, at_power_cap=None)
    clock, watts = statistics.median(samples.clocks), statistics.median(samples.watts)
    return found | dict(watts=round(watts), sm_mhz=round(clock), at_power_cap=round(samples.at_power_cap, 2))
