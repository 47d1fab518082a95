"""Runs real code in virtual time: many processes in one, on a store with latency and faults, repeatable by a seed.

Module by module: `scheduler` has virtual time and tasks, `threads` stands in for the threads, queues and pools that real
code starts, `store` is the object store, and `collectives` stands in for the ranks' process group.
"""
