"""Run a Mixture-of-Experts checkpoint over several devices of one host: experts spread, tokens brought to them.

python examples/mesh.py DIR [--mesh expert=4,tensor=2] [--quantize fp8_channel] [--ids 1,2,3] [--new-tokens 64]
XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu python examples/mesh.py DIR   # simulated
"""

import argparse
import time

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import moe_jax
from moe_jax.parallel import parse_mesh


@jax.jit
def last_logits(model, ids):
    """ids (B, S) -> (B, vocab): logits of the next token. The model is an argument, so that its weights stay shared."""
    return model(ids)[:, -1]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("--mesh", help="devices per axis of expert, tensor, data, sequence (default: experts over all)")
    parser.add_argument("--quantize", help="scheme for the experts of a full-precision checkpoint")
    parser.add_argument("--ids", default="1,2,3,4", help="token ids of the prompt")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args(argv)

    # Any jax.sharding.Mesh with axes of these names will do, Auto or Explicit.
    mesh = parse_mesh(options.mesh or f"expert={jax.device_count()}")

    # Each device reads and holds its share of the experts, and of attention, dense layers, embedding and head.
    model = moe_jax.load_pretrained(
        options.directory, quantize=options.quantize, mesh=mesh, dtype=jnp.dtype(options.dtype)
    )
    ids = jnp.array([[int(token) for token in options.ids.split(",")]], jnp.int32)
    ids = jax.device_put(ids, NamedSharding(mesh, PartitionSpec()))
    print(model.moe_blocks()[0].experts.explain(num_tokens=ids.size))
    print("likeliest next token:", int(last_logits(model, ids)[0].argmax()))

    for attempt in ("with compilation", "compiled"):
        start = time.perf_counter()
        out = moe_jax.generate(model, ids, max_new_tokens=options.new_tokens)
        out.block_until_ready()
        print(f"{attempt}: {options.new_tokens / (time.perf_counter() - start):.1f} tokens/s on {mesh.size} devices")
    print(out[0, ids.shape[1] :].tolist())
    return out


if __name__ == "__main__":
    main()
