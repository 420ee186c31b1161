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


def device_kind() -> str:
    """The kind of the device a function is traced for, in JAX's words ("NVIDIA H200"); found as in ``hopper_sms``."""
    return (jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]).device_kind
