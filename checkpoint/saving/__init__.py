"""From the trainer's tensors to a committed step.

- `arena`, `copying`, `slices`, `copy_threads`: staging. One reused memfd, eager and lazy copies, and states larger
  than the memory.
- `plan`, `executor`, `commit_worker`: the put plan, and where it is executed (the node's daemon, or this process).
- `upload`, `dedup`, `compression`, `progress`: chunks into packs, deduplication, codecs, and the log that a retry
  resumes from.

Invariant: the committed step is the state as it was when `save` was called, to the bit, or the save fails.
Failure behaviour: that of each module.
"""
