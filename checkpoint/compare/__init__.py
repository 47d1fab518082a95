"""Compares two steps: which tensors and values differ, and by how much (docs/howto/compare-copy.md)."""
