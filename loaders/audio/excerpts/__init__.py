"""Excerpts: small files that hold the part of a recording that a window needs, each decoded in one call."""
