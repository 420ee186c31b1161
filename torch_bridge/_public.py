"""The public names of the torch bridge with their homes; ``torch_bridge`` loads this module at the first use of one."""

from moe_jax.loading import make_expert_params_mapping
from moe_jax.parallel import determine_expert_map
from torch_bridge._compressed_tensors import (
    CompressedTensorsW4A4Nvfp4MoEMethod,
    CompressedTensorsW4A8Int8MoEMethod,
    CompressedTensorsW8A8Fp8MoEMethod,
    CompressedTensorsWNA16MarlinMoEMethod,
)
from torch_bridge._convert import convert, from_nnx, load_tensors, patch, to_nnx
from torch_bridge._eplb import EplbLayerState
from torch_bridge._fp8 import Fp8MoEMethod
from torch_bridge._layer import FusedMoE
from torch_bridge._method_base import FusedMoEMethodBase, replace_parameter, set_weight_attrs
from torch_bridge._methods import SchemeMoEMethod, UnquantizedFusedMoEMethod
from torch_bridge._moe_config import FusedMoEConfig, FusedMoEParallelConfig, MoEActivation, RoutingMethodType
from torch_bridge._online import (
    Int8OnlineMoEMethod,
    MoeOnlineQuantizer,
    MoeOnlineWeightQuantizer,
    OnlineMoEMethodBase,
    SchemeOnlineMoEMethod,
)
from torch_bridge._patched import PatchedExperts
from torch_bridge._quant_config import FusedMoEQuantConfig, FusedMoEQuantDesc, GroupShape
from torch_bridge._rank import Rank
from torch_bridge._transformers import register_experts
from torch_bridge.launch._kernels import as_torch_kernels

__all__ = [
    "CompressedTensorsW4A4Nvfp4MoEMethod",
    "CompressedTensorsW4A8Int8MoEMethod",
    "CompressedTensorsW8A8Fp8MoEMethod",
    "CompressedTensorsWNA16MarlinMoEMethod",
    "EplbLayerState",
    "Fp8MoEMethod",
    "FusedMoE",
    "FusedMoEConfig",
    "FusedMoEMethodBase",
    "FusedMoEParallelConfig",
    "FusedMoEQuantConfig",
    "FusedMoEQuantDesc",
    "GroupShape",
    "Int8OnlineMoEMethod",
    "MoEActivation",
    "MoeOnlineQuantizer",
    "MoeOnlineWeightQuantizer",
    "OnlineMoEMethodBase",
    "PatchedExperts",
    "Rank",
    "RoutingMethodType",
    "SchemeMoEMethod",
    "SchemeOnlineMoEMethod",
    "UnquantizedFusedMoEMethod",
    "as_torch_kernels",
    "convert",
    "determine_expert_map",
    "from_nnx",
    "load_tensors",
    "make_expert_params_mapping",
    "patch",
    "register_experts",
    "replace_parameter",
    "set_weight_attrs",
    "to_nnx",
]
