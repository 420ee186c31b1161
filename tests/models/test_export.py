"""``jax.export`` of whole models: serialized, run in another process, with a cache that is threaded through."""

import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import moe_jax

RUN = """
import sys
import jax
import numpy as np
import moe_jax  # knows the pytrees that the program takes and returns
blob, directory, out = sys.argv[1:]
from flax import nnx
model = moe_jax.load_pretrained(directory, quantize="int8_w8a16", dtype="float32")
exported = jax.export.deserialize(bytearray(open(blob, "rb").read()))
ids, cache = np.asarray([[3, 1, 4]], np.int32), model.init_cache(1, 8)
for _ in range(2):
    logits, cache = exported.call(jax.tree.leaves(nnx.state(model)), ids, cache)
np.savez(out, logits=logits, keys=cache.layers[0].arrays[0])
"""


def program_of(model):
    """(function of the state's arrays, ids and a cache; those arrays)."""
    graphdef, state = nnx.split(model)
    leaves, structure = jax.tree.flatten(state)

    def run(leaves, ids, cache):
        return nnx.merge(graphdef, jax.tree.unflatten(structure, leaves))(ids, cache=cache)

    return jax.jit(run), leaves


@pytest.mark.parametrize("name", ["mixtral", "qwen3_next"])
def test_round_trip(case, name):
    """The cache comes back as a cache, as the model makes it, whatever kinds its layers have."""
    model, ids = case(name).model, np.asarray([[3, 1, 4]], np.int32)
    run, leaves = program_of(model)
    cache = model.init_cache(1, 8)
    program = jax.export.deserialize(jax.export.export(run)(leaves, ids, cache).serialize())
    found: Any = program.call(leaves, ids, cache)
    wanted = run(leaves, ids, cache)
    assert jax.tree.structure(found) == jax.tree.structure(wanted) and type(found[1]) is type(cache)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert found[1].num_tokens == 3


@pytest.mark.slow
def test_a_program_runs_in_another_process(case, tmp_path):
    """A process loads the weights as it likes; no source of the model runs."""
    directory = case("mixtral").directory
    model = moe_jax.load_pretrained(directory, quantize="int8_w8a16", dtype="float32")
    ids, cache = np.asarray([[3, 1, 4]], np.int32), model.init_cache(1, 8)
    run, leaves = program_of(model)
    (tmp_path / "program").write_bytes(jax.export.export(run)(leaves, ids, cache).serialize())
    arguments = [str(tmp_path / "program"), str(directory), str(tmp_path / "out.npz")]
    subprocess.run([sys.executable, "-W", "ignore", "-c", RUN, *arguments], check=True, timeout=120)
    for _ in range(2):
        logits, cache = model(ids, cache=cache)
    found = np.load(tmp_path / "out.npz")
    np.testing.assert_allclose(found["logits"], logits, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["keys"], cache.layers[0].arrays[0], rtol=1e-5, atol=1e-6)
