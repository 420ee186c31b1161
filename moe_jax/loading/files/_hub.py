"""``checkpoint_directory``: from a directory, or the name of a model on a hub, to the directory that holds the files.

Downloads and their cache are those of huggingface_hub: HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE mean what they
mean there. The package is loaded when a name is looked for; nothing else needs it.
"""

import glob
import os
import re
import shutil
import sys
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar

from moe_jax._terminal import size
from moe_jax.loading._errors import CheckpointError, listed, shown
from moe_jax.loading.files._checkpoint import (
    INDEX_FILE,
    SINGLE_FILE,
    check_directory,
    foreign_weights,
    two_sets_of_weights,
    weight_files,
)

_NAME = re.compile(r"(?!.*(--|\.\.))[A-Za-z0-9_][\w.-]*(?<![.-])/[A-Za-z0-9_][\w.-]*(?<![.-])", re.ASCII)
_REVISION = re.compile(r"(?!.*(\.\.|//))[A-Za-z0-9_][\w./+-]*(?<!/)", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAX_NAME = 96  # the hub's own limit
# What is read beside the weights, by this package and by those who read what ``quantize`` writes.
_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "quantize_config.json",
    INDEX_FILE,
    "tokenizer.json",
    "tokenizer.model",
    "tiktoken.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "LICENSE",
    "LICENSE.md",
    "LICENSE.txt",
    "NOTICE",
)
_TOKENIZERS = ("tokenizer.json", "tiktoken.model")
_BAR = "huggingface_hub.snapshot_download"  # its name for the bar of all bytes
_TIMEOUT = 10.0  # seconds until a hub that does not answer counts as out of reach


def checkpoint_directory(source: str | os.PathLike[str], *, revision: str | None = None) -> Path:
    """The local directory of a checkpoint, downloaded first if ``source`` is the name of a model on a hub.

    A path that exists always is that path. Of a model on a hub come config.json, generation_config.json, tokenizer,
    chat template, license, and the safetensors files that its index names; no other weights and no code. What the
    cache holds is not downloaded again. Without a network, and with HF_HUB_OFFLINE=1, a complete snapshot in the cache
    is used. A bar on stderr shows the download if stderr is a terminal.

    Args:
        source: a directory with config.json, or as a str also ``organization/name``.
        revision: branch, tag or commit on the hub; None is the branch main. Not for a local directory.

    Raises:
        CheckpointError: no such directory, no such model or revision, no access to it, no safetensors, a download that
            broke off, a snapshot that is incomplete without a network. ValueError: a revision that cannot be one, or
            one for a local directory. ImportError: huggingface_hub is not installed.
    """
    if not isinstance(source, str) or os.path.lexists(source):
        if revision is not None:
            raise ValueError(f"revision={revision!r}: {source} is a local directory, which has none; leave it out")
        check_directory(Path(source))
        return Path(source)
    if len(source) > _MAX_NAME or not _NAME.fullmatch(source):
        hint = "; write no more of its address than that" if "://" in source else ""
        raise CheckpointError(
            f"{shown(source)}: no such directory, and no name of a model on a hub, which is organization/name{hint}"
        )
    if revision is not None and not _REVISION.fullmatch(revision):
        raise ValueError(f"revision={shown(revision)}: expected the name of a branch or tag, or a commit, of {source}")
    try:
        import huggingface_hub  # noqa: F401
    except ImportError:
        raise ImportError(
            f"{source}: no such directory; to look for it on a hub: pip install huggingface_hub"
        ) from None
    return _Model(source, revision or "main").directory()


class _Model:
    """A model on the hub: ``name`` at ``revision``."""

    def __init__(self, name: str, revision: str):
        from huggingface_hub import constants

        self._name, self._revision = name, revision
        self._hub, self._cache = constants.ENDPOINT, Path(constants.HF_HUB_CACHE)
        self._is_offline = constants.HF_HUB_OFFLINE

    def directory(self) -> Path:
        cached, lack = self._cached()
        if self._is_offline:
            if cached is None:
                raise self._absent(f"and {lack}; HF_HUB_OFFLINE forbids a download: unset it, or give a directory")
            return cached
        # A commit never changes. A snapshot without a tokenizer may be one of which only the weights were asked for.
        has_tokenizer = cached is not None and any((cached / name).exists() for name in _TOKENIZERS)
        if cached is not None and has_tokenizer and _COMMIT.fullmatch(self._revision):
            return cached
        from huggingface_hub import HfApi

        try:
            info = HfApi().model_info(self._name, revision=self._revision, files_metadata=True, timeout=_TIMEOUT)
        except Exception as error:  # of httpx, httpx2 or requests: which one depends on the version of huggingface_hub
            if refusal := self._refusal(error):
                raise refusal from None
            problem = f"{self._hub} cannot be reached ({_text(error)})"
            if cached is None:
                raise self._absent(f"{problem}, and {lack}; try again, or give a directory") from None
            warnings.warn(f"{self._name}: {problem}; the snapshot in the cache is used: {cached}", stacklevel=4)
            return cached
        return self._download({file.rfilename: file.size or 0 for file in info.siblings or ()})

    def _cached(self) -> tuple[Path | None, str]:
        """The complete snapshot in the cache, or None and what is missing."""
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(self._name, "config.json", revision=self._revision)
        if not isinstance(config, str):
            return None, f"the cache {self._cache} has no snapshot of revision {self._revision}"
        directory = Path(config).parent
        missing = [name for name in weight_files(directory) if not (directory / name).exists()]
        if missing:
            return None, f"the snapshot {directory} in the cache lacks {listed(missing, 2)}"
        return directory, ""

    def _download(self, files: dict[str, int]) -> Path:
        """files: name -> bytes, of all that the repository holds."""
        if "config.json" not in files:
            raise self._error(foreign_weights(files) or "has no config.json, which every model has")
        if INDEX_FILE not in files and SINGLE_FILE not in files:
            missing = f"has neither {SINGLE_FILE} nor {INDEX_FILE}, and only safetensors files can be read"
            raise self._error(foreign_weights(files) or missing)
        directory = self._fetch([name for name in _SMALL_FILES if name in files], self._revision)
        weights = weight_files(directory)
        if SINGLE_FILE in files and SINGLE_FILE not in weights:
            way_out = "download those that you want into a directory, and give that"
            raise self._error(two_sets_of_weights(way_out))
        if absent := [name for name in weights if name not in files]:
            raise self._error(f"{INDEX_FILE} names {listed(absent, 2)}, which is not there; choose another revision")
        nbytes = sum(files[name] for name in weights if not (directory / name).exists())
        free = shutil.disk_usage(directory).free
        if nbytes > free:
            raise self._error(f"weights of {size(nbytes)}, but {self._cache} has {size(free)} left; set HF_HOME")
        self._fetch(weights, directory.name, self._bar(nbytes))
        return directory

    def _fetch(self, names: Collection[str], revision: str, bar: Any = None) -> Path:
        """Download those of ``names`` that the cache does not hold. Returns the snapshot."""
        from huggingface_hub import snapshot_download

        patterns = [glob.escape(name) for name in names]
        bar = bar or self._bar(0)
        try:
            found = snapshot_download(self._name, revision=revision, allow_patterns=patterns, tqdm_class=bar)
        except Exception as error:  # as above, and of the file system
            if refusal := self._refusal(error):
                raise refusal from None
            if isinstance(error, OSError) and error.errno is not None:
                raise self._error(f"the cache {self._cache} cannot be written: {error.strerror}") from None
            raise self._error(f"the download broke off ({_text(error)}); try again: what has come is kept") from None
        finally:
            for each in bar.opened:  # huggingface_hub leaves them open
                each.close()
        directory = Path(found)
        if missing := [name for name in names if not (directory / name).exists()]:
            raise self._error(f"the download left out {listed(missing, 2)}; try again: what has come is kept")
        return directory

    def _refusal(self, error: Exception) -> CheckpointError | None:
        """What the hub answered and what to do about it; None if it gave no answer, or has a problem of its own."""
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        log_in = "`hf auth login`, or set HF_TOKEN"
        if isinstance(error, GatedRepoError):
            return self._error(f"access is restricted; accept the terms of {self._hub}/{self._name}, then {log_in}")
        if isinstance(error, RepositoryNotFoundError):
            return self._absent(f"and no such model on {self._hub}; check the spelling; if it is private, {log_in}")
        if isinstance(error, RevisionNotFoundError):
            return self._error(f"no revision {self._revision!r}; expected one of its branches, tags or commits")
        if isinstance(error, HfHubHTTPError) and 400 <= (status := error.response.status_code) < 500 and status != 429:
            return self._error(f"the request was refused ({_text(error)}); if the token is not valid, {log_in}")
        return None

    def _absent(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._name}: no such directory, {problem}")

    def _error(self, problem: str) -> CheckpointError:
        """Of a model that the hub has."""
        return CheckpointError(f"{self._name} on {self._hub}: {problem}")

    def _bar(self, nbytes: int) -> Any:
        """The class of the bars of a download, of which one is shown: that of all bytes, if there are any to come."""
        from huggingface_hub.utils import tqdm

        label = f"downloading {self._name}"

        class Bar(tqdm):
            opened: ClassVar[list[Any]] = []
            total = property(lambda self: nbytes, lambda self, value: None)  # huggingface_hub adds up what it has begun

            def __init__(self, *args: Any, name: str | None = None, **options: Any):
                hidden = not nbytes or name != _BAR or not sys.stderr.isatty()
                options |= dict(desc=label, leave=False, bar_format=None, disable=hidden)
                super().__init__(*args, name=name, **options)
                self.opened.append(self)

            def set_description(self, desc: str | None = None, refresh: bool | None = True) -> None:
                pass

        return Bar


def _text(error: Exception) -> str:
    """What it is and what it says in its first line; after that an answer of the hub only has advice."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
