"""What dispatch and combine would cost on 64 and 256 GPUs: bytes counted, rates measured on one host, a fabric assumed.

    python benchmarks/project_expert_parallel.py [--fabric-gbps 50]

Runs anywhere, prints Markdown. Hosts have 8 GPUs joined by NVLink, and a fabric joins hosts, one 400 Gb/s port a
GPU. Every token goes to top_k of E experts, uniformly; a GPU has E / P experts. A token's row travels

    flat   once to every GPU that has experts of it
    hosts  once to every other host that has experts of it, to one GPU there, which passes it on over NVLink
    groups as hosts, where the router keeps to some groups of experts and a group lies on hosts of its own (placement)

and comes back as one row for each expert (``push`` in float32, ``all_to_all``: sums in the order of one device) or as
one partial sum for each GPU (``push`` in bfloat16), or host, that has experts of it. NVLink and the fabric work at the
same time; the slower one counts.

Measured: NVLink's rate at size and the fixed cost of an exchange inside jit (4 H200s: ``MEASURED``). Counted:
bytes. Assumed: the fabric's rate (its datasheet) and its fixed cost, ``FABRIC_US``. Experts: reads of weights at
the measured rate, or products at the rate measured for FP8 at size, whichever takes longer.
"""

import argparse
import dataclasses
import math
import sys

from _timing import READ_GBPS

HOST = 8  # GPUs of a host
FABRIC_US = 10.0  # assumed: a message through the fabric and its completion
FP8_TFLOPS = 1000.0  # grouped fp8_block products at size, by the tuning table
# (experts, top_k, hidden, intermediate)
MODELS = {"dsv3": (256, 8, 7168, 2048), "qwen3": (128, 8, 2048, 768)}
GROUPS = {"dsv3": (8, 4)}  # groups of experts, of which a token chooses from so many
TOKENS = (16, 128, 4096)
GPUS = (8, 64, 256)
# GPUs, then (tokens a GPU, us) of dispatch and combine: push:bfloat16 of DeepSeek-V3 in results/ep_x4_h200.txt
MEASURED = (4, (16, 22.9), (4096, 864.9))


@dataclasses.dataclass(frozen=True)
class Rates:
    """GB/s of a GPU over NVLink and over the fabric, and microseconds of an exchange that carries nothing."""

    nvlink: float
    fabric: float
    fixed_us: float


def measured(fabric: float) -> Rates:
    """What push with bfloat16 sums reached for DeepSeek-V3: its bytes over its time at the most tokens; half of what
    both ways took at the fewest, less the time of their bytes.
    """
    gpus, (few, least_us), (many, most_us) = MEASURED
    experts, top_k, hidden, _ = MODELS["dsv3"]
    per_token = (gpus - 1) * hit(experts, top_k, gpus) * hidden * (1 + 4 / 128 + 2)
    nvlink = many * per_token / most_us / 1e3
    return Rates(nvlink, fabric, (least_us - few * per_token / nvlink / 1e3) / 2)


def hit(experts: int, top_k: int, parts: int) -> float:
    """Chance that a token has an expert on one of ``parts`` equal parts of the experts."""
    share = experts // parts if parts <= experts else 1
    chance = 1 - math.comb(experts - share, top_k) / math.comb(experts, top_k)
    return chance if parts <= experts else chance * experts / parts


@dataclasses.dataclass(frozen=True)
class Way:
    """by_host: a token crosses the fabric once for each host. sums_first: partial sums come back, not expert rows.
    is_limited: experts of a token lie in few groups, and groups on hosts of their own (``GROUPS``)."""

    by_host: bool = False
    sums_first: bool = False
    is_limited: bool = False


WAYS = {
    "flat, rows": Way(),
    "flat, sums": Way(sums_first=True),
    "hosts, rows": Way(by_host=True),
    "hosts, sums": Way(by_host=True, sums_first=True),
    "hosts, sums, groups": Way(by_host=True, sums_first=True, is_limited=True),
}


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Rows that one token sends: over NVLink and over the fabric, to its experts and back."""

    nvlink: float
    fabric: float
    nvlink_back: float
    fabric_back: float


def traffic(model: str, gpus: int, way: Way) -> Traffic:
    experts, top_k, *_ = MODELS[model]
    groups, kept = GROUPS.get(model, (1, 1)) if way.is_limited else (1, 1)
    reached = kept / groups  # of all GPUs: those whose experts the token's groups hold
    on_gpu = hit(experts * kept // groups, top_k, gpus * kept // groups)
    near, far = (HOST - 1) * reached * on_gpu, (gpus - HOST) * reached * on_gpu
    near_rows, far_rows = top_k * (HOST - 1) / gpus, top_k * (gpus - HOST) / gpus
    if not way.by_host or gpus == HOST:
        return Traffic(near, far, near, far) if way.sums_first else Traffic(near, far, near_rows, far_rows)
    hosts = gpus // HOST
    parts = max(1, hosts * kept // groups)
    across = (hosts - 1) * reached * hit(experts * kept // groups, top_k, parts)
    passed_on = far - across  # the first GPU of a host that gets a row is one that wants it
    if way.sums_first:
        return Traffic(near + passed_on, across, near + passed_on, across)
    return Traffic(near + passed_on, across, near_rows, far_rows)


def exchange_us(rates: Rates, model: str, gpus: int, tokens: int, way: Way) -> tuple[float, float]:
    """Microseconds of dispatch and of combine."""
    hidden = MODELS[model][2]
    rows = traffic(model, gpus, way)
    fixed = rates.fixed_us + (FABRIC_US if gpus > HOST else 0.0)
    out_bytes, back_bytes = tokens * hidden * (1 + 4 / 128), tokens * hidden * 2

    def micros(size: float, nvlink: float, fabric: float) -> float:
        return fixed + max(size * nvlink / rates.nvlink, size * fabric / rates.fabric) / 1e3

    return micros(out_bytes, rows.nvlink, rows.fabric), micros(back_bytes, rows.nvlink_back, rows.fabric_back)


def experts_us(model: str, gpus: int, tokens: int) -> float:
    """FP8 products of a GPU that serves ``tokens`` tokens of every GPU."""
    experts, top_k, hidden, intermediate = MODELS[model]
    local = max(1, experts // gpus)
    reached = local * (1 - (1 - top_k / experts) ** (tokens * gpus))
    size = 3 * hidden * intermediate
    return max(reached * size / READ_GBPS / 1e3, 2 * tokens * top_k * size / FP8_TFLOPS / 1e6)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fabric-gbps", type=float, default=50.0, help="of one GPU's port")
    args = parser.parse_args()
    rates = measured(args.fabric_gbps)
    print(
        f"NVLink {rates.nvlink:.0f} GB/s and {rates.fixed_us:.0f} us an exchange (measured), fabric {rates.fabric:.0f}"
    )
    print(f"GB/s and {FABRIC_US:.0f} us more (assumed); microseconds, dispatch + combine / experts.\n")
    print("| model | GPUs | tokens a GPU | " + " | ".join(WAYS) + " | experts |")
    print("|---|---|---|" + "---|" * (len(WAYS) + 1))
    for model in MODELS:
        for gpus in GPUS:
            for tokens in TOKENS:
                cells = [
                    "{:.0f} + {:.0f}".format(*exchange_us(rates, model, gpus, tokens, way))
                    if model in GROUPS or not way.is_limited
                    else "-"
                    for way in WAYS.values()
                ]
                print(f"| {model} | {gpus} | {tokens} | {' | '.join(cells)} | {experts_us(model, gpus, tokens):.0f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
