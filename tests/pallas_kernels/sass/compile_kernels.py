"""Compile every Hopper kernel to SASS for an H200, without a GPU, and print what ptxas made of it as JSON lines.

    python compile_kernels.py [--prefix NAME] [--every N [--start I]]    names that start so; each N-th of them, from I

Runs in an environment of its own (``make test-sass``): jax with its CUDA plugin, ptxas, libdevice and nvdisasm, but no
driver, no cuDNN, no cuBLAS. A compile-only topology made from a text description stands for the machine.
"""

import argparse
import collections
import functools
import glob
import json
import math
import os
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
  device_memory_size: 150754820096 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 12 patch: 0 } device_description_str: "NVIDIA H200"
"""


# ACQBULK and PREEXIT are griddepcontrol's wait and launch_dependents.
MATRIX = ("HGMMA", "QGMMA", "IGMMA")
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_]*)(.*)")
# What runs at half rate in the pipe of integers and bits.
BITS = set("I2FP LOP3 SHF PRMT LEA SEL ISETP IADD3 VIADD VIMNMX IMNMX MOV PLOP3".split())
GLOBAL_MEMORY = set("LD LDG LDGSTS ST STG RED REDG ATOM ATOMG UTMALDG UTMASTG UTMAREDG UBLKCP UBLKRED LDGMC".split())


def report(name: str, instruction: str | None, base: str) -> dict:
    log, ptx, sass = (Path(base + end).read_text() for end in (".ptxas", ".ptx", ".sass_ctrl"))
    spills = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    operations = [operation for operation, _ in INSTRUCTION.findall(sass)]
    counts = collections.Counter(operations)
    starts = [op for op in operations if op == "ACQBULK" or op in GLOBAL_MEMORY]
    return dict(
        name=name,
        instruction=instruction,
        registers=int(re.search(r"Used (\d+) registers", log).group(1)),
        spill_bytes=max(map(int, spills.groups())),
        notes=sorted(set(re.findall(r"\((C\d+)\)", log))),
        serialized="serialized" in log,
        wgmma=sorted(set(re.findall(r"wgmma.mma_async.sync.aligned.(m64n\d+k\d+\.\w+\.\w+\.\w+)", ptx))),
        register_limits=[
            (way, int(n)) for way, n in re.findall(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32\s+(\d+)", ptx)
        ],
        threads=int(re.search(r"\.maxntid (\d+)", ptx).group(1)),
        before_wait=sorted(set(starts[: starts.index("ACQBULK")])) if "PREEXIT" in counts else None,
        loop=of_loop(sass),
        sass={op: counts[op] for op in (*MATRIX, "USETMAXREG", "LDL", "STL") if counts[op]},
    )


def of_loop(sass: str) -> dict[str, int] | None:
    """Instructions of the shortest loop that multiplies matrices: all, those that multiply, those of ``BITS``."""
    labels: dict[str, int] = {}
    found: list[tuple[str, str]] = []
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label.group(1)] = len(found)
        elif one := INSTRUCTION.search(line):
            found.append((one.group(1), one.group(2)))
    loops = []
    for at, (operation, rest) in enumerate(found):
        target = re.search(r"\.L_x_\d+", rest) if operation == "BRA" else None
        first = labels.get(target.group(), at) if target else at
        body = [name for name, _ in found[first : at + 1]] if first < at else []
        if set(MATRIX) & set(body):
            loops.append(body)
    if not loops:
        return None
    body = min(loops, key=len)
    return dict(all=len(body), matrix=sum(op in MATRIX for op in body), bits=sum(op in BITS for op in body))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", default="")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--start", type=int, default=0)
    options = parser.parse_args()
    dump = tempfile.mkdtemp(prefix="sass_")
    os.environ["JAX_PLATFORMS"] = "cpu"  # the plugin complains about cuDNN otherwise
    os.environ["MOSAIC_GPU_DUMP_TO"] = dump
    sys.path[:0] = [str(ROOT)]
    # Behind the settings above, which are read at import.
    import jax
    from jax.experimental import topologies

    from tests.support.kernels.cases import all_cases

    @functools.cache
    def mesh_of(axes: tuple[tuple[str, int], ...]) -> jax.sharding.Mesh:
        names, sizes = zip(*axes, strict=True)
        topology = topologies.get_topology_desc(platform="cuda", target_config=H200, topology=f"1x1x{math.prod(sizes)}")
        return topologies.make_mesh(topo=topology, mesh_shape=sizes, axis_names=names)

    seen: set[str] = set()
    wanted = [case for case in all_cases() if case.name.startswith(options.prefix)]
    for case in wanted[options.start :: options.every]:
        try:
            if case.mesh:
                function, arguments = case.over(mesh_of(case.mesh))
            else:
                alone = jax.sharding.NamedSharding(mesh_of((("x", 1),)), jax.sharding.PartitionSpec())
                function = case.function
                arguments = [jax.ShapeDtypeStruct(*shape, sharding=alone) for shape in case.shapes]
            jax.jit(function).lower(*arguments).compile()
            new = sorted(set(glob.glob(f"{dump}/*.ptxas")) - seen)
            seen.update(new)
            found = [report(case.name, case.instruction, path.removesuffix(".ptxas")) for path in new]
            print(json.dumps(found[0] if len(found) == 1 else dict(name=case.name, error=f"{len(found)} kernels")))
        except Exception as error:
            print(json.dumps(dict(name=case.name, error=f"{type(error).__name__}: {str(error)[:500]}")))
        sys.stdout.flush()
        for big in glob.glob(f"{dump}/*mlir-passes.log"):
            os.remove(big)


if __name__ == "__main__":
    main()
