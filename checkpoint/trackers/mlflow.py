"""MLflow: `Checkpointer(..., trackers=[MlflowTracker()])` logs each committed step to an MLflow run.

| in MLflow | what |
| --- | --- |
| metrics `checkpoint/...`, at the step's number | bytes, stall and duration in seconds, numbers of the metadata |
| tags `checkpoint/...` | URL, step, attempt, digest and texts of the metadata of the newest step |
| artifact `checkpoints/step-<step>.<attempt>.json` | all of it, as a small JSON document |
| metrics and tags `published/<name>/...`, artifact `published/<name>/<version>.json` | the same of a published version |

Invariant: nothing else is uploaded. The run is found once, in the trainer's thread, so a later run is not logged to.
Failure behaviour: `start` raises `UsageError` if there is no active run. Errors of MLflow's server are logged once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import mlflow
from mlflow.entities import Metric, RunTag

from headrace.checkpoint.trackers.events import CommittedStep, PublishedVersion, Tracker, safe_name
from headrace.dataio.core.errors import UsageError


class MlflowTracker(Tracker):
    """Logs committed steps and published versions to an MLflow run.

    Args:
        run_id (str | None): The run. Default: None, the active run when the checkpointer is created.
        tracking_uri (str | None): The tracking server. Default: None, MLflow's current one.

    Raises:
        UsageError: When the checkpointer is created, if no run is given and none is active.

    Example:
        >>> tracker = MlflowTracker("0123456789abcdef0123456789abcdef")  # doctest: +SKIP
        >>> checkpointer = Checkpointer(url, run="exp42", trackers=[tracker])  # doctest: +SKIP
    """

    def __init__(self, run_id: str | None = None, *, tracking_uri: str | None = None) -> None:
        self._run_id, self._uri = run_id, tracking_uri
        self._client: Any = None

    def start(self) -> None:
        if self._run_id is None:
            active = mlflow.active_run()
            if active is None:
                raise UsageError(
                    "there is no active MLflow run",
                    hint="call mlflow.start_run() before you create the checkpointer, or give MlflowTracker a run_id",
                )
            self._run_id = active.info.run_id
        self._client = mlflow.MlflowClient(tracking_uri=self._uri)

    def committed(self, step: CommittedStep) -> None:
        self._log("checkpoint", step.step, step.numbers(), step.texts())
        self._document(step.document(), f"checkpoints/step-{step.step}.{step.attempt}.json")

    def published(self, version: PublishedVersion) -> None:
        folder = f"published/{version.name}"
        self._log(folder, version.step, version.numbers(), version.texts())
        self._document(version.document(), f"{folder}/{version.version}.json")

    def _log(self, prefix: str, step: int, numbers: Mapping[str, float], texts: Mapping[str, str]) -> None:
        """One request."""
        now = int(time.time() * 1000)
        metrics = [Metric(f"{prefix}/{name}", value, now, step) for name, value in numbers.items()]
        tags = [RunTag(safe_name(f"{prefix}/{name}"), text) for name, text in texts.items()]
        self._client.log_batch(self._run_id, metrics=metrics, tags=tags)

    def _document(self, document: Mapping[str, Any], path: str) -> None:
        self._client.log_dict(self._run_id, document, path)
