"""``Portable``: the sequence of the hopper backend with products by ``mma.sync``, on NVIDIA GPUs from sm_80 on.

The plan, the kernels for rows and the layout of packed weights are the hopper backend's. Its kernels for rows need
neither TMA nor wgmma, and the words of packed weights are the register operands of ``mma.sync`` too.
"""

from moe_jax.experts._backend import Problem
from moe_jax.experts.hopper._kernel_backend import KernelBackend
from moe_jax.experts.hopper._plan import Plan, describe_portable
from moe_jax.experts.xla._batches import plan_batches
from pallas_kernels.common.device import portable_target
from pallas_kernels.common.targets import Target
from pallas_kernels.grouped_gemm.portable.config import ALIGNMENT


class Portable(KernelBackend):
    """Pallas kernels for NVIDIA GPUs from sm_80 on; the default on every GPU, after those for Hopper."""

    name = "portable"
    row_bytes = ALIGNMENT

    def device(self) -> Target:
        return portable_target()

    def faster_elsewhere(self, problem: Problem) -> str | None:
        if problem.config.implementation is None and _xla_reads_as_fast(problem):
            return f"unquantized weights of {problem.num_tokens} token(s): xla reads them as fast in fewer launches"
        return None

    def describe_plan(self, problem: Problem, plan: Plan) -> list[str]:
        return describe_portable(plan)

    def in_brief(self, problem: Problem) -> str:
        return "grouped GEMM by mma.sync"

    def gradient_refusal(self, problem: Problem) -> str | None:
        return "has no gradient"


def _xla_reads_as_fast(problem: Problem) -> bool:
    """Whether xla multiplies each pair of a token and an expert with unquantized weights where they lie.

    It takes one launch a product: on an H100 29 us for both of Qwen3 at one token, 2.6 TB/s.
    """
    config, scheme = problem.config, problem.weights.scheme
    if scheme.is_quantized or not isinstance(problem.num_tokens, int):
        return False
    batches = plan_batches(config, scheme, problem.num_tokens, config.top_k, config.dtype.itemsize)
    return batches is not None and batches.kind == "pairs"
