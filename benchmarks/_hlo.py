"""Kernels of a compiled program, from its HLO: what a turn of its loop launches."""

import re
from typing import NamedTuple

# Instructions that launch nothing.
_FREE = {
    "parameter",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "constant",
    "after-all",
    "partition-id",
    "add-dependency",
}
_INSTRUCTION = re.compile(r"(?:ROOT )?%?([\w.\-]+) = (?:\(.*?\)|\S+) ([\w\-]+)\(")


class Launch(NamedTuple):
    """name: of the HLO instruction. scope: where it comes from, as jax.named_scope and jax.jit name it."""

    name: str
    scope: str


def launches(text: str) -> list[Launch]:
    """Of one turn of the longest loop, in the order of execution. text: ``compiled.as_text()``."""
    parts: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in text.splitlines():
        if current is None and (head := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line)):
            current = parts.setdefault(head[1], [])
        elif line.startswith("}"):
            current = None
        elif current is not None:
            current.append(line.strip())
    bodies = [
        name for lines in parts.values() for line in lines for name in re.findall(r" while\(.*body=%?([\w.\-]+)", line)
    ]
    return max((_of(parts, name) for name in bodies), key=len, default=[])


def _of(parts: dict[str, list[str]], name: str) -> list[Launch]:
    found = []
    for line in parts.get(name, ()):
        matched = _INSTRUCTION.match(line)
        if matched is None or matched[2] in _FREE or 'custom_call_target="AllocateBuffer"' in line:
            continue
        called = re.search(r"to_apply=%?([\w.\-]+)", line) if matched[2] == "call" else None
        if called is not None:  # what a command buffer records
            found += _of(parts, called[1])
            continue
        scope = re.search(r'op_name="([^"]*)"', line)
        found.append(Launch(matched[1], scope[1] if scope else ""))
    return found


def outside_the_experts(found: list[Launch]) -> list[list[Launch]]:
    """For each layer but the first the launches between the experts of the layer before it and its own."""
    layers: list[list[Launch]] = []
    is_inside = False
    for launch in found:
        if "forward_layer" in launch.scope:
            is_inside = True
            continue
        if is_inside:
            layers.append([])
        is_inside = False
        if layers:
            layers[-1].append(launch)
    return layers[:-1]  # behind the last experts come norm and head
