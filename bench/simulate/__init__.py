"""Scale on paper: a model of reading, saving and failing on a cluster.

`cluster` describes a cluster and a training job. It computes costs from steady rates, and goodput by simulating saves,
interruptions and restarts. `command` is `headrace bench simulate`. Tests compare the costs with a discrete-event model
of one node (`tests/support/node_model.py`), and that model with real runs.
"""
