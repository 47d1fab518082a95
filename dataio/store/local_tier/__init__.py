"""The local tier: a copy of a node's newest checkpoint steps, in a directory of the node.

* `tier` manages the directory and its budget.
* `objects` reads and writes single objects.
* `records` describes the steps, and selects those that may be removed.
* `stores` has the two wrappers of a store: `WriteThroughTier` for writers and `TierReader` for readers.

docs/design/0005 explains the design.
"""
