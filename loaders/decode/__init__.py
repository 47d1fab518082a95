"""Decoders: compressed clips to frames. Several back ends share one contract and return the same pixels."""
