"""Decides what the node cache fetches, keeps and drops. Sans-I/O: events go in by method calls, instructions come out.

- `core`: `CachePlan`, which combines the others
- `pinned`: chooses a tier for block files, and evicts them
- `extents`: decides whether a read gets its blocks or only its own bytes
- `ring`: files of single reads
- `in_flight`: running fetches, and the requests and streams that they are for
- `files`: files, tiers and their byte counts
- `streams`: the announcements of the loaders
- `events`: the input and output values

A *ticket* is the number of a request, and a `Want` is one announced read. `headrace.dataio.cache` explains the other
terms.
"""

from headrace.dataio.cache.plan.core import CachePlan

__all__ = ["CachePlan"]
