"""What runs on this machine and what is missing, as ``moe-jax doctor`` reports it."""

from moe_jax.cli._doctor import Diagnosis, SchemeRun, diagnose, scheme_runs

__all__ = ["Diagnosis", "SchemeRun", "diagnose", "scheme_runs"]
