"""Samples to batches: the builder of samples, the threads, the memory, and the batches made ahead of the trainer."""
