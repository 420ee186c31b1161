"""What our dataclasses of arrays share: they are pytrees, print by shape, and ``jax.export`` can serialize them."""

import dataclasses
import enum
import itertools
import json
from typing import Any, TypeVar

import jax
from jax import export

T = TypeVar("T")
_STATIC: dict[str, type] = {}  # types of static fields, by their names in serialized programs


def pytree(cls: type[T]) -> type[T]:
    """Decorator of a frozen dataclass, below which it is made with ``repr=False`` and has arrays but in its static
    fields. Its repr reads no value: it neither waits for a device nor fetches from one."""
    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    static = [field.name for field in fields if field.metadata.get("static")]
    arrays = [field.name for field in fields if field.name not in static]
    jax.tree_util.register_dataclass(cls, data_fields=arrays, meta_fields=static)
    if "__repr__" not in vars(cls):
        cls.__repr__ = _repr
    export.register_pytree_node_serialization(
        cls,
        serialized_name=f"moe_jax.{cls.__name__}",
        serialize_auxdata=lambda values: json.dumps(_encoded(values)).encode(),
        deserialize_auxdata=lambda text: _decoded(json.loads(text)),
        from_children=lambda aux_data, children: cls(
            **dict(zip(arrays, children, strict=True)), **dict(zip(static, aux_data, strict=True))
        ),
    )
    return cls


def signature(tree: T) -> T:
    """Shape and dtype of every leaf, which trees of other values can be compared by."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def static_type(cls: type[T]) -> type[T]:
    """Decorator of a dataclass or enum whose objects stand in static fields."""
    _STATIC[cls.__name__] = cls
    return cls


def _repr(self: Any) -> str:
    parts = []
    for field in dataclasses.fields(self):
        value = getattr(self, field.name)
        if value is not None and (not field.metadata.get("static") or value != field.default):
            parts.append(f"{field.name}={by_shape(value)}")
    return f"{type(self).__name__}({', '.join(parts)})"


def by_shape(value: Any) -> str:
    """An array as "float32[4, 8]", equal neighbours of a tuple once: "48 x (...)"; a static value by its name."""
    if type(value) is tuple:
        runs = [(text, len([*same])) for text, same in itertools.groupby(map(by_shape, value))]
        return f"({', '.join(text if count == 1 else f'{count} x {text}' for text, count in runs)})"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        if dataclasses.is_dataclass(value):
            return repr(value)
        return f"{value.dtype}[{', '.join(map(str, value.shape))}]"
    if type(value).__name__ in _STATIC:
        return str(getattr(value, "name", value))
    return repr(value)


def _encoded(value: Any) -> Any:
    """A static value as JSON: lists for tuples, and [name, content] under "type" for what ``static_type`` knows."""
    if isinstance(value, tuple):
        return [_encoded(each) for each in value]
    if isinstance(value, enum.Enum):
        return {"type": type(value).__name__, "value": value.value}
    if dataclasses.is_dataclass(value):
        fields = {field.name: _encoded(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"type": type(value).__name__, "fields": fields}
    return value


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_decoded(each) for each in value)
    if not isinstance(value, dict):
        return value
    cls = _STATIC[value["type"]]
    if "value" in value:
        return cls(value["value"])
    return cls(**{name: _decoded(content) for name, content in value["fields"].items()})
