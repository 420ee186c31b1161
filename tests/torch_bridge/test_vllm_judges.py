"""The line that engine.py says about a format, from what its two engines found."""

import pytest
import torch

from tests.torch_bridge.vllm.engine import line

OURS = dict(errors=dict(experts=0.0030, layer=0.0031), methods=["Method (ours)"], seconds=11.6)
VLLM = dict(errors=dict(own=0.0030), methods=["Method"], seconds=8.2)
BROKEN = dict(error="ValueError: no kernel", seconds=3.0)
UNSEEN = dict(errors={}, methods=["?"])  # with --tp


def said_of(root, ours, vllm, difference=0.0, spread=0.0, name="bf16", log="all is well", apart=slice(None)):
    """Logits of vLLM, those of ours that far from them (rows ``apart``), and vLLM's spread between its own two."""
    generator = torch.Generator().manual_seed(0)
    base, far = (torch.randn(8, 64, generator=generator) for _ in range(2))
    for side, moved, own in (("vllm", 0.0, spread), ("ours", difference, 0.0)):
        (root / side / name).mkdir(parents=True)
        together = base.clone()
        together[apart] += moved * far[apart]
        torch.save(dict(together=together, alone=together + own * far), root / side / name / "logits.pt")
    (root / "ours" / name / "log.txt").write_text(log)
    return line(name, root, dict(vllm=vllm, ours=ours) if vllm else dict(ours=ours))


# Case -> arguments of said_of, and how the line begins.
CASES = {
    "both alike": (dict(ours=OURS, vllm=VLLM), "PASS"),
    "logits a little apart": (dict(ours=OURS, vllm=VLLM, difference=0.02), "PASS"),
    "logits apart": (dict(ours=OURS, vllm=VLLM, difference=0.05), "FAIL"),
    "logits apart, as vLLM's own": (dict(ours=OURS, vllm=VLLM, difference=0.05, spread=0.03), "PASS"),
    "one prompt in eight takes other experts": (dict(ours=OURS, vllm=VLLM, difference=0.5, apart=slice(1)), "PASS"),
    "three prompts in eight": (dict(ours=OURS, vllm=VLLM, difference=0.05, apart=slice(3)), "FAIL"),
    "8 bits": (dict(ours=OURS, vllm=VLLM, difference=0.05, name="ct_fp8_channel"), "PASS"),
    "a wrong layer": (dict(ours=OURS | dict(errors=dict(experts=0.003, layer=0.006)), vllm=VLLM), "FAIL"),
    "an infinite layer": (dict(ours=OURS | dict(errors=dict(experts=float("inf"))), vllm=VLLM), "FAIL"),
    "vLLM's layer is infinite": (dict(ours=OURS, vllm=VLLM | dict(errors=dict(own=float("inf")))), "FAIL"),
    "rows in 8 bits, vLLM in 16": (
        dict(ours=OURS | dict(errors=dict(layer=0.03, exact=0.03)), vllm=VLLM, name="ct_int8"),
        "PASS",
    ),
    "left to vLLM": (dict(ours=OURS, vllm=VLLM, log="WARNING moe_jax leaves model.layers.0 to vLLM's X: y"), "LEFT"),
    "ours fails": (
        dict(ours=BROKEN, vllm=VLLM),
        "FAIL bf16: ours: ValueError: no kernel; vLLM: ran (vllm 8 s, ours 3 s)",
    ),
    "both fail alike": (dict(ours=BROKEN, vllm=BROKEN), "NEITHER"),
    "both fail": (dict(ours=BROKEN, vllm=BROKEN | dict(error="KeyError: 'w2'")), "FAIL"),
    "vLLM fails": (dict(ours=OURS, vllm=BROKEN), "PASS"),
    "vLLM fails and ours is wrong": (dict(ours=OURS | dict(errors=dict(layer=0.03)), vllm=BROKEN), "FAIL"),
    "vLLM not asked": (dict(ours=OURS, vllm=None), "PASS"),
    "two GPUs": (dict(ours=OURS | UNSEEN, vllm=VLLM | UNSEEN), "PASS"),
    "two GPUs, logits apart": (dict(ours=OURS | UNSEEN, vllm=VLLM | UNSEEN, difference=0.05), "FAIL"),
    "two GPUs, and vLLM fails": (dict(ours=OURS | UNSEEN, vllm=BROKEN), "FAIL bf16: ? errors ; nothing to judge by; "),
}


@pytest.mark.parametrize("arguments, begins", CASES.values(), ids=CASES)
def test_line(arguments, begins, tmp_path):
    said = said_of(tmp_path, **arguments)
    assert said.startswith(begins) and "\n" not in said
    assert f"ours {arguments['ours']['seconds']:.0f} s" in said
