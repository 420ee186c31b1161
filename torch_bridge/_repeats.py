"""Tensors that come twice: the same again changes nothing, other values in its place are refused."""

from collections.abc import Hashable

import torch

_SAMPLE = 64  # places along the last two axes whose bytes are kept


class Repeats:
    """What came for which place, as digests."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, tuple[object, ...]] = {}

    def has(self, place: Hashable, tensor: torch.Tensor, name: str) -> bool:
        """Whether this tensor came for this place before. Raises ValueError when another did."""
        known = self._seen.get(place)
        if known is None:
            return False
        if known != _digest(tensor):
            raise ValueError(f"{name}: came twice with different values; load one of them, or reload_weights the other")
        return True

    def add(self, place: Hashable, tensor: torch.Tensor) -> None:
        """Note what came."""
        self._seen[place] = _digest(tensor)


def _digest(tensor: torch.Tensor) -> tuple[object, ...]:
    """Shape, dtype, the sum of all bits as integers, and a sample of values in their order."""
    tensor = tensor.detach()
    bits = tensor.contiguous().reshape(-1).view(torch.uint8)
    words = bits.view(torch.int32) if bits.numel() % 4 == 0 and bits.data_ptr() % 4 == 0 else bits
    steps = (slice(None, None, max(1, size // _SAMPLE)) for size in tensor.shape[-2:])
    sample = tensor[(..., *steps)].contiguous().reshape(-1).view(torch.uint8)
    total = int(words.sum(dtype=torch.int64))
    return tuple(tensor.shape), tensor.dtype, total, hash(sample.cpu().numpy().tobytes())
