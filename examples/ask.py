"""Answer prompts with a checkpoint, as text: a batch at once, then one streamed with the likeliest other tokens.

python examples/ask.py MODEL PROMPT [PROMPT ...] [--chat] [--quantize fp8_channel] [--max-tokens 64]

MODEL is a directory, or a name on the Hugging Face hub. Needs the extra chat, and hub for a name.
"""

import argparse

import moe_jax


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompts", nargs="+", metavar="PROMPT")
    parser.add_argument("--chat", action="store_true", help="a prompt is what a user says")
    parser.add_argument("--quantize", help="scheme for the experts of a full-precision checkpoint")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args(argv)

    llm = moe_jax.LLM(options.model, quantize=options.quantize, dtype=options.dtype)
    params = moe_jax.SamplingParams(temperature=0, max_tokens=options.max_tokens, logprobs=3)
    conversations = [[{"role": "user", "content": prompt}] for prompt in options.prompts]
    outputs = llm.chat(conversations, params) if options.chat else llm.generate(options.prompts, params)
    for output in outputs:
        answer = output.outputs[0]
        print(f"{answer.text!r}: {len(answer.token_ids)} tokens, log-probability {answer.cumulative_logprob:.2f}")

    parts = llm.stream_chat(conversations[0], params) if options.chat else llm.stream(options.prompts[0], params)
    for part in parts:
        for likely in part.outputs[0].logprobs:
            print("  ".join(f"{each.decoded_token!r} {each.logprob:.2f}" for each in likely.values()))
    return outputs


if __name__ == "__main__":
    main()
