"""Folders that transformers and compressed-tensors wrote, through real vLLM up to our subclasses; against float32.

The model, its config and the loading of its weights are vLLM's own, but for attention, whose backends want a GPU.
"""

from unittest import mock

import pytest

pytest.importorskip("vllm")

import torch

from tests.support.checkpoints.written import WRITTEN, write
from tests.support.vllm_layers import (
    computed_by_reference,
    errors_of_both_applies,
    heard,
    model_config,
    vllm_without_gpu,
    weights_of,
)
from tests.torch_bridge.vllm.test_formats import TOLERANCES

E, TOP_K, H, INTERMEDIATE, LAYERS = 4, 2, 512, 256, 2
SIZES = dict(num_experts=E, top_k=TOP_K, hidden=H, intermediate=INTERMEDIATE, layers=LAYERS, vocabulary=128)
pytestmark = pytest.mark.filterwarnings("ignore")


class _NoAttention(torch.nn.Module):
    def __init__(self, *_, **__):
        super().__init__()


def model_of(folder, config):
    """vLLM's model of a folder, loaded and processed as ``vllm serve FOLDER --quantization moe_jax`` does it."""
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.model_loader.weight_utils import get_quant_config
    from vllm.model_executor.models import qwen3_moe

    config.model_config = model_config(folder)
    config.quant_config = get_quant_config(config.model_config, config.load_config)
    with mock.patch.object(qwen3_moe, "Attention", _NoAttention):
        model = initialize_model(vllm_config=config, model_config=config.model_config)
    DefaultModelLoader(LoadConfig()).load_weights(model, config.model_config)
    return model


@pytest.mark.parametrize("name", WRITTEN)
def test_a_written_folder(name, caplog, tmp_path, monkeypatch):
    computed_by_reference(monkeypatch)
    form, values = WRITTEN[name], write(tmp_path / "model", name, **SIZES)
    generator = torch.Generator().manual_seed(len(name))
    with vllm_without_gpu() as config, heard(caplog):
        model = model_of(tmp_path / "model", config)
        layers = [module for module in model.modules() if type(module).__name__ == "RoutedExperts"]
        assert len(layers) == LAYERS
        for index, layer in enumerate(layers):
            method, (w13, w2, _, _) = layer.quant_method, values[str(index)]
            assert type(method).__name__ == form.method and hasattr(method, "moe_jax")
            method.process_weights_after_loading(layer)
            found13, found2 = map(torch.from_numpy, weights_of(method.moe_jax.experts))
            torch.testing.assert_close(found13, w13, rtol=1e-6, atol=0)
            torch.testing.assert_close(found2, w2, rtol=1e-6, atol=0)
            errors = errors_of_both_applies(layer, generator, TOP_K, w13, w2)
            assert errors.max() < TOLERANCES[form.activations], errors
    assert "nothing was loaded" not in caplog.text
