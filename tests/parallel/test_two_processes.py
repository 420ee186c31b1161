"""Two processes under ``jax.distributed`` on one machine: each reads and holds its own experts, both get the answer."""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import moe_jax
from moe_jax.loading import Checkpoint
from tests.support.checkpoints import writers

EXPERTS = 4


@pytest.mark.slow
def test_two_processes(tmp_path):
    directory = tmp_path / "mixtral"
    writers.write_model(
        "mixtral", directory, num_local_experts=EXPERTS, num_hidden_layers=1, hidden_size=512, intermediate_size=1024
    )
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    script = Path(__file__).with_name("two_processes.py")
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), port, directory, tmp_path], stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=600)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]

    block = moe_jax.load_moe(directory, 0, dtype="float32")
    x = np.random.default_rng(0).standard_normal((11, 512)).astype(np.float32)
    expected = np.asarray(block(jax.numpy.asarray(x)))
    layer_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(block.experts.weights.get_value()))
    logits = np.asarray(
        moe_jax.load_pretrained(directory, dtype="float32")(np.arange(12, dtype=np.int32).reshape(2, 6))
    )
    with Checkpoint(directory) as opened:
        on_disk = {name: opened.info(name).nbytes for name in opened.names if ".experts." not in name}
    for rank, report in enumerate(reports):
        assert report["processes"] == 2
        # The whole model: before and after its experts have moved; half of what is split, read once.
        for found in report["logits"]:
            np.testing.assert_allclose(np.asarray(found, np.float32), logits, rtol=1e-3, atol=1e-3)
        assert report["load"] == 2 * 2 * 12 and report["slots"] != [0, 1, 2, 3, 0, 1]
        assert dict(report["dense_read"]) == {
            name: size // 2 if re.search("[qkvo]_proj|embed_tokens|lm_head", name) else size
            for name, size in on_disk.items()
        }
        assert len(report["dense_read"]) == len(on_disk)
        for y in report["answers"].values():
            np.testing.assert_allclose(np.asarray(y, np.float32), expected, rtol=1e-4, atol=1e-4)
        experts = {int(re.search(r"experts\.(\d+)\.", name)[1]) for name, _ in report["read"]}
        assert experts == {2 * rank, 2 * rank + 1}
        # bfloat16 on disk, float32 in memory: a process reads half of the bytes and holds half of the layer.
        assert sum(size for _, size in report["read"]) == layer_bytes // 4
        assert report["mine"] == report["total"] // 2
        # At no time more than its own shares and one and a half layers in full precision beside them.
        assert report["held"] <= report["mine"] + 1.5 * layer_bytes
