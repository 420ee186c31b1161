"""A hundred iterations of ``run.py``; the log of ten thousand is benchmarks/results/fuzz.txt."""

import pytest

from tests.fuzz.entries import KINDS
from tests.fuzz.run import fuzz


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")
def test_damaged_checkpoints(tmp_path):
    outcomes, fails = fuzz(tmp_path, range(100), log=lambda line: None)
    assert not fails, f"{len(fails)} fails:\n" + "\n".join(fails)
    counts = {outcome: sum(n for (_, o), n in outcomes.items() if o == outcome) for outcome in ("refused", "accepted")}
    assert sum(counts.values()) == 100 and min(counts.values()) > 20 and len(KINDS) > 20
