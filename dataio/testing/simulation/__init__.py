"""Simulation: runs real code of many processes in virtual time, on a store with latency and faults.

One seed repeats one history.

* `scheduler` has virtual time and tasks.
* `threads` replaces the threads, queues and pools that real code starts.
* `store` is the object store.
* `collectives` replaces the process group of the ranks.
"""
