"""Quantizing a full-precision layer while it is loaded: expert by expert, so that a layer never exists twice."""

import dataclasses

import numpy as np

from moe_jax._config import MoEConfig
from moe_jax.quantization import MoEMethod


class OnlineExperts:
    """Holds full-precision parts of experts until an expert is complete, then keeps only its quantized leaves.

    leaves: the quantized leaves of all experts, filled one expert at a time; biases stay as they are and are not among
    them. pending_bytes: full-precision bytes held right now.
    """

    def __init__(self, method: MoEMethod, config: MoEConfig):
        scheme = method.scheme
        if scheme.activations is not None and scheme.activations.needs_input_scale:
            raise ValueError(
                f"scheme {scheme.name!r} needs input scales, which a full-precision checkpoint does not have; "
                "quantize with a scheme of dynamic activations"
            )
        self._method = method
        self._one_expert = dataclasses.replace(config, num_experts=1, top_k=1, has_bias=False)
        self._shards = ("w1", "w3", "w2") if config.is_act_and_mul else ("w1", "w2")
        specs = method.create_weights(dataclasses.replace(config, has_bias=False))
        self.leaves = {name: np.zeros(spec.shape, spec.dtype) for name, spec in specs.items()}
        self._parts: dict[int, dict[str, np.ndarray]] = {}
        self.pending_bytes = 0

    def add(self, expert: int, shard: str, part: np.ndarray) -> None:
        """Take one matrix (out, in) of one expert; it must not change until the expert is quantized."""
        self._parts.setdefault(expert, {})[shard] = part
        self.pending_bytes += part.nbytes

    def quantize_if_complete(self, expert: int) -> None:
        """Once all projections of an expert are there, replace them by their quantized leaves."""
        if len(self._parts[expert]) < len(self._shards):
            return
        parts = self._parts.pop(expert)
        w13 = np.stack([parts[shard] for shard in self._shards[:-1]])[None]
        quantized = self._method.quantize_leaves(w13, parts["w2"][None], None, self._one_expert)
        for name, leaf in self.leaves.items():
            leaf[expert] = np.asarray(quantized[name])[0]
        self.pending_bytes -= sum(part.nbytes for part in parts.values())
