"""The search: every candidate of both products at every tile height, timed by whoever can."""

from collections.abc import Callable, Iterable

from pallas_kernels.grouped_gemm import GemmConfig, GemmDesc, candidates
from pallas_kernels.tuning.layer import LayerConfig, LayerKey
from pallas_kernels.tuning.table import Entry

# (product, configuration, key, tokens) -> microseconds; raises NotImplementedError for what cannot run after all
Timer = Callable[[GemmDesc, GemmConfig, LayerKey, int], float]


def tune(
    keys: Iterable[LayerKey],
    tokens: Iterable[int],
    timer: Timer,
    num_sms: int,
    report: Callable[[str], None] = lambda line: None,
) -> list[Entry]:
    """The fastest configuration for each key and number of tokens: the least sum of both products at one tile height.

    report: called with a line for each time taken and each candidate that failed. A layer that no candidate runs is
    reported and left out.
    """
    entries = []
    tokens = tuple(tokens)
    for key in keys:
        for count in tokens:
            best: tuple[float, LayerConfig] | None = None
            for block_m in _heights(key, count):
                products = key.products(count, block_m)
                first, second = (
                    _fastest(desc, candidates(desc, block_m, num_sms), key, count, timer, report) for desc in products
                )
                if first is None or second is None:
                    continue
                (micros1, gemm1), (micros2, gemm2) = first, second
                if best is None or micros1 + micros2 < best[0]:
                    best = micros1 + micros2, LayerConfig(block_m, gemm1, gemm2)
            if best is None:
                report(f"{key} tokens={count}: no candidate runs")
                continue
            entries.append(Entry(key, count, best[1], best[0]))
    return entries


def _heights(key: LayerKey, num_tokens: int) -> list[int]:
    """Tile heights worth a look: a token has an expert at most once, so that no expert has more rows than tokens."""
    swapped = [height for height in (8, 16, 32) if height < 2 * num_tokens or height == 8] if key.may_swap else []
    average = num_tokens * key.top_k / key.num_experts
    return [h for h in swapped if average <= 2 * h] + [64] + ([128] if num_tokens > 64 else [])


def _fastest(desc, configs, key, num_tokens, timer, report) -> tuple[float, GemmConfig] | None:
    best = None
    for config in configs:
        try:
            micros = timer(desc, config, key, num_tokens)
        except NotImplementedError as error:
            report(f"{key} tokens={num_tokens} {config}: {error}")
            continue
        report(f"{key} tokens={num_tokens} {config}: {micros:.1f} us")
        if best is None or micros < best[0]:
            best = micros, config
    return best
