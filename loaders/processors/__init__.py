"""Processors: one module for each kind of sample, and wrappers that work with any processor."""
