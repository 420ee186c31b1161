"""The GPU that kernels are traced for. JAX need not see it: what it asks of a device is said by an abstract one."""

import dataclasses
from typing import Any

import jax
import torch


@dataclasses.dataclass(frozen=True)
class Gpu:
    """kind: in JAX's words, which are torch's too ("NVIDIA H200"). num_sms: its multiprocessors."""

    kind: str
    num_sms: int

    @classmethod
    def of(cls, device: torch.device) -> "Gpu":
        """The GPU of a torch device. Raises NotImplementedError for anything but a Hopper GPU."""
        if device.type != "cuda":
            raise NotImplementedError(f"the kernels need a Hopper GPU, the weights are on {device}")
        found = torch.cuda.get_device_properties(device)
        if (found.major, found.minor) != (9, 0):
            raise NotImplementedError(
                f"the kernels need compute capability 9.0, {found.name} has {found.major}.{found.minor}"
            )
        return cls(found.name, found.multi_processor_count)

    def tracing(self) -> Any:
        """A context in which functions of JAX are traced and lowered for this GPU."""
        device = jax.sharding.AbstractDevice(device_kind=self.kind, platform="gpu", num_cores=self.num_sms)
        return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))
