"""Where tokens go in the tests of ``nvlink_dispatch``: hostile cases and random ones."""

import numpy as np


def make_slots(routing, size, tokens, num_slots, top_k, seed=3):
    """(size, tokens, top_k) int32 slots, -1 for none: all on the "first" or "last" device, "none" at all, an "idle"
    device without tokens, "holes", or "random"."""
    rng = np.random.default_rng(seed)
    slots = np.argsort(rng.random((size, tokens, num_slots)), axis=-1)[..., :top_k].astype(np.int32)
    match routing:
        case "first":
            slots[:] = np.arange(top_k)
        case "last":
            slots[:] = num_slots - 1 - np.arange(top_k)
        case "none":
            slots[:] = -1
        case "idle":
            slots[0] = -1
        case "holes":
            slots[rng.random(slots.shape) < 0.4] = -1
        case "random":
            pass
        case _:
            raise ValueError(f"routing={routing!r} is no case of this function")
    return slots
