"""The version, read by the build (pyproject.toml) and by ``moe_jax.__version__``."""

__version__ = "0.1.0"
