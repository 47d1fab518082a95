"""The node cache: keeps parts of immutable objects in files, in one or more tiers (directories in memory or on a disk).

- `engine`: the cache; `fetcher`: its threads; `scheduling`: the order of fetches; `counters`: its statistics
- `plan`: decides what is fetched, kept and dropped
- `blocks`, `disks`: the cache files
- `objects`: sizes and modification times of objects
- `announcements`: converts the loaders' announcements, and predicts when reads are due
- `readers`: the readers that loaders use

Terms:

- A *source* is the name of a store: its URL and its options.
- A *block* is a part of an object, at a multiple of the block size (`limits.CACHE_BLOCK_BYTES`).
- A *part* is a read that leaves out much of its file. Only its bytes are fetched, as *extents*.
- A *stream* is a loader that announces its next reads.
- A file is *held* while a reader may use it. A `Lease` is one hold.
- A *run* is a range of present bytes, as (first, end).
- A block is *adopted* if an earlier daemon left it on the disk.
"""
