"""W&B: `Checkpointer(..., trackers=[WandbTracker()])` logs each committed step to a W&B run.

- Numbers are logged as `checkpoint/...`: bytes, stall and duration in seconds, and numbers of the metadata. Their x axis
  is `checkpoint/step`, because a step is committed later than it is saved.
- Each step is a version of the artifact `checkpoint-<run>`, with the alias `step-<step>`. The artifact has one reference:
  the URL of the step's decision. W&B reads nothing and computes no checksum. URL, digest and metadata are the artifact's
  metadata.
- A published version is a version of the artifact `published-<name>`, with the alias `version-<number>`.

Invariant: W&B gets no file of the repository. The run's own step counter does not change.
Failure behaviour: `start` raises `UsageError` if there is no run, and ImportError without W&B. Errors of W&B are logged
once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.checkpoint.trackers.events import CommittedStep, PublishedVersion, Tracker
from headrace.dataio.core.errors import UsageError

_NAME_CHARACTERS = 128
"""The maximum length of an artifact's name."""


class WandbTracker(Tracker):
    """Logs committed steps and published versions to a W&B run.

    Args:
        run (wandb.Run | None): The run. Default: None, the run of `wandb.init` when the checkpointer is created.
        artifacts (bool): Also log an artifact with a reference for each step and version. Default: True.

    Raises:
        UsageError: When the checkpointer is created, if no run is given and there is none.

    Example:
        >>> run = wandb.init(project="video")  # doctest: +SKIP
        >>> checkpointer = Checkpointer(url, run="exp42", trackers=[WandbTracker(run)])  # doctest: +SKIP
    """

    def __init__(self, run: Any = None, *, artifacts: bool = True) -> None:
        self._run, self._artifacts = run, artifacts
        self._defined = set[str]()

    def start(self) -> None:
        if self._run is None:
            import wandb

            self._run = wandb.run
        if self._run is None:
            raise UsageError(
                "there is no W&B run",
                hint="call wandb.init() before you create the checkpointer, or give WandbTracker a run",
            )

    def committed(self, step: CommittedStep) -> None:
        self._log("checkpoint", step.step, step.numbers())
        self._artifact(f"checkpoint-{step.run}", "checkpoint", f"step-{step.step}", step.reference, step.document())

    def published(self, version: PublishedVersion) -> None:
        self._log(f"published/{version.name}", version.step, version.numbers())
        alias = f"version-{version.version}"  # W&B reserves "v3"
        name = f"published-{version.name}"
        self._artifact(name, "published-weights", alias, version.reference, version.document())

    def _log(self, prefix: str, step: int, numbers: Mapping[str, float]) -> None:
        if prefix not in self._defined:
            self._run.define_metric(f"{prefix}/*", step_metric=f"{prefix}/step")
            self._defined.add(prefix)
        values = {f"{prefix}/{name}": value for name, value in numbers.items()} | {f"{prefix}/step": step}
        # with commit=True, W&B's own counter would advance, and drop what the trainer logs for the current step
        self._run.log(values, commit=False)

    def _artifact(self, name: str, kind: str, alias: str, reference: str, document: Mapping[str, Any]) -> None:
        if not self._artifacts:
            return
        import wandb

        artifact = wandb.Artifact(name[:_NAME_CHARACTERS], type=kind, metadata=dict(document))
        artifact.add_reference(reference, name=f"{alias}.json", checksum=False)
        self._run.log_artifact(artifact, aliases=[alias])
