"""Publishers that are killed in every state, and ranks that subscribe on another mesh."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import headrace.checkpoint.publishing.publisher
from headrace.checkpoint import Subscriber
from headrace.checkpoint.publishing import records
from headrace.dataio.core.crashpoints import declared
from headrace.dataio.store.open import open_store
from tests.checkpoint.publishing.conftest import Trainer, empty_like, same
from tests.support import nursery
from tests.support.ranks import launch
from tests.support.waiting import wait_for

pytestmark = pytest.mark.process
assert headrace.checkpoint.publishing.publisher
POINTS = sorted(name for name in declared() if name.startswith("publish."))


@pytest.mark.parametrize("point", POINTS)
def test_a_publisher_that_is_killed_leaves_the_old_version_or_the_new_one(
    trainer: Trainer, tmp_path: Path, point: str
) -> None:
    trainer.next_version()
    held = empty_like(trainer.weights[1])
    with Subscriber(trainer.url, "policy") as subscriber:
        subscriber.wait(10).apply(held)
        trainer.train()
        trainer.save()
        mark = tmp_path / "mark"
        process = nursery.start(
            "tests.support.publishing_process",
            str(trainer.url),
            "2",
            HEADRACE_CRASH=point,
            HEADRACE_CRASH_MARK=str(mark),
        )
        _, err = process.communicate(120)
        assert process.returncode == -signal.SIGKILL, err
        assert mark.read_text() == f"{point}\n"
        version = subscriber.newest()
        assert (version is not None) == (point == "publish.record")
        if version is not None:
            version.apply(held)
        assert same(held, trainer.weights[subscriber.version or 0])
        record = trainer.next_version()
        assert record.number == (3 if version else 2)
        subscriber.wait(10).apply(held)
        assert same(held, trainer.weights[3])
    with open_store(str(trainer.url)) as store:
        assert records.require(store, "policy") == record
    kept = {path.name.removesuffix(".json") for path in (trainer.url / "tags").iterdir()}
    assert record.tag in kept
    assert len(kept) == 2


def test_ranks_follow_weights_that_another_mesh_publishes(tmp_path: Path) -> None:
    directory = str(tmp_path / "repository")
    launch(2, "tests.support.publishing_ranks", "publish", directory, "1")
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(launch, 4, "tests.support.publishing_ranks", "follow", directory)
        wait_for(lambda: Path(f"{directory}-applied").exists() or following.done(), 120)
        launch(2, "tests.support.publishing_ranks", "publish", directory, "2")
        found = following.result(180)
    for lines in found:
        assert [line["step"] for line in lines] == [1, 2]
        assert all(all(line["right"].values()) for line in lines)
        assert lines[1]["bytes"] < lines[0]["bytes"] / 20
