"""State dicts of ``FusedMoE`` in vLLM's layout, before processing and after, in and out."""

from typing import Any

import torch

from moe_jax.quantization import method_for
from torch_bridge._layer_loading import LoadingMixin
from torch_bridge._leaf_layout import shown_leaves
from torch_bridge._methods import SchemeMoEMethod
from torch_bridge._repeats import Repeats
from torch_bridge._state import interleaved, is_interleaved, stored_leaves
from torch_bridge._tensors import to_numpy
from torch_bridge._views import checkpoint_view, processed_view

_PREFIXES = ("w13_", "w2_")


class StateDictMixin(LoadingMixin):
    """The state dict half of ``FusedMoE``.

    Out: nothing loaded gives placeholders on the meta device, a processed layer its leaves. What is loaded but not
    processed yet is refused: some of it may be quantized already.
    In: leaves as they come out, or as ``processed_state_dict`` has them, complete. An unprocessed layer keeps them
    until process_weights_after_loading, a processed one replaces its weights at once, or none of them. Full-precision
    leaves under a quantizing scheme are quantized.
    """

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if not isinstance(self.quant_method, SchemeMoEMethod):
            super()._save_to_state_dict(destination, prefix, keep_vars)
            return
        if self._loader is not None:
            raise RuntimeError(
                f"{self.layer_name}: weights are loaded but not processed; call process_weights_after_loading() before "
                "state_dict()"
            )
        leaves = {name: p.data for name, p in self.named_parameters(recurse=False) if name.startswith(_PREFIXES)}
        if self._experts is not None:
            leaves = stored_leaves(self._experts.weights, self.local_config)
            leaves = interleaved(leaves) if is_interleaved(self.config) else leaves
            leaves = shown_leaves(leaves, {name: self.quant_method.layout(name) for name in leaves})
        for name, leaf in leaves.items():
            destination[f"{prefix}{name}"] = leaf

    def processed_state_dict(self) -> dict[str, torch.Tensor]:
        """The leaves of a processed layer as vLLM names and stores them after its own processing.

        NVFP4: ``weight``, ``weight_scale``, and ``weight_scale_2`` and ``input_scale``, which multiply. int4 with int8
        activations: ``weight_packed`` (E, N, K / 2) uint8, and its scales. Every other scheme: ``state_dict()``.
        ``load_state_dict`` takes either. Raises RuntimeError when nothing is processed.
        """
        if self._experts is None:
            raise RuntimeError(f"{self.layer_name} has no processed weights: call process_weights_after_loading()")
        leaves = {name: leaf for name, leaf in self.state_dict().items() if name.startswith(_PREFIXES)}
        return processed_view(leaves, self.local_config.scheme)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if not isinstance(self.quant_method, SchemeMoEMethod):
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )
            return
        scheme, names, layout = self.local_config.scheme, {}, self.quant_method.layout
        leaf_of = {layout(leaf).name: leaf for leaf in method_for(scheme).create_weights(self.local_config)}
        for key in state_dict:
            name = key.removeprefix(prefix)
            if key.startswith(prefix) and name.startswith(_PREFIXES) and "." not in name:
                names[leaf_of.get(name, name)] = state_dict[key]
        # weight_shape tells nothing that the scheme does not.
        names = {name: leaf for name, leaf in names.items() if not name.endswith("_weight_shape")}
        names = checkpoint_view(names, scheme)
        weight = names.get("w2_weight")
        is_full_precision = weight is not None and weight.dtype in (torch.float32, torch.float16, torch.bfloat16)
        is_online = scheme.is_quantized and is_full_precision
        expected = (method_for(None) if is_online else method_for(scheme)).create_weights(self.local_config)
        unexpected_keys += [f"{prefix}{name}" for name in names.keys() - expected.keys()]
        missing = sorted(expected.keys() - names.keys())
        missing_keys += [f"{prefix}{name}" for name in missing]
        if missing or any(leaf.is_meta for leaf in names.values()):
            return
        loader = self.new_loader(online=is_online)
        try:
            for name in sorted(expected):
                leaf, shape = names[name], expected[name].shape
                if leaf.shape == layout(name).shape(shape):
                    leaf = layout(name).stored(leaf, shape)
                loader.accept_leaf(name, to_numpy(leaf), is_interleaved=is_interleaved(self.config))
            if self._experts is not None:
                self.install(self.finished(loader))
            else:
                self._loader, self._repeats = loader, Repeats()
        except (ValueError, TypeError) as error:
            error_msgs.append(f"{prefix}{error}")
