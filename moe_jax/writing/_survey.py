"""What a checkpoint holds, by headers alone: layers of experts, other quantizable matrices, and the rest."""

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from moe_jax._config import MoEConfig
from moe_jax._typing import Json
from moe_jax.loading import CheckpointError, ExpertNames, ExpertReader, ExpertTensor, QuantizationConfig
from moe_jax.loading._errors import shorten
from moe_jax.loading.config._modules import classes_of, is_normally_plain
from moe_jax.loading.files._checkpoint import CheckpointLike
from moe_jax.loading.layer._names import is_expert_name
from moe_jax.quantization import Packing, Scheme, method_for

_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_PROJECTIONS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_UNQUANTIZED = Scheme.parse(None)


@dataclasses.dataclass(frozen=True)
class ExpertLayer:
    """Experts of one layer. config: its scheme is the one they are stored in. names: the tensors they are made of.

    modules: (expert, "w1" | "w3" | "w2") -> name of the module that will hold it: the one it has in the file, or where
    the file holds all experts in one tensor ``<prefix>.experts.<e>.gate_proj`` and so on. bias_dtype: None without.
    """

    layer: int
    config: MoEConfig
    names: tuple[str, ...]
    modules: Mapping[tuple[int, str], str]
    bias_dtype: np.dtype | None

    @property
    def stored(self) -> Scheme:
        return self.config.scheme

    def shape(self, shard: str) -> tuple[int, int]:
        """(n, k) of a projection."""
        hidden, intermediate = self.config.hidden_size, self.config.intermediate_size
        return (hidden, intermediate) if shard == "w2" else (intermediate, hidden)


@dataclasses.dataclass(frozen=True)
class Linear:
    """A matrix outside the experts. leaves: what it is stored as, by the words of ``MoEMethod.matrix_specs``."""

    module: str
    shape: tuple[int, int]
    stored: Scheme
    leaves: Mapping[str, str]
    names: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Survey:
    """experts: by layer. linears: 2-D weights of projections, stored quantized or not. plain: all other tensors."""

    experts: tuple[ExpertLayer, ...]
    linears: tuple[Linear, ...]
    plain: tuple[str, ...]


def survey(checkpoint: CheckpointLike, quantization: QuantizationConfig, reader: ExpertReader) -> Survey:
    """Raises CheckpointError for what cannot be told: sizes of experts, tensors that belong to nothing known."""
    by_layer: dict[int, list[ExpertTensor]] = {layer: [] for layer in reader.layers}
    names = ExpertNames(is_interleaved=checkpoint.config.get("model_type") == "gpt_oss")
    others = []
    for name in checkpoint.names:
        if not is_expert_name(name):
            others.append(name)
            continue
        try:
            tensor = names.parse(name)
        except ValueError as error:
            raise CheckpointError(f"{checkpoint.info(name).file}: tensor {error}") from None
        if tensor is not None and tensor.layer is not None:
            by_layer[tensor.layer].append(tensor)
    experts = tuple(_expert_layer(checkpoint, quantization, reader, *item) for item in by_layer.items())
    linears, plain = _linears(checkpoint, quantization, others)
    return Survey(experts, linears, plain)


def _expert_layer(
    checkpoint: CheckpointLike,
    quantization: QuantizationConfig,
    reader: ExpertReader,
    layer: int,
    tensors: list[ExpertTensor],
) -> ExpertLayer:
    where = f"{checkpoint.directory}: layer {layer}"
    stored = reader.stored_scheme(layer) or _UNQUANTIZED
    shards = {shard for tensor in tensors for shard in tensor.shards}
    is_gated = "w1" in shards and "w3" in shards
    biases = {checkpoint.info(t.name).numpy_dtype for t in tensors if t.suffix == "bias"}
    if len(biases) > 1:
        raise CheckpointError(f"{where}: biases of {len(biases)} dtypes, expected one")
    count = _stated(checkpoint.config, _EXPERT_COUNTS) or _count_experts(checkpoint, tensors)
    fused = (checkpoint.info(tensor.name) for tensor in tensors if tensor.expert is None)
    held = max([len(tensors), *(info.shape[0] for info in fused if info.nbytes and info.shape)])
    if count > held:
        raise CheckpointError(f"{where}: {count} experts are stated, and the files can hold {held}; are files missing?")
    hidden, intermediate = _sizes(checkpoint, tensors, stored, where)
    config = MoEConfig(
        num_experts=count,
        top_k=1,
        hidden_size=hidden,
        intermediate_size=intermediate,
        scheme=stored,
        is_act_and_mul=is_gated,
        has_bias=bool(biases),
        param_dtype="float32",
        name=f"layer {layer}",
    )
    return ExpertLayer(
        layer=layer,
        config=config,
        names=tuple(tensor.name for tensor in tensors),
        modules=_modules(tensors, count, is_gated),
        bias_dtype=next(iter(biases), None),
    )


def _modules(tensors: list[ExpertTensor], count: int, is_gated: bool) -> dict[tuple[int, str], str]:
    found = {(t.expert, shard): t.module for t in tensors if t.expert is not None for shard in t.shards}
    if not is_gated:  # its one input projection may be called up_proj
        found = {(expert, "w1" if shard == "w3" else shard): module for (expert, shard), module in found.items()}
    head = tensors[0].module
    head = head[: head.index(".experts.")] if ".experts." in head else head.rpartition(".")[0]
    words = _PROJECTIONS if is_gated else {"w1": "up_proj", "w2": "down_proj"}
    return {
        (expert, shard): found.get((expert, shard), f"{head}.experts.{expert}.{word}")
        for expert in range(count)
        for shard, word in words.items()
    }


def _count_experts(checkpoint: CheckpointLike, tensors: list[ExpertTensor]) -> int:
    numbered = [tensor.expert for tensor in tensors if tensor.expert is not None]
    return 1 + max(numbered) if numbered else checkpoint.info(tensors[0].name).shape[0]


def _sizes(checkpoint: CheckpointLike, tensors: list[ExpertTensor], stored: Scheme, where: str) -> tuple[int, int]:
    """(hidden, intermediate) from down_proj, and config.json where the tensor does not say which axis is which."""
    hidden = _stated(checkpoint.config, ("hidden_size",))
    for tensor in tensors:
        if tensor.shards != ("w2",) or tensor.suffix not in ("weight", "weight_packed"):
            continue
        shape = tuple(checkpoint.info(tensor.name).shape)
        if tensor.expert is None:
            shape = shape[1:]
        if len(shape) == 3:  # gpt-oss: blocks of 16 bytes
            shape = (shape[0], 16 * shape[1])
        if len(shape) != 2:
            continue
        if stored.weights is not None:
            shape = _matrix_shape(checkpoint, tensor.module, shape, stored, where)
        elif tensor.expert is None and hidden is not None and shape[0] != hidden:
            shape = shape[::-1]
        return shape[0], shape[1]
    raise CheckpointError(f"{where}: no down_proj or w2 of its experts shows their sizes; is the file complete?")


def _matrix_shape(
    checkpoint: CheckpointLike, module: str, stored_shape: tuple[int, ...], scheme: Scheme, where: str
) -> tuple[int, int]:
    """(n, k) of a quantized matrix from the shape of what is stored."""
    n, columns = stored_shape
    fmt = scheme.weights
    if fmt is None or fmt.packing is None:
        return n, columns
    if fmt.packing is Packing.NIBBLES:
        return n, 2 * columns
    name = f"{module}.weight_shape"
    if name in checkpoint:
        rows, k = (int(size) for size in np.asarray(checkpoint.read(name)).reshape(-1))
        if rows == n and fmt.stored_length(k) <= columns:
            return rows, k
    elif (bits := 32 * columns) % fmt.element_type.bits == 0:
        return n, bits // fmt.element_type.bits
    raise CheckpointError(f"{where}: {shorten(module)}: its shape cannot be told from {columns} words per row")


def _linears(
    checkpoint: CheckpointLike, quantization: QuantizationConfig, names: list[str]
) -> tuple[tuple[Linear, ...], tuple[str, ...]]:
    linears, used = [], set()
    by_module: dict[str, list[str]] = {}
    for name in names:
        by_module.setdefault(name.rpartition(".")[0], []).append(name)
    for module, own in by_module.items():
        stored_as = next((n for s in ("weight", "weight_packed") if (n := f"{module}.{s}") in own), None)
        if stored_as is None or len(checkpoint.info(stored_as).shape) != 2 or "Linear" not in classes_of(module):
            continue
        scheme = quantization.scheme_for(module) or _UNQUANTIZED
        if scheme.weights is None and is_normally_plain(module):
            continue
        linear = _linear(checkpoint, module, checkpoint.info(stored_as).shape, scheme, own)
        used.update(linear.names)
        linears.append(linear)
    return tuple(linears), tuple(name for name in names if name not in used)


def _linear(checkpoint: CheckpointLike, module: str, shape: tuple[int, ...], scheme: Scheme, own: list[str]) -> Linear:
    if scheme.weights is None:
        weight = f"{module}.weight"
        return Linear(module, (shape[0], shape[1]), scheme, {"weight": weight}, (weight,))
    shape = _matrix_shape(checkpoint, module, shape, scheme, str(checkpoint.directory))
    leaves = {leaf: f"{module}.{leaf}" for leaf in method_for(scheme).matrix_specs(*shape)}
    if f"{module}.weight_scale_inv" in own:
        leaves["weight_scale"] = f"{module}.weight_scale_inv"
    missing = [name for name in leaves.values() if name not in checkpoint]
    names = (*leaves.values(), f"{module}.weight_shape")
    surplus = [name for name in own if name not in names and not name.endswith((".bias", "_proj.output_scale"))]
    if missing or surplus:
        raise CheckpointError(
            f"{checkpoint.directory}: {shorten(module)} is stored as {scheme.name}; missing: {missing or 'nothing'}, "
            f"unexpected: {surplus or 'nothing'}"
        )
    return Linear(module, shape, scheme, leaves, tuple(name for name in own if name in names))


def list_of_layers(module: str) -> str | None:
    """ "model.layers.3.mlp.gate" -> "model.layers", None where a module is of no layer."""
    head, dot_layers, _ = f".{module}".partition(".layers.")
    return f"{head}.layers"[1:] if dot_layers else None


def numbered_experts(checkpoint: CheckpointLike, name: str) -> list[str]:
    """Modules of the experts that a fused tensor of a predictor holds, as a file with one tensor each names them."""
    head, dot_experts, projection = name.removesuffix(".weight").rpartition(".experts.")
    words = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(projection, ())
    shape = checkpoint.info(name).shape
    if not dot_experts or len(shape) != 3:
        return []
    return [f"{head}.experts.{expert}.{word}" for expert in range(shape[0]) for word in words]


def _stated(config: Json, keys: Iterable[str]) -> int | None:
    """An integer of config.json, or of the text model's part of it; None when it says nothing."""
    of_text = config.get("text_config")
    for part in (config, of_text if isinstance(of_text, Mapping) else {}):
        for key in keys:
            value = part.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None
