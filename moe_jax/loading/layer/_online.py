"""Quantizing a full-precision layer while it is loaded: expert by expert, so that a layer never exists twice."""

import collections
import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moe_jax._config import MoEConfig
from moe_jax._typing import HostArray
from moe_jax.loading.layer._values import TensorError, check_values
from moe_jax.quantization import MoEMethod

_IN_FLIGHT_BYTES = 768 << 20  # full-precision bytes on the device; enough to keep copies and products overlapping
# Part of them is sent before the first is quantized: a program's start waits until its arguments have left host memory,
# and it takes several copies at a time to keep the bus busy (online_quantize*_h200.txt).
_SENT_SHARE = 0.5


class _Part(NamedTuple):
    """One matrix of an expert. sent: its copy on the device, None where the host quantizes."""

    name: str
    array: HostArray
    sent: jax.Array | None


class OnlineExperts:
    """Holds full-precision parts of experts until an expert is complete, then keeps only its quantized leaves.

    On an accelerator parts are sent as they are when they come, checked and quantized there, each expert into its place
    in the leaves; the host goes on with the next one in the meantime. On a CPU, and for a method that cannot be traced
    (one in NumPy), leaves are host arrays.

    leaves: the quantized leaves of all experts, filled one expert at a time; biases stay as they are and are not among
    them. pending_bytes: full-precision bytes held right now. checks_values: NaN and infinity are looked for here.
    """

    def __init__(self, method: MoEMethod, config: MoEConfig, *, on_device: bool | None = None):
        """on_device: where the leaves are; None decides by the backend and the method."""
        scheme = method.scheme
        if scheme.activations is not None and scheme.activations.needs_input_scale:
            raise ValueError(
                f"scheme {scheme.name!r} needs input scales, which a full-precision checkpoint does not have; "
                "quantize with a scheme of dynamic activations"
            )
        self._method, self.num_experts = method, config.num_experts
        # Without a name, so that one program serves all layers.
        self._one_expert = dataclasses.replace(config, num_experts=1, top_k=1, has_bias=False, name="")
        self._shards = ("w1", "w3", "w2") if config.is_act_and_mul else ("w1", "w2")
        if on_device is None:
            on_device = jax.default_backend() != "cpu" and _is_traceable(method, self._one_expert)
        self.checks_values = on_device
        zeros = jnp.zeros if on_device else np.zeros
        specs = method.create_weights(dataclasses.replace(config, has_bias=False))
        self.leaves: dict[str, Any] = {name: zeros(spec.shape, spec.dtype) for name, spec in specs.items()}
        self._parts: dict[int, dict[str, _Part]] = {}
        self._sent: collections.deque[tuple[int, dict[str, _Part]]] = collections.deque()
        self._sent_bytes = 0
        self._in_flight: collections.deque[tuple[jax.Array, list[_Part]]] = collections.deque()
        self._in_flight_bytes = 0
        self._damage: TensorError | None = None
        self.pending_bytes = 0

    @property
    def is_damaged(self) -> bool:
        """Whether a value was not finite, so that nothing can be made of this layer."""
        return self._damage is not None

    def add(self, expert: int, shard: str, part: HostArray, name: str) -> None:
        """Take one matrix (out, in) of one expert; it must not change until ``finish``. name: for errors."""
        sent = jax.device_put(part) if self.checks_values else None
        self._parts.setdefault(expert, {})[shard] = _Part(name, part, sent)
        self.pending_bytes += part.nbytes

    def quantize_if_complete(self, expert: int) -> None:
        """Once all projections of an expert are there, replace them by their quantized leaves.

        Raises TensorError for a value that is not finite, maybe one of an earlier expert.
        """
        if len(self._parts[expert]) < len(self._shards):
            return
        parts = self._parts.pop(expert)
        nbytes = _nbytes(parts.values())
        if self.checks_values:
            self._sent.append((expert, parts))
            self._sent_bytes += nbytes
            self._start(int(_SENT_SHARE * _IN_FLIGHT_BYTES))
            self._wait(_IN_FLIGHT_BYTES - self._sent_bytes)
            return
        w13 = [parts[shard].array for shard in self._shards[:-1]]
        quantized = self._method.quantize_leaves(np.stack(w13)[None], parts["w2"].array[None], None, self._one_expert)
        for name, leaf in self.leaves.items():
            leaf[expert] = np.asarray(quantized[name])[0]
        self.pending_bytes -= nbytes

    def finish(self) -> None:
        """Wait for what is on its way. Raises TensorError for a value that is not finite."""
        self._start(0)
        self._wait(0)
        if self._damage is not None:
            raise self._damage

    def _start(self, most: int) -> None:
        """Quantize the experts sent first, until at most so many bytes only lie there."""
        while self._sent_bytes > most:
            expert, parts = self._sent.popleft()
            w13 = [parts[shard].sent for shard in self._shards[:-1]]
            self.leaves, is_finite = _quantize_into(
                self.leaves, w13, parts["w2"].sent, expert, self._method, self._one_expert
            )
            self._in_flight.append((is_finite, list(parts.values())))
            nbytes = _nbytes(parts.values())
            self._sent_bytes -= nbytes
            self._in_flight_bytes += nbytes

    def _wait(self, most: int) -> None:
        while self._in_flight_bytes > max(most, 0):
            is_finite, parts = self._in_flight.popleft()
            nbytes = _nbytes(parts)
            self._in_flight_bytes -= nbytes
            self.pending_bytes -= nbytes
            if bool(is_finite):
                continue
            for part in parts:  # the device only says that there is one; where, the host finds out
                try:
                    check_values(part.name, part.array)
                except ValueError as error:
                    self._damage = self._damage or TensorError(part.name, str(error))
                    raise self._damage from None


def _nbytes(parts: Iterable[_Part]) -> int:
    return sum(part.array.nbytes for part in parts)


@functools.partial(jax.jit, static_argnums=(4, 5), donate_argnums=0)
def _quantize_into(leaves, w13, w2, expert, method, config):
    """The leaves of all experts with those of one expert written into them, in place; whether its values are finite."""
    quantized = method.quantize_leaves(jnp.stack(w13)[None], w2[None], None, config)
    is_finite = functools.reduce(jnp.logical_and, (jnp.isfinite(part).all() for part in (*w13, w2)))
    return {
        name: lax.dynamic_update_index_in_dim(leaf, quantized[name][0], expert, axis=0) for name, leaf in leaves.items()
    }, is_finite


def _is_traceable(method: MoEMethod, config: MoEConfig) -> bool:
    w13, w2 = (jax.ShapeDtypeStruct((*lead, n, k), jnp.float32) for _, lead, n, k in config.shape.products)
    try:
        jax.eval_shape(lambda w13, w2: method.quantize_leaves(w13, w2, None, config), w13, w2)
    except jax.errors.JAXTypeError:
        return False
    return True
