"""From the trainer's tensors to a committed step.

- `arena`, `copying`, `slices`, `copy_threads`: staging. One reused memfd, eager and lazy copies, and states that are
  larger than the staging memory.
- `plan`, `executor`, `commit_worker`: the put plan, and where it is executed (the node's daemon, or this process).
- `upload`, `dedup`, `compression`, `progress`: chunks into packs, deduplication, codecs, and the log from which a
  retry resumes.

Invariant: the committed step equals the state at the call of `save`, bit for bit, or the save fails.
Failure behaviour: see each module.
"""
