"""One layer of experts with random weights: its shapes, and the time of a call after the router logits."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax._config import MoEConfig
from moe_jax.cli.bench._limits import Limits
from moe_jax.cli.bench._timing import NUM_VARIANTS, time_in_jit
from moe_jax.experts import fused_moe
from moe_jax.experts._choice import in_best_layout
from moe_jax.quantization import ExpertWeights, method_for

# name: (experts E, top_k, hidden H, intermediate I); dsv3-ep8 is one of eight expert-parallel ranks.
MODELS = {
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "dsv3-ep8": (32, 8, 7168, 2048),
    "mixtral-8x7b": (8, 2, 4096, 14336),
    "gpt-oss-120b": (128, 4, 2880, 2880),
}
SHAPES = MODELS | {"toy": (16, 4, 256, 128)}  # the small one is for CPUs


def layer_shape(model: str) -> tuple[int, int, int, int]:
    """(experts, top_k, hidden, intermediate) of a name in SHAPES, or of "16,4,256,128". Raises ValueError."""
    if model in SHAPES:
        return SHAPES[model]
    parts = model.split(",")
    if len(parts) != 4 or not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(
            f"model {model!r}: expected one of {', '.join(SHAPES)}, or four positive integers "
            "'experts,top_k,hidden,intermediate'"
        )
    experts, top_k, hidden, intermediate = map(int, parts)
    if top_k > experts:
        raise ValueError(f"model {model!r}: top_k is {top_k}, expected at most the {experts} experts")
    return experts, top_k, hidden, intermediate


_TEMPORARY_BYTES = 1 << 30  # of 16-bit values while weights are made
# Of normal inputs, and of hidden values of weights as random_weights makes them: for activations with given scales.
_LARGEST = {"w13": 6.0, "w2": 12.0}


def random_weights(config: MoEConfig) -> ExpertWeights:
    """Normal values, made and quantized on the device some experts at a time, in the layout that the kernels read;
    scales of groups rounded to the dtype that the scheme holds them in. Given scales of activations reach 6 for inputs
    and 12 for hidden values; global ones are 1.
    """
    method = method_for(config.scheme)
    activations = config.scheme.activations
    if activations is not None and activations.needs_input_scale:
        quantizing = method_for(dataclasses.replace(config.scheme, activations=None))
    else:
        quantizing = method
    intermediate, hidden = config.intermediate_size, config.hidden_size
    most = max(1, _TEMPORARY_BYTES // (6 * intermediate * hidden))  # experts whose 16-bit values fit

    def stack(key, lead, n, k):
        def values(key):
            return (jax.random.normal(key, (n, k), jnp.bfloat16) * k**-0.5).astype(jnp.bfloat16)

        keys = jax.random.split(key, int(np.prod(lead)))
        return jax.jit(lambda keys: jax.lax.map(values, keys).reshape(*lead, n, k))(keys)

    def some_experts(first):
        part = dataclasses.replace(config, num_experts=min(most, config.num_experts - first))
        key13, key2 = jax.random.split(jax.random.fold_in(jax.random.key(0), first))
        w13 = stack(key13, (part.num_experts, 2), intermediate, hidden)
        w2 = stack(key2, (part.num_experts,), hidden, intermediate)
        return quantizing.quantize_leaves(w13, w2, None, part)

    parts = [some_experts(first) for first in range(0, config.num_experts, most)]
    leaves = {name: jnp.concatenate([part.pop(name) for part in parts]) for name in list(parts[0])}
    for name, spec in method.create_weights(config).items() if quantizing is not method else ():
        if spec.kind == "input_scale":
            inputs = config.scheme.activation_format
            largest = inputs.element_type.max
            scale = 1.0 if inputs.global_scale is not None else _LARGEST[name.split("_")[0]] / largest
            leaves[name] = jnp.full(spec.shape, scale, spec.dtype)
    weights = method.process_weights_after_loading(leaves, config)
    return in_best_layout(config, weights)


def operand_of(config: MoEConfig) -> str:
    """The dtype in which the products run, where the device multiplies it."""
    activations = config.scheme.activations
    if activations is None or activations.scale != "float32":
        return config.dtype.name
    return str(activations.element_type.storage)


def measure_layer(
    config: MoEConfig,
    model: str,
    weights: ExpertWeights,
    tokens: int,
    limits: Limits,
    *,
    turn: Callable[[], Any] = contextlib.nullcontext,
    **timing: Any,
) -> dict[str, Any]:
    """Time ``fused_moe`` of ``tokens`` random tokens: routing, both products, combine.

    turn, timing: for ``time_in_jit``. Returns model, scheme, tokens; us of one call; tflops over the routed rows; gbps
    over the weights of the experts that were hit plus activations in and out; fraction of the nearer of ``limits``.
    """
    hidden = config.hidden_size
    count = timing.get("calls", (0, NUM_VARIANTS))[1]
    kx, kz = jax.random.split(jax.random.key(tokens))
    x = jax.random.normal(kx, (tokens, hidden), config.dtype)
    # Every call routes anew: at few tokens the weights of one routing would stay in the L2.
    logits = list(jax.random.normal(kz, (count, tokens, config.num_experts), jnp.float32))
    micros = time_in_jit(
        lambda w, x, z: fused_moe(x, z, w, config),
        (weights, x, logits[0]),
        varied=2,
        variants=logits,
        turn=turn,
        **timing,
    )
    hit = np.mean([len(np.unique(np.asarray(jax.lax.top_k(z, config.top_k)[1]))) for z in logits])
    flops = 2 * 3 * tokens * config.top_k * hidden * config.intermediate_size
    moved = weights.nbytes() * hit / config.num_experts + 2 * config.dtype.itemsize * tokens * hidden
    tflops, gbps = flops / micros / 1e6, moved / micros / 1e3
    return dict(
        model=model,
        scheme=config.scheme.name,
        tokens=tokens,
        us=round(micros, 1),
        tflops=_digits(tflops),
        gbps=_digits(gbps),
        fraction=_digits(limits.fraction(tflops, gbps, operand_of(config))),
    )


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
