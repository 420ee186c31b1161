"""What pip resolves is what the library accepts: ranges, pins, extras, Pythons, and what pages and messages advise."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from moe_jax import _compat
from moe_jax.cli._doctor import OPTIONAL, REQUIRED

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
OWN = re.compile(r"pip3? (?:install|download)[^\n`#;&]*?['\" ]moe[-_]jax\b")


def needed(extra=None):
    """The requirements of the project, or of an extra with those it names in turn."""
    found = []
    for text in PROJECT["dependencies"] if extra is None else EXTRAS[extra]:
        requirement = Requirement(text)
        inner = requirement.extras if requirement.name == PROJECT["name"] else ()
        found += [one for name in sorted(inner) for one in needed(name)] or [requirement]
    return found


def names(requirements):
    return {canonicalize_name(requirement.name) for requirement in requirements}


def test_the_range_of_jax_is_the_one_checked_at_import():
    ranges = [r for extra in (None, *EXTRAS) for r in needed(extra) if r.name in ("jax", "jaxlib")]
    low, end = (".".join(map(str, bound)) for bound in (_compat.MIN_JAX, _compat.END_JAX))
    assert {str(r.specifier) for r in ranges} == {f"<{end},>={low}"}
    assert [tuple(r.extras) for r in needed("cuda12")] == [("cuda12",)]
    assert [tuple(r.extras) for r in needed("cuda13")] == [("cuda13",)]
    assert str(needed("cuda")[0]) == str(needed("cuda13")[0])


def test_doctor_knows_every_requirement():
    assert {canonicalize_name(name) for name in REQUIRED} == names(needed())
    brought_by_flax = {"orbax-checkpoint"}
    assert {canonicalize_name(name) for name in OPTIONAL} - brought_by_flax <= names(needed("all"))


def test_all_is_what_runs_on_every_machine():
    assert names(needed("all")) == names([r for extra in ("chat", "demo", "hub", "torch") for r in needed(extra)])
    assert not any(r.extras for r in needed("all")), "a plugin for GPUs is chosen by the driver"


@pytest.mark.parametrize("python", PYTHONS)
def test_pins_are_what_the_ranges_accept(python):
    """One pin for each distribution, and every requirement has one: constraints.txt decides all that we name."""
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)
            if pin.marker is None or pin.marker.evaluate({"python_version": python}):
                assert canonicalize_name(pin.name) not in pins, f"{pin.name} is pinned twice"
                ((pins[canonicalize_name(pin.name)]),) = (Version(s.version) for s in pin.specifier)
    checked = 0
    for requirement in [r for extra in (None, *EXTRAS) for r in needed(extra)]:
        if requirement.marker is None or requirement.marker.evaluate({"python_version": python}):
            assert pins[canonicalize_name(requirement.name)] in requirement.specifier, requirement
            checked += 1
    assert checked > 30


def test_pythons_are_stated_alike():
    stated = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", c)]
    assert tuple(stated) == PYTHONS and PROJECT["requires-python"] == f">={PYTHONS[0]}"
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    assert {python for python in PYTHONS if f'"{python}"' in workflow} == set(PYTHONS)
    rows = re.findall(r"^\| (3\.\d+) \|", (ROOT / "docs/install.md").read_text(), re.MULTILINE)
    assert tuple(rows) == PYTHONS


def test_every_extra_is_on_the_install_page():
    table = (ROOT / "docs/install.md").read_text().partition("## Extras")[2]
    rows = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert set(rows) == set(EXTRAS) and len(rows) == len(EXTRAS)


@pytest.mark.parametrize("text", ["pip install moe-jax", "pip install 'moe_jax[chat]'", "pip install -U moe-jax[cuda]"])
def test_the_advice_that_is_looked_for_is_found(text):
    assert (
        OWN.search(text) and not OWN.search("pip install '.[chat]' # moe-jax doctor") and not OWN.search("moe-jax run")
    )


def test_nothing_advises_a_name_that_is_not_on_the_index():
    """moe-jax is not published; whoever registers the name first would be installed."""
    files = [
        path
        for folder in ("docs", "moe_jax", "torch_bridge", "notebooks", "benchmarks", "examples")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".md", ".py", ".ipynb")
    ]
    files += [*ROOT.glob("*.md"), ROOT / "Dockerfile"]
    assert len(files) > 150
    assert [str(path.relative_to(ROOT)) for path in files if OWN.search(path.read_text())] == []
