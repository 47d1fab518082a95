"""Storage: `open.open_store(url)` returns a `Store`, and `base` has the contract of every store."""
