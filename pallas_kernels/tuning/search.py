"""The search: every candidate of both products at every tile height, timed by whoever can."""

from collections.abc import Callable, Iterable

from pallas_kernels.tuning.layer import AnyConfig, AnyDesc, AnyKey, LayerConfig
from pallas_kernels.tuning.table import Entry

# (product, configuration, key, tokens) -> microseconds; raises NotImplementedError for what cannot run after all
Timer = Callable[[AnyDesc, AnyConfig, AnyKey, int], float]


def tune(
    keys: Iterable[AnyKey],
    tokens: Iterable[int],
    timer: Timer,
    num_sms: int,
    report: Callable[[str], None] = lambda line: None,
) -> list[Entry]:
    """The fastest configuration for each key and number of tokens: the least sum of both products at one tile height,
    and of requantizing rows where that is left to a launch of its own.

    report: called with a line for each time taken and each candidate that failed. A layer that no candidate runs is
    reported and left out.
    """
    entries = []
    tokens = tuple(tokens)
    for key in keys:
        for count in tokens:
            best: tuple[float, LayerConfig] | None = None
            for block_m in key.heights(count):
                products = key.products(count, block_m)

                def time_first(desc, config, key, tokens):
                    micros = timer(key.as_it_runs(desc, config), config, key, tokens)
                    return micros + key.requantize_micros(tokens, config)

                first, second = (
                    _fastest(desc, key.candidates(desc, block_m, num_sms), key, count, timed_by, report)
                    for desc, timed_by in zip(products, (time_first, timer), strict=True)
                )
                if first is None or second is None:
                    continue
                (micros1, gemm1), (micros2, gemm2) = first, second
                micros = micros1 + micros2
                if best is None or micros < best[0]:
                    best = micros, LayerConfig(block_m, gemm1, gemm2)
            if best is None:
                report(f"{key} tokens={count}: no candidate runs")
                continue
            entries.append(Entry(key, count, best[1], best[0]))
    return entries


def _fastest(
    desc: AnyDesc,
    configs: Iterable[AnyConfig],
    key: AnyKey,
    num_tokens: int,
    timer: Timer,
    report: Callable[[str], None],
) -> tuple[float, AnyConfig] | None:
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
