"""The torch bridge: the layer of moe_jax as a torch module. torch is imported here and nowhere else in the library.

Names load at first use: vLLM imports this package in every process, to learn that there is a plugin.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_bridge._public import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name.startswith("_") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torch_bridge import _public

    if name == "__all__":
        return _public.__all__
    return getattr(_public, name)
