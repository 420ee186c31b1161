"""Rows that a model reads in several calls."""

import jax
import numpy as np


@jax.jit
def stepped(model, ids, cache, mask=None):
    return model(ids, attention_mask=mask, cache=cache)


def in_chunks(model, ids, ends, slots):
    """Logits of ids (B, S), each call up to the next of ``ends``, in a cache of so many slots."""
    cache, found, begin = model.init_cache(len(ids), slots), [], 0
    for end in ends:
        logits, cache = stepped(model, ids[:, begin:end], cache)
        found.append(np.asarray(logits))
        begin = end
    return np.concatenate(found, axis=1)
