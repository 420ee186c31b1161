"""Attention of the models: grouped-query, multi-head latent, and rotary positions."""
