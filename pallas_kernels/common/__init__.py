"""Formulas and layouts shared by references and kernel bodies."""

from pallas_kernels.common.layout import PLAIN, WeightLayout

__all__ = ["PLAIN", "WeightLayout"]
