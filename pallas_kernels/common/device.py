"""What the device can run. The only module of this package that asks one."""

import jax

_HOPPER = ("H100", "H200", "GH200", "H800", "H20")


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
