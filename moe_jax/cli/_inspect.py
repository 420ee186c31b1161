"""``inspect_checkpoint``: what is in a checkpoint, how its experts would run, and what is wrong with it.

Only config.json, headers and the scales of experts are read. A checkpoint that cannot be opened at all is an error;
whatever is found after that is listed in the report, so that one look shows all of it.
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from moe_jax._config import MoEConfig
from moe_jax._terminal import cut, printable, size, table
from moe_jax.experts._explain import explain
from moe_jax.loading import Checkpoint, QuantizationConfig, as_packed, checkpoint_directory
from moe_jax.loading._errors import ranges, shorten
from moe_jax.loading.layer._names import is_correction_bias_name, is_expert_name
from moe_jax.loading.layer._reader import HeaderCheck
from moe_jax.models import CausalLM, DecoderConfig, read_family
from moe_jax.models._counts import check_counts
from moe_jax.models._dense_loader import DenseTensor, dense_names, keep_as_stored, plan_dense, skipped_layers
from moe_jax.quantization import Scheme, method_for

_PARTS = (
    "experts",
    "shared experts",
    "routers",
    "attention",
    "dense feed-forward",
    "embeddings",
    "head",
    "norms",
    "left out",
    "other",
)
_ROUTERS = ("gate", "router", "shared_expert_gate")
_ATTENTION = ("self_attn", "attn", "linear_attn")
_FEED_FORWARD = ("mlp", "feed_forward", "block_sparse_moe")
# Layers for multi-token prediction, and vision models: not of the language model.
_LEFT_OUT = ("mtp", "mtp_block", "visual", "vision_model", "multi_modal_projector")
_MOST_PROBLEMS = 20


@dataclasses.dataclass(frozen=True)
class Part:
    """One kind of tensors. dtypes: the format's names, the one with most bytes first."""

    name: str
    num_tensors: int
    nbytes: int
    dtypes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ExpertRun:
    """Layers whose experts are stored alike. scheme: its name. nbytes: of their weights once loaded.

    explanation: what would run them, as ``explain`` says it. config: of one such layer. They are 0, "" and None when
    config.json is not understood.
    """

    layers: tuple[int, ...]
    scheme: str
    nbytes: int = 0
    explanation: str = ""
    config: MoEConfig | None = None


@dataclasses.dataclass(frozen=True)
class DenseRun:
    """Quantized matrices outside the experts that are stored alike. scheme: its name. held: that of the scheme in which
    a loaded model holds them, None for those that are dequantized. counts: how many of each part.
    """

    scheme: str
    held: str | None
    counts: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class CheckpointReport:
    """What ``inspect_checkpoint`` found.

    family: config.json's model_type. config: None when it is not understood. quantization: method and format in the
    words of config.json. problems: one line each, as loading would say it; empty when all is in order. left_out: first
    word of names -> number of tensors that the model has no part for, such as those of a vision model.
    """

    directory: str
    family: str
    config: DecoderConfig | None
    quantization: str
    files: tuple[str, ...]
    num_tensors: int
    nbytes: int
    parts: tuple[Part, ...]
    expert_runs: tuple[ExpertRun, ...]
    problems: tuple[str, ...]
    dense_runs: tuple[DenseRun, ...] = ()
    left_out: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def render(self) -> str:
        """The report as text for a terminal."""
        head = [
            ("checkpoint", self.directory),
            ("family", self.family),
            ("files", f"{len(self.files)} with {self.num_tensors} tensors, {size(self.nbytes)}"),
            ("quantization", self.quantization),
        ]
        if self.config is not None:
            head += _architecture(self.config)
        if self.left_out:
            head.append(("left out", ", ".join(f"{word}: {count} tensors" for word, count in self.left_out.items())))
        parts = [(part.name, str(part.num_tensors), size(part.nbytes), ", ".join(part.dtypes)) for part in self.parts]
        lines = [*table(head), "", *table([("part", "tensors", "size", "stored as"), *parts], right=(1, 2))]
        for run in self.expert_runs:
            loaded = f", {size(run.nbytes)} when loaded" if run.nbytes else ""
            lines += ["", f"experts of layers {ranges(run.layers)}: {run.scheme}{loaded}"]
            lines += [f"  {line}" for line in run.explanation.splitlines()]
        for dense in self.dense_runs:
            counts = ", ".join(f"{count} of {part}" for part, count in dense.counts.items())
            how = "dequantized when loaded" if dense.held is None else f"stay quantized, multiplied as {dense.held}"
            lines += ["", f"dense matrices in {dense.scheme}, {how}: {counts}"]
        verdict = "problems:" if self.problems else "no problems in headers and scales; weights are checked when loaded"
        text = "\n".join([*lines, "", verdict, *(f"  {cut(problem)}" for problem in self.problems)])
        return printable(text, keep="\n")


def inspect_checkpoint(
    directory: str | os.PathLike[str], *, revision: str | None = None, num_tokens: int = 256
) -> CheckpointReport:
    """Look at a checkpoint without reading its weights.

    Args:
        directory: config.json and safetensors files; or ``organization/name`` on a hub, which is downloaded.
        revision: branch, tag or commit on the hub; None is main.
        num_tokens: of the call whose execution the report explains.

    Raises:
        CheckpointError: the directory, config.json, the index or the header of a file cannot be used.
    """
    where = checkpoint_directory(directory, revision=revision)
    with Checkpoint(where) as checkpoint:
        checkpoint.expect_scattered_reads()  # scales lie between weights: read-ahead would fetch a tenth of the file
        look = _Look(as_packed(checkpoint), num_tokens)
        return CheckpointReport(
            directory=str(where),
            family=shorten(" ".join(str(checkpoint.config.get("model_type")).split())),
            config=look.config,
            quantization=_quantization(checkpoint.quantization_config),
            files=checkpoint.files,
            num_tensors=len(checkpoint.names),
            nbytes=checkpoint.nbytes,
            parts=_parts(checkpoint),
            expert_runs=look.expert_runs,
            problems=look.problems,
            dense_runs=look.dense_runs,
            left_out=look.left_out,
        )


class _Look:
    """Goes through a checkpoint as loading would, and notes what is wrong instead of stopping."""

    def __init__(self, checkpoint: Any, num_tokens: int):
        self._checkpoint, self._num_tokens = checkpoint, num_tokens
        self._problems: dict[str, None] = {}  # in order, and each said once
        self.config: DecoderConfig | None = None
        self.expert_runs: tuple[ExpertRun, ...] = ()
        self.dense_runs: tuple[DenseRun, ...] = ()
        self.left_out: Mapping[str, int] = {}
        family = quantization = reader = None
        with self._noting():
            family, config = read_family(checkpoint.config, str(checkpoint.config_path))
            check_counts(config, checkpoint)
            self.config = config
        with self._noting():
            quantization = QuantizationConfig.from_config(checkpoint.config, checkpoint)
        if quantization is None:
            return
        with self._noting():
            reader = HeaderCheck(checkpoint, quantization=quantization)
        if reader is None:
            return
        if family is None or self.config is None:
            by_scheme = self._by_scheme(reader, reader.layers)
            self.expert_runs = tuple(ExpertRun(layers, scheme.name) for scheme, layers in by_scheme.items())
        else:
            self._check_model(family, self.config, reader, quantization)

    @property
    def problems(self) -> tuple[str, ...]:
        found = list(self._problems)
        rest = len(found) - _MOST_PROBLEMS
        return tuple(found) if rest <= 0 else (*found[:_MOST_PROBLEMS], f"and {rest} more")

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, NotImplementedError) as error:
            self._problems[" ".join(str(error).split())] = None

    def _by_scheme(self, reader: HeaderCheck, layers: Iterable[int]) -> dict[Scheme, tuple[int, ...]]:
        """The scheme that layers are stored in -> those layers."""
        found: dict[Scheme, tuple[int, ...]] = {}
        for layer in layers:
            with self._noting():
                scheme = Scheme.parse(reader.stored_scheme(layer))
                found[scheme] = (*found.get(scheme, ()), layer)
        return found

    def _check_model(
        self,
        family: type[CausalLM],
        config: DecoderConfig,
        reader: HeaderCheck,
        quantization: QuantizationConfig,
    ) -> None:
        checkpoint, where = self._checkpoint, str(self._checkpoint.directory)
        surplus = set(reader.layers) - set(config.moe_layers) - skipped_layers(checkpoint.names, config.num_layers)
        if surplus:
            self._problems[
                f"{where}: expert tensors in layers {ranges(sorted(surplus))}; config.json puts experts into layers "
                f"{ranges(config.moe_layers)}"
            ] = None
        for scheme, layers in self._by_scheme(reader, config.moe_layers).items():
            layer_config = family.make_moe_block(config, layers[0], scheme=scheme).experts.config
            weights, explanation = method_for(scheme).abstract_weights(layer_config), ""
            with self._noting():
                explanation = explain(dataclasses.replace(layer_config, name=""), weights, self._num_tokens)
            self.expert_runs += (
                ExpertRun(layers, scheme.name, len(layers) * weights.nbytes(), explanation, layer_config),
            )
            for layer in layers:
                with self._noting():
                    reader.check(layer, dataclasses.replace(layer_config, name=family.moe_prefix(layer)))
        self.left_out = family.left_out(checkpoint.names)
        account = set(dense_names(checkpoint.names, config.num_layers, family.other_modules))
        with self._noting():
            model = family(config)
            if model.lm_head is None:  # a file may hold the tied head as well
                account.discard(f"{family.head_module}.weight")
            modules = model.dense_modules()
            keep_as_stored(modules, checkpoint, quantization, dtype=jnp.bfloat16)
            plan = plan_dense(modules, checkpoint, quantization, where=where, account=account)
            self.dense_runs = _dense_runs(plan)


def _dense_runs(plan: Iterable[DenseTensor]) -> tuple[DenseRun, ...]:
    counts: dict[tuple[str, str | None], dict[str, int]] = {}
    for tensor in plan:
        if tensor.scheme is None:
            continue
        held = None if tensor.held is None else tensor.held.name
        own, part = counts.setdefault((tensor.scheme.name, held), {}), _part_of(tensor.name)
        own[part] = own.get(part, 0) + 1
    return tuple(DenseRun(scheme, held, own) for (scheme, held), own in counts.items())


def _parts(checkpoint: Checkpoint) -> tuple[Part, ...]:
    sizes: dict[str, dict[str, int]] = {}
    counts: dict[str, int] = {}
    for name in checkpoint.names:
        info, part = checkpoint.info(name), _part_of(name)
        by_dtype = sizes.setdefault(part, {})
        by_dtype[info.dtype] = by_dtype.get(info.dtype, 0) + info.nbytes
        counts[part] = counts.get(part, 0) + 1
    return tuple(
        Part(
            part,
            counts[part],
            sum(sizes[part].values()),
            tuple(sorted(sizes[part], key=lambda dtype: -sizes[part][dtype])),
        )
        for part in _PARTS
        if part in sizes
    )


def _part_of(name: str) -> str:
    """One of ``_PARTS``, by the words of a tensor's name."""
    words = name.split(".")
    owners = words[:-1]
    if any(word in _LEFT_OUT for word in words):
        return "left out"
    if is_expert_name(name):
        return "experts"
    if is_correction_bias_name(name) or any(word in _ROUTERS for word in owners):
        return "routers"
    if any(word.startswith(("shared_expert", "shared_mlp")) for word in owners):
        return "shared experts"
    if any(word.endswith("norm") for word in owners):
        return "norms"
    if any(word in _ATTENTION for word in owners):
        return "attention"
    if any(word in _FEED_FORWARD for word in owners):
        return "dense feed-forward"
    return {"embed_tokens": "embeddings", "wte": "embeddings", "lm_head": "head"}.get(
        owners[-1] if owners else "", "other"
    )


def _quantization(stated: Any) -> str:
    if not isinstance(stated, dict):
        return "none"
    method = shorten(str(stated.get("quant_method", "compressed-tensors" if "config_groups" in stated else "unnamed")))
    details = [shorten(str(stated[key])) for key in ("format", "fmt", "version") if isinstance(stated.get(key), str)]
    return " ".join((f"{method} ({', '.join(details)})" if details else method).split())


def _architecture(config: DecoderConfig) -> list[tuple[str, str]]:
    dense = config.num_layers - len(config.moe_layers)
    rows = [
        (
            "layers",
            f"{config.num_layers}, {len(config.moe_layers)} with experts" + (f", {dense} dense" if dense else ""),
        ),
        (
            "experts",
            f"{config.num_experts} per layer, top {config.top_k}, intermediate size {config.moe_intermediate_size}",
        ),
        ("routing", _routing(config)),
    ]
    if config.shared_intermediate_size:
        gate = ", behind a sigmoid gate" if config.has_shared_expert_gate else ""
        rows.append(("shared experts", f"intermediate size {config.shared_intermediate_size}{gate}"))
    return [
        *rows,
        ("hidden size", str(config.hidden_size)),
        ("attention", _attention(config)),
        ("vocabulary", f"{config.vocab_size}, {'tied' if config.tie_word_embeddings else 'untied'} head"),
    ]


def _attention(config: DecoderConfig) -> str:
    heads = f"{config.num_heads} heads of {config.head_dim}"
    if config.mla is not None:
        widths = [sum(width for _, width in config.cache_widths(layer)) for layer in range(config.num_layers)]
        most, least = max(widths), min(widths)
        cached = f"{most} numbers cached per token" + (f", {least} in layers that share" if least < most else "")
        indexer = config.mla.indexer
        selects = "" if indexer is None else f", an indexer selects {indexer.topk} tokens"
        return f"{heads}, MLA: {cached}{selects}"
    heads = f"{heads}, {config.num_kv_heads} for keys and values"
    if config.linear_attention is None:
        return heads
    linear = config.linear_attention
    return (
        f"{heads}; linear attention (gated delta rule) in {len(config.linear_layers)} of {config.num_layers} layers, "
        f"{linear.num_key_heads} key and {linear.num_value_heads} value heads"
    )


def _routing(config: DecoderConfig) -> str:
    """The settings in the words of ``FusedMoE``."""
    parts = [config.custom_routing_function or config.scoring_func]
    if config.num_expert_group is not None:
        parts.append(f"best {config.topk_group} of {config.num_expert_group} groups")
    if config.has_correction_bias:
        parts.append("correction bias")
    if config.renormalize:
        parts.append("renormalized")
    if config.routed_scaling_factor != 1.0:
        parts.append(f"scaled by {config.routed_scaling_factor:g}")
    if config.apply_router_weight_on_input:
        parts.append("weight applied to the input")
    return ", ".join(parts)
