"""Expert-parallel load balancing: statistics, placement of copies, and moving weights."""
