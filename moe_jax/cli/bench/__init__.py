"""What ``moe-jax bench`` does; ``moe_jax.benchmarking`` has its public names."""
