"""The stretch of a recording that a window needs as a small file of its own, and that file decoded in one go."""
