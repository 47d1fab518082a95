"""From samples to their compressed bytes, checked."""
