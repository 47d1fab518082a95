"""Steps in the node's tier: `saving` keeps them, `reading` finds them, `finishing` commits what only the tier has.
docs/design/0005 has the reasons; the directory itself is `headrace.dataio.store.local_tier`."""
