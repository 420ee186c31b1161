"""Compile a small model with ``pinned_tokens`` for an H200, without a GPU, and print the kernels of each program.

    python compile_models.py --packages DIR --pinned 48 [--projections fp8_channel] [--experts hopper] 3x1x136 3x131x200

A program reads ROWSxTOKENSxSLOTS: rows, tokens of each, and slots of the cache. Of each a JSON line maps the text of a
kernel, names left out, to how often it is launched in the loops over tiles and pages. Runs in the environment of
compile_kernels.py; DIR has what this one lacks, such as flax.
"""

import argparse
import collections
import json
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
COMPUTATION = re.compile(r"^(ENTRY )?%([^\s(]+) \(.*\) -> .* \{\n((?:.*\n)*?)\}", re.M)
LAUNCH = re.compile(r"= (\S+|\(.*?\)) (fusion|custom-call)\(")


def kernels(text: str) -> collections.Counter:
    """Of the computations that are no fusion and not the program's own."""
    bodies = {name: (body, bool(entry)) for entry, name, body in COMPUTATION.findall(text)}
    found: collections.Counter = collections.Counter()
    for name, (body, is_entry) in bodies.items():
        for line in () if is_entry or f"calls=%{name}" in text else body.splitlines():
            launch, callee = LAUNCH.search(line), re.search(r"calls=%([^\s,]+)", line)
            if launch and callee:
                found[without_names(bodies[callee.group(1)][0])] += 1
            elif launch:
                target = re.search(r'custom_call_target="([^"]+)"', line)
                found[f"{launch.group(1)} custom-call to {target and target.group(1)}"] += 1
    return found


def without_names(body: str) -> str:
    names: dict[str, str] = {}
    body = re.sub(r", (metadata|frontend_attributes|backend_config)=\{.*", "", body)
    return re.sub(r"%[\w.\-]+", lambda name: names.setdefault(name.group(), f"%{len(names)}"), body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", required=True)
    parser.add_argument("--pinned", type=int, required=True)
    parser.add_argument("--projections")
    parser.add_argument("--experts", default="hopper")
    parser.add_argument("programs", nargs="+")
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"  # the plugin complains about cuDNN otherwise
    sys.path[:0] = [str(ROOT)]
    sys.path.append(options.packages)
    # Behind the settings above, which are read at import.
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies

    from moe_jax.models import KVCache
    from moe_jax.models._compiled import merge_model, split_model
    from tests.pallas_kernels.sass.compile_kernels import H200
    from tests.pallas_kernels.test_whole_models_gpu import make_model

    model = make_model("auto", "bfloat16", options.projections, options.experts, options.pinned)
    structure, leaves = split_model(model)
    topology = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1")
    mesh = topologies.make_mesh(topo=topology, mesh_shape=(1,), axis_names=("x",))
    alone = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    jax.default_backend = lambda: "gpu"  # which the model asks while it is traced

    def read(leaves, ids, cache):
        return merge_model(structure, leaves)(ids, cache=cache)

    for program in options.programs:
        rows, tokens, slots = map(int, program.split("x"))
        cache = jax.eval_shape(lambda r=rows, s=slots: KVCache.zeros(model.config, r, s, model.dtype))
        shapes = (leaves, jax.ShapeDtypeStruct((rows, tokens), jnp.int32), cache)
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=alone), shapes)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            lowered = jax.jit(read).trace(*shapes).lower(lowering_platforms=("cuda",))
        compiled = lowered.compile(compiler_options={"xla_gpu_autotune_level": "0"})
        print(json.dumps(kernels(compiled.as_text())), flush=True)


if __name__ == "__main__":
    main()
