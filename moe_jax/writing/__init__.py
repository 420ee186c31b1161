"""Writing quantized checkpoints: compressed-tensors' formats, streamed layer by layer, all or nothing."""

from moe_jax.writing._quantize_checkpoint import WrittenCheckpoint, quantize_checkpoint

__all__ = ["WrittenCheckpoint", "quantize_checkpoint"]
