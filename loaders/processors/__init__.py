"""Processors: one module for each kind of sample, and wrappers that add to any of them."""
