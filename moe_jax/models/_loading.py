"""``load_pretrained`` and ``load_moe``: from a checkpoint directory to a model whose experts stay quantized."""

import json
import os
from typing import Any

import jax.numpy as jnp
import numpy as np

from moe_jax._typing import DTypeLike, Json
from moe_jax.loading import Checkpoint, as_packed
from moe_jax.models._counts import check_counts
from moe_jax.models._decoder import CausalLM
from moe_jax.models._partition import spread_dense
from moe_jax.models._reader import ModelReader, Progress, install_values, ranges
from moe_jax.models.families._registry import read_family, read_model_family
from moe_jax.nn import MoEBlock
from moe_jax.parallel._layer import parallel_of, spread
from moe_jax.quantization import Scheme


def load_pretrained(
    directory: str | os.PathLike[str],
    *,
    quantize: str | Scheme | Json | None = None,
    mesh: Any = None,
    enable_eplb: bool = False,
    num_redundant_experts: int = 0,
    implementation: Any = None,
    dtype: DTypeLike = jnp.bfloat16,
    max_seq_len: int | None = None,
    progress: Progress | None = None,
) -> CausalLM:
    """Load a checkpoint directory. Experts keep the checkpoint's quantization; everything else is held in ``dtype``.

    Dense weights that are quantized in the checkpoint are dequantized in float32 and rounded once to ``dtype``; their
    activations are not quantized. Headers are checked as a whole before a weight is read, then layers are read one by
    one.

    Args:
        directory: config.json and safetensors files, as transformers, compressed-tensors or DeepSeek write them.
        quantize: scheme for the experts of a full-precision checkpoint, quantized layer by layer while loading. For a
            quantized checkpoint it may only change how activations are treated: ``w4a8_int8_g32`` for a ``w4a16_g32``
            file.
        mesh: a ``jax.sharding.Mesh`` with some of the axes "expert", "tensor", "data" and "sequence", or a
            ``moe_jax.parallel.ParallelConfig`` that names them. None for one device. Experts are read and held in
            shards. Attention, embeddings, head and dense feed-forward layers are split over the tensor axis, or over
            the expert axis if there is no tensor axis. What does not divide, and all else, is whole on every device.
        enable_eplb: experts may be moved and copied according to their load, see ``moe_jax.parallel.rebalance``; needs
            an expert axis.
        num_redundant_experts: slots for copies in each layer, with ``enable_eplb``.
        implementation: name or ordered names of expert implementations, as for ``FusedMoE``.
        dtype: bfloat16, float16 or float32.
        max_seq_len: longest sequence that will be used; None takes the model's own limit.
        progress: called as ``progress(done, total)`` after each layer.

    Raises:
        CheckpointError: files that cannot be used. ValueError: config.json or an argument that cannot.
            NotImplementedError: a capability that is not built yet. Each names what is wrong in one line.
    """
    parallel = parallel_of(mesh)
    balancing = dict(enable_eplb=enable_eplb, num_redundant_experts=num_redundant_experts)
    with Checkpoint(directory) as opened:
        checkpoint = as_packed(opened)
        family, config = read_model_family(checkpoint.config, str(checkpoint.config_path))
        check_counts(config, checkpoint)
        reader = ModelReader(checkpoint, checkpoint.config, family, config)
        model = family(
            config,
            schemes={layer: reader.scheme(layer, quantize) for layer in config.moe_layers},
            max_seq_len=max_seq_len,
            implementation=implementation,
            dtype=dtype,
        )
        for block in model.moe_blocks():
            spread(block.experts, parallel, **balancing)
        if parallel is not None:
            spread_dense(model, parallel)
        model.quantization_config = json.dumps(opened.quantization_config, sort_keys=True)
        install_values(reader.read_model(model, progress))
    return model


def load_moe(
    directory: str | os.PathLike[str],
    layer: int = 0,
    *,
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
    with Checkpoint(directory) as opened:
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
        if parallel is not None:
            spread_dense(block, parallel)
        account = [name for name in reader.dense if name.startswith(family.moe_prefix(layer) + ".")]
        install_values(
            [
                *reader.read_dense(family.moe_dense_modules(block, layer), account, parallel),
                reader.read_experts(block, layer),
            ]
        )
    return block
