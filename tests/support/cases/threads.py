"""Threads that reload again and again while another one reads."""

import contextlib
import sys
import threading
import time


@contextlib.contextmanager
def quick_switches():
    """Threads take turns a thousand times as often as usual."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


def while_reloading(reloads, read, times, is_enough=lambda found: True):
    """What ``read`` gives, ``times`` times, while each of ``reloads`` runs again and again in a thread of its own, with
    1, 0, 1, ...; more often where a busy machine has not let each of them run ten times, or as often, by then, and for
    a minute at most until what was found ``is_enough``."""
    is_over, errors, rounds = threading.Event(), [], [0] * len(reloads)

    def again(index, reload):
        version = 0
        try:
            while not is_over.is_set():
                version = 1 - version
                reload(version)
                rounds[index] += 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=again, args=each) for each in enumerate(reloads)]
    with quick_switches():
        for thread in threads:
            thread.start()
        try:
            found = [read() for _ in range(times)]
            until = time.monotonic() + 60
            while min(rounds) < min(times, 10) and not errors:
                found.append(read())
            while not is_enough(found) and not errors and time.monotonic() < until:
                found.append(read())
        finally:
            is_over.set()
            for thread in threads:
                thread.join()
    assert not errors, errors
    return found
