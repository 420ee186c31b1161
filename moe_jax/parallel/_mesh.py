"""Meshes by words, as the command line takes them."""

import math
import re
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

AXES = ("expert", "tensor", "data", "sequence")
_ENTRY = re.compile(r"\s*([a-z]+)\s*=\s*([1-9][0-9]{0,5})\s*")


def mesh_sizes(text: str, name: str = "mesh", axes: Sequence[str] = AXES) -> dict[str, int]:
    """Devices of each axis by words: "expert=4,tensor=2".

    name: of the argument, for errors. Raises ValueError for another form and for an unknown or repeated axis.
    """
    entries = [_ENTRY.fullmatch(entry) for entry in text.split(",")]
    sizes = {entry[1]: int(entry[2]) for entry in entries if entry is not None}
    if None in entries or len(sizes) < len(entries) or not sizes.keys() <= set(axes):
        raise ValueError(
            f"{name} {text!r}: expected AXIS=DEVICES,..., such as expert=4,tensor=2, each axis of {', '.join(axes)} at "
            "most once"
        )
    return sizes


def parse_mesh(text: str, name: str = "mesh") -> Mesh:
    """A mesh by words, as ``mesh_sizes`` reads them: over the first devices, with Auto axes of these names.

    Raises ValueError where ``mesh_sizes`` does, and for more devices than there are.
    """
    sizes = mesh_sizes(text, name)
    wanted, devices = math.prod(sizes.values()), jax.devices()
    if wanted > len(devices):
        hint = ""
        if devices[0].platform == "cpu":
            hint = f"; XLA_FLAGS=--xla_force_host_platform_device_count={wanted} simulates them"
        raise ValueError(f"{name} {text} takes {wanted} devices, found {len(devices)} ({devices[0].platform}){hint}")
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes), devices=devices[:wanted]
    )
