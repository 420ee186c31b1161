"""Cases in turn: what fails, hangs, dies or never starts costs itself alone, and nothing is left running."""

import os
import sys
import time

import pytest

from tests.support.in_turn import Slice, gpus_of_slices, run, summary

LIMIT = 3.0  # seconds, in which a busy machine starts Python
PROCESS = """
import os, subprocess, sys, time
from pathlib import Path
from tests.support.in_turn import judge_in_turn

def judge(name, folder):
    print("this is", name)
    if name == "raises":
        raise ValueError("of two\\nlines")
    if name == "hangs":
        (folder / "worker").write_text(str(subprocess.Popen(["sleep", "60"]).pid))
        in_vain()
    if name == "dies":
        print("SomeError: in its log", file=sys.stderr)
        os._exit(7)
    return dict(process=os.getpid(), parent=os.getppid())

def in_vain():
    time.sleep(60)

def named(names):
    for name in names.split(","):
        if name == "unreachable":
            print("SomeError: of the start")
            sys.exit(3)
        yield name
        if name == "lingers":
            in_vain()

judge_in_turn(named(sys.argv[3]), Path(sys.argv[1]), judge, sys.argv[2] == "forks")
"""


def slice_of(names, root, limit=LIMIT, kind="in itself"):
    return Slice([sys.executable, "-c", PROCESS, str(root), kind], names.split(), root, limit, os.environ)


def runs_on(process):
    """Whether it still runs after a few seconds, which a killed process does not need."""
    for _ in range(50):
        try:
            with open(f"/proc/{process}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return False
        except FileNotFoundError:
            return False
        time.sleep(0.1)
    return True


def test_failures_cost_themselves_alone(tmp_path):
    names = "a b raises c dies d hangs e lingers f g"
    one, began = slice_of(names, tmp_path), time.monotonic()
    found = [(name, result) for _, name, result in run([one])]
    assert [name for name, _ in found] == names.split() and not one.left
    assert time.monotonic() - began < 60  # nobody waited for a sleep
    results = dict(found)
    assert all(0 <= result["seconds"] < LIMIT + 2 for result in results.values())
    errors = {name: result["error"] for name, result in results.items() if "error" in result}
    assert errors.pop("raises").startswith("ValueError: of two lines")
    assert errors.pop("dies") == "its process ended with 7 | SomeError: in its log"
    assert errors.pop("hangs") == f"{LIMIT:.0f} s are over" and not errors
    process = {name: result["process"] for name, result in results.items() if "process" in result}
    assert process["a"] == process["b"] and process["f"] == process["g"] and process["e"] == process["lingers"]
    assert len(set(process.values())) == len(one.starts) == 5, "a new process after each failure and after lingers"
    assert (tmp_path / "b" / "log.txt").read_text() == "this is b\n"
    assert "in_vain" in (tmp_path / "hangs" / "log.txt").read_text(), "the log says where it hung"
    workers = [int((tmp_path / "hangs" / "worker").read_text())]
    assert not any(map(runs_on, [*process.values(), *workers]))


def test_forks(tmp_path):
    """A failure costs no start then; a hang and a death still do."""
    one = slice_of("a raises b dies c hangs d", tmp_path, kind="forks")
    results = {name: result for _, name, result in run([one])}
    assert list(results) == ["a", "raises", "b", "dies", "c", "hangs", "d"]
    errors = {name: result["error"] for name, result in results.items() if "error" in result}
    assert errors.pop("raises").startswith("ValueError: of two lines")
    assert errors.pop("dies") == "its process ended with 7 | SomeError: in its log"
    assert errors.pop("hangs") == f"{LIMIT:.0f} s are over" and not errors
    assert "in_vain" in (tmp_path / "hangs" / "log.txt").read_text(), "the log says where it hung"
    own, parent = ([results[name][key] for name in "abcd"] for key in ("process", "parent"))
    assert parent[0] == parent[1] and len(set(parent)) == len(one.starts) == 3 and len({*own, *parent}) == 7
    assert not any(map(runs_on, [*own, *parent, int((tmp_path / "hangs" / "worker").read_text())]))


def test_a_process_that_does_not_start_fails_all_that_is_left(tmp_path):
    """Starting anew for each case would cost a start for each; slices beside it go on."""
    slices = [slice_of("unreachable a b", tmp_path), slice_of("c d", tmp_path)]
    found = {name: result.get("error") for _, name, result in run(slices)}
    said = "its process ended with 3 before the first case | SomeError: of the start"
    assert found == dict(unreachable=said, a=said, b=said, c=None, d=None)
    assert [len(one.starts) for one in slices] == [0, 1]


def test_a_start_that_hangs_is_ended(tmp_path):
    hanging = Slice([sys.executable, "-c", "import time; time.sleep(60)"], ["a", "b"], tmp_path, 0.5, os.environ)
    found = {name: result["error"] for _, name, result in run([hanging])}
    assert found == dict.fromkeys("ab", "0 s are over before the first case")


def test_the_total_ends_what_runs(tmp_path):
    one, other = slice_of("hangs a", tmp_path, 60), slice_of("b", tmp_path)
    seen = [name for _, name, _ in run([one, other], LIMIT)]
    assert seen == ["b"] and one.left == ["hangs", "a"]
    assert not runs_on(int((tmp_path / "hangs" / "worker").read_text()))


def test_summary(tmp_path, capsys):
    one = slice_of("a", tmp_path)
    one.starts = [3.0, 11.6]
    assert summary("abcd", dict(a="PASS", b="LEFT", c="FAIL"), [one]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "1 PASS, 1 FAIL, 1 LEFT, 0 NEITHER, 1 not reached: d",
        "2 processes started, in 12 s at most",
    ]
    assert summary("ab", dict(a="PASS", b="LEFT"), []) == 0
    assert capsys.readouterr().out.startswith("1 PASS, 0 FAIL, 1 LEFT, 0 NEITHER, 0 not reached\n")


def test_gpus_of_slices(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5")
    assert gpus_of_slices(4) == ["2", "3", "5", "2"]
    assert gpus_of_slices(2, 2) == ["2,3", "2,3"]
    with pytest.raises(SystemExit, match="4 GPUs are needed for an engine, this process sees 3: 2,3,5"):
        gpus_of_slices(1, 4)
