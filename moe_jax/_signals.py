"""SIGINT, SIGTERM and SIGHUP of the program: one thread waits for them, cleans up and ends the process.

Python's own way, an exception in the main thread, comes late (a compilation may take a minute), can vanish in a
callback, and unwinds through libraries that crash on it. Here the main thread never sees the signal.
"""

import os
import signal
import sys
import threading

_ENDING = ("SIGINT", "SIGTERM", "SIGHUP")
_is_ending = threading.Event()


def end_on_signals(program: str) -> None:
    """From now on these signals end the process within moments, wherever it is; what it was writing is removed.

    To be called in the main thread before other threads start: they inherit that the signals are blocked, and so do
    child processes, which have to unblock them. A signal that the parent wants ignored (``nohup``) stays ignored.

    program: for the one line on stderr.
    """
    if not hasattr(signal, "sigwait"):  # not a POSIX system
        return
    known = [getattr(signal, name) for name in _ENDING]
    awaited = [number for number in known if signal.getsignal(number) is not signal.SIG_IGN]
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    for number in awaited:
        signal.signal(number, signal.SIG_DFL)
    threading.Thread(target=_end, args=(program, awaited), name="signals", daemon=True).start()


def hold_if_ending() -> None:
    """Never returns once a signal has come: what fails then, fails because of it, and is nothing to report."""
    if _is_ending.is_set():
        threading.Event().wait()


def _end(program: str, awaited: list[signal.Signals]) -> None:
    number = signal.sigwait(awaited)
    _is_ending.set()
    if output := sys.modules.get("moe_jax._output"):  # not imported here: the sooner signals are seen to, the better
        output.discard_partials()
    reason = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
    with open(2, "wb", buffering=0, closefd=False) as stderr:
        try:
            clear = "\r\x1b[K" if stderr.isatty() else ""  # a bar that stands on the line
            stderr.write(f"{clear}{program}: {reason}\n".encode())
        except OSError:
            pass  # nobody reads it any more
    # By the signal itself, so that a shell sees it: 130, 143 or 129.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
    os._exit(128 + number)
