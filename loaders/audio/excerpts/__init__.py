"""Excerpts: small files that contain the part of a recording that a window needs. Each is decoded in one call."""
