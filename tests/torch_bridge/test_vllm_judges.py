"""The line that engine.py says about a format, from what its two engines found."""

import pytest
import torch

from tests.torch_bridge.vllm.engine import line

OURS = dict(errors=dict(experts=0.0030, layer=0.0031), methods=["Method (ours)"], seconds=11.6)
VLLM = dict(errors=dict(own=0.0030), methods=["Method"], seconds=8.2)
BROKEN = dict(error="ValueError: no kernel", seconds=3.0)
UNSEEN = dict(errors={}, methods=[])  # with --tp


def said_of(root, ours, vllm, ours_off=0.0, vllm_off=0.0, name="bf16", log="all is well", rows=slice(None)):
    """Logits in float32, those of ours so far from them (``rows``), and vLLM's."""
    generator = torch.Generator().manual_seed(0)
    base, far = (torch.randn(8, 64, generator=generator) for _ in range(2))
    for side, moved, of_rows in (("vllm", vllm_off, slice(None)), ("ours", ours_off, rows)):
        (root / side / name).mkdir(parents=True)
        together = base.clone()
        together[of_rows] += moved * far[of_rows]
        logits = dict(together=together, alone=together) | (dict(float32=base) if side == "ours" else {})
        torch.save(logits, root / side / name / "logits.pt")
    (root / "ours" / name / "log.txt").write_text(log)
    return line(name, root, dict(vllm=vllm, ours=ours) if vllm else dict(ours=ours))


# Case -> arguments of said_of, and how the line begins.
CASES = {
    "both alike": (dict(ours=OURS, vllm=VLLM), "PASS"),
    "logits a little off": (dict(ours=OURS, vllm=VLLM, ours_off=0.02), "PASS"),
    "logits off": (dict(ours=OURS, vllm=VLLM, ours_off=0.05), "FAIL"),
    "logits off, as vLLM's": (dict(ours=OURS, vllm=VLLM, ours_off=0.05, vllm_off=0.045), "PASS"),
    "both are noise": (dict(ours=OURS | UNSEEN, vllm=VLLM | UNSEEN, ours_off=1.0, vllm_off=2.0), "FAIL"),
    "vLLM's are off": (dict(ours=OURS, vllm=VLLM, vllm_off=0.5), "PASS"),
    "one prompt in eight takes other experts": (dict(ours=OURS, vllm=VLLM, ours_off=0.5, rows=slice(1)), "PASS"),
    "three prompts in eight": (dict(ours=OURS, vllm=VLLM, ours_off=0.05, rows=slice(3)), "FAIL"),
    "8 bits": (dict(ours=OURS, vllm=VLLM, ours_off=0.05, name="ct_fp8_channel"), "PASS"),
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
    "two GPUs, logits off": (dict(ours=OURS | UNSEEN, vllm=VLLM | UNSEEN, ours_off=0.05), "FAIL"),
    "two GPUs, and vLLM fails": (dict(ours=OURS | UNSEEN, vllm=BROKEN, ours_off=0.01), "PASS"),
    "two GPUs, vLLM fails, logits off": (dict(ours=OURS | UNSEEN, vllm=BROKEN, ours_off=0.05), "FAIL"),
}


@pytest.mark.parametrize("arguments, begins", CASES.values(), ids=CASES)
def test_line(arguments, begins, tmp_path):
    said = said_of(tmp_path, **arguments)
    assert said.startswith(begins) and "\n" not in said
    assert f"ours {arguments['ours']['seconds']:.0f} s" in said
