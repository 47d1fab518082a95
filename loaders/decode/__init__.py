"""Decoders: compressed clips to frames. Several back ends implement one contract and return the same pixels."""
