"""Staged checkpoints in the daemon (docs/design/0004).

An accepted job is finished even if the trainer, its worker or the daemon dies.

- `job_service`: accepts jobs and answers queries
- `runner`: starts, follows and retries workers
- `job_table`: the jobs, shared by both
- `schedule`: decides which jobs are accepted, started or paused, and when they are retried (sans-I/O)
- `journal`: the files from which the next daemon continues the jobs
- `fd_keeper`, `keeper_process`: keep the arenas' descriptors open for the next daemon
- `worker`: the process that runs one job, and its events
- `gate`: pauses workers while an urgent one runs
- `memfd`: checks arenas and plans
"""
