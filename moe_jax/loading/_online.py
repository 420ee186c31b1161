"""Quantizing a full-precision layer while it is loaded: expert by expert, so that a layer never exists twice."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moe_jax._config import MoEConfig
from moe_jax.quantization import MoEMethod


class OnlineExperts:
    """Holds full-precision parts of experts until an expert is complete, then keeps only its quantized leaves.

    On an accelerator experts are sent as they are and quantized there, each into its place in the leaves; the host goes
    on with the next one in the meantime. On a CPU, and for a method that cannot be traced (one in NumPy), leaves are
    host arrays.

    leaves: the quantized leaves of all experts, filled one expert at a time; biases stay as they are and are not among
    them. pending_bytes: full-precision bytes held right now.
    """

    def __init__(self, method: MoEMethod, config: MoEConfig, *, on_device: bool | None = None):
        """on_device: where the leaves are; None decides by the backend and the method."""
        scheme = method.scheme
        if scheme.activations is not None and scheme.activations.needs_input_scale:
            raise ValueError(
                f"scheme {scheme.name!r} needs input scales, which a full-precision checkpoint does not have; "
                "quantize with a scheme of dynamic activations"
            )
        self._method = method
        # Without a name, so that one program serves all layers.
        self._one_expert = dataclasses.replace(config, num_experts=1, top_k=1, has_bias=False, name="")
        self._shards = ("w1", "w3", "w2") if config.is_act_and_mul else ("w1", "w2")
        if on_device is None:
            on_device = jax.default_backend() != "cpu" and _is_traceable(method, self._one_expert)
        self._on_device = on_device
        zeros = jnp.zeros if on_device else np.zeros
        specs = method.create_weights(dataclasses.replace(config, has_bias=False))
        self.leaves: dict[str, Any] = {name: zeros(spec.shape, spec.dtype) for name, spec in specs.items()}
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
        halves = [parts[shard] for shard in self._shards[:-1]]
        if self._on_device:
            self.leaves = _quantize_into(self.leaves, halves, parts["w2"], expert, self._method, self._one_expert)
        else:
            quantized = self._method.quantize_leaves(np.stack(halves)[None], parts["w2"][None], None, self._one_expert)
            for name, leaf in self.leaves.items():
                leaf[expert] = np.asarray(quantized[name])[0]
        self.pending_bytes -= sum(part.nbytes for part in parts.values())


@functools.partial(jax.jit, static_argnums=(4, 5), donate_argnums=0)
def _quantize_into(leaves, halves, w2, expert, method, config):
    """The leaves of all experts with those of one expert written into them, in place."""
    quantized = method.quantize_leaves(jnp.stack(halves)[None], w2[None], None, config)
    return {
        name: lax.dynamic_update_index_in_dim(leaf, quantized[name][0], expert, axis=0) for name, leaf in leaves.items()
    }


def _is_traceable(method: MoEMethod, config: MoEConfig) -> bool:
    halves, inner, hidden = config.num_halves, config.intermediate_size, config.hidden_size
    w13 = jax.ShapeDtypeStruct((1, halves, inner, hidden), jnp.float32)
    w2 = jax.ShapeDtypeStruct((1, hidden, inner), jnp.float32)
    try:
        jax.eval_shape(lambda w13, w2: method.quantize_leaves(w13, w2, None, config), w13, w2)
    except jax.errors.JAXTypeError:
        return False
    return True
