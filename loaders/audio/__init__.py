"""Audio: windows of recordings, decoded and resampled, and the features computed from them."""
