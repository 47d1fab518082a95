"""The sidecar: one daemon per node, which shares a cache between trainers and stages their checkpoints.

The trainer's side:

- `client`: the API
- `reader`: reads shards through the daemon; `store`: reads other objects that never change
- `connection`: the connection to the daemon; `staged_jobs`: the checkpoints that were handed to it
- `meters`: measure how long the trainer waits

The daemon's side:

- `daemon`: its life cycle
- `connections`, `session`: its clients
- `reads`, `staging`: the clients' requests about shards and about checkpoints
- `jobs`: the staged checkpoints
- `tier`: the local tier, which keeps the last steps, and copies of them on other nodes
- `status`, `status_server`, `job_stats`, `save_stats`, `metrics`: the status page and the metrics
- `cache_directory`: the directories of the cache
- `systemd`: socket activation and the watchdog

Both sides use `protocol` (the messages), `wire` (their frames) and `paths` (the socket). `settings` is the
configuration. `cli` and `cli_status` are the commands.

Terms:

- To *stage* a checkpoint is to hand it to the daemon, which uploads and commits it.
- An *arena* is a memory file with the tensors of one rank. A *put plan* is the rest that is needed to commit them: where
  each tensor is in the arena, and the run, the step and the store.
- A *worker* is the process that uploads and commits one staged checkpoint.
- A *token* identifies a staged job.
"""
