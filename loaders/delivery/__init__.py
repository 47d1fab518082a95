"""Finished samples to batches: threads, memory, and what is in the making while the trainer works."""
