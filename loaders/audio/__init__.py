"""Sound: windows of it, decoded and resampled to the sample, and what is computed from them."""
