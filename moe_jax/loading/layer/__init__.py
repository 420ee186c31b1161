"""From named tensors to the leaves of one layer: names, slices, staging, coverage."""
