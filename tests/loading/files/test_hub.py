"""Models by their name on a hub: what is downloaded, what the cache is used for, and what each refusal says."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import constants

from moe_jax.loading import Checkpoint, CheckpointError, checkpoint_directory
from tests.fuzz import bases
from tests.support.hub import COMMIT, NAME, serving

SHARDS = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
NEEDED = {
    *("config.json", "generation_config.json", "model.safetensors.index.json"),
    *("tokenizer.json", "tiktoken.model", "chat_template.jinja", "LICENSE"),
    *SHARDS,
}
NOT_NEEDED = {
    *("pytorch_model.bin", "modeling_tiny.py", "README.md", "model.gguf", "extra.safetensors"),
    *("original/model.safetensors", "onnx/config.json"),
}


@pytest.fixture(scope="module")
def contents(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hub") / "model"
    bases.write(directory, bases.plain(np.random.default_rng(0)), shards=2)
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    return files | {name: name.encode() for name in (NEEDED | NOT_NEEDED) - files.keys()}


@pytest.fixture
def hub(contents, monkeypatch, tmp_path):
    with serving(dict(contents)) as server:
        point_at(server.url, monkeypatch, tmp_path / "cache")
        yield server


def point_at(url, monkeypatch, cache):
    """What HF_ENDPOINT and HF_HOME do to a process that starts with them."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def refused(*words, source=NAME, kind=CheckpointError, **options):
    with pytest.raises(kind) as error:
        checkpoint_directory(source, **options)
    text = str(error.value)
    assert "\n" not in text and all(word in text for word in words), text


def test_only_what_is_needed_comes(hub):
    directory = checkpoint_directory(NAME)
    assert hub.downloaded() == NEEDED
    assert {path.name for path in directory.iterdir()} == NEEDED
    with Checkpoint(directory) as checkpoint:
        assert set(checkpoint.files) == SHARDS and checkpoint.names


def test_one_file_without_an_index(hub, tmp_path):
    bases.write(tmp_path / "single", bases.plain(np.random.default_rng(0)))
    hub.files = {path.name: path.read_bytes() for path in (tmp_path / "single").iterdir()} | {"flax_model.msgpack": b""}
    directory = checkpoint_directory(NAME)
    assert hub.downloaded() == {"config.json", "model.safetensors"}
    with Checkpoint(directory):
        pass


def test_what_is_there_is_not_downloaded_again(hub):
    first = checkpoint_directory(NAME)
    hub.requests.clear()
    assert checkpoint_directory(NAME) == first
    assert not hub.downloaded()
    hub.requests.clear()
    assert checkpoint_directory(NAME, revision=COMMIT) == first and hub.requests == []  # which cannot change
    shard = first / "model-00002-of-00002.safetensors"
    shard.unlink()
    assert checkpoint_directory(NAME, revision=COMMIT) == first and shard.exists()


def test_a_new_commit_of_a_branch_is_seen(hub):
    first = checkpoint_directory(NAME)
    hub.revisions["main"] = hub.revisions["d" * 40] = "d" * 40
    hub.files["config.json"] += b" "
    second = checkpoint_directory(NAME)
    assert (first.name, second.name) == (COMMIT, "d" * 40)
    assert (second / "config.json").read_bytes() == hub.files["config.json"]


def test_revisions(hub):
    assert checkpoint_directory(NAME, revision="v1").name == COMMIT
    refused(NAME, "no revision 'v2'", "branches, tags or commits", revision="v2")


@pytest.mark.parametrize("offline", [True, False])
def test_without_a_network_the_cache_serves(hub, monkeypatch, offline):
    if offline:
        words = ("no such directory", "has no snapshot of revision main", "HF_HUB_OFFLINE")
    else:
        words = ("no such directory", "cannot be reached (ConnectError", "has no snapshot of revision main")
    first = checkpoint_directory(NAME, revision="v1")
    hub.requests.clear()
    if offline:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert checkpoint_directory(NAME, revision="v1") == first
    else:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
        with pytest.warns(UserWarning, match=r"cannot be reached .*the snapshot in the cache is used"):
            assert checkpoint_directory(NAME, revision="v1") == first
    refused(NAME, *words)
    (first / "model-00002-of-00002.safetensors").unlink()
    refused("lacks model-00002-of-00002.safetensors", revision="v1")
    assert hub.requests == []


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_hub_that_is_down_is_no_missing_model(hub, status):
    first = checkpoint_directory(NAME)
    hub.refusal = (status, "")
    with pytest.warns(UserWarning, match=str(status)):
        assert checkpoint_directory(NAME) == first
    refused("cannot be reached", str(status), "has no snapshot of revision v1", revision="v1")


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        ((401, "RepoNotFound"), ("no such directory", "no such model", "spelling", "hf auth login", "HF_TOKEN")),
        ((404, "RepoNotFound"), ("no such directory", "no such model", "spelling")),
        ((401, ""), ("refused", "401", "hf auth login")),
        ((401, "GatedRepo"), ("access is restricted", "accept the terms", NAME, "hf auth login")),
        ((403, "GatedRepo"), ("access is restricted", "accept the terms", "HF_TOKEN")),
        ((403, ""), ("refused", "403", "hf auth login")),
    ],
)
def test_refusals_name_the_problem(hub, refusal, words):
    hub.refusal = refusal
    refused(NAME, hub.url, *words)


def test_gated_files_of_a_model_that_is_listed(hub):
    """As the hub has it: anybody may see the names."""
    hub.is_gated = True
    refused(NAME, "access is restricted", f"{hub.url}/{NAME}", "hf auth login")


def test_another_model(hub):
    refused("tiny-org/other", "no such directory", f"no such model on {hub.url}", source="tiny-org/other")


@pytest.fixture
def no_waiting(monkeypatch):
    """huggingface_hub waits a second before it goes on with a download."""
    monkeypatch.setattr(huggingface_hub.file_download.time, "sleep", lambda seconds: None)


def test_a_download_that_breaks_goes_on(hub, no_waiting):
    shard = "model-00001-of-00002.safetensors"
    hub.cut[shard] = 2
    directory = checkpoint_directory(NAME)
    assert (directory / shard).read_bytes() == hub.files[shard]


def test_a_download_that_stays_broken(hub, no_waiting):
    shard = "model-00001-of-00002.safetensors"
    hub.cut[shard] = 10**9
    refused("broke off", "try again")
    assert not any(path.name == shard for path in Path(constants.HF_HUB_CACHE).rglob("*"))
    hub.cut.clear()
    assert (checkpoint_directory(NAME) / shard).read_bytes() == hub.files[shard]


@pytest.mark.parametrize(
    ("removed", "added", "words"),
    [
        ({"config.json"}, {}, ("has no config.json",)),
        (SHARDS, {}, ("index.json names model-00001-of-00002.safetensors", "not there")),
        ({*SHARDS, "model.safetensors.index.json", "extra.safetensors", "original/model.safetensors", "model.gguf"}, {},
         ("pytorch_model.bin", "pickle files can run code")),
        ({"model.safetensors.index.json"}, {}, ("neither model.safetensors nor model.safetensors.index.json",)),
        (set(), {"model.safetensors": b"x"}, ("two sets of weights",)),
    ],
)  # fmt: skip
def test_repositories_without_usable_weights(hub, removed, added, words):
    for name in removed:
        del hub.files[name]
    hub.files |= added
    refused(f"{NAME} on {hub.url}: ", *words)
    assert not hub.downloaded() & (SHARDS | {"pytorch_model.bin", "model.safetensors"})


def test_shards_outside_of_the_repository(hub):
    hub.files["model.safetensors.index.json"] = json.dumps({"weight_map": {"a": "../../../x.safetensors"}}).encode()
    refused("../../../x.safetensors", "plain name")
    assert not hub.downloaded() & SHARDS


def test_weights_that_do_not_fit_on_the_disk(hub, monkeypatch):
    import shutil

    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    refused("has 1000 B left", "HF_HOME")
    assert not hub.downloaded() & SHARDS


HOSTILE = (
    *("../x", "a/../b", "/no/such/place", "a/b/c", "https://huggingface.co/a/b", "hf://a/b", "http://127.0.0.1/x"),
    *("a/..", "./a/b", "a\\b/c", "a/b\n", "a/b?x=1", "a/b@main", "a/b#c", "a/b%2f..", "-a/b", "a/-b", ".a/b", "a/b."),
    *("a/b--c", "alone", "a/\N{CYRILLIC SMALL LETTER A}", "a/b\0", "a/" + "b" * 200, "~/models", "a//b", "a/b/", ""),
)


@pytest.mark.parametrize("name", HOSTILE)
def test_names_that_are_none_never_reach_the_network(hub, name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    refused("no such directory", "organization/name", source=name)
    assert hub.requests == []


@pytest.mark.parametrize("revision", ["../main", "a/../../b", "/main", "", "a b", "main\n", "-x", "a//b", "x?y", "a/"])
def test_revisions_that_are_none_never_reach_the_network(hub, revision):
    refused("revision=", "branch or tag", kind=ValueError, revision=revision)
    assert hub.requests == []


def test_a_local_directory_wins(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bases.write(tmp_path / NAME, bases.plain(np.random.default_rng(0)))
    assert checkpoint_directory(NAME) == Path(NAME)
    refused("local directory", "leave it out", kind=ValueError, revision="main")
    Path(NAME, "config.json").unlink()
    refused("config.json", "no such file")  # and not what a hub has under that name
    assert hub.requests == []


def test_a_path_object_is_never_a_name(hub):
    refused("no such directory", "organization/name", source=Path(NAME))
    assert hub.requests == []


def test_without_huggingface_hub(hub, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refused(NAME, "no such directory", "pip install huggingface_hub", kind=ImportError)
    refused("no name of a model", source="no/such/place")  # the package would not help


def test_the_environment_of_huggingface_hub_counts(hub, tmp_path, monkeypatch):
    """HF_HOME and HF_HUB_OFFLINE here, HF_ENDPOINT in tests/cli/test_hub_commands.py."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    directory = checkpoint_directory(NAME)
    hub.requests.clear()
    code = "import sys; from moe_jax.loading import checkpoint_directory as d; print(d(sys.argv[1]))"
    env = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code, NAME], env=env, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == (f"{directory}\n", "") and hub.requests == []


def test_two_at_once(hub):
    found, threads = [], []
    for _ in range(4):
        threads.append(threading.Thread(target=lambda: found.append(checkpoint_directory(NAME))))
        threads[-1].start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 4 and len(set(found)) == 1
