"""Floor 1, storage: `open_store(url)` gives a `Store`; the contract is in `contract.py`."""
