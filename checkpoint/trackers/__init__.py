"""Experiment trackers that log committed steps and published versions by reference. Each has one module.

- `mlflow`: `MlflowTracker`.
- `tensorboard`: `TensorBoardTracker`.
- `wandb`: `WandbTracker`.

`events` has the base class `Tracker` for other trackers, and what a tracker is given. `background` calls trackers in
threads.

Invariant: importing this package imports no tracker. A tracker gets URLs, digests and numbers, never tensors.
Failure behaviour: `Tracker.start` may raise `UsageError`. Later errors of a tracker are logged once.
"""
