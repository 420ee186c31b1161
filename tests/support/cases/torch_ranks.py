"""Ranks that share a layer, simulated by threads, and the whole layer in float64 NumPy."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

E, Z, K, H, I, T = 5, 2, 2, 16, 32, 7  # noqa: E741
FACTOR = 2.5
LAYOUTS = [
    dict(tp_size=2),
    dict(ep_size=3),
    dict(ep_size=2, expert_placement_strategy="round_robin"),
    dict(tp_size=2, ep_size=2),
]


class SimulatedGroup:
    """One rank's handle of a group whose ranks are threads, with the words of vLLM's GroupCoordinator."""

    def __init__(self, rank, size, parts, barrier):
        self.rank_in_group, self.world_size, self._parts, self._barrier = rank, size, parts, barrier
        self.sums = 0

    @classmethod
    def make(cls, size):
        parts, barrier = [None] * size, threading.Barrier(size)
        return [cls(rank, size, parts, barrier) for rank in range(size)]

    def all_reduce(self, tensor):
        self.sums += 1
        self._parts[self.rank_in_group] = tensor
        self._barrier.wait(60)
        total = torch.stack(self._parts).sum(0)
        self._barrier.wait(60)
        return total


@functools.cache
def arrays():
    """float64 parameters of everything a layer may have."""
    rng = np.random.default_rng(0)
    sizes = dict(w1=(E, I, H), w3=(E, I, H), w2=(E, H, I), b1=(E, I), b3=(E, I), b2=(E, H), shared=(H, H), gate=(1, H))
    sizes |= dict(into=(H, H), correction=(E + Z,))
    found = {name: rng.standard_normal(shape).astype(np.float32).astype(np.float64) for name, shape in sizes.items()}
    return {name: value * (0.3 if name.startswith("w") else 1.0) for name, value in found.items()}


@functools.cache
def inputs(features):
    rng = np.random.default_rng(1)
    return rng.standard_normal((T, H)), rng.standard_normal((T, E + Z * ("zero" in features.split())))


def output_transform(y):
    """Not linear, so that it must see the whole sum."""
    return y * y.abs() if isinstance(y, torch.Tensor) else y * np.abs(y)


def top_k_of(words):
    """Experts of a token: one where router weights multiply the input."""
    return 1 if "input" in words else K


def correction_of(words):
    """(E + Z,) e_score_correction_bias; small enough for one choice to be an expert here, a zero expert there."""
    return arrays()["correction"] * (0.1 if "input" in words else 1.0)


def is_renormalized(words):
    return not {"zero", "input"} & set(words)


def routing_of(features, x, z):
    """(T, K) weights and ids, before a factor; the torch function prefers the worst experts."""
    top_k = top_k_of(features)
    scores = np.exp(z - z.max(-1, keepdims=True))
    scores /= scores.sum(-1, keepdims=True)
    if "torch_routing" in features:
        ids = np.argsort(z, axis=-1)[:, :top_k]
        return np.abs(np.take_along_axis(z, ids, -1)) + 0.5, ids
    steered = scores + correction_of(features) if "zero" in features else scores
    ids = np.argsort(-steered, axis=-1, kind="stable")[:, :top_k]
    weights = np.take_along_axis(scores, ids, -1)
    return weights / (weights.sum(-1, keepdims=True) if is_renormalized(features) else 1), ids


def routed_reference(features, x, z):
    """The routed output of the whole layer, token by token."""
    p, words, y = arrays(), features.split(), np.zeros((T, H))
    weights, ids = routing_of(words, x, z)
    weights = weights * (FACTOR if "factor" in words else 1.0)
    for t in range(T):
        for weight, e in zip(weights[t], ids[t], strict=True):
            if e >= E:
                y[t] += weight * x[t]
                continue
            on_input, on_output = (weight, 1.0) if "input" in words else (1.0, weight)
            row = on_input * x[t]
            gate, up = (p[w][e] @ row + ("bias" in words) * p[b][e] for w, b in (("w1", "b1"), ("w3", "b3")))
            y[t] += on_output * (p["w2"][e] @ (gate / (1 + np.exp(-gate)) * up) + ("bias" in words) * p["b2"][e])
    return y * FACTOR if "scale" in words else y


def reference(features):
    p, words, (x, z) = arrays(), features.split(), inputs(features)
    y = routed_reference(features, x @ p["into"].T if "transforms" in words else x, z)
    y = output_transform(y) if "transforms" in words else y
    if {"shared", "partial"} & set(words):
        share = 1 / (1 + np.exp(-x @ p["gate"].T)) if "gated" in words else 1.0
        y = y + share * (x @ p["shared"].T)
    return y


def linear(weight):
    module = torch.nn.Linear(*weight.shape[::-1], bias=False)
    module.weight = torch.nn.Parameter(torch.tensor(weight, dtype=torch.float32), requires_grad=False)
    return module


def modules_around(words, place, size, transformed=output_transform):
    """The arguments of a layer for "transforms" and for "partial" shared experts, whose inputs ``size`` ranks divide.

    transformed: what the output transform computes.
    """
    p, options = arrays(), {}
    if "transforms" in words:
        transform = torch.nn.Module()
        transform.forward = transformed
        options |= dict(routed_input_transform=linear(p["into"]), routed_output_transform=transform)
    if "partial" in words:
        options |= dict(shared_experts=linear(p["shared"] * (np.arange(H) % size == place)))
    return options


def worst(hidden_states, gating_output, topk, renormalize):
    """The worst experts, by torch."""
    values, ids = torch.topk(-gating_output, topk)
    return values.abs() + 0.5, ids


def run_ranks(function, size):
    """function(rank) of all ranks at once, since they wait for each other."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(function, range(size)))


def assert_rows(found, expected):
    found = found.double().numpy()
    scale = np.abs(expected).max(-1, keepdims=True)
    assert (np.abs(found - expected) <= 2e-4 * scale).all(), np.abs(found - expected).max(-1) / scale[:, 0]


def tensors(features):
    return tuple(torch.tensor(array, dtype=torch.float32) for array in inputs(features))
