"""The processes that share one layer: torch's process groups, and vLLM's group coordinators."""

from typing import Any

import torch

_COORDINATOR = ("world_size", "rank_in_group", "all_reduce")  # what vLLM's GroupCoordinator offers


def is_running() -> bool:
    """Whether this process belongs to a torch.distributed job."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def place_in(group: Any) -> tuple[int, int]:
    """(number of ranks, own rank) in a group.

    group: a ProcessGroup, an object with the words of vLLM's GroupCoordinator, or None for all ranks of
    torch.distributed, which without torch.distributed is one.

    Raises TypeError for anything else, which is also what torch gives ranks outside a new group.
    """
    if group is None:
        return (torch.distributed.get_world_size(), torch.distributed.get_rank()) if is_running() else (1, 0)
    if _is_process_group(group):
        return group.size(), group.rank()
    if all(hasattr(group, word) for word in _COORDINATOR):
        return group.world_size, group.rank_in_group
    raise TypeError(
        f"process_group is {group!r} of type {type(group).__name__}, expected a torch.distributed.ProcessGroup that "
        f"this rank belongs to, or an object with {', '.join(_COORDINATOR)}"
    )


def summed(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum over the ranks of a group; the tensor itself is left as it is."""
    if group is not None and not _is_process_group(group):
        return group.all_reduce(tensor)
    tensor = tensor.clone()
    torch.distributed.all_reduce(tensor, group=group)
    return tensor


def _is_process_group(group: Any) -> bool:
    return torch.distributed.is_available() and isinstance(group, torch.distributed.ProcessGroup)
