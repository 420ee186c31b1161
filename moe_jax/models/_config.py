"""``DecoderConfig``: one family's config.json, understood; and the strict reader that families use to make it.

config.json comes in two dialects, that of transformers 4 (the hub) and that of transformers 5 (``save_pretrained``).
Both spellings of a key are accepted. A key that changes the arithmetic is either understood or refused by name.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from moe_jax._arguments import integer
from moe_jax._typing import Json
from moe_jax.loading._errors import shown
from moe_jax.models._layer_cache import LayerCacheSpec, RecurrentCacheSpec, SlotCacheSpec
from moe_jax.models.attention._rope import RopeConfig

# Features of neighbouring families. The value is the one under which the key changes nothing; any other is refused by
# families that do not look the key up, since a model that ignored it would answer wrongly without a word.
_NEUTRAL = {
    "attention_bias": False,
    "attention_multiplier": None,
    "attn_logit_softcapping": None,
    "clip_qkv": None,
    "embedding_multiplier": 1.0,
    "final_logit_softcapping": None,
    "logits_scaling": 1.0,
    "mlp_bias": False,
    "moe_layer_freq": 1,
    "n_shared_experts": 0,
    "num_shared_experts": 0,
    "residual_multiplier": 1.0,
    "rope_interleaved": False,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "shared_expert_intermediate_size": 0,
}


_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_MOST_OF = {"num_hidden_layers": 1024, "num_local_experts": 2**16}  # by the first spelling of a key
_MOST = 2**31 - 1  # positions are 32-bit numbers, and so is what is compared with them
_MOST_FLOAT = 1e30  # what float32 arithmetic on a config value survives


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEBlockConfig:
    """Static description of the blocks with experts of one model, alike in all its layers; hashable.

    model_type: the family, as config.json spells it. moe_layers: indices of the layers with experts, ascending.
    moe_intermediate_size: width of one expert. renormalize and the fields after it are arguments of ``FusedMoE``, with
    num_expert_group None where experts are not chosen by groups. shared_intermediate_size: width of the dense block
    that every token passes besides, 0 without one; has_shared_expert_gate: its output is scaled by sigmoid(gate(x)).
    pinned_tokens: as of ``load_pretrained``; who loads the model decides it, no family.
    """

    model_type: str
    hidden_size: int
    num_layers: int
    moe_layers: tuple[int, ...]
    num_experts: int
    top_k: int
    moe_intermediate_size: int
    renormalize: bool
    scoring_func: str = "softmax"
    num_expert_group: int | None = None
    topk_group: int | None = None
    routed_scaling_factor: float = 1.0
    custom_routing_function: str | None = None
    apply_router_weight_on_input: bool = False
    activation: str = "silu"
    swiglu_limit: float | None = None
    swiglu_alpha: float | None = None
    has_bias: bool = False
    has_router_bias: bool = False
    has_correction_bias: bool = False
    shared_intermediate_size: int = 0
    has_shared_expert_gate: bool = False
    pinned_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.pinned_tokens is not None:
            object.__setattr__(self, "pinned_tokens", integer("pinned_tokens", self.pinned_tokens, minimum=1))
        if self.top_k > self.num_experts:
            raise ValueError(f"num_experts_per_tok={self.top_k} exceeds the number of experts {self.num_experts}")
        groups = self.num_expert_group
        if groups is not None and self.num_experts % groups:
            raise ValueError(f"n_group={groups} does not divide the number of experts {self.num_experts}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexerConfig:
    """Which tokens a query attends to where an indexer selects them (DeepSeek-V3.2); hashable.

    num_heads, head_dim: of index queries; all heads share one index key per token. topk: tokens that a query attends to
    at most. is_interleaved: as of ``MLAConfig``, for index queries and keys. shared_layers: those without an indexer of
    their own, which attend to what the layer before attends to.
    """

    num_heads: int
    head_dim: int
    topk: int
    is_interleaved: bool = False
    shared_layers: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """Widths of multi-head latent attention (DeepSeek-V2 and later); hashable.

    q_lora_rank: width that queries are compressed to, None for plain queries. kv_lora_rank: width of the latent that
    stands for keys and values. qk_nope_head_dim, qk_rope_head_dim: parts of a query or key head without and with
    rotation, the latter shared by all key heads. v_head_dim: of a value head. is_interleaved: rotated columns are
    stored as pairs (2i, 2i + 1) instead of (i, i + D/2). indexer: it selects the tokens that a query attends to; None
    for all.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    is_interleaved: bool = True
    indexer: IndexerConfig | None = None

    def __post_init__(self) -> None:
        if self.indexer is None:
            return
        if self.q_lora_rank is None:
            raise ValueError("q_lora_rank is missing: index queries are made of compressed queries")
        if self.indexer.head_dim < self.qk_rope_head_dim:
            raise ValueError(
                f"index_head_dim={self.indexer.head_dim} is below qk_rope_head_dim={self.qk_rope_head_dim}, the "
                "rotated part of an index key"
            )
        if 0 in self.indexer.shared_layers:
            raise ValueError("layer 0 has no indexer, and no layer before it has selected tokens")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearAttentionConfig:
    """Sizes of linear attention by the gated delta rule (Qwen3-Next); hashable.

    Each of ``num_key_heads`` serves the same number of ``num_value_heads``. conv_steps: tokens that the causal
    convolution sees, the own one included. is_fused: ``in_proj_qkvz`` and ``in_proj_ba`` hold, key head by key head,
    what the other spelling has in ``in_proj_qkv``, ``in_proj_z``, ``in_proj_b`` and ``in_proj_a``.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_steps: int
    is_fused: bool

    @property
    def channels(self) -> int:
        """Of the convolution, for one key head: its query, key and values."""
        return 2 * self.key_head_dim + self.num_value_heads // self.num_key_heads * self.value_head_dim

    @property
    def cache(self) -> RecurrentCacheSpec:
        """What a layer keeps."""
        return RecurrentCacheSpec(
            conv=(self.num_key_heads, self.conv_steps - 1, self.channels),
            state=(self.num_value_heads, self.key_head_dim, self.value_head_dim),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig(MoEBlockConfig):
    """Static description of a decoder-only language model with Mixture-of-Experts layers; hashable.

    head_dim: width of a query or key head. intermediate_size: width of dense feed-forward layers. mla: None for
    grouped-query attention, for which alone the fields from qk_norm to has_sinks may be set.
    qk_norm: RMSNorm of queries and keys before the rotation, "head" for each head or "projection" over all heads, or
    "rotated_head" for each head after the rotation, or "rotated_unit" likewise without weights in layers that rotate;
    None without. unrotated_layers: those without a rotation. temperature: (floor, scale) in these layers: queries at
    position p are multiplied by 1 + scale * log(1 + floor((p + 1) / floor)). attention_chunk: a token sees only
    positions p with the same p // attention_chunk, None for all; chunked_layers: the layers where it holds.
    attention_multiplier: on scores, None for head_dim ** -0.5. is_rope_interleaved: rotated columns are stored as pairs
    (2i, 2i + 1). clip_qkv: bound on the magnitude of queries, keys and values. use_attention_bias: the projections into
    attention have biases, but for those that MLA puts behind a norm; use_output_bias: the one out of it has. has_sinks:
    every head has one more logit that takes its part of the softmax and gives nothing. has_output_gate: ``q_proj`` has,
    behind each query, as many logits whose sigmoid scales what the head gives. sliding_window: number of latest
    positions, the own one included, that a token sees, None for all; sliding_layers: the layers it holds in, None for
    all. linear_layers: those with ``linear_attention`` instead of the attention that the other fields describe.
    norm: "rms", "zero_centered_rms" with weights stored minus one, those of ``qk_norm`` too, or "layer" with means and
    biases. is_post_norm: attention and feed-forward layers are followed by
    their norms instead of preceded. embedding_multiplier, residual_multiplier: on what the embedding, and on what every
    attention and feed-forward layer gives. logits_scaling: logits are divided by it. has_head_bias: the head has one.
    eos_token_id: the tokens that end a text; () when the config names none. kv_cache_dtype: "float8_e4m3fn", or None
    for the dtype of computation; who loads the model decides it, no family.
    """

    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    intermediate_size: int
    mla: MLAConfig | None = None
    qk_norm: str | None = None
    attention_multiplier: float | None = None
    is_rope_interleaved: bool = False
    unrotated_layers: tuple[int, ...] = ()
    temperature: tuple[float, float] | None = None
    attention_chunk: int | None = None
    chunked_layers: tuple[int, ...] = ()
    clip_qkv: float | None = None
    has_sinks: bool = False
    use_attention_bias: bool = False
    use_output_bias: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] | None = None
    has_output_gate: bool = False
    linear_attention: LinearAttentionConfig | None = None
    linear_layers: tuple[int, ...] = ()
    norm: str = "rms"
    is_post_norm: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    has_head_bias: bool = False
    tie_word_embeddings: bool = False
    eos_token_id: tuple[int, ...] = ()
    kv_cache_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.pinned_tokens is not None:
            where = f"pinned_tokens={self.pinned_tokens}"
            if self.linear_layers:
                raise NotImplementedError(
                    f"{where}: the recurrent state of linear attention takes the tokens of a row one after another, "
                    "and tiles hold tokens of any rows; leave pinned_tokens out"
                )
            if self.mla is not None and self.mla.indexer is not None:
                raise NotImplementedError(
                    f"{where}: the indexer scores all slots of the cache in one product, whose bits depend on their "
                    "number; leave pinned_tokens out"
                )
        if self.kv_cache_dtype not in (None, "float8_e4m3fn"):
            raise ValueError(f"kv_cache_dtype={self.kv_cache_dtype!r}, expected 'float8_e4m3fn' or None")
        if self.kv_cache_dtype is not None and self.mla is not None:
            raise NotImplementedError(
                "kv_cache_dtype: a cache in FP8 holds keys and values of heads; that of multi-head latent attention "
                "stays in the model's dtype: say it as kv_cache_dtype"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads={self.num_heads} is not a multiple of num_key_value_heads={self.num_kv_heads}"
            )
        if self.mla is not None and self.num_kv_heads != self.num_heads:
            raise ValueError(
                f"num_key_value_heads={self.num_kv_heads}: every one of the {self.num_heads} heads has keys and values "
                "in this architecture"
            )
        linear = self.linear_attention
        if linear is not None and linear.num_value_heads % linear.num_key_heads:
            raise ValueError(
                f"linear_num_value_heads={linear.num_value_heads} is not a multiple of "
                f"linear_num_key_heads={linear.num_key_heads}"
            )
        super().__post_init__()
        if any(token >= self.vocab_size for token in self.eos_token_id):
            raise ValueError(
                f"eos_token_id={shown(list(self.eos_token_id))} is outside the vocabulary, expected 0 to "
                f"{self.vocab_size - 1}"
            )

    def window_of(self, layer: int) -> int | None:
        """``sliding_window`` where it holds, None in the other layers."""
        return self.sliding_window if self.sliding_layers is None or layer in self.sliding_layers else None

    def has_indexer(self, layer: int) -> bool:
        """Whether a layer selects the tokens that it attends to."""
        indexer = None if self.mla is None else self.mla.indexer
        return indexer is not None and layer not in indexer.shared_layers

    def cache_widths(self, layer: int) -> tuple[tuple[int, int], ...]:
        """(heads, width) of each array that the cache keeps of a layer: keys and values, or MLA's latent, and the index
        keys of an indexer."""
        if self.mla is None:
            return ((self.num_kv_heads, self.head_dim),) * 2
        latent = (1, self.mla.kv_lora_rank + self.mla.qk_rope_head_dim)
        if self.mla.indexer is None or not self.has_indexer(layer):
            return (latent,)
        return (latent, (1, self.mla.indexer.head_dim))

    @property
    def layer_caches(self) -> tuple[LayerCacheSpec, ...]:
        """What each layer keeps of the tokens seen so far."""

        def of_layer(layer: int) -> LayerCacheSpec:
            if self.linear_attention is not None and layer in self.linear_layers:
                return self.linear_attention.cache
            return SlotCacheSpec(self.cache_widths(layer), self.kv_cache_dtype)

        return tuple(map(of_layer, range(self.num_layers)))


class ConfigReader:
    """Typed look-ups in a config.json that remember which keys were understood.

    Every look-up takes the spellings of one key, preferred first. Errors name the file, the key, what was expected and
    what was found.
    """

    def __init__(self, config: Json, source: str = "config.json"):
        self._config = config
        self.source = source
        self._known: set[str] = set()

    def error(self, text: str) -> ValueError:
        return ValueError(f"{self.source}: {text}")

    def value(self, *keys: str, default: Any = None) -> Any:
        """The first of ``keys`` that is present and not null, else ``default``; two that disagree are an error."""
        self._known.update(keys)
        found = {key: self._config[key] for key in keys if self._config.get(key) is not None}
        if any(value != next(iter(found.values())) for value in found.values()):
            raise self.error(
                f"{', '.join(f'{key}={shown(value)}' for key, value in found.items())} disagree; keep one of them"
            )
        return next(iter(found.values()), default)

    def part(self, key: str) -> "ConfigReader":
        """A reader of the object under ``key``."""
        value = self._required((key,), None)
        if not isinstance(value, Mapping):
            raise self.error(f"{key} is {shown(value)}, expected an object")
        return ConfigReader(value, f"{self.source}: {key}")

    def integer(self, *keys: str, minimum: int = 1, default: int | None = None, is_of_layers: bool = False) -> int:
        """is_of_layers: a list with the same number for every layer counts as that number."""
        value = self._required(keys, default)
        if is_of_layers and isinstance(value, list) and value and all(entry == value[0] for entry in value):
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.error(f"{self._stated(keys)} is {shown(value)}, expected an integer >= {minimum}")
        maximum = _MOST_OF.get(keys[0], _MOST)
        if value > maximum:
            raise self.error(f"{self._stated(keys)} is {value}, expected at most {maximum}")
        return value

    def positive(self, *keys: str, default: float | None = None) -> float:
        value = self._required(keys, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MOST_FLOAT:
            raise self.error(f"{self._stated(keys)} is {shown(value)}, expected a positive number")
        return float(value)

    def boolean(self, *keys: str, default: bool | None = None) -> bool:
        value = self._required(keys, default)
        if not isinstance(value, bool):
            raise self.error(f"{self._stated(keys)} is {shown(value)}, expected true or false")
        return value

    def integers(self, *keys: str) -> tuple[int, ...]:
        """A list of non-negative integers, a single one, or nothing: ()."""
        value = self.value(*keys, default=[])
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values):
            raise self.error(f"{self._stated(keys)} is {shown(value)}, expected a list of integers >= 0")
        return tuple(values)

    def one_of(self, key: str, supported: tuple[str, ...], default: str | None = None) -> str:
        value = self._required((key,), default)
        if value not in supported:
            raise self.error(f"{key}={shown(value)} is not supported; supported: {', '.join(supported)}")
        return value

    def rope(self, *, head_dim: int, partial_rotary_factor: float | None = None) -> RopeConfig:
        """The rotary embedding, from ``rope_parameters`` or from ``rope_theta`` with ``rope_scaling``.

        partial_rotary_factor: see ``RopeConfig.from_config``.
        """
        self._known.update(("rope_parameters", "rope_scaling", "rope_theta", "original_max_position_embeddings"))
        self._known.add("partial_rotary_factor")
        max_positions = self.integer("max_position_embeddings")
        try:
            return RopeConfig.from_config(
                self._config,
                head_dim=head_dim,
                max_position_embeddings=max_positions,
                partial_rotary_factor=partial_rotary_factor,
            )
        except ValueError as error:
            raise self.error(str(error)) from None

    def finish(self) -> None:
        """Refuse what changes the arithmetic and was not understood, and keys that look like misspelt ones."""
        for key, value in _NEUTRAL.items():
            if key not in self._known and self._config.get(key) not in (None, value):
                raise self.error(
                    f"{key}={shown(self._config[key])} is not supported for this architecture; expected {shown(value)}"
                )
        known = self._known | _NEUTRAL.keys()
        absent = [key for key in known if key not in self._config]
        for key in self._config.keys() - known:
            meant = difflib.get_close_matches(key, absent, n=1, cutoff=0.9)
            if meant:
                raise self.error(f"unknown key {key!r}; was {meant[0]!r} meant?")

    def _stated(self, keys: tuple[str, ...]) -> str:
        """The spelling that the file has, else the preferred one."""
        return next((key for key in keys if self._config.get(key) is not None), keys[0])

    def _required(self, keys: tuple[str, ...], default: Any) -> Any:
        value = self.value(*keys, default=default)
        if value is None:
            raise self.error(f"{' or '.join(keys)} is missing")
        return value


def read_decoder_config(
    reader: ConfigReader,
    *,
    moe_intermediate_size: tuple[str, ...],
    renormalize: bool,
    moe_layers: tuple[int, ...] | None = None,
    mla: MLAConfig | None = None,
    partial_rotary_factor: float | None = None,
    **fields: Any,
) -> DecoderConfig:
    """The keys that all families share, plus what a family found out itself.

    moe_intermediate_size: spellings of the key that holds the width of one expert. moe_layers: None for all. mla: None
    for grouped-query attention. partial_rotary_factor: see ``RopeConfig.from_config``. fields: of ``DecoderConfig``.
    """
    shared = _block_fields(reader, moe_intermediate_size)
    num_heads = reader.integer("num_attention_heads")
    layers = tuple(range(shared["num_layers"])) if moe_layers is None else moe_layers
    if mla is None:
        head_dim = rotated = _head_dim(reader, shared["hidden_size"], num_heads)
    else:
        head_dim, rotated = mla.qk_nope_head_dim + mla.qk_rope_head_dim, mla.qk_rope_head_dim
    shared |= dict(
        vocab_size=reader.integer("vocab_size"),
        num_heads=num_heads,
        num_kv_heads=reader.integer("num_key_value_heads", default=num_heads),
        head_dim=head_dim,
        rms_norm_eps=reader.positive("rms_norm_eps"),
        rope=reader.rope(head_dim=rotated, partial_rotary_factor=partial_rotary_factor),
        tie_word_embeddings=reader.boolean("tie_word_embeddings", default=False),
        eos_token_id=reader.integers("eos_token_id"),
    )
    if "intermediate_size" not in fields:
        shared |= dict(intermediate_size=reader.integer("intermediate_size"))
    reader.finish()
    values: dict[str, Any] = dict(renormalize=renormalize, moe_layers=layers, mla=mla) | shared | fields
    try:
        return DecoderConfig(**values)
    except ValueError as error:
        raise reader.error(str(error)) from None


def _head_dim(reader: ConfigReader, hidden_size: int, num_heads: int) -> int:
    if reader.value("head_dim", "attention_head_dim") is not None:
        return reader.integer("head_dim", "attention_head_dim")
    if hidden_size % num_heads:
        raise reader.error(f"hidden_size={hidden_size} is not a multiple of num_attention_heads={num_heads}")
    return hidden_size // num_heads


def _block_fields(reader: ConfigReader, moe_intermediate_size: tuple[str, ...]) -> dict[str, Any]:
    reader.one_of("hidden_act", ("silu",))
    return dict(
        model_type=reader.value("model_type"),
        hidden_size=reader.integer("hidden_size"),
        num_layers=reader.integer("num_hidden_layers"),
        moe_intermediate_size=reader.integer(*moe_intermediate_size, is_of_layers=True),
        num_experts=reader.integer(*_EXPERT_COUNTS, is_of_layers=True),
        top_k=reader.integer("num_experts_per_tok", "experts_per_token", "moe_k", "moe_topk", is_of_layers=True),
    )
