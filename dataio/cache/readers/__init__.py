"""The readers that loaders use to read shards.

- `base`: the interface `ShardReader`, and the choice of a reader without the sidecar
- `cached`: reads through a cache engine
- `local`: reads local files without a cache
- `bypass`: reads the first batch directly from the store
"""
