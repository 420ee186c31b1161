"""Regular expressions of configs: real ones run with re's own meaning, hostile ones are refused before they run."""

import fnmatch
import itertools
import re
import time

import numpy as np
import pytest

from moe_jax.loading import CheckpointError
from moe_jax.loading.config._patterns import MAX_PATTERNS, MAX_STEPS, BoundedPatterns, count_steps
from moe_jax.loading.config._rules import Covering
from tests.support.refusals import refuses

NAMES = [
    "lm_head",
    "model.embed_tokens",
    "model.layers.0.mlp.gate",
    "model.layers.11.self_attn.q_proj",
    "model.layers.0.mlp.experts.7.gate_proj",
    "model.layers.10.block_sparse_moe.experts.0.w2",
    "model.layers.3.mlp.shared_expert_gate",
]
REAL = [
    ".*",
    "",
    ".*lm_head",
    ".*mlp.gate$",
    r".*mlp\.experts\.\d+\.(gate|up|down)_proj$",
    r"model\.layers\.[0-9]+\.mlp\.experts\.[0-9]+\..*",
    r".*layers.*mlp.*experts.*proj.*",
    r"^(?!.*experts).*",
    r".*(?<!shared_expert)_gate$",
    r".*\.layers\.(0|1|2|3|10|11|12)\..*self_attn\.[qkvo]_proj",
    r"(?i:LM_HEAD)|model\.embed.*",
    r"model\.layers\.\d{1,2}\.mlp\.(?:gate|shared_expert_gate)\b",
    r"(?P<a>m)odel.*(?P=a)lp",
]
HOSTILE = [
    "(a+)+$",
    "(.*)*x",
    "(.*)*" * 20 + "x",
    "(a|aa)+$",
    "(a|a)*b",
    "([a-z]+)*!",
    "(x+x+)+y",
    r"(\w*\.)*\d",
    "a?" * 40 + "a" * 40,
    "(a?){50}a{50}$",
    ".*" * 12 + "!",
    "((a{0,30}){0,30}){0,30}b",
    "(?=(a+)+b)",
    "(?!(.*)*x)",
    "(?>(a|aa)+)c",
    r"(.*)*\1x",
]


@pytest.mark.parametrize("pattern", REAL)
def test_real_patterns_mean_what_re_says(pattern):
    patterns = BoundedPatterns(longest_name=100)
    patterns.add(pattern)
    assert [patterns.match(pattern, [name]) for name in NAMES] == [
        re.match(pattern, name) is not None for name in NAMES
    ]


@pytest.mark.parametrize("pattern", HOSTILE)
def test_hostile_patterns_are_refused_at_once(pattern):
    start = time.process_time()
    with pytest.raises(ValueError, match="could take too long"):
        BoundedPatterns(longest_name=64).add(pattern)
    assert time.process_time() - start < 10.0


@pytest.mark.parametrize("pattern", ["(unclosed", "[", "*", "(?P<a>x)(?P<a>y)", "a{2,1}", "(?<=.*)a", r"\8"])
def test_invalid_patterns(pattern):
    with pytest.raises(ValueError, match="not a valid regular expression|too long"):
        BoundedPatterns(longest_name=64).add(pattern)


def test_deep_nesting_is_valid_or_refused_but_never_a_crash():
    """Which of the two depends on the interpreter's recursion limit."""
    try:
        BoundedPatterns(longest_name=64).add("(" * 490 + ")" * 490)
    except ValueError as error:
        assert "not a valid regular expression" in str(error)


def test_length_and_number():
    patterns = BoundedPatterns(longest_name=64)
    refuses(ValueError, "1001 characters, at most 1000", patterns.add, "a" * 1001)
    for i in range(MAX_PATTERNS):
        patterns.add(f"a{i}")
    patterns.add("a0")
    refuses(ValueError, "more than", patterns.add, "b")
    refuses(ValueError, "module name of 65 characters", patterns.match, "a0", ["x" * 65])


@pytest.mark.parametrize(
    "pattern",
    ["(a|b)(a|ab)(b|a)", "a*b*a*c", "(a?b?)c", "a{1,3}b{0,2}a", "(ab|a)(b)?x", "[ab]*[ab]*x", "(a*|b)a*x", "(ab)*a*x"],
)
def test_the_bound_is_no_less_than_the_ends_counted_by_brute_force(pattern):
    """Of a tiny backtracking matcher, on every word of a and b of six letters."""
    most = max(brute_force_ends(pattern, "".join(word)) for word in itertools.product("ab", repeat=6))
    assert most <= count_steps(pattern, 6)


def brute_force_ends(pattern, word):
    """Complete and dead ends that backtracking through ``pattern`` meets on ``word``: every way of trying has one."""
    ends = 0

    def run(items, at, then):
        nonlocal ends
        if not items:
            return then(at)
        (op, argument), rest = items[0], items[1:]
        go_on = lambda position: run(rest, position, then)  # noqa: E731
        match str(op):
            case "LITERAL" | "IN":
                accepted = {argument} if str(op) == "LITERAL" else letters(argument)
                if at < len(word) and ord(word[at]) in accepted:
                    return go_on(at + 1)
                ends += 1
            case "SUBPATTERN":
                run(list(argument[3]), at, go_on)
            case "BRANCH":
                for branch in argument[1]:
                    run(list(branch), at, go_on)
            case "MAX_REPEAT":
                repeat(argument, at, 0, go_on)
            case other:
                raise NotImplementedError(other)

    def repeat(argument, at, done, then):
        low, high, body = argument
        if done < min(int(high), len(word)):
            run(list(body), at, lambda position: repeat(argument, position, done + 1, then) if position > at else None)
        if done >= low:
            then(at)

    def letters(argument):
        return {
            code
            for op, value in argument
            for code in ([value] if str(op) == "LITERAL" else range(value[0], value[1] + 1))
        }

    def finish(position):
        nonlocal ends
        ends += 1

    run(list(re._parser.parse(pattern)), 0, finish)
    return ends


def test_all_matches_share_a_budget(monkeypatch):
    """However short each one is: a thousand patterns on the names of a large model add up to hours."""
    monkeypatch.setattr("moe_jax.loading.config._patterns.TIME_LIMIT", 0.1)
    patterns = BoundedPatterns(longest_name=100)
    patterns.add(".*a.*a!")
    names = ["a" * 100]
    start = time.thread_time()
    re.match(".*a.*a!", names[0])
    assert time.thread_time() - start < 0.01, "each of them is quick"
    start = time.process_time()
    with pytest.raises(ValueError, match="took over 0.1 s"):
        for _ in range(100_000):
            patterns.match(".*a.*a!", names)
    assert time.process_time() - start < 5.0


def test_compilation_counts(monkeypatch):
    """A class of a million letters takes milliseconds, a hundred of them in a pattern most of a second."""
    monkeypatch.setattr("moe_jax.loading.config._patterns.TIME_LIMIT", 0.5)
    patterns = BoundedPatterns(longest_name=100)
    with pytest.raises(ValueError, match="took over 0.5 s"):
        for i in range(1000):
            patterns.add("(?i)" + "[\x00-\U0010ffff]" * 20 + str(i))


@pytest.mark.parametrize(
    "pattern, length",
    [(r"(a*)\1b", 10**6), (".*.*.*a{400}b", 1000), (".*.*.*.*.*(?=a{90})b", 100)],
)
def test_letters_that_are_compared_count(pattern, length):
    """A way is not one step: a back reference or a long run of letters is compared on each of them."""
    with pytest.raises(ValueError, match="could take too long"):
        BoundedPatterns(longest_name=length).add(pattern)
    BoundedPatterns(longest_name=30).add(pattern)


def test_the_slowest_patterns_that_pass_end_soon():
    """Among thousands at random: a step takes nanoseconds, so the bound on steps is one on time."""
    rng = np.random.default_rng(0)
    parts = [*("a", ".", "[ab]", "a?", "a*", ".*", ".*?", "a{0,5}", "a{3}", "(a)", "(a*)", "(a|b)", "(?:ab)*")]
    parts += ["(?=a*b)", r"(a+)", "a{2,}", "[^b]*"]
    slowest, tried = 0.0, 0
    for _ in range(1000):
        pattern = "".join(rng.choice(parts, rng.integers(1, 12))) + rng.choice(["b", "!", "$"])
        if 1e4 < count_steps(pattern, 100) <= MAX_STEPS / 20:
            tried += 1
            for name in ("a" * 100, "ab" * 50):
                start = time.thread_time()
                re.match(pattern, name)
                slowest = max(slowest, (time.thread_time() - start) / count_steps(pattern, 100))
    assert tried > 100 and slowest < 50e-9


def test_the_slowest_pattern_that_passes_ends_soon():
    patterns = BoundedPatterns(longest_name=100)
    pattern = ".*a" * 5 + "!"
    patterns.add(pattern)
    start = time.process_time()
    patterns.match(pattern, ["a" * 100])
    assert time.process_time() - start < 20.0


@pytest.mark.parametrize("entries", [["*a*b*c*d*e*f"], [f"*{i}" for i in range(999)] + ["x"], ["[a-z]?*"]])
def test_names_with_stars(entries):
    """What ModelOpt leaves out: as fnmatch has it, for a module, its parents and its last components."""
    covering = Covering(entries, "config.json")
    for name in ("m.abcdef.x", "a.b.c.d.e.f", "m.12.x", "m.x.999", "x", "model.layers.0"):
        words = name.split(".")
        parts = [".".join(words[a:b]) for a in range(len(words)) for b in range(a + 1, len(words) + 1)]
        parts = [part for part in parts if name.startswith(part) or name.endswith(part)]
        expected = [entry for entry in entries if any(fnmatch.fnmatchcase(part, entry) for part in parts)]
        assert covering(name) == (expected[0] if expected else None)


def test_stars_are_bounded_too(monkeypatch):
    for entries in ([f"*{i}" for i in range(1001)], ["*" * 1001]):
        refuses(CheckpointError, "config.json: more than 1000 names with", Covering, entries, "config.json")
    monkeypatch.setattr("moe_jax.loading.config._patterns.TIME_LIMIT", 0.1)
    covering = Covering([f"*{i}*x*y" for i in range(1000)], "config.json")
    with pytest.raises(CheckpointError, match="config.json: regular expressions took over 0.1 s"):
        for i in range(10_000):
            covering(f"model.layers.{i}." + "a.1." * 20)


def test_a_long_list_of_names_is_looked_up(monkeypatch):
    """A config of ModelOpt may list every module of a large model."""
    covering = Covering([f"model.layers.{i}.mlp.experts.{j}" for i in range(60) for j in range(256)], "config.json")
    start = time.process_time()
    assert all(covering(f"model.layers.{i}.mlp.experts.{j}.w1") for i in range(60) for j in range(256))
    assert time.process_time() - start < 10.0
