"""Fetching: the compressed bytes of samples, verified."""
