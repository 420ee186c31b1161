"""One of two processes of ``test_two_processes.py``: loads its shares of a model, runs it, and reports in JSON.

    python tests/parallel/two_processes.py RANK PORT CHECKPOINT OUT

Each process has two simulated CPU devices; gloo carries the collectives.
"""

import json
import os
import sys
from pathlib import Path


def rss() -> int:
    """Bytes of anonymous memory: what the process holds itself, without mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def main(rank: int, port: str, checkpoint: str, out: Path) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    sys.path.insert(0, str(Path(__file__).parents[2]))
    import jax
    import numpy as np

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=rank)
    import moe_jax
    from moe_jax.loading import Checkpoint
    from moe_jax.parallel import ParallelConfig

    read, whole_read = [], Checkpoint.read

    def counted(self, name, rows=None, columns=None):
        array = whole_read(self, name, rows, columns)
        if ".experts." in name:
            read.append((name, array.nbytes))
        return array

    Checkpoint.read = counted
    mesh = jax.make_mesh((2, 2), ("expert", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    before = rss()
    block = moe_jax.load_moe(checkpoint, 0, dtype="float32", mesh=mesh)
    held = rss() - before
    weights = block.experts.weights.get_value()
    mine = sum(s.data.nbytes for leaf in jax.tree.leaves(weights) for s in leaf.addressable_shards)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((11, block.experts.config.hidden_size)).astype(np.float32)
    answers = {}
    for dispatch in ("replicate", "all_gather", "all_to_all"):
        block.experts.parallel = ParallelConfig(mesh, expert_axis="expert", tensor_axis="tensor", dispatch=dispatch)
        whole = jax.sharding.NamedSharding(mesh, jax.P())
        y = jax.jit(lambda block, x: block(x), out_shardings=whole)(block, x)
        answers[dispatch] = np.asarray(y.addressable_data(0)).tolist()
    report = dict(
        read=read,
        held=held,
        mine=mine,
        total=sum(leaf.nbytes for leaf in jax.tree.leaves(weights)),
        answers=answers,
        processes=jax.process_count(),
    )
    (out / f"{rank}.json").write_text(json.dumps(report))


main(int(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]))
