"""What earlier versions wrote is read by this one: repositories, datasets, loader states, and both sides of the sidecar's socket.

Each folder here was written once, by the version that it is named after (`tests/golden/make.py`), and is never changed.
"""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from headrace.checkpoint import Checkpointer, Keep, read, read_artifact
from headrace.checkpoint.repository import check, collect, survey, usage
from headrace.checkpoint.repository import steps as repository
from headrace.dataio.shards.dataset import Dataset
from headrace.dataio.sidecar import protocol as m
from headrace.dataio.store.open import open_store
from tests.golden import dialogue, make, make_metadata
from tests.support.checkpoint_states import RUN as STAGED
from tests.support.checkpoint_states import load
from tests.support.indexed_datasets import sample

VERSIONS = sorted(path.parent for path in Path(__file__).parent.glob("*/expected.json"))


@pytest.fixture(params=VERSIONS, ids=lambda path: path.name)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy, in which a test may write."""
    return Path(shutil.copytree(request.param, tmp_path / "golden"))


def expected(golden: Path, what: str) -> Any:
    return json.loads((golden / "expected.json").read_text())[what]


def same(ours: Any, theirs: Any) -> bool:
    """Whether two states agree if one was computed again: other processors round floating-point numbers differently."""
    if isinstance(ours, torch.Tensor):
        if ours.dtype == theirs.dtype and ours.is_floating_point() and ours.layout == torch.strided:
            return ours.shape == theirs.shape and torch.allclose(ours.float(), theirs.float(), rtol=0.02, atol=0.02)
        return make.digest(ours) == make.digest(theirs)
    if isinstance(ours, torch.nn.Module | torch.optim.Optimizer | make.Position):
        return same(ours.state_dict(), theirs.state_dict())
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list | tuple):
        return type(ours) is type(theirs) and len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(ours == theirs)


def test_there_is_a_version_to_read() -> None:
    assert VERSIONS


def test_every_tensor_of_every_step_is_the_one_that_was_saved(golden: Path) -> None:
    wanted = expected(golden, "repository")
    url = str(golden / "repository")
    for run, step in make.STEPS:
        assert make.tensors_of(url, run, step) == wanted["tensors"][f"{run} {step}"]
    for tag, step in wanted["tags"].items():
        with Checkpointer(url, run=make.RUN, sidecar=None) as checkpointer:
            assert checkpointer.restore(make.training(0), tag=tag) == step
    for run, steps in wanted["steps"].items():
        with Checkpointer(url, run=run, sidecar=None) as checkpointer:
            assert checkpointer.steps() == steps


def test_a_state_of_every_kind_is_restored_and_the_run_goes_on(golden: Path) -> None:
    url = str(golden / "repository")
    state = make.training(0)
    with Checkpointer(url, run=make.RUN, sidecar=None, compression="delta", keep=Keep(last=2)) as checkpointer:
        assert checkpointer.restore(state) == 40
        saved = make.training(40)
        rng, _ = state.pop("rng"), saved.pop("rng")
        assert same(state, saved)
        assert state["tied"]["a"] is state["tied"]["b"]
        checkpointer.save(41, {**make.training(41), "rng": rng}).result(60)
    again = make.training(0)
    with Checkpointer(url, run=make.RUN, sidecar=None) as checkpointer:
        assert checkpointer.restore(again) == 41
        assert same({**again, "rng": 0}, {**make.training(41), "rng": 0})
    with open_store(url) as store:
        assert check.check(store).clean


def test_check_and_collection_accept_the_repository_and_keep_what_they_must(golden: Path) -> None:
    url = str(golden / "repository")
    with open_store(url) as store:
        report = check.check(store)
        assert report.clean, report.problems
        assert report.chunks >= 20
        collect.retain(store, make.RUN, Keep(last=1))
        collect.collect(store, ())
        assert check.check(store).clean
    kept = expected(golden, "repository")["tensors"]
    for run, step in [(make.RUN, 10), (make.RUN, 40), (make.FORK, 1), (make.PRUNED, 3)]:  # 10 and 40 have tags
        found = make.tensors_of(url, run, step)
        assert found
        assert found == kept.get(f"{run} {step}", found)


def test_steps_in_groups_without_totals_are_read_listed_and_collected(tmp_path: Path) -> None:
    """Five ranks in groups of two wrote them, with the code of 237101d7: its decisions have no totals.

    The state is that of `tests.support.grouped_ranks`, with 30 columns, and with 85,000 elements in "frozen".
    """
    url = str(shutil.copytree(Path(__file__).parent / "grouped", tmp_path / "golden"))
    whole = torch.arange(70 * 30, dtype=torch.float32).reshape(70, 30)
    with open_store(url) as store:
        assert [(line.run, line.step, line.world_size) for line in survey.survey(store).steps] == [
            *(("dcp", 3, 5), ("own", 1, 5), ("own", 2, 5))
        ]
        assert check.check(store).clean
        assert len(usage.usage(store, "own").runs) == 1
        done = collect.retain(store, "own", Keep(last=1))
        assert done is not None
        assert [step.step for step in done.tombstones] == [1]
        assert len([key for key, _ in done.objects if key.endswith(".pack")]) == 0  # step 2 needs "frozen" of all ranks
        assert check.check(store).clean
    for run, step, path in (("own", 2, "model/"), ("dcp", 3, "")):
        with read(url, run=run, step=step) as saved:
            assert torch.equal(saved[f"{path}rows"].read(), whole * step)
            assert torch.equal(saved[f"{path}columns"].read(), whole * step)
            assert torch.equal(saved[f"{path}common"].read(), whole + 1)
            assert torch.equal(saved[f"{path}frozen"].read(), (torch.arange(85_000) % 7).float())


def test_metadata_descriptions_and_artifacts_are_read_and_a_policy_follows_them(tmp_path: Path) -> None:
    """`tests.golden.make_metadata` wrote them, with the code of note 0046."""
    url = str(shutil.copytree(Path(__file__).parent / "metadata", tmp_path / "golden"))
    wanted: dict[tuple[str, int], Any] = {
        (make_metadata.SINGLE, step): each for step, each in make_metadata.METADATA.items()
    }
    wanted[make_metadata.GROUPED, 1] = {"rank": 0, "loss": 0.5}
    with open_store(url) as store:
        found = {(line.run, line.step): line.metadata for line in survey.survey(store).steps}
        assert {at: repr(each) for at, each in found.items()} == {at: repr(each) for at, each in wanted.items()}
        assert check.check(store).clean
        shown = check.describe(store, make_metadata.SINGLE, "2")
        assert shown.description == {"config": {"lr": 1e-3, "layers": [1, 2]}, "code": "3f2a9c1"}
        assert shown.artifacts == [("configs/train.yaml", 0, len(make_metadata.ARTIFACT))]
        base = repository.find(store, make_metadata.GROUPED, 1)
        assert base is not None
        whole = b"".join(map(make_metadata.contents, range(make_metadata.WORLD)))
        assert load(store, base, run=make_metadata.GROUPED) == {"w": whole}
    artifact = read_artifact(url, run=make_metadata.SINGLE, step=2, name="configs/train.yaml")
    assert artifact == make_metadata.ARTIFACT
    with read(url, run=make_metadata.SINGLE, step=2) as saved:
        assert list(saved) == ["w"]
        assert torch.equal(saved["w"].read(), torch.arange(9.0) * 2)
    with open_store(url) as store:
        collect.retain(store, make_metadata.SINGLE, Keep(last=1, best=("loss", 1, "min")))
        assert [base.step for base in repository.visible(store, make_metadata.SINGLE)] == [3, 1]


def test_a_dataset_has_the_samples_that_were_packed(golden: Path) -> None:
    wanted = expected(golden, "datasets")["packed"]
    assert make.described(Dataset(golden / "datasets" / "packed")) == wanted
    with (
        Dataset(golden / "datasets" / "packed", version=1) as first,
        Dataset(golden / "datasets" / "packed", version="all") as tagged,
    ):
        assert len(first) == len(tagged) == wanted["samples"] + 1
        first.check()
        sample = first.find("clip0")
        assert json.loads(first.read(sample, "json"))["caption"] == "clip 0"


def test_a_paged_version_document_is_read(tmp_path: Path) -> None:
    """It was written by `tests.support.indexed_datasets.make`, with pages of 4 shards and 2 parts."""
    shutil.copytree(Path(__file__).parent / "dataset-2", tmp_path / "golden")
    with Dataset(tmp_path / "golden") as dataset:
        assert dataset.document.format == 2
        assert [one.key for one in dataset] == [f"k{n:05}" for n in range(100)]
        assert all(one == sample(one.id, one.shard, one.id % 10) for one in dataset)
        dataset.check()


def test_a_loader_state_goes_on_with_the_batches_that_came_next(golden: Path) -> None:
    wanted = expected(golden, "loaders")
    for name, loader in make.loaders_of(golden / "datasets").items():
        with loader:
            loader.load_state_dict(wanted[name]["state"])
            batches = make.batches(loader)
            assert [next(batches) for _ in wanted[name]["next"]] == wanted[name]["next"], name


def test_a_daemon_understands_an_earlier_client_and_stores_its_checkpoint(golden: Path, tmp_path: Path) -> None:
    wanted = expected(golden, "dialogue")
    arena = base64.b64decode(wanted["arena"])
    shard = golden / "datasets" / "packed" / wanted["read"]["key"]
    with dialogue.daemon() as path, open_store(tmp_path / "steps") as steps:
        dialogue.begin(steps)
        places = {dialogue.HERE: f"file://{golden / 'datasets' / 'packed'}", dialogue.STEPS: steps.location.url}
        heard = list(dialogue.play(path, wanted["told"], places, dialogue.raw(wanted["plan"]), arena))
        assert {tag for tag, _, _ in heard} >= {answer["t"] for answer in wanted["answered"]} - {"progress"}
        (read,) = [content for tag, _, content in heard if tag == "opened"]
        assert read == [shard.read_bytes()[at : at + length] for at, length in wanted["read"]["ranges"]]
        base = repository.find(steps, STAGED, "latest")
        assert base is not None
        assert load(steps, base) == dialogue.STATE


def test_a_client_understands_what_an_earlier_daemon_answered(golden: Path) -> None:
    for answer in expected(golden, "dialogue")["answered"]:
        found = m.decode_from_daemon(msgspec.msgpack.encode(dialogue.raw(answer)))
        assert superset(msgspec.to_builtins(found), answer)


def test_messages_of_every_kind_mean_what_they_meant(golden: Path) -> None:
    messages = expected(golden, "dialogue")["messages"]
    assert len(messages) > 20
    for message in messages:
        payload = bytes.fromhex(message["payload"])
        client = message["fields"]["t"] in {each.__struct_config__.tag for each in m.FromClient.__args__}
        found: Any = m.decode_from_client(payload) if client else m.decode_from_daemon(payload)
        assert superset(dialogue.plain(msgspec.to_builtins(found)), message["fields"])


def superset(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether every field that the earlier version had has its value; later ones may be added."""
    return all(json.loads(json.dumps(found[name])) == value for name, value in wanted.items())
