"""Copies steps to another repository, or to another run (docs/design/0045-copy.md)."""
