"""The last steps of a node's checkpoints, kept on the node: `tier` is the directory, `objects` its files, `records` its
steps.

`stores` has the two wrappers: `WriteThroughTier` for writers and `TierReader` for readers. docs/design/0005 has the
reasons.
"""
