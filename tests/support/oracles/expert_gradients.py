"""Gradients of a layer's experts in float64, by torch's autograd: expert after expert, with formulas of its own."""

from typing import Any

import numpy as np
import torch


def _activated(name: str, gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
    match name:
        case "silu":
            return torch.nn.functional.silu(gate) * up
        case "gelu_tanh":
            return torch.nn.functional.gelu(gate, approximate="tanh") * up
        case "swigluoai":
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            return gate * torch.sigmoid(1.702 * gate) * (up + 1.0)
        case "relu2_no_mul":
            return torch.relu(gate) ** 2
    raise NotImplementedError(name)


def expert_gradients(
    g: Any,
    x: Any,
    topk_weights: Any,
    topk_ids: Any,
    w13: Any,
    w2: Any,
    *,
    activation: str = "silu",
    w13_bias: Any = None,
    w2_bias: Any = None,
) -> dict[str, np.ndarray]:
    """Gradients of sum(g * y), by name of the argument, y itself, and as "topk_weights_terms", (T, k), the norms of the
    terms over I that a router weight's gradient sums: in three tokens they may all cancel.

    g, x: (T, H). topk_weights, topk_ids: (T, k), ids outside of the experts are not routed. w13: (E, G, I, H). w2:
    (E, H, I). w13_bias: (E, G, I). w2_bias: (E, H).
    """
    given = dict(x=x, topk_weights=topk_weights, w13=w13, w2=w2, w13_bias=w13_bias, w2_bias=w2_bias)
    leaves = {
        name: torch.tensor(np.asarray(value).astype(np.float64), requires_grad=True)
        for name, value in given.items()
        if value is not None
    }
    ids = np.array(topk_ids)
    y, terms = torch.zeros_like(leaves["x"]), torch.zeros(ids.shape, dtype=torch.float64)
    cotangent = torch.tensor(np.asarray(g).astype(np.float64))
    for expert in range(leaves["w13"].shape[0]):
        token, slot = map(torch.as_tensor, np.nonzero(ids == expert))
        h = torch.einsum("rh,gih->gri", leaves["x"][token], leaves["w13"][expert])
        if w13_bias is not None:
            h = h + leaves["w13_bias"][expert][:, None]
        hidden = _activated(activation, h[0], h[1] if len(h) > 1 else None)
        own = hidden @ leaves["w2"][expert].T
        terms[token, slot] = (hidden * (cotangent[token] @ leaves["w2"][expert])).norm(dim=1).detach()
        if w2_bias is not None:
            own = own + leaves["w2_bias"][expert]
        y = y.index_add(0, token, own * leaves["topk_weights"][token, slot][:, None])
    (y * cotangent).sum().backward()
    found = {name: np.zeros(leaf.shape) if leaf.grad is None else leaf.grad.numpy() for name, leaf in leaves.items()}
    return dict(found, y=y.detach().numpy(), topk_weights_terms=terms.numpy())


def assert_gradients_close(found: dict[str, Any], expected: dict[str, np.ndarray], fraction: float = 2.0**-6) -> None:
    """Each row of each gradient within ``fraction`` of its largest value, plus 1/256 of the largest of its expert; of
    router weights plus 1/128 of the largest norm of the terms that one sums.

    A row sums products of values that were rounded to 16 bits; where they cancel, the second term is their rounding.
    """
    for name, value in found.items():
        actual, wanted = np.asarray(value).astype(np.float64), expected[name]
        assert actual.shape == wanted.shape, f"{name}: shape {actual.shape}, expected {wanted.shape}"
        assert np.isfinite(actual).all(), f"{name} is not finite"
        row = np.abs(wanted).max(axis=-1, keepdims=True)
        whole = np.abs(wanted).max()
        if name not in ("x", "topk_weights"):
            whole = np.abs(wanted).reshape(len(wanted), -1).max(axis=1).reshape(-1, *(1,) * (wanted.ndim - 1))
        rounding = 2.0**-8 * whole
        if name == "topk_weights":
            rounding = 2.0**-7 * expected["topk_weights_terms"].max(initial=0.0)
        bound = fraction * row + rounding
        error = np.abs(actual - wanted)
        at = np.unravel_index(np.argmax(error - bound), error.shape)
        assert (error <= bound).all(), (
            f"{name} at {tuple(map(int, at))}: {actual[at]:.6g}, expected {wanted[at]:.6g}; "
            f"{int((error > bound).any(axis=-1).sum())} rows differ"
        )
