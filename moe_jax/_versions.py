"""Weights of one version: how new values get into the Variables of a module, and how a call reads them.

``install`` never writes into a Variable that another thread may be reading. It makes new Variables and puts them into
their modules, those of one module in one step. ``one_version`` copies the tree of modules, not the Variables, and so
holds what was installed together. Nothing waits unless an installation is under way, which takes microseconds.
"""

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from flax import nnx

_Module = TypeVar("_Module")

_changing = threading.RLock()
_installing = threading.RLock()
_steps = 0  # an odd number while values are put in place


class Place(NamedTuple):
    """The Variable that a module has under a name, or what has ``copy(value)`` like one."""

    module: Any
    name: str

    @property
    def variable(self) -> Any:
        return vars(self.module)[self.name]


@contextlib.contextmanager
def changing() -> Iterator[None]:
    """One thread at a time: around what computes new values from those that are there, and installs them."""
    with _changing:
        yield


def install(values: Iterable[tuple[Place, Any]]) -> None:
    """Give Variables new values, all or none; a ``one_version`` of any module around them has all or none of them."""
    global _steps
    with _changing:
        changes: dict[int, tuple[Any, dict[str, Any]]] = {}
        for place, value in values:
            _, own = changes.setdefault(id(place.module), (place.module, {}))
            own[place.name] = place.variable.copy(value)
        before = [(module, {name: vars(module)[name] for name in own}) for module, own in changes.values()]
        with _installing:
            _steps += 1
            try:
                for module, own in changes.values():
                    vars(module).update(own)
            except BaseException:  # Ctrl-C between two modules
                for module, own in before:
                    vars(module).update(own)
                raise
            finally:
                _steps += 1


def one_version(module: _Module) -> _Module:
    """A copy of a module and its submodules with the same Variables, all of one version."""
    before = _steps
    copied = _copied(module, {})
    if before == _steps and before % 2 == 0:
        return copied
    with _installing:
        return _copied(module, {})


def _copied(node: Any, made: dict[int, Any]) -> Any:
    if id(node) not in made:
        made[id(node)] = copy = _shallow(node)
        held = vars(copy)
        for name, value in held.items():
            if isinstance(value, nnx.Pytree):
                held[name] = _copied(value, made)
    return made[id(node)]


def _shallow(node: _Module) -> _Module:
    copy = object.__new__(type(node))
    vars(copy).update(vars(node).copy())  # in one step: no other thread runs while a dict is copied
    return copy


class Versioned(nnx.Module):
    """A module that crosses into JAX's functions with weights of one version, while other threads reload it.

    As an argument of a jitted function it and its submodules are one version. In nnx.split, which needs the modules
    themselves, its own Variables are; give it ``one_version`` of a module with submodules. nnx.jit takes a module apart
    and writes it back, so no other thread may use the module meanwhile.
    """

    def _pytree__flatten(self) -> Any:
        return nnx.Module._pytree__flatten(one_version(self))

    def _pytree__flatten_with_paths(self) -> Any:
        return nnx.Module._pytree__flatten_with_paths(one_version(self))

    def _graph_node_flatten(self) -> Any:
        return nnx.Module._graph_node_flatten(_shallow(self))
