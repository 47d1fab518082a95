"""Scale on paper: a discrete-event model of reading, saving and failing on a cluster, calibrated from what one machine measures.

`engine` has time, processes and shared links; `reading` the ranks of a node in front of a store, `saving` their saves and
restores; `training` a job that computes, saves, fails and comes back; `cluster` says what a cluster is and what each part of
Headrace changes; `cli` is `headrace bench simulate`. The predictions of `reading` for 1, 2 and 4 local ranks and of `saving`
for 1 and 2 are checked against real runs by the tests, and `cluster` against `saving`.
"""
