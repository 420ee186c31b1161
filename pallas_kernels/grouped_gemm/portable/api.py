"""A call of the portable kernels: what both forms of weights share around them."""

from collections.abc import Mapping
from typing import Any

import jax

from pallas_kernels.common.device import portable_target
from pallas_kernels.common.implementations import check_config
from pallas_kernels.grouped_gemm.packed.format import pad_to
from pallas_kernels.grouped_gemm.portable.config import AnyDesc, MmaConfig, choose_config, config_error, group_rows
from pallas_kernels.grouped_gemm.problem import GemmDesc


def run(desc: AnyDesc, config: Any, block_m: int, operands: Mapping[str, Any]) -> jax.Array:
    """(Mp, N) of a call whose operands, by the names of ``desc.operand_names``, are as the kernels take them.

    Raises NotImplementedError where no configuration, or the one that is given, can run it.
    """
    target = portable_target()
    check_config(config, MmaConfig)
    config = config or choose_config(desc, block_m, target)
    if reason := config_error(desc, config):
        raise NotImplementedError(reason)
    operands = dict(operands)
    if desc.unpermuted_rows:
        operands["x"] = pad_to(operands["x"], 0, block_m)
    if isinstance(desc, GemmDesc):
        for name in ("w_scale", "bias"):
            vector = operands.get(name)
            if vector is not None and vector.shape[1:] == (desc.n,):
                operands[name] = pad_to(vector, 1, config.block_n)
    else:  # a last step past K takes scales past the last group, which multiply zeros and must be numbers
        for name in ("scale", "zero"):
            if name in operands:
                operands[name] = pad_to(operands[name], 1, group_rows(desc, config))
    # here: importing it loads Pallas
    from pallas_kernels.grouped_gemm.portable.kernel_mma import grouped_gemm_mma

    found = grouped_gemm_mma(desc, config)(operands)
    return found if found.shape[1] == desc.n else found[:, : desc.n]
