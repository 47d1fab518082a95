"""Compressed clips to frames: one contract, several back-ends, the same pixels from all of them."""
