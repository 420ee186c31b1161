"""Facts of the GPUs that the portable kernels are built for."""

import dataclasses

# Bytes of shared memory that a CTA may have.
_SMEM_BYTES = {(8, 0): 166_912, (8, 6): 101_376, (8, 7): 166_912, (8, 9): 101_376, (12, 0): 101_376, (12, 1): 101_376}
_SMEM_BYTES_FROM_90 = 232_448


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU by its compute capability, (9, 0) for Hopper."""

    major: int
    minor: int

    @classmethod
    def parse(cls, capability: str) -> "Target":
        """From "9.0". Raises NotImplementedError below 8.0, which has no cp.async."""
        major, minor = (int(part) for part in capability.split("."))
        if major < 8:
            raise NotImplementedError(f"needs compute capability 8.0 or newer, found {capability}")
        return cls(major, minor)

    def __str__(self) -> str:
        return f"sm_{self.major}{self.minor}"

    @property
    def smem_bytes(self) -> int:
        """Shared memory that a CTA may have."""
        return _SMEM_BYTES.get((self.major, self.minor), _SMEM_BYTES_FROM_90 if self.major in (9, 10) else 101_376)

    @property
    def multiplies_e4m3(self) -> bool:
        """Whether ``mma`` takes e4m3."""
        return (self.major, self.minor) >= (8, 9)

    @property
    def unpacks_e4m3(self) -> bool:
        """Whether ptxas makes float16 of e4m3 operands of ``mma``, in twice the registers."""
        return self.major in (9, 10)

    @property
    def has_bf16_mul(self) -> bool:
        """Whether two bfloat16 are multiplied in one instruction; below sm_90 a fused sum of -0 takes its place."""
        return self.major >= 9

    @property
    def may_overlap(self) -> bool:
        """Whether a kernel may start while the one before it still runs (programmatic dependent launch)."""
        return self.major >= 9
