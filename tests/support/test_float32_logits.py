import pytest
import torch

from tests.support.checkpoints.vllm_formats import FORMATS
from tests.support.oracles.float32_logits import last_logprobs
from tests.torch_bridge.vllm.engine import INTERMEDIATE, write_checkpoint

PROMPTS = [[5, 9, 700, 31], [17]]


@pytest.mark.parametrize("name", ["bf16", "ct_w4a16_g128", "gpt_oss"])
def test_values_of_experts_are_where_transformers_has_them(name, tmp_path):
    """Beside what transformers itself loads: bfloat16 as it is, MXFP4 and packed int4 dequantized by its quantizers."""
    transformers = pytest.importorskip("transformers")
    values = write_checkpoint(tmp_path / "model", name, INTERMEDIATE)
    found = last_logprobs(tmp_path / "model", values, PROMPTS)
    more = {}
    if FORMATS[name].is_gpt_oss:
        more["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
    elif FORMATS[name].config:
        more["quantization_config"] = transformers.CompressedTensorsConfig(run_compressed=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32, attn_implementation="eager", **more
    )
    with torch.inference_mode():
        wanted = torch.stack([model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1) for prompt in PROMPTS])
    assert (found - wanted).norm() < 1e-3 * (wanted - wanted.mean(-1, keepdim=True)).norm()
