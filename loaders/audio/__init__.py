"""Audio: decoding and resampling windows of recordings, and computing features from them."""
