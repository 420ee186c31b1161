"""Routing written a second time: one token at a time, float64, plain loops. Shares no code with moe_jax.routing."""

import numpy as np


def score_row(z, scoring):
    """Scores of one token; a score that is not finite is 0."""
    z = np.asarray(z, np.float64)
    with np.errstate(all="ignore"):
        if scoring == "softmax":
            exps = np.exp(z - z.max())
            s = exps / exps.sum()
        elif scoring == "sigmoid":
            s = 1 / (1 + np.exp(-z))
        elif scoring == "sqrtsoftplus":
            s = np.sqrt(np.where(z > 20, z, np.log1p(np.exp(np.minimum(z, 20)))))
    return np.where(np.isfinite(s), s, 0.0)


def best(values, k, allowed=None):
    """Indices of the k largest, descending, ties to the lower index."""
    indices = range(len(values)) if allowed is None else allowed
    return sorted(indices, key=lambda i: (-values[i], i))[:k]


def divide_by_sum(weights, floor):
    """floor 0: divide by the sum, or by 1 when it is not positive; else by max(sum, floor)."""
    total = sum(weights)
    if floor:
        total = max(total, floor)
    return [w / (total if total > 0 else 1.0) for w in weights]


def route_row(
    z, *, top_k, scoring="softmax", renormalize=True, factor=1.0, bias=None, groups=None, kept=None, table=None
):
    """(weights, ids) of one token for the plain, biased, grouped and hashed routers."""
    s = score_row(z, scoring)
    c = s if bias is None else s + np.asarray(bias, np.float64)
    if table is not None:
        ids = list(table)
    elif groups is not None:
        size = len(s) // groups
        members = [range(g * size, (g + 1) * size) for g in range(groups)]
        worth = [sum(sorted((c[e] for e in m), reverse=True)[: 1 if bias is None else 2]) for m in members]
        ids = best(c, top_k, [e for g in best(worth, kept) for e in members[g]])
    else:
        ids = best(c, top_k)
    weights = [s[e] for e in ids]
    if renormalize:
        is_plain = bias is None and groups is None and table is None
        weights = divide_by_sum(weights, 0 if is_plain else 1e-20)
    return [w * factor for w in weights], ids


def llama4_row(z, top_k, renormalize):
    ids = best(np.asarray(z, np.float64), top_k)
    return [score_row(z, "sigmoid")[e] for e in ids], ids


def cohere2_row(z, top_k, renormalize):
    return route_row(z, top_k=top_k, scoring="sigmoid", renormalize=renormalize)


def phi_sparsemixer_row(z, top_k, renormalize):
    assert top_k == 2 and not renormalize
    left = [float(v) for v in z]
    weights, ids = [], []
    for _ in range(2):
        pick = best(left, 1)[0]
        m = left[pick]
        near = [e for e, v in enumerate(left) if v > -np.inf and not (m - z[e]) / max(abs(z[e]), m) > 0.02]
        weights.append(np.exp(m - m) / sum(np.exp(left[e] - m) for e in near))
        ids.append(pick)
        left[pick] = -np.inf
    return weights, ids


def gemma4_row(z, top_k, renormalize, scale=None):
    weights, ids = route_row(z, top_k=top_k, renormalize=True)
    return [w * (1.0 if scale is None else scale[e]) for w, e in zip(weights, ids, strict=True)], ids


def interns1_pro_row(z, top_k, renormalize, groups=1):
    s = score_row(z, "softmax")
    size = len(s) // groups
    ids = [e for g in range(groups) for e in best(s, top_k // groups, range(g * size, (g + 1) * size))]
    weights = [s[e] for e in ids]
    return (divide_by_sum(weights, 0) if renormalize else weights), ids


def rows(function, z, **kwargs):
    """Apply a row function to every token of (T, E) logits; (T, top_k) float64 weights and ids."""
    pairs = [function(np.asarray(row, np.float64), **kwargs) for row in z]
    return np.array([w for w, _ in pairs]), np.array([i for _, i in pairs])
