"""Run a Mixture-of-Experts checkpoint on one GPU, or on the CPU: what would run, scores of a prompt, generation.

python examples/one_gpu.py DIR [--quantize fp8_channel] [--ids 1,2,3] [--new-tokens 64]
"""

import argparse
import time

import jax
import jax.numpy as jnp

import moe_jax


@jax.jit
def log_probabilities(model, ids):
    """ids (B, S) -> (B, S - 1): log probability of each token after those before it.

    The model is an argument. A function that closes over it would freeze its weights into the program.
    """
    scores = jax.nn.log_softmax(model(ids[:, :-1]))
    return jnp.take_along_axis(scores, ids[:, 1:, None], axis=-1)[..., 0]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("--quantize", help="scheme for the experts of a full-precision checkpoint")
    parser.add_argument("--ids", default="1,2,3,4", help="token ids of the prompt")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args(argv)

    model = moe_jax.load_pretrained(options.directory, quantize=options.quantize, dtype=jnp.dtype(options.dtype))
    ids = jnp.array([[int(token) for token in options.ids.split(",")]], jnp.int32)
    print(model.moe_blocks()[0].experts.explain(num_tokens=ids.size))
    print("log probabilities:", log_probabilities(model, ids)[0])

    for attempt in ("with compilation", "compiled"):
        start = time.perf_counter()
        out = moe_jax.generate(
            model, ids, max_new_tokens=options.new_tokens, temperature=0.8, top_p=0.95, rng=jax.random.key(0)
        )
        out.block_until_ready()
        print(f"{attempt}: {options.new_tokens / (time.perf_counter() - start):.1f} tokens/s")
    print(out[0, ids.shape[1] :].tolist())
    return out


if __name__ == "__main__":
    main()
