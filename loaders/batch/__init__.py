"""From samples to batches: building samples, the threads that do it, batch memory, and prefetching."""
