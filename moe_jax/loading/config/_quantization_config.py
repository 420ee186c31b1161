"""``QuantizationConfig``: the scheme of every module, as config.json states it and the tensors confirm it."""

import dataclasses
from collections.abc import Mapping

from moe_jax._typing import Json
from moe_jax.loading._errors import CheckpointError, shorten, shown
from moe_jax.loading.config._modules import is_normally_plain
from moe_jax.loading.config._rules import (
    CompressedTensorsRules,
    Fp8Rules,
    ModelOptRules,
    Rules,
    Unquantized,
    fbgemm_rules,
    gpt_oss_rules,
    supported_schemes,
)
from moe_jax.loading.files._checkpoint import CheckpointLike
from moe_jax.loading.files._safetensors import DTYPES, TensorInfo
from moe_jax.quantization import Packing, QuantFormat, Scheme, Strategy

_COMPRESSED_TENSORS, _FP8, _MODELOPT = "compressed-tensors", "fp8", "modelopt"
_MXFP4, _FBGEMM = "mxfp4", "fbgemm_fp8"
# Formats of other tools, refused by name. What is stored under the same tensor names means something else there.
_OTHER_METHODS = frozenset(
    """aqlm auto-round awq bitnet bitsandbytes deepspeedfp eetq exl2 exl3 experts_int8 fouroversix
    fp_quant gemma gguf gptq gptq_marlin higgs hqq ipex marlin metal mlx modelopt_fp4 mxfp8
    nvfp4 petit_nvfp4 quanto quark sinq spqr torchao tpu_int8 vptq""".split()
)
_DEQUANTIZE = (
    "write it in full precision once with transformers, "
    "AutoModelForCausalLM.from_pretrained(DIR).dequantize().save_pretrained(NEW_DIR), and load that with quantize=..., "
    "or use a compressed-tensors version"
)
_WAY_OUT = "use a compressed-tensors version, or load the full-precision model with quantize=..."
_FULL_PRECISION = ("BF16", "F16", "F32", "F64")
# Any of these beside a module's name says that it is stored quantized, in whatever format.
_EVIDENCE = (".weight_scale", ".weight_scale_inv", ".weight_packed", ".weight_blocks")
_FUSED_EVIDENCE = ("_scale", "_scale_inv", "_scales", "_blocks", "_weight_scale", "_weight_scale_inv", "_weight_packed")
_GROUP_SCALE_DTYPES = {"BF16": "bfloat16", "F16": "float16"}
_MARGIN = 32  # aliases are a few letters longer than the names in the file


class QuantizationConfig:
    """Maps module names ("model.layers.0.mlp.experts.3.gate_proj") to schemes.

    The config is parsed strictly and as a whole when this is made. ``scheme_for`` then weighs it against the tensors,
    which have the last word: where they contradict the config there is an error that names both, with one exception:
    routers, embeddings and the head that are stored in 16 bits are so, even if the config forgets to say it.
    """

    def __init__(self, rules: Rules, source: CheckpointLike | None, where: str):
        self._rules = rules
        self._source = source
        self._where = where
        self._known: dict[str, Scheme | None] = {}
        # How compressed-tensors packs 3, 5, 6 and 7-bit codes, see ``LayerLoader``; None when its version is unknown.
        self.words_are_dense: bool | None = getattr(rules, "words_are_dense", None)

    @classmethod
    def from_config(cls, config: Json, source: CheckpointLike | None = None) -> "QuantizationConfig":
        """Parse ``quantization_config`` of a config.json.

        Args:
            config: the parsed config.json.
            source: a ``Checkpoint``, or what has its ``names``, ``info`` and ``in``; None trusts the config alone.

        Raises:
            CheckpointError: a method that is not supported, or a config that is not understood.
        """
        where = str(getattr(source, "config_path", "config.json"))
        stated = config.get("quantization_config")
        if stated is None:
            if config.get("compression_config"):
                raise CheckpointError(
                    f"{where}: compression_config is a spelling of early 2024 that is not supported; save the model "
                    "again with a current compressed-tensors, which writes quantization_config"
                )
            if isinstance(config.get("quantization"), Mapping):
                raise CheckpointError(f"{where}: quantization is how MLX writes it, which is not supported; {_WAY_OUT}")
            return cls(Unquantized(), source, where)
        if not isinstance(stated, Mapping):
            raise CheckpointError(f"{where}: quantization_config is {shown(stated)}, expected an object or null")
        method = stated.get("quant_method", _COMPRESSED_TENSORS if "config_groups" in stated else None)
        if method == _COMPRESSED_TENSORS:
            names = () if source is None else source.names
            longest = max(map(len, names), default=128) + _MARGIN
            return cls(CompressedTensorsRules(stated, where, longest), source, where)
        if method == _FP8:
            return cls(Fp8Rules(stated, where), source, where)
        if method == _MODELOPT:
            return cls(ModelOptRules(stated, where), source, where)
        if method == _MXFP4:
            return cls(gpt_oss_rules(stated, where), source, where)
        if method == _FBGEMM:
            return cls(fbgemm_rules(stated, where), source, where)
        kind = "is not supported" if isinstance(method, str) and method in _OTHER_METHODS else "is unknown"
        way_out = _DEQUANTIZE if method == "bitsandbytes" else _WAY_OUT
        raise CheckpointError(
            f"{where}: quant_method {shown(method)} {kind}; supported: {_COMPRESSED_TENSORS!r}, {_FP8!r}, "
            f"{_MODELOPT!r}, {_MXFP4!r} and {_FBGEMM!r}, for {supported_schemes()}; {way_out}"
        )

    def scheme_for(self, module: str) -> Scheme | None:
        """The scheme that a module is stored in, None when it is not quantized.

        Args:
            module: a tensor's name without its last component; for fused experts up to the projection
                ("model.layers.0.mlp.experts.gate_up_proj").

        Raises:
            CheckpointError: config and tensors contradict each other (names both), or the scheme is not built.
        """
        if module not in self._known:
            self._known[module] = self._decide(module)
        return self._known[module]

    def _decide(self, module: str) -> Scheme | None:
        decision = self._rules.decide(module)
        weight, evidence = self._stored(module)
        is_stored_plain = weight is not None and evidence is None
        is_fused = weight is not None and len(weight.shape) == 3
        if is_stored_plain and (is_normally_plain(module) or (is_fused and decision.is_for_linear)):
            return None
        if decision.refusal:
            raise CheckpointError(
                f"{self._where}: module {shorten(module)}: {decision.why}, which cannot be loaded: {decision.refusal}"
            )
        scheme = decision.scheme
        if scheme is None or scheme.weights is None:
            if evidence is not None:
                raise self._contradiction(module, f"no quantization, since {decision.why}", evidence)
            return None
        if weight is not None and evidence is None:
            raise self._contradiction(module, f"{scheme.name}, since {decision.why}", weight)
        scheme = self._in_container(module, scheme, scheme.weights, weight)
        if weight is not None and scheme.weights is not None:
            self._check_fit(module, scheme.weights, weight)
        return self._with_scale_dtype(module, scheme)

    def _with_scale_dtype(self, module: str, scheme: Scheme) -> Scheme:
        """With the 16-bit dtype that the file has scales of groups in."""
        fmt = scheme.weights
        if self._source is None or fmt is None or fmt.scale != "float32":
            return scheme
        names = (module + suffix for suffix in (".weight_scale", ".weight_scale_inv", *_FUSED_EVIDENCE))
        dtypes = {self._source.info(name).dtype for name in names if name in self._source}
        held = _GROUP_SCALE_DTYPES.get(next(iter(dtypes))) if len(dtypes) == 1 else None
        if held is None or fmt.strategy not in (Strategy.GROUP, Strategy.BLOCK):
            return scheme
        return dataclasses.replace(scheme, weights=dataclasses.replace(fmt, group_scale_dtype=held))

    def _in_container(self, module: str, scheme: Scheme, fmt: QuantFormat, weight: TensorInfo | None) -> Scheme:
        """Integers may be packed in words or not whatever ``format`` says (W4AFP8 was written both ways)."""
        is_packed = self._source is not None and f"{module}.weight_packed" in self._source
        if fmt.element_type.is_float or (weight is None and not is_packed):
            return scheme
        packing = Packing.WORDS if weight is None else None
        if packing is fmt.packing:
            return scheme
        try:
            return Scheme.parse(dataclasses.replace(scheme, weights=dataclasses.replace(fmt, packing=packing)))
        except NotImplementedError as error:
            raise CheckpointError(f"{self._where}: module {shorten(module)}: {error}") from None

    def _stored(self, module: str) -> tuple[TensorInfo | None, TensorInfo | None]:
        """``info`` of the weight and of a tensor that shows that it is quantized; None for what the source lacks."""
        source = self._source
        if source is None:
            return None, None
        suffixes = _EVIDENCE
        weight = source.info(f"{module}.weight") if f"{module}.weight" in source else None
        if weight is None and module in source:  # fused experts: the module's name is the tensor's
            weight, suffixes = source.info(module), _EVIDENCE + _FUSED_EVIDENCE
        for suffix in suffixes:
            if f"{module}{suffix}" in source:
                return weight, source.info(f"{module}{suffix}")
        if weight is not None and weight.dtype not in _FULL_PRECISION:
            return weight, weight
        return weight, None

    def _check_fit(self, module: str, fmt: QuantFormat, weight: TensorInfo) -> None:
        """The weight's dtype, the name and shape of its scale. What is missing is for loaders to report."""
        if DTYPES.get(weight.dtype) != fmt.element_type.storage:
            raise self._contradiction(module, f"weights of {fmt.element}", weight)
        for suffix in ("weight_scale", "weight_scale_inv"):
            name = f"{module}.{suffix}"
            if self._source is None or name not in self._source:
                continue
            scale = self._source.info(name)
            if suffix != self._rules.scale_suffix:
                raise self._contradiction(module, f"its scale as {self._rules.scale_suffix}", scale)
            if len(weight.shape) == 2:
                rows, columns = weight.shape
                shape = fmt.scale_shape(rows, 2 * columns if fmt.packing is Packing.NIBBLES else columns)
                if _without_ones(scale.shape) != _without_ones(shape):
                    extent = f"one scale per {fmt.strategy.value} {list(shape)} for weight {list(weight.shape)}"
                    raise self._contradiction(module, extent, scale)

    def _contradiction(self, module: str, expected: str, found: TensorInfo) -> CheckpointError:
        return CheckpointError(
            f"{self._where}: module {shorten(module)}: expected {expected}; found {shorten(found.name)} {found.dtype} "
            f"{list(found.shape)}; config.json and the weights do not belong together"
        )


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """[] and [1], [N] and [N, 1] hold the same scales."""
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return tuple(shape)
