"""Checkpoint steps in the node's local tier.

`saving` keeps them. `restoring` finds them, and commits steps that only the tier has. docs/design/0005 gives the
reasons. `headrace.dataio.store.local_tier` manages the tier's directory.
"""
