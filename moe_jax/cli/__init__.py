"""The command line: ``moe-jax`` and ``python -m moe_jax``."""

from moe_jax.cli._main import main

__all__ = ["main"]
