"""The repository on the store: the commit protocol, leases, timelines, steps, tags, retention and garbage collection.

- `commit`, `lease`, `timeline`, `writers`: how an attempt becomes a step, and to which timeline it goes.
- `steps`, `fetch`, `check`: listing, reading and checking steps.
- `tag_records`, `tags`: names for steps.
- `retention`, `inventory`, `collect`: which steps go, what the repository holds, and the collection itself.

Invariant: no byte that a committed or leased step needs is ever removed (`docs/design/0012-retention.md`).
Failure behaviour: that of each module. A collection that stops anywhere leaves a whole repository; the next one
finishes its work.
"""
