"""Scale on paper: a discrete-event model of reading, saving and failing on a cluster.

The model is calibrated with measurements of one machine.

- `engine` simulates time, processes and shared links.
- `node` models the ranks of one node: they read from a store, save and restore.
- `cluster` describes a cluster and a training job that computes, saves, fails and restarts. It also says what each part
  of Headrace changes.
- `cli` is `headrace bench simulate`.

The tests compare the predictions of `node` with real runs: reading with 1, 2 and 4 local ranks, saving with 1 and 2.
They also compare `cluster` with `node`.
"""
