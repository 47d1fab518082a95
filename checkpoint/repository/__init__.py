"""The repository on the store: the commit protocol, leases, timelines, steps, tags, retention and garbage collection.

- `commit`, `lease`, `timeline`, `writers`: how an attempt becomes a step, and which timeline it belongs to.
- `steps`, `fetch`, `check`: listing, reading and checking steps.
- `tag_records`, `tags`: names for steps.
- `retention`, `inventory`, `collect`: which steps are removed, what the repository holds, and the collection itself.

Invariant: a collection never removes a byte that a committed or leased step needs (`docs/design/0012-retention.md`).
Failure behaviour: see each module. A collection that stops at any point leaves the repository consistent. The next
collection finishes its work.
"""
