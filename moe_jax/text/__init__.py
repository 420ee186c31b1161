"""Prompts and conversations in, texts out: ``LLM``, and the texts of tokens while they are made."""

from moe_jax.text._llm import LLM
from moe_jax.text._outputs import CompletionOutput, Logprob, RequestOutput

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput"]
