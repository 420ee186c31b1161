"""Compile the portable kernels to SASS for one GPU, without it, and print what ptxas made of them as JSON lines.

    python compile_portable.py TARGET [--tallest] [--every N [--start I]]    one of sm_80, sm_89, sm_90, sm_100, sm_120
    python compile_portable.py TARGET --rows                                 the kernels that route and move rows

Runs where compile_kernels.py runs, with jax 0.11. Mosaic asks the first device of the process for its capability and
takes 9.0 where it has none, so the target is put in its place: one process compiles for one target. For sm_120 jax
0.11.2 hands PTX for sm_120a to ptxas as sm_120, which refuses it; the PTX is then given to ptxas here.
"""

import argparse
import glob
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
# Name, capability, SMs, bytes of shared memory of a CTA.
GPUS = {
    "sm_80": ("A100", (8, 0), 108, 166912),
    "sm_89": ("L40S", (8, 9), 142, 101376),
    "sm_90": ("H200", (9, 0), 132, 232448),
    "sm_100": ("B200", (10, 0), 148, 232448),
    "sm_120": ("RTX 5090", (12, 0), 170, 101376),
}
MACHINE = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: {per_sm}
  threads_per_core_limit: 2048 core_count: {sms} fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 2000000000000 l2_cache_size: 41943040
  clock_rate_ghz: 1.41 device_memory_size: 80000000000 shared_memory_per_block_optin: {smem}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 12 patch: 0 }} device_description_str: "NVIDIA {name}"
"""
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_]*)")


def cases() -> Iterator[tuple[str, Any]]:
    """(name, desc without its rows' tile): every form of weights, gated or not."""
    from pallas_kernels.common.activations import Activation
    from pallas_kernels.grouped_gemm.packed.format import PackedFormat as Format
    from pallas_kernels.grouped_gemm.packed.problem import PackedDesc
    from pallas_kernels.grouped_gemm.problem import GemmDesc

    scaled = dict(lhs_scale="row", rhs_scale="channel")
    plain: dict[str, dict[str, Any]] = {
        "bf16": dict(dtype="bfloat16", bias_dtype="bfloat16"),
        "f16": dict(dtype="float16", out_dtype="float16"),
        "int8": dict(dtype="int8", **scaled),
        "e4m3": dict(dtype="float8_e4m3fn", bias_dtype="bfloat16", **scaled),
        "e4m3 blocks": dict(dtype="float8_e4m3fn", lhs_scale="group", rhs_scale="block"),
        "e4m3 blocks f32": dict(dtype="float8_e4m3fn", lhs_scale="group", rhs_scale="block", out_dtype="float32"),
    }
    grouped, wide = dict(scale_dtype="bfloat16"), dict(scale_dtype="float32")
    channel = dict(has_channel_scale=True)
    packed: dict[str, dict[str, Any]] = {
        "int4 g128": dict(fmt=Format("int4", "bfloat16", "group", 128), **grouped),
        "int4 g128 zeros": dict(fmt=Format("int4", "bfloat16", "group", 128, True), **grouped),
        "int4 g32": dict(fmt=Format("int4", "bfloat16", "group", 32), **grouped),
        "int4 g128 f32": dict(fmt=Format("int4", "bfloat16", "group", 128), **wide),
        "int4 g32 f32 zeros": dict(fmt=Format("int4", "bfloat16", "group", 32, True), **wide),
        "int4 channel": dict(fmt=Format("int4", "bfloat16"), **channel),
        "int4 g128 f16": dict(
            fmt=Format("int4", "float16", "group", 128, True), scale_dtype="float16", out_dtype="float16"
        ),
        "int8 channel": dict(fmt=Format("int8", "bfloat16"), **channel),
        "int8 g64 zeros": dict(fmt=Format("int8", "bfloat16", "group", 64, True), **grouped),
        "e4m3 channel": dict(fmt=Format("e4m3", "bfloat16"), **channel),
        "e4m3 g128": dict(fmt=Format("e4m3", "bfloat16", "group", 128), **wide),
        "mxfp8": dict(fmt=Format("e4m3", "bfloat16", "e8m0", 32), **channel),
        "nvfp4": dict(fmt=Format("e2m1", "bfloat16", "e4m3", 16), **channel),
        "mxfp4": dict(fmt=Format("e2m1", "bfloat16", "e8m0", 32), **channel),
        "int4 int8": dict(fmt=Format("int4", "int8", "group", 128), lhs_scale="row", **grouped),
        "int4 int8 zeros": dict(fmt=Format("int4", "int8", "group", 64, True), lhs_scale="row", **wide),
        "int4 int8 channel": dict(fmt=Format("int4", "int8"), lhs_scale="row", **channel),
        "int4 e4m3": dict(fmt=Format("int4", "float8_e4m3fn", "group", 128), lhs_scale="row", **grouped),
        "mxfp4 e4m3": dict(fmt=Format("e2m1", "float8_e4m3fn", "e8m0", 32), lhs_scale="row", **channel),
    }
    for (name, options), gated in itertools.product((plain | packed).items(), (False, True)):
        kind: Any = GemmDesc if name in plain else PackedDesc
        activation = Activation("silu") if gated else None
        sizes = dict(rows=2048, n=1024, k=4096, num_experts=8, projections=1 + gated, activation=activation)
        yield f"{name}{' gated' if gated else ''}", kind(**sizes, **options)


def row_kernels(target: Any, num_sms: int) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """(name, kernel, (shape, dtype) of its operands): what surrounds the products."""
    from pallas_kernels.align.api import describe as describe_align
    from pallas_kernels.align.config import choose_config as choose_align
    from pallas_kernels.align.kernel_sm90 import align_sm90
    from pallas_kernels.combine.config import CombineDesc
    from pallas_kernels.combine.config import choose_config as choose_combine
    from pallas_kernels.combine.kernel_sm90 import combine_sm90
    from pallas_kernels.nvlink_dispatch.config import PlaceDesc, choose_place_config
    from pallas_kernels.nvlink_dispatch.place_sm90 import place_sm90
    from pallas_kernels.quantize_and_permute.config import TAKES_SCALE, PermuteDesc
    from pallas_kernels.quantize_and_permute.config import choose_config as choose_permute
    from pallas_kernels.quantize_and_permute.kernel_sm90 import quantize_and_permute_sm90
    from pallas_kernels.quantize_and_permute.narrow_sm90 import quantize_narrow_rows_sm90
    from pallas_kernels.route.config import RouteDesc
    from pallas_kernels.route.config import choose_config as choose_route
    from pallas_kernels.route.kernel_sm90 import route_and_align_sm90, route_sm90

    few = describe_align(16, 8, 128, 16, has_offset=False, unpermuted=True)
    many = describe_align(8192, 8, 128, 128, has_offset=False, unpermuted=False)
    yield "align few", align_sm90(few, choose_align(few)), (((128,), "int32"),)
    yield "align many", align_sm90(many, choose_align(many)), (((65536,), "int32"),)

    for dtype, width in (("bfloat16", 2048), ("float16", 4096)):
        combine = CombineDesc(16, width, 8, 2048, dtype, "float32")
        operands = (((2048, width), dtype), ((16, 8), "int32"), ((16, 8), "float32"))
        yield f"combine {dtype}", combine_sm90(combine, choose_combine(combine, num_sms)), operands

    options: Any = dict(scoring="softmax", renormalize=True, scale=1.0, has_bias=False, num_groups=0, groups_kept=0)
    route = RouteDesc(num_tokens=16, num_experts=128, top_k=8, dtype="float32", has_mask=False, **options)
    logits, in_one = ((2048,), "float32"), choose_route(route, in_one_cta=True)
    yield "route", route_sm90(route, choose_route(route)), (logits,)
    yield "route and align", route_and_align_sm90(route, in_one, few), (logits,)
    beside = PermuteDesc(16, 2048, 0, 16, "bfloat16", "int8_row", scale_rows=16)
    yield "route, int8", route_and_align_sm90(route, in_one, few, beside), (logits, ((16, 2048), "bfloat16"))

    for groups in (0, 16):
        place = PlaceDesc(256, 4096, 2048, 8, groups)
        scales = ((256, groups) if groups else (256,), "float32")
        operands = (((256, 2048), "int8"), scales, ((256, 8), "int32"))
        yield f"place, {groups} groups", place_sm90(place, choose_place_config(place, num_sms)), operands

    kinds = ["none", "int8_row", "nvfp4", "nvfp4_row", "mxfp4", "mxfp8"]
    if target.multiplies_e4m3:
        kinds += ["e4m3_row", "e4m3_tensor", "e4m3_group", "e4m3_group_ue8m0"]
    for kind, (tokens, width, moves) in itertools.product(kinds, ((256, 2048, True), (4096, 768, False))):
        places = dict(top_k=8, num_rows=4096) if moves else dict(top_k=0, num_rows=tokens, num_named=tokens)
        desc = PermuteDesc(num_tokens=tokens, width=width, dtype="bfloat16", quantization=kind, **places)
        chosen = choose_permute(desc, num_sms)
        kernel = quantize_narrow_rows_sm90 if chosen.rows_at_once > 1 else quantize_and_permute_sm90
        operands = [((tokens, width), "bfloat16")]
        operands += [((tokens, 8), "int32")] if moves else []
        operands += [((1,), "float32")] if kind in TAKES_SCALE else []
        operands += [] if moves else [((tokens,), "int32")]
        yield f"{kind}, {'moved' if moves else 'in place'}", kernel(desc, chosen), tuple(operands)


def shapes_of(desc: Any, block_m: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """(shape, dtype) of the operands."""
    matrices, tiles = desc.num_experts * desc.projections, desc.rows // block_m
    found: dict[str, tuple[tuple[int, ...], str]] = dict(tile_expert=((tiles,), "int32"), num_tiles=((1,), "int32"))
    if hasattr(desc, "fmt"):
        fmt, blocks = desc.fmt, matrices * desc.channel_blocks
        groups = desc.k // (fmt.group_size or desc.k)
        found |= dict(
            x=((desc.rows, desc.k), fmt.operand),
            w=((blocks, desc.k // fmt.block_k, *fmt.block_shape), "int32"),
            scale=((blocks, groups, 64), desc.scale_dtype),
            zero=((blocks, groups, 64), fmt.operand),
            channel_scale=((blocks, 64), "float32"),
            bias=((blocks, 64), "bfloat16"),
            x_scale=((desc.rows,), "float32"),
        )
    else:
        groups = (desc.n // 128, desc.k // 128)
        found |= dict(
            x=((desc.rows, desc.k), desc.dtype),
            w=((matrices, desc.n, desc.k), desc.dtype),
            x_scale=((groups[1], desc.rows) if desc.is_block_scaled else (desc.rows,), "float32"),
            w_scale=((matrices, *groups) if desc.is_block_scaled else (matrices, desc.n), "float32"),
            bias=((matrices, desc.n), "bfloat16"),
        )
    return {name: found[name] for name in desc.operand_names}


def report(name: str, base: str, arch: str) -> dict[str, Any]:
    """What ptxas says of the PTX that was dumped under ``base``."""
    log = Path(base + ".ptxas")
    text = log.read_text() if log.exists() else ""
    if "Used" not in text:
        text = assembled(Path(base + ".ptx"), arch)
    sass = Path(base + ".sass_ctrl")
    operations = INSTRUCTION.findall(sass.read_text()) if sass.exists() else []
    spills = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text)
    assert spills is not None, text[-300:]
    return dict(
        name=name,
        target=re.search(r"\.target (\S+)", Path(base + ".ptx").read_text()).group(1),
        registers=int(re.search(r"Used (\d+) registers", text).group(1)),
        spill_bytes=max(map(int, spills.groups())),
        matrix={op: operations.count(op) for op in ("HMMA", "IMMA", "QMMA") if op in operations},
        instructions=len(operations),
    )


def assembled(ptx: Path, arch: str) -> str:
    """The log of ptxas, called as jax should have."""
    import nvidia

    (ptxas,) = (path for root in nvidia.__path__ for path in Path(root).rglob("bin/ptxas"))
    command = [str(ptxas), f"-arch={arch}a", "-v", "-O3", str(ptx), "-o", os.devnull]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    return run.stdout + run.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=GPUS)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--tallest", action="store_true", help="of each form the highest tiles alone")
    parser.add_argument("--rows", action="store_true", help="the kernels around the products")
    options = parser.parse_args()
    dump = tempfile.mkdtemp(prefix="sass_")
    os.environ["JAX_PLATFORMS"] = "cpu"  # the plugin complains about cuDNN otherwise
    os.environ["MOSAIC_GPU_DUMP_TO"] = dump
    sys.path[:0] = [str(ROOT)]
    # Behind the settings above, which are read at import.
    import jax
    from jax.experimental import topologies
    from jax.experimental.mosaic.gpu import utils

    from pallas_kernels.common import device
    from pallas_kernels.common.targets import Target
    from pallas_kernels.grouped_gemm import portable
    from pallas_kernels.grouped_gemm.portable.config import BLOCK_MS
    from pallas_kernels.grouped_gemm.portable.kernel_mma import grouped_gemm_mma

    name, capability, sms, smem = GPUS[options.target]
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("jax") and "_infer_arch" in vars(module):
            setattr(module, "_infer_arch", lambda: capability)  # noqa: B010
    assert utils._infer_arch() == capability
    target = Target(*capability)
    sizes = dict(name=name, sms=sms, smem=smem, per_sm=smem + 1024, major=target.major, minor=target.minor)
    machine = topologies.get_topology_desc(platform="cuda", target_config=MACHINE.format(**sizes), topology="1x1x1")
    mesh = topologies.make_mesh(topo=machine, mesh_shape=(1,), axis_names=("x",))
    alone = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    device.portable_target = lambda: target  # which kernels ask whether they may overlap
    wanted: list[tuple[str, Any, Any]] = []
    for case, desc in () if options.rows else cases():
        if portable.unsupported(desc, target) is None:
            heights = [each for each in BLOCK_MS if each <= portable.largest_block_m(desc, target)]
            for height in heights[-1:] if options.tallest else heights:
                config = portable.choose_config(desc, height, target)
                tag = f"{case}, {portable.describe(desc, config)}"
                wanted.append((tag, grouped_gemm_mma(desc, config), (shapes_of(desc, height),)))
    wanted += row_kernels(target, sms) if options.rows else ()
    for tag, kernel, shapes in wanted[options.start :: options.every]:
        before = set(glob.glob(f"{dump}/*.ptx"))
        failed = ""
        try:
            operands = jax.tree.map(
                lambda each: jax.ShapeDtypeStruct(*each, sharding=alone),
                shapes,
                is_leaf=lambda each: isinstance(each, tuple) and isinstance(each[-1], str),
            )
            jax.jit(kernel).lower(*operands).compile()
        except Exception as error:
            failed = f"{type(error).__name__}: {str(error)[-300:]}"
        new = sorted(set(glob.glob(f"{dump}/*.ptx")) - before)
        try:
            if not new:
                raise RuntimeError(failed or "no kernel")
            for each in new:
                print(json.dumps(report(tag, each.removesuffix(".ptx"), options.target)), flush=True)
        except Exception as error:
            print(json.dumps(dict(name=tag, error=f"{str(error)[:300]} {failed}")), flush=True)
        for big in glob.glob(f"{dump}/*mlir-passes.log"):
            os.remove(big)


if __name__ == "__main__":
    main()
