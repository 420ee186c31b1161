"""What is in a checkpoint and what would run it, as ``moe-jax inspect`` reports it."""

from moe_jax.cli._inspect import CheckpointReport, ExpertRun, Part, inspect_checkpoint

__all__ = ["CheckpointReport", "ExpertRun", "Part", "inspect_checkpoint"]
