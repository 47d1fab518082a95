"""MLflow, TensorBoard and W&B, with the real packages: what they stored is read back."""

from __future__ import annotations

import json
import math
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.checkpoint import Checkpointer
from headrace.checkpoint.format.metadata import Metadata
from headrace.checkpoint.trackers.events import Tracker
from headrace.checkpoint.trackers.tensorboard import TensorBoardTracker
from headrace.checkpoint.trackers.wandb import WandbTracker
from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.json import parse_json
from tests.support.waiting import wait_for

SECONDS = 60
METADATA: Metadata = {
    "loss": 2.5,
    "eval/acc": 0.75,
    "note": "<b>warm-up</b>\n```",
    "done": True,
    "gap": None,
    "broken": math.nan,
}


def train(where: Path, tracker: Tracker) -> list[str]:
    """Two saves and one publication. Returns the attempts."""
    attempts = []
    with Checkpointer(where, run="exp", sidecar=None, trackers=[tracker]) as checkpointer:
        for step in (10, 20):
            handle = checkpointer.save(step, {"model": {"w": torch.full((300,), float(step))}}, metadata=METADATA)
            attempts.append(handle.result(SECONDS).attempt)
        checkpointer.publish("policy", handle)
    return attempts


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """MLflow with a store of files."""
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    module = pytest.importorskip("mlflow", reason="the extra trackers is not installed")
    before = module.get_tracking_uri()
    module.set_tracking_uri((tmp_path / "mlruns").as_uri())
    yield module
    module.end_run()
    module.set_tracking_uri(before)


def test_mlflow_has_metrics_tags_and_a_small_document_of_each_step(mlflow: Any, tmp_path: Path) -> None:
    from headrace.checkpoint.trackers.mlflow import MlflowTracker

    with mlflow.start_run() as run:
        attempts = train(tmp_path / "store", MlflowTracker())
    client, run_id = mlflow.MlflowClient(), run.info.run_id
    found = client.get_run(run_id).data
    history = client.get_metric_history(run_id, "checkpoint/metadata/eval/acc")
    assert [(each.step, each.value) for each in history] == [(10, 0.75), (20, 0.75)]
    assert found.metrics["checkpoint/bytes_state"] == 1200
    assert found.metrics["checkpoint/stall_seconds"] > 0
    assert math.isnan(found.metrics["checkpoint/metadata/broken"])
    assert (found.tags["checkpoint/step"], found.tags["checkpoint/attempt"]) == ("20", attempts[1])
    assert found.tags["checkpoint/url"] == (tmp_path / "store").as_uri()
    assert found.tags["checkpoint/metadata/note"] == METADATA["note"]
    assert found.metrics["published/policy/bytes"] == 1200
    artifacts = [each.path for each in client.list_artifacts(run_id, "checkpoints")]
    assert artifacts == [f"checkpoints/step-{s}.{a}.json" for s, a in zip((10, 20), attempts, strict=True)]
    document = json.loads(Path(client.download_artifacts(run_id, artifacts[0], str(tmp_path))).read_bytes())
    assert document["metadata"]["loss"] == 2.5
    assert document["digest"]
    assert Path(document["reference"].removeprefix("file://")).is_file()


def test_without_an_mlflow_run_the_checkpointer_is_refused_at_once(mlflow: Any, tmp_path: Path) -> None:
    from headrace.checkpoint.trackers.mlflow import MlflowTracker

    with pytest.raises(UsageError, match="there is no active MLflow run"):
        Checkpointer(tmp_path, run="exp", trackers=[MlflowTracker()])


def test_tensorboard_has_scalars_and_texts_of_each_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra trackers is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    attempts = train(tmp_path / "store", TensorBoardTracker(tmp_path / "events"))
    found = EventAccumulator(str(tmp_path / "events"))
    found.Reload()
    losses = [(each.step, each.value) for each in found.Scalars("checkpoint/metadata/loss")]
    assert losses == [(10, 2.5), (20, 2.5)]
    assert [each.value for each in found.Scalars("checkpoint/bytes_state")] == [1200, 1200]
    assert [each.value for each in found.Scalars("published/policy/version")] == [1]
    texts = found.Tensors("checkpoint/committed/text_summary")
    assert [each.step for each in texts] == [10, 20]
    text = texts[1].tensor_proto.string_val[0].decode()
    assert all(line.startswith("    ") for line in text.splitlines())  # Markdown interprets nothing in it
    document = json.loads(text)
    assert (document["attempt"], document["metadata"]["note"]) == (attempts[1], METADATA["note"])


def test_tensorboard_uses_the_writer_of_the_trainer_and_leaves_it_open(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra trackers is not installed")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "events")) as writer:
        train(tmp_path / "store", TensorBoardTracker(writer))
        writer.add_scalar("loss", 1.0, 30)
    assert len(list((tmp_path / "events").iterdir())) == 1


class Run:
    """The methods of a W&B run that the tracker calls, recorded."""

    def __init__(self) -> None:
        self.rows: list[tuple[dict[str, Any], bool]] = []
        self.axes: dict[str, str] = {}
        self.artifacts: list[tuple[Any, list[str]]] = []

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes[name] = step_metric

    def log(self, data: dict[str, Any], commit: bool) -> None:
        self.rows.append((data, commit))

    def log_artifact(self, artifact: Any, aliases: list[str]) -> None:
        self.artifacts.append((artifact, aliases))


class Artifact:
    """As `wandb.Artifact`, recorded."""

    def __init__(self, name: str, type: str, metadata: dict[str, Any]) -> None:
        self.name, self.type, self.metadata = name, type, metadata
        self.references: list[tuple[str, str, bool]] = []

    def add_reference(self, uri: str, name: str, checksum: bool) -> None:
        self.references.append((uri, name, checksum))


def test_wandb_gets_references_without_checksums_and_its_step_counter_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B's interface is recorded here. The next test uses the real package where it is installed."""
    module = types.ModuleType("wandb")
    module.Artifact, module.run = Artifact, None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    run = Run()
    train(tmp_path, WandbTracker(run))
    assert run.axes == {"checkpoint/*": "checkpoint/step", "published/policy/*": "published/policy/step"}
    assert [row["checkpoint/step"] for row, _ in run.rows[:2]] == [10, 20]
    assert not any(commit for _, commit in run.rows)
    artifacts = [(artifact.name, artifact.type, aliases) for artifact, aliases in run.artifacts]
    assert artifacts == [
        ("checkpoint-exp", "checkpoint", ["step-10"]),
        ("checkpoint-exp", "checkpoint", ["step-20"]),
        ("published-policy", "published-weights", ["version-1"]),
    ]
    for artifact, _ in run.artifacts:
        ((uri, _, checksum),) = artifact.references
        assert not checksum
        parse_json(Path(uri.removeprefix("file://")).read_bytes())
    with pytest.raises(UsageError, match=r"call wandb\.init\(\)"):
        Checkpointer(tmp_path, run="other", trackers=[WandbTracker()])


@pytest.mark.process
def test_wandb_itself_accepts_them_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="W&B is not installed")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    with wandb.init(project="headrace", mode="offline", dir=str(tmp_path), settings={"silent": True}) as run:
        run.log({"loss": 1.0}, step=5)
        train(tmp_path / "store", WandbTracker())
        run.log({"loss": 2.0}, step=5)  # the same step still takes values
        run.log({"loss": 3.0}, step=6)  # W&B writes the row of step 5 now
        assert run.summary["checkpoint/step"] == 20
        assert run.summary["checkpoint/bytes_state"] == 1200
        assert run.summary["loss"] == 2.0
    (stored,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    texts = (b"checkpoint-exp", b"step-20", b"published-policy")
    # W&B's own process may write the file after `finish` has returned
    wait_for(lambda: all(text in stored.read_bytes() for text in texts), SECONDS)
