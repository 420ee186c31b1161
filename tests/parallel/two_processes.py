"""One of two processes of ``test_two_processes.py``: loads its shares of a model, runs it, and reports in JSON.

    python tests/parallel/two_processes.py RANK PORT CHECKPOINT OUT

Each process has two simulated CPU devices; gloo carries the collectives.
"""

import json
import os
import sys
import threading
from pathlib import Path


def rss() -> int:
    """Bytes of anonymous memory: what the process holds itself, without mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


class Peak:
    """The most that ``rss`` grew by inside a ``with`` block, sampled by a thread."""

    def __enter__(self):
        self.bytes, self._before, self._is_over = 0, rss(), threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self):
        while not self._is_over.wait(0.001):
            self.bytes = max(self.bytes, rss() - self._before)

    def __exit__(self, *_):
        self._is_over.set()
        self._thread.join()
        self.bytes = max(self.bytes, rss() - self._before)


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
    from moe_jax.parallel import EplbState, ParallelConfig, rebalance

    read, dense_read, whole_read = [], [], Checkpoint.read

    def counted(self, name, rows=None, columns=None):
        array = whole_read(self, name, rows, columns)
        (read if ".experts." in name else dense_read).append((name, array.nbytes))
        return array

    Checkpoint.read = counted
    mesh = jax.make_mesh((2, 2), ("expert", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with Peak() as peak:
        block = moe_jax.load_moe(checkpoint, 0, dtype="float32", mesh=mesh)
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
    expert_reads = list(read)

    # A whole model: the first process has the first half of the heads, the second one the second half.
    dense_read.clear()
    mesh = jax.make_mesh((2, 2), ("tensor", "expert"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    whole = jax.sharding.NamedSharding(mesh, jax.P())
    model = moe_jax.load_pretrained(checkpoint, dtype="float32", mesh=mesh, enable_eplb=True, num_redundant_experts=2)
    state = EplbState.create(1, model.layers[0].mlp.experts.placement.get_value(), window_size=2, mesh=mesh)
    step = jax.jit(lambda model, ids: model(ids, return_stats=True), out_shardings=whole)
    ids, logits = np.arange(12, dtype=np.int32).reshape(2, 6), []
    for _ in range(2):
        y, stats = step(model, ids)
        logits.append(np.asarray(y.addressable_data(0)).tolist())
        state = state.record(stats.load).next_step()
        plan = rebalance(state, load=[[1, 2, 60, 90]])
        for layer in plan.layers:
            state = plan.apply(layer, model.moe_blocks()[layer].experts, state)
    report = dict(
        logits=logits,
        load=np.asarray(state.load().addressable_data(0)).sum().item(),
        slots=np.asarray(model.layers[0].mlp.experts.placement.get_value().physical_to_logical).tolist(),
        dense_read=dense_read,
        read=expert_reads,
        held=peak.bytes,
        mine=mine,
        total=sum(leaf.nbytes for leaf in jax.tree.leaves(weights)),
        answers=answers,
        processes=jax.process_count(),
    )
    (out / f"{rank}.json").write_text(json.dumps(report))


main(int(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]))
