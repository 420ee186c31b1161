"""Where programs are kept for later processes, and the sources that they are made from."""

import hashlib
import importlib.util
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from pallas_kernels.tuning import user_cache


def folder(name: str) -> Path | None:
    """In MOE_JAX_CACHE_DIR, else in our folder of the user's cache; None where that is set to ""."""
    chosen = os.environ.get("MOE_JAX_CACHE_DIR")
    if chosen == "":
        return None
    return (user_cache() if chosen is None else Path(chosen)) / name


def sources(*packages: str) -> Iterator[tuple[str, Path]]:
    """Sources and tables of packages, and their names apart from where these are installed."""
    for package in packages:
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.origin is not None
        root = Path(spec.origin).parent
        for file in sorted(root.rglob("*")):
            if file.suffix in (".py", ".json"):
                yield f"{package}/{file.relative_to(root).as_posix()}", file


def digest_of(files: Iterable[tuple[str, Path]]) -> str:
    """Of names and contents."""
    digest = hashlib.sha256()
    for name, file in files:
        digest.update(f"{name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()
