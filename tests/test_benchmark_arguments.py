"""Scripts in benchmarks/: an argument that makes no sense is one line, before anything runs."""

import importlib

import pytest

from tests.support.benchmarks import benchmarks_or_skip

WRONG = [
    ("train_layer", "--tokens=", "argument --tokens: '' has '', expected integers of at least 1"),
    ("train_layer", "--tokens=4,-5", "argument --tokens: '4,-5' has '-5', expected integers of at least 1"),
    ("train_layer", "--models=tiny,gpt", "argument --models: 'gpt' is none of qwen3-30b-a3b, mixtral-8x7b, tiny"),
    ("train_layer", "--models=tiny,tiny", "argument --models: 'tiny' is named twice"),
    ("train_layer", "--sides=", "--sides is empty, and so is --frozen; nothing to measure"),
    ("train_layer", "--sides=ours,jax", "--sides 'jax' is none of torch, ours, ours_kept, tokamax"),
    ("train_layer", "--frozen=w4", "--frozen: unknown scheme 'w4'"),
    ("train_layer", "--seconds=nan", "argument --seconds: 'nan', expected a number of seconds"),
    ("train_layer", "--out=/no/such/file", "argument --out: '/no/such/file', expected a file in a folder that exists"),
    ("generate", "--cases=gpt:bf16", "argument --cases: 'gpt:bf16', expected MODEL:FORMAT, MODEL one of qwen3-30b-a3b"),
    ("generate", "--cases=mixtral-8x7b", "argument --cases: 'mixtral-8x7b': unknown scheme ''"),
    ("generate", "--layers=0", "argument --layers: '0', expected integers of at least 1"),
    ("generate", "--attention=flash", "argument --attention: 'flash' is none of auto, xla, hopper, cudnn"),
    ("generate", "--prefill=x", "argument --prefill: 'x' has 'x', expected integers of at least 1"),
    ("generate", "--prefill= --context=", "no call to time: --prefill is empty, and --decode or --context"),
    ("generate", "--tiny --profile=decode:1", "--profile: 'decode:1' is none of the calls, decode:2, prefill:9"),
    ("generate", "--json=/", "argument --json: '/', expected a file in a folder that exists"),
    ("prompt_file", "--new=0", "argument --new: '0', expected integers of at least 1"),
    ("prompt_file", "--longest=4", "argument --longest: '4', expected integers of at least 8"),
    ("prompt_file", "--long=-1:9", "argument --long: '-1:9', expected COUNT:LENGTH"),
    ("prompt_file", "--long=9:9 --prompts=8", "--long names 9 of --prompts 8"),
    ("prompt_file", "--num-pages=few", "argument --num-pages: 'few', expected integers of at least 1"),
    ("prompt_file", "--case=mixtral-8x7b", "--case or --attention: 'mixtral-8x7b': unknown scheme ''"),
    ("prompt_file", "--attention=auto,xla", "--attention: 'auto,xla', expected one"),
    ("prompt_file", "--attention=", "--case or --attention: '' is none of auto"),
]


@pytest.mark.parametrize(("name", "given", "error"), WRONG, ids=lambda value: value if value.startswith("-") else "")
def test_wrong_arguments(monkeypatch, capsys, name, given, error):
    monkeypatch.syspath_prepend(str(benchmarks_or_skip()))
    script = importlib.import_module(name)
    monkeypatch.setattr("sys.argv", [name, *given.split()])
    with pytest.raises(SystemExit) as ended:
        script.main()
    last = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2 and f"error: {error}" in last
