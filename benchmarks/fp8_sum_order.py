"""How far the rows of a layer with e4m3 activations lie apart when sums of GEMM 1 come in another order: an emulation.

    python benchmarks/fp8_sum_order.py [--tokens 300] [--noise 1e-4,3e-4,1e-3]

GEMM 1 of Qwen3-30B-A3B's experts is computed once in float32, and once with normal noise of the given size, as a
fraction of the mean magnitude, before its activation; both are rounded to bfloat16, requantized per row, multiplied and
combined. Weights are on MXFP4's grid. The noise stands for sums in another order, as of tiles that split K; how large
it is on a tensor core is an assumption. Printed: of all tokens the largest RMS difference over the RMS of the row, the
median, and the largest difference of an element over the RMS of its row.
"""

import argparse
import sys

import torch

HIDDEN, INNER, EXPERTS, TOP_K = 2048, 768, 128, 8
_GRID = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def e4m3_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of rows (R, C) as float32, and their scales (R, 1)."""
    scale = (x.abs().amax(1, keepdim=True) / 448).clamp_min(1e-12)
    return (x / scale).to(torch.float8_e4m3fn).float(), scale


def on_mxfp4_grid(w: torch.Tensor) -> torch.Tensor:
    groups = w.view(w.shape[0], -1, 32)
    scale = torch.exp2(torch.floor(torch.log2(groups.abs().amax(2, keepdim=True))) - 2)
    nearest = _GRID[((groups / scale).abs()[..., None] - _GRID).abs().argmin(-1)]
    return (nearest * groups.sign() * scale).view_as(w)


def differences(tokens: int, noise: float) -> tuple[float, float, float]:
    """(largest, median) relative RMS of rows, largest element over its row's RMS."""
    torch.manual_seed(0)
    x = torch.randn(tokens, HIDDEN).bfloat16().float()
    weights, ids = torch.softmax(torch.randn(tokens, EXPERTS), 1).topk(TOP_K, 1)
    weights = weights / weights.sum(1, keepdim=True)
    codes, scale = e4m3_rows(x)
    outs = [torch.zeros(tokens, HIDDEN) for _ in range(2)]
    for expert in range(EXPERTS):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        w13 = on_mxfp4_grid(torch.randn(2 * INNER, HIDDEN) * HIDDEN**-0.5)
        w2 = on_mxfp4_grid(torch.randn(HIDDEN, INNER) * INNER**-0.5)
        sums = (codes[token] @ w13.T) * scale[token]
        noisy = sums + torch.randn_like(sums) * noise * sums.abs().mean()
        for out, value in zip(outs, (sums, noisy), strict=True):
            hidden = (torch.nn.functional.silu(value[:, :INNER]) * value[:, INNER:]).bfloat16().float()
            hidden_codes, hidden_scale = e4m3_rows(hidden)
            rows = ((hidden_codes @ w2.T) * hidden_scale).bfloat16().float()
            out.index_add_(0, token, rows * weights[token, slot][:, None])
    one, other = (out.bfloat16().float() for out in outs)
    size = one.square().mean(1).sqrt()
    apart = (one - other).square().mean(1).sqrt() / size
    return apart.max().item(), apart.median().item(), ((one - other).abs().amax(1) / size).max().item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--noise", default="1e-4,3e-4,1e-3")
    options = parser.parse_args()
    for noise in map(float, options.noise.split(",")):
        worst, median, element = differences(options.tokens, noise)
        print(
            f"noise {noise:.0e}: rows {worst:.4f} apart at most, {median:.4f} median; elements {element:.3f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
