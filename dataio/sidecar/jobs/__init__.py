"""Staged checkpoints in the daemon: an accepted job is finished even if trainer, worker or daemon die
(docs/design/0004).

`schedule` decides who may be taken, run and held back (sans-I/O); `journal` is what the next daemon needs to know,
`keeper` holds the arenas' descriptors for it, `worker` is the process that carries one job and `events` what it says;
`gate` holds workers back; `memfd` says what an arena is; `jobs` puts them together.
"""
