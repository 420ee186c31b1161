"""The torch bridge: the layer of moe_jax as a torch module. torch is imported here and nowhere else in the library."""
