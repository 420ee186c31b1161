"""A PyTorch model of transformers whose experts run on moe_jax: quantized in place, then used as ever.

    python examples/with_torch.py DIR [--quantize int8_w8a16] [--ids 1,2,3] [--new-tokens 32]

On a GPU set XLA_PYTHON_CLIENT_PREALLOCATE=false, so that JAX leaves memory to PyTorch.
"""

import argparse

import torch
import transformers

import torch_bridge


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("--quantize", default="int8_w8a16")
    parser.add_argument("--ids", default="1,2,3,4", help="token ids of the prompt")
    parser.add_argument("--new-tokens", type=int, default=32)
    options = parser.parse_args(argv)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers.AutoModelForCausalLM.from_pretrained(options.directory, dtype="auto").to(device).eval()
    ids = torch.tensor([[int(token) for token in options.ids.split(",")]], device=device)
    with torch.inference_mode():
        before = model(ids).logits
        replaced = torch_bridge.patch(model, quantize=options.quantize)
        after = model(ids).logits
    change = (after - before).abs().max() / (before.max() - before.min())
    print(f"{len(replaced)} blocks run as {options.quantize}; logits moved by {change.item():.2%} of their range")

    # Each block is one operator of torch.library inside the graph; the rest is compiled by torch as usual.
    compiled = torch.compile(model, backend="inductor" if device == "cuda" else "aot_eager")
    with torch.inference_mode():
        compiled_logits = compiled(ids).logits
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=options.new_tokens, do_sample=False
        )
    print(f"compiled: logits within {(compiled_logits - after).abs().max().item():.1e}")
    print(out[0, ids.shape[1] :].tolist())
    return out


if __name__ == "__main__":
    main()
