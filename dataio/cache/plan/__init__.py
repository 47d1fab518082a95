"""Decides what the node cache fetches, keeps and drops. Sans-I/O: events go in by method calls, instructions come out.

`core` is the whole: `CachePlan`. `pinned` places and evicts block files, `ring` the files of single reads, `flights`
says what is fetched for whom, `tiers` keeps the books, `files` is one file, `streams` what loaders announced.
"""

from headrace.dataio.cache.plan.core import CachePlan

__all__ = ["CachePlan"]
