"""Which prompts of a call begin alike, so that what they share is read once."""

import dataclasses
from collections.abc import Sequence

import numpy as np

BLOCK = 64  # what is shared is a multiple of so many tokens


@dataclasses.dataclass
class _Node:
    """Prompts that begin alike up to ``depth`` blocks, with at least one token more. best: tokens that sharing saves
    among them, at this node or below."""

    parent: int
    depth: int
    prompts: list[int]
    children: list[int]
    best: int = 0


def shared_prefixes(prompts: Sequence[np.ndarray], least: int) -> list[tuple[int, list[int]]]:
    """(tokens that are shared, a multiple of ``BLOCK``; indices of the prompts that share them) of disjoint groups that
    together save most tokens. A group that saves fewer than ``least`` is left out.

    prompts: (n,) integers each.
    """
    nodes = [_Node(-1, 0, list(range(len(prompts))), [])]
    names: dict[tuple[int, bytes], int] = {}
    for index, prompt in enumerate(prompts):
        at = 0
        for depth in range(1, (len(prompt) - 1) // BLOCK + 1):
            key = at, prompt[(depth - 1) * BLOCK : depth * BLOCK].tobytes()
            if key not in names:
                names[key] = len(nodes)
                nodes[at].children.append(len(nodes))
                nodes.append(_Node(at, depth, [], []))
            at = names[key]
            nodes[at].prompts.append(index)
    for node in reversed(nodes):  # children stand behind their parents
        below = sum(nodes[child].best for child in node.children)
        node.best = max(_saved(node), below)
    groups, open_nodes = [], [0]
    while open_nodes:
        node = nodes[open_nodes.pop()]
        if _saved(node) == node.best:
            if node.best >= max(1, least):
                groups.append((node.depth * BLOCK, node.prompts))
        else:
            open_nodes += node.children
    return groups


def _saved(node: _Node) -> int:
    return (len(node.prompts) - 1) * node.depth * BLOCK
