"""``load_pretrained`` and ``load_moe``: from a checkpoint directory to a model whose weights stay as stored."""

import dataclasses
import json
import os
import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np

from moe_jax._typing import DTypeLike, Json
from moe_jax.loading import Checkpoint, CheckpointError, as_packed, checkpoint_directory
from moe_jax.models._config import DecoderConfig
from moe_jax.models._counts import check_counts
from moe_jax.models._decoder import CausalLM
from moe_jax.models._generation_config import NAME, GenerationConfig
from moe_jax.models._kv_cache_dtype import resolve
from moe_jax.models._pages import check_mesh
from moe_jax.models._partition import spread_dense
from moe_jax.models._prefill import MAX_NUM_BATCHED_TOKENS
from moe_jax.models._reader import ModelReader, Progress, install_values, ranges
from moe_jax.models.attention._choice import AttentionImplementation
from moe_jax.models.families._registry import read_family
from moe_jax.nn import MoEBlock
from moe_jax.parallel._layer import parallel_of, spread
from moe_jax.quantization import Scheme


def load_pretrained(
    directory: str | os.PathLike[str],
    *,
    revision: str | None = None,
    quantize: str | Scheme | Json | None = None,
    mesh: Any = None,
    enable_eplb: bool = False,
    num_redundant_experts: int = 0,
    implementation: Any = None,
    attention: AttentionImplementation = "auto",
    dtype: DTypeLike = jnp.bfloat16,
    kv_cache_dtype: DTypeLike | None = None,
    max_seq_len: int | None = None,
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS,
    pinned_tokens: int | None = None,
    progress: Progress | None = None,
) -> CausalLM:
    """Load a checkpoint. Quantized weights stay quantized; everything else is held in ``dtype``.

    Experts, attention, shared experts, dense layers and head keep the checkpoint's quantization, weights and
    activations. Embeddings and MLA's ``kv_b_proj``, of which parts are read, are dequantized in float32 and rounded
    once to ``dtype``. Headers are checked as a whole before a weight is read, then layers are read one by one. Of a
    checkpoint that holds other models too, such as a vision model, the language model is built, and a warning names
    what is left out.

    Args:
        directory: config.json and safetensors files, as transformers, compressed-tensors or DeepSeek write them; or the
            name of a model on the Hugging Face hub, ``organization/name``, which is downloaded unless the cache holds
            it (``moe_jax.loading.checkpoint_directory``).
        revision: branch, tag or commit on the hub; None is main.
        quantize: scheme for the experts of a full-precision checkpoint, quantized layer by layer while loading. For a
            quantized checkpoint it may only change how activations are treated: ``w4a8_int8_g32`` for a ``w4a16_g32``
            file. Dense layers that are stored like it follow.
        mesh: a ``jax.sharding.Mesh`` with some of the axes "expert", "tensor", "data" and "sequence", or a
            ``moe_jax.parallel.ParallelConfig`` that names them. None for one device. Experts are read and held in
            shards. Attention, embeddings, head and dense feed-forward layers are split over the tensor axis, or over
            the expert axis if there is no tensor axis. What does not divide, and all else, is whole on every device.
        enable_eplb: experts may be moved and copied according to their load, see ``moe_jax.parallel.rebalance``; needs
            an expert axis.
        num_redundant_experts: slots for copies in each layer, with ``enable_eplb``.
        implementation: name or ordered names of expert implementations, as for ``FusedMoE``.
        attention: what attends. "auto" takes for each call the first of "hopper", "cudnn" and "xla" that can. "hopper":
            kernels for Hopper GPUs that keep no scores in memory, for calls of 64 and more tokens per row and of up to
            8; with jax 0.11. "cudnn": NVIDIA GPUs from Ampere on, for calls of 64 and more tokens per row, without
            sinks and with heads of up to 128 (256 on Hopper). Both take bfloat16 and float16, and neither takes
            attention in chunks, slots that an indexer selects for several tokens, or positions that a call states in
            layers with a sliding window. "xla" takes every call, those that the kernel of another choice refuses too. A
            model that "hopper" or "cudnn" cannot serve here is refused.
        dtype: bfloat16, float16 or float32.
        kv_cache_dtype: of the key-value cache. None or "auto" takes what the checkpoint says (``kv_cache_scheme``,
            ``kv_cache_quant_algo``), else ``dtype``. "fp8" or "fp8_e4m3": keys and values are stored as e4m3 codes of
            one scale a tensor, those of the checkpoint, else 1. ``dtype``'s name leaves them unquantized. Queries and
            states of linear attention stay as they are. Not for multi-head latent attention.
        max_seq_len: longest sequence that will be used; None takes the model's own limit.
        max_num_batched_tokens: of prompts that pass the model at once, padding included. ``generate`` reads longer
            prompts in chunks, which bounds memory; a row gets at least 16 tokens of a chunk. The answers are the same,
            but for rounding, and for formats that scale the activations of a call by their maximum ("fp8_tensor").
        pinned_tokens: let so many tokens at a time, of whatever rows, pass the layers in every call, so that hidden
            states, logits, draws and log-probabilities of a token have the same bits beside any other rows, in chunks
            of any size, in a prompt and in an answer. A call of fewer tokens costs what this many cost, but for the
            experts, which skip what is missing; see docs/guides/generate.md. Not with linear attention or an indexer,
            with formats that scale the activations of a call by their maximum, over a mesh with Explicit axes, and
            without gradients. None lets all tokens of a call pass at once.
        progress: called as ``progress(done, total)`` after each layer.

    Raises:
        CheckpointError: files that cannot be used, or cannot be had from the hub. ValueError: config.json or an
            argument that cannot. ImportError: a name on a hub, but no huggingface_hub. NotImplementedError: a
            capability that is not built yet. Each names what is wrong in one line.
    """
    parallel = parallel_of(mesh)
    balancing = dict(enable_eplb=enable_eplb, num_redundant_experts=num_redundant_experts)
    with Checkpoint(checkpoint_directory(directory, revision=revision)) as opened:
        checkpoint = as_packed(opened)
        family, config = read_family(checkpoint.config, str(checkpoint.config_path))
        check_counts(config, checkpoint)
        cache_dtype = resolve(opened, kv_cache_dtype, jnp.dtype(dtype))
        config = dataclasses.replace(config, kv_cache_dtype=cache_dtype, pinned_tokens=pinned_tokens)
        if others := family.left_out(checkpoint.names):
            parts = ", ".join(f"{word} ({count} tensors)" for word, count in others.items())
            warnings.warn(f"{opened.directory}: {parts} left out: the language model alone is built", stacklevel=2)
        reader = ModelReader(checkpoint, checkpoint.config, family, config)
        model = family(
            config,
            schemes={layer: reader.scheme(layer, quantize) for layer in config.moe_layers},
            max_seq_len=max_seq_len,
            max_num_batched_tokens=max_num_batched_tokens,
            implementation=implementation,
            attention=attention,
            dtype=dtype,
        )
        for block in model.moe_blocks():
            spread(block.experts, parallel, **balancing)
        reader.keep_as_stored(model.dense_modules(), quantize, dtype, implementation, parallel)
        if parallel is not None:
            spread_dense(model, parallel)
        if pinned_tokens is not None:
            check_mesh(f"pinned_tokens={pinned_tokens}", model)
        model.eos_token_id = _end_tokens(opened, config)
        model.quantization_config = json.dumps(opened.quantization_config, sort_keys=True)
        install_values(reader.read_model(model, progress))
    return model


def _end_tokens(checkpoint: Checkpoint, config: DecoderConfig) -> tuple[int, ...]:
    """The tokens that end a text: of generation_config.json, else of config.json."""
    tokens = GenerationConfig.read(checkpoint.directory).eos_token_id
    if tokens is None:
        return config.eos_token_id
    if outside := [token for token in tokens if token >= config.vocab_size]:
        raise CheckpointError(
            f"{checkpoint.directory / NAME}: eos_token_id {outside[0]} is outside the vocabulary, expected 0 to "
            f"{config.vocab_size - 1}"
        )
    return tokens


def load_moe(
    directory: str | os.PathLike[str],
    layer: int = 0,
    *,
    revision: str | None = None,
    quantize: str | Scheme | Json | None = None,
    mesh: Any = None,
    enable_eplb: bool = False,
    num_redundant_experts: int = 0,
    implementation: Any = None,
    dtype: DTypeLike = jnp.bfloat16,
) -> MoEBlock:
    """Load the Mixture-of-Experts block of one layer: router, experts, and shared experts where the family has them.

    Args:
        layer: index as the checkpoint names it. The other arguments are those of ``load_pretrained``.

    Raises:
        ValueError: the layer is dense or does not exist; the message names the layers with experts. Otherwise as
            ``load_pretrained``. TypeError: layer is no integer.
    """
    parallel = parallel_of(mesh)
    balancing = dict(enable_eplb=enable_eplb, num_redundant_experts=num_redundant_experts)
    with Checkpoint(checkpoint_directory(directory, revision=revision)) as opened:
        checkpoint = as_packed(opened)
        family, config = read_family(checkpoint.config, str(checkpoint.config_path))
        if isinstance(layer, bool) or not isinstance(layer, int | np.integer):
            raise TypeError(f"layer={layer!r}, expected an integer; layers with experts: {ranges(config.moe_layers)}")
        if layer not in config.moe_layers:
            kind = "is dense" if layer in range(config.num_layers) else "does not exist"
            raise ValueError(f"layer {layer} {kind}; layers with experts: {ranges(config.moe_layers)}")
        check_counts(config, checkpoint, layers=1)
        reader = ModelReader(checkpoint, checkpoint.config, family, config)
        scheme = reader.scheme(layer, quantize)
        block = family.make_moe_block(
            config, layer, scheme=scheme, implementation=implementation, dtype=jnp.dtype(dtype)
        )
        spread(block.experts, parallel, **balancing)
        modules = family.moe_dense_modules(block, layer)
        reader.keep_as_stored(modules, quantize, dtype, implementation, parallel)
        if parallel is not None:
            spread_dense(block, parallel)
        account = [name for name in reader.dense if name.startswith(family.moe_prefix(layer) + ".")]
        install_values(
            [
                *reader.read_dense(modules, account, parallel),
                reader.read_experts(block, layer),
            ]
        )
    return block
