"""docs/parallel.md: its example runs, and its text names what exists."""

import re
from pathlib import Path

from moe_jax import parallel
from moe_jax.parallel._choice import FEW_TOKENS
from moe_jax.parallel._dispatch import ROOM, WAYS

GUIDE = (Path(__file__).parents[2] / "docs" / "parallel.md").read_text()


def test_the_example_runs(capsys):
    example, *_ = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    exec(compile(example, "docs/parallel.md", "exec"), {})
    printed = capsys.readouterr().out
    assert printed.startswith("(7, 64) ") and "('ep', None, 'tp', None)" in printed
    assert "dispatch: replicate, since" in printed


def test_numbers_and_names():
    assert set(re.findall(r'^\| `"(\w+)"` \|', GUIDE, re.MULTILINE)) == set(WAYS)
    assert f"up to {FEW_TOKENS} tokens" in GUIDE and f"devices - 1 > {ROOM} top_k" in GUIDE
    for name in re.findall(r"moe_jax\.parallel\.(\w+)", GUIDE):
        assert hasattr(parallel, name), name
