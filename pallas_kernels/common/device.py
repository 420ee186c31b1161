"""What the device can run. The only module of this package that asks one."""

import dataclasses

import jax

from pallas_kernels.common.targets import Target

# Parts of the names of GPUs, for abstract devices, which have no capability.
_CAPABILITIES = {
    **dict.fromkeys(("A100", "A800", "A30"), (8, 0)),
    **dict.fromkeys(("A10", "A40", "A6000", "RTX 30"), (8, 6)),
    **dict.fromkeys(("L40", "L4", "L20", "RTX 40", "RTX 6000 Ada"), (8, 9)),
    **dict.fromkeys(("H100", "H200", "GH200", "H800", "H20"), (9, 0)),
    **dict.fromkeys(("B200", "B100"), (10, 0)),
    **dict.fromkeys(("RTX 50", "RTX PRO 6000"), (12, 0)),
}
_HOPPER = ("H100", "H200", "GH200", "H800", "H20")
# Kinds in JAX's words: bytes a second that memory can deliver by NVIDIA's data sheets, in 1e9.
_MEMORY_GBPS = {
    "NVIDIA H200": 4800,
    "NVIDIA H200 NVL": 4800,
    "NVIDIA H100 80GB HBM3": 3350,
    "NVIDIA H100 NVL": 3900,
    "NVIDIA H100 PCIe": 2000,
    "NVIDIA H800": 3350,
    "NVIDIA H800 PCIe": 2000,
    "NVIDIA H20": 4000,
    "NVIDIA GH200 480GB": 4000,
    "NVIDIA GH200 144G HBM3e": 4900,
}


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU as far as tuning tables depend on it.

    kind: in JAX's words ("NVIDIA H200").
    num_sms: SMs that a program may use.
    """

    kind: str
    num_sms: int

    @property
    def memory_gbps(self) -> int | None:
        """1e9 bytes a second that its memory can deliver by the data sheet; None where that is not known here."""
        return _MEMORY_GBPS.get(self.kind)

    def is_like(self, other: "Gpu") -> bool:
        """Whether kernels run alike on both, but for the speed of memory and for clocks."""
        return self.num_sms == other.num_sms


def hopper_sms() -> int:
    """SMs of the device a function is traced for, when it is a Hopper GPU (sm_90).

    The device is the abstract one of the current mesh where there is one: with it a function can be lowered for a
    machine that is not here. Otherwise it is the first device of the default backend. Raises NotImplementedError for
    any other.
    """
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        if not any(name in abstract.device_kind for name in _HOPPER):
            raise NotImplementedError(f"needs a Hopper GPU, the mesh is of {abstract.device_kind!r}")
        return abstract.num_cores
    if jax.default_backend() != "gpu":
        raise NotImplementedError(f"needs a Hopper GPU, the default backend is {jax.default_backend()!r}")
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", None)
    if capability != "9.0":
        raise NotImplementedError(f"needs compute capability 9.0, {device.device_kind} has {capability}")
    return device.core_count


def portable_target() -> Target:
    """What the portable kernels are compiled for: the device as in ``hopper_sms``, any NVIDIA GPU from sm_80 on.

    Raises NotImplementedError for any other, and for jax 0.10, whose Pallas has no ``mma``.
    """
    if jax.__version_info__ < (0, 11):
        raise NotImplementedError(f"needs plgpu.mma of jax 0.11, found jax {jax.__version__}")
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        for name, capability in _CAPABILITIES.items():
            if name in abstract.device_kind:
                return Target(*capability)
        raise NotImplementedError(f"needs an NVIDIA GPU that it knows, the mesh is of {abstract.device_kind!r}")
    if jax.default_backend() != "gpu":
        raise NotImplementedError(f"needs an NVIDIA GPU, the default backend is {jax.default_backend()!r}")
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", None)
    if capability is None or not capability.replace(".", "").isdigit():
        raise NotImplementedError(f"needs an NVIDIA GPU, {device.device_kind} has compute capability {capability}")
    return Target.parse(capability)


def portable_sms() -> int:
    """SMs of the device of ``portable_target``. Raises NotImplementedError as it does."""
    portable_target()
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].core_count if abstract is None else abstract.num_cores


def may_overlap() -> bool:
    """Whether a kernel may start before the last one of its stream has ended: not below sm_90."""
    try:
        return portable_target().may_overlap
    except NotImplementedError:  # jax 0.10, which has kernels for Hopper alone; or no GPU, where none is compiled
        return True


def cuda_capability() -> tuple[int, int]:
    """Compute capability of the first device of the default backend. Raises NotImplementedError where that is no NVIDIA
    GPU, or not the device that a function is traced for."""
    if jax.sharding.get_abstract_mesh().abstract_device is not None:
        raise NotImplementedError("needs the GPU itself, the mesh is of an abstract one")
    if jax.default_backend() != "gpu" or "cuda" not in jax.devices()[0].client.platform_version:
        raise NotImplementedError(f"needs an NVIDIA GPU, the default backend is {jax.default_backend()!r}")
    major, minor = jax.devices()[0].compute_capability.split(".")
    return int(major), int(minor)


def device_kind() -> str:
    """The kind of the device a function is traced for, in JAX's words ("NVIDIA H200"); found as in ``hopper_sms``."""
    return (jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]).device_kind


def hopper_gpu() -> Gpu:
    """The device a function is traced for. Raises NotImplementedError where it is no Hopper GPU."""
    return Gpu(device_kind(), hopper_sms())
