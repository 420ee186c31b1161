"""Faults to plant into the library, by name: each is a patch of one function that makes it accept or mean too much."""

import sys
from unittest import mock

import jax
import jax.numpy as jnp

from moe_jax._versions import install
from moe_jax.loading import _errors
from moe_jax.loading.files import _checkpoint, _safetensors
from moe_jax.loading.layer import _bitpacked, _layer_loader, _plan, _values
from moe_jax.models import _config, _reader
from moe_jax.nn import FusedMoE
from moe_jax.parallel import _loading
from moe_jax.quantization import _scale_checks


def everywhere(original, replacement):
    """Patches of a function under every module's name for it."""
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("moe_jax"):
            for name, value in list(vars(module).items()):
                if value is original:
                    yield mock.patch.object(module, name, replacement)


def input_scale_min():
    def smallest(values, fmt, name):
        return original(values if fmt.global_scale == "divides" else values.min().reshape(1), fmt, name)

    original = _scale_checks.common_input_scale
    return everywhere(original, smallest)


def input_scale_doubled():
    original = _scale_checks.common_input_scale
    return everywhere(original, lambda values, fmt, name: original(values, fmt, name) * 2)


def global_scale_max():
    def largest(values, fmt, name):
        return jnp.asarray(values).max() if fmt.global_scale == "divides" else original(values, fmt, name)

    original = _scale_checks.common_input_scale
    return everywhere(original, largest)


def duplicate_keys():
    return [mock.patch.object(_errors, "_unique", dict)]


def duplicate_tensors():
    def forget(self):
        self._duplicate.clear()
        return original(self)

    original = _layer_loader.LayerLoader._check_complete
    return [mock.patch.object(_layer_loader.LayerLoader, "_check_complete", forget)]


def left_over_tensors():
    return [mock.patch.object(_layer_loader.LayerLoader, "_all_unexpected", lambda self: [])]


def bad_scales():
    return everywhere(_scale_checks.check_scale_values, lambda *args, **options: None)


def weight_shape():
    return everywhere(_bitpacked.check_weight_shape, lambda *args: None)


def values_not_finite():
    return [
        mock.patch.object(_values, "_may_be_infinite", lambda value, target=None: _copied(value, target)),
        *everywhere(_values.check_values, lambda *args: None),
    ]


def _copied(value, target):
    if target is not None:
        target[...] = value.reshape(target.shape)
    return False


def holes():
    """Bytes that belong to no tensor, between two of them."""

    def lenient(header, data_bytes, where):
        infos = [_safetensors._tensor_info(name, entry, where) for name, entry in header.items()]
        infos.sort(key=lambda info: (info.start, info.nbytes))
        position = 0
        for info in infos:
            if info.start < position:
                return original(header, data_bytes, where)
            position = info.start + info.nbytes
        return {info.name: info for info in infos} if position == data_bytes else original(header, data_bytes, where)

    original = _safetensors._tensor_infos
    return everywhere(original, lenient)


def reload_sets_first():
    """A layer's reload that fails has set its weights already."""

    def eager(self, pairs, *, experts=None):
        try:
            original(self, pairs, experts=experts)
        except Exception:
            self.set_weights(jax.tree.map(jnp.zeros_like, self.weights.get_value()))
            raise

    original = FusedMoE.reload_weights
    return [mock.patch.object(FusedMoE, "reload_weights", eager)]


def hidden_act():
    def ignoring(self, key, supported, default=None):
        if key == "hidden_act":
            self._known.add(key)
            return supported[0]
        return original(self, key, supported, default)

    original = _config.ConfigReader.one_of
    return [mock.patch.object(_config.ConfigReader, "one_of", ignoring)]


def tied_head():
    return [mock.patch.object(_reader.ModelReader, "_check_tied", lambda self: None)]


def index():
    """Tensors of the files that the index does not list, or in another file."""

    def lenient(placed):
        return dict.fromkeys(original(placed))

    original = _checkpoint._by_file
    return everywhere(original, lenient)


def model_reload_sets_first():
    """A model's reload that fails in its experts has set its dense weights already."""

    def eager(self, tensors, parallel):
        values = original(self, tensors, parallel)
        if eager.is_reload:
            install(values)
        return values

    def reload(*args):
        eager.is_reload = True
        try:
            return original_reload(*args)
        finally:
            eager.is_reload = False

    eager.is_reload = False
    original, original_reload = _reader.ModelReader._read, _reader.reload_weights
    return [mock.patch.object(_reader.ModelReader, "_read", eager), *everywhere(original_reload, reload)]


def shares_of_one_scale():
    """Over a mesh each device takes the input scale of its own experts."""
    return [mock.patch.object(_loading.ShardedExpertReader, "_input_scales", lambda *args: {})]


def routed_scaling_factor():
    original = _config.ConfigReader.positive

    def ignoring(self, *keys, default=None):
        value = original(self, *keys, default=default)
        return default if keys == ("routed_scaling_factor",) else value

    return [mock.patch.object(_config.ConfigReader, "positive", ignoring)]


def scalars():
    """A number that is spread over a whole matrix."""
    return everywhere(_plan.check_axes, lambda *args: None)


# The first twelve are those of the first hunt.
FAULTS = (
    *(input_scale_min, input_scale_doubled, global_scale_max, duplicate_keys, duplicate_tensors, left_over_tensors),
    *(bad_scales, weight_shape, values_not_finite, holes, reload_sets_first, hidden_act),
    *(tied_head, index, model_reload_sets_first, shares_of_one_scale, routed_scaling_factor, scalars),
)
