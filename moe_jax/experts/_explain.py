"""``explain``: what would run for a layer and a number of tokens, and everything substituted, as text."""

import jax
import jax.numpy as jnp

from moe_jax._arguments import integer
from moe_jax._config import MoEConfig
from moe_jax.activations import resolve_activation
from moe_jax.experts._backend import Problem
from moe_jax.experts._choice import choose, describe, describe_kept, nothing_runs, order_of
from moe_jax.quantization import ExpertWeights, QuantFormat, Strategy


def explain(config: MoEConfig, weights: ExpertWeights, num_tokens: int, platform: str | None = None) -> str:
    """Say which method and implementation would run a call, how, and what was skipped or substituted, and why.

    weights: arrays or ShapeDtypeStructs. platform: "cpu" or "gpu"; None for JAX's default backend. Raises ValueError
    for an unknown implementation and num_tokens < 0; when nothing can run the layer, the text says so.

    Example:
        >>> import moe_jax
        >>> from moe_jax.quantization import method_for
        >>> scheme = moe_jax.Scheme.parse("int8_w8a16")
        >>> config = moe_jax.MoEConfig(8, 2, 64, 32, scheme=scheme, dtype="float32")
        >>> print(explain(config, method_for(scheme).abstract_weights(config), 16, platform="cpu"))
        layer: 8 experts, top_k 2, hidden 64, intermediate 32, silu, 16 tokens on cpu
        method: int8_w8a16
          weights: int8, one scale per channel
          activations: not quantized, computed in float32
        implementation: xla (order: xla)
          tiles of 8 rows, one pass over the rows
          products: codes in float32, sums in float32
    """
    num_tokens = integer("num_tokens", num_tokens, minimum=0)
    platform = platform or jax.default_backend()
    problem = Problem(config, weights, num_tokens, platform)
    chosen, skipped = choose(problem)
    name = f"{config.name}: " if config.name else ""
    lines = [
        f"{name}layer: {config.num_experts} experts, top_k {config.top_k}, hidden {config.hidden_size}, intermediate "
        f"{config.intermediate_size}, {_activation(config)}, {num_tokens} tokens on {platform}",
        f"method: {weights.scheme.name}",
        f"  weights: {_weights(weights)}",
        f"  activations: {_activations(weights.scheme.activations, config)}",
    ]
    if weights.has_adapters:
        lines.append(f"  adapters: {_adapters(weights)}, added in the same call to rows that are not quantized")
    if chosen is None:
        lines.append(nothing_runs(skipped))
    else:
        lines.append(f"implementation: {chosen.name} (order: {', '.join(order_of(config, platform))})")
        lines += [f"  {line}" for line in describe(chosen, problem)]
        if config.keep_hidden:
            lines.append(f"kept for the gradient (keep_hidden): {describe_kept(problem)}")
        lines += [f"skipped: {skipped_name}: {reason}" for skipped_name, reason in skipped]
    return "\n".join(lines + [f"note: {note}" for note in _notes(config, weights)])


def _activation(config: MoEConfig) -> str:
    activation = resolve_activation(config)
    if config.swiglu_limit is None and activation.limit is None:
        return activation.name
    return f"{activation.name} (limit {activation.limit}, alpha {activation.alpha}, beta {activation.beta})"


def _weights(weights: ExpertWeights) -> str:
    fmt = weights.scheme.weights
    if fmt is None:
        return f"not quantized, stored in {jnp.dtype(weights.w13.data.dtype).name}"
    return f"{fmt.element}, {_extent(fmt)}"


def _adapters(weights: ExpertWeights) -> str:
    addends = dict(w13=weights.w13_lora, w2=weights.w2_lora)
    return " and ".join(f"rank {lora.rank} on {name}" for name, lora in addends.items() if lora is not None)


def _activations(fmt: QuantFormat | None, config: MoEConfig) -> str:
    if fmt is None:
        return f"not quantized, computed in {config.dtype.name}"
    when = "computed from the rows of the call" if fmt.dynamic else "fixed by the checkpoint"
    if fmt.global_scale is not None:
        when += ", the global scale " + ("fixed by the checkpoint" if fmt.needs_input_scale else "one for each row")
    how = "approximated in" if fmt.approximate else "quantized to"
    return f"{how} {fmt.element} before both products, {_extent(fmt)}, {when}"


def _extent(fmt: QuantFormat) -> str:
    match fmt.strategy:
        case Strategy.GROUP:
            return f"one scale per group of {fmt.group_size}"
        case Strategy.BLOCK:
            return f"one scale per block of {fmt.block[0]} x {fmt.block[1]}"
    return f"one scale per {fmt.strategy.value}"


def _notes(config: MoEConfig, weights: ExpertWeights) -> list[str]:
    notes = []
    fmt = weights.scheme.activations
    if fmt is not None and fmt.dynamic and fmt.strategy is Strategy.TENSOR:
        notes.append("one activation scale for all rows of the call: a token's output depends on the tokens beside it")
    if fmt is not None and fmt.approximate:
        notes.append(
            "approximate: the checkpoint leaves activations in 16 bits; here each is rounded to e4m3, by up to 1/16"
        )
    stored = jnp.dtype(weights.w13.data.dtype)
    if weights.scheme.weights is None and stored == jnp.float32 and config.dtype == jnp.bfloat16:
        notes.append("weights stored in float32 are rounded to bfloat16 for the products; dtype='float32' avoids it")
    return notes
