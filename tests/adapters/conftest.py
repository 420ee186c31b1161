"""Checkpoints of whole models, each made once per session."""

from tests.models.conftest import case, prompt

__all__ = ["case", "prompt"]
