"""Pallas GPU kernels for quantized Mixture-of-Experts layers: arrays and static configs in, arrays out."""
