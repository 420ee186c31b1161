"""The one module that knows JAX versions: the range we run on, and every difference inside it.

``check_versions`` runs when ``moe_jax`` is imported, before anything that a wrong version would break.
"""

import importlib
import importlib.util
import os
import sys

MIN_JAX = (0, 10, 2)
END_JAX = (0, 12)


def version_error(package: str, version: str) -> str | None:
    """One line saying that ``package`` at ``version`` is outside the supported range, or None when it is inside.

    A development or local suffix counts as the release it stands before: "0.11.2.dev20260801+x" is 0.11.2.
    """
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())
    if MIN_JAX <= release < END_JAX:
        return None
    low, end = (".".join(map(str, bound)) for bound in (MIN_JAX, END_JAX))
    return (
        f"moe_jax supports {package} >= {low}, < {end}; found {package} {version}. "
        f"Way out: pip install 'jax>={low},<{end}' 'jaxlib>={low},<{end}'"
    )


def check_versions() -> None:
    """Raise ImportError, in one line, when the jax or jaxlib in use is outside the supported range."""
    for package in ("jax", "jaxlib"):
        if error := version_error(package, _version_of(package)):
            raise ImportError(error)


def _version_of(package: str) -> str:
    """Of what is loaded, else as the name of its metadata's directory says: to load it takes a second."""
    if package not in sys.modules:
        spec = importlib.util.find_spec(package)
        site = os.path.dirname(os.path.dirname(spec.origin)) if spec and spec.origin else None
        names = os.listdir(site) if site else []
        found = [name for name in names if name.startswith(f"{package}-") and name.endswith(".dist-info")]
        if len(found) == 1:
            return found[0].removeprefix(f"{package}-").removesuffix(".dist-info")
    return importlib.import_module(package).__version__


def installed_version(distribution: str) -> str | None:
    """None where it is not installed."""
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
