"""Frameworks that save from several ranks: torchtitan, Megatron-Core, torch_checkpointing; skipped where one is not installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.checkpoint import Checkpointer, read
from headrace.dataio.core.errors import NotFoundError, UsageError
from tests.support.checkpoint_states import flip
from tests.support.ranks import launch

pytestmark = pytest.mark.filterwarnings("ignore")  # the frameworks' own


def needs(package: str, pip: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed (`make test` installs it): pip install --no-deps {pip}")


@pytest.mark.parametrize("mode", ["disabled", pytest.param("async", marks=pytest.mark.soak)])
def test_torchtitan_resumes_from_the_repository_as_if_it_had_never_stopped(tmp_path: Path, mode: str) -> None:
    needs("torchtitan", "torchtitan==0.3.0")
    repo = str(tmp_path / "repo")
    ranks = launch(2, "tests.support.torchtitan_ranks", str(tmp_path / "dump"), repo, mode)
    for lines in ranks:
        output: dict[str, Any] = {key: value for line in lines for key, value in line.items()}
        assert output["loaded"] == output["first"]
        assert output["resumed"] == output["straight"]
    assert not list((tmp_path / "dump").rglob("*.distcp"))
    with Checkpointer(repo, run="exp", sidecar=None) as checkpointer:
        kept = checkpointer.steps()
    with read(repo, run="exp", step=6) as saved:
        assert saved.metadata == {"step": 6, "loss": 1 / 6}
    assert kept in ([6, 8], [4, 6, 8])  # two, and what came before an asynchronous save that was still on its way


def test_a_folder_of_torchtitans_own_manager_is_imported_and_continued_by_ours(tmp_path: Path) -> None:
    needs("torchtitan", "torchtitan==0.3.0")
    for lines in launch(2, "tests.support.torchtitan_ranks", str(tmp_path / "dump"), str(tmp_path / "repo"), "import"):
        assert lines[-1]["continued"] == lines[-1]["saved"]
        assert lines[-1]["saved"]["step"] == 6


def test_megatron_core_saves_with_two_ranks_and_loads_with_two_and_with_one(tmp_path: Path) -> None:
    needs("megatron", "megatron-core==0.16.1")
    folder, repo = str(tmp_path / "iter_0000012"), str(tmp_path / "repo")
    saved = launch(2, "tests.support.megatron_ranks", folder, repo, "save")
    assert saved[0][0]["saved"] == ["common.pt", "metadata.json"]
    with read(repo, run="exp", step=12) as step:
        assert step.metadata == {"loss": 2.5}
    keys = ["bias", "rng/shard_0_2", "rng/shard_1_2", "weight"]
    good = {"weight": True, "bias": True, "iteration": 12, "keys": keys}
    assert launch(1, "tests.support.megatron_ranks", folder, repo, "load") == [[good]]
    two = launch(2, "tests.support.megatron_ranks", folder, repo, "load")
    assert two == [[good | {"rng": True}]] * 2


def test_megatron_cores_queue_of_asynchronous_saves_holds_what_was_there_when_each_began(tmp_path: Path) -> None:
    needs("megatron", "megatron-core==0.16.1")
    folder, repo = str(tmp_path / "iter_0000012"), str(tmp_path / "repo")
    for saved, found, failed in launch(2, "tests.support.megatron_ranks", folder, repo, "queue"):
        assert saved == {"raised": None}
        assert [found[key] for key in ("weight", "bias", "rng", "iteration")] == [True, True, True, 12]
        assert "not a directory" in failed["raised"].lower()
    with Checkpointer(repo, run="exp", sidecar=None) as checkpointer:
        assert checkpointer.steps() == [11, 12]
    for step in (11, 12):
        with read(repo, run="exp", step=step) as found_step:
            assert found_step.metadata == {"step": step}


def test_torch_checkpointing_keeps_the_files_of_two_ranks_in_one_step(tmp_path: Path) -> None:
    needs("torch_checkpointing", "torch_checkpointing==0.1.1")
    ranks = launch(2, "tests.support.torch_checkpointing_ranks", str(tmp_path / "repo"))
    for rank, lines in enumerate(ranks):
        assert lines == [{"same": True, "loader": 100 + rank, "second": None}]
    with read(str(tmp_path / "repo"), run="exp") as saved:
        assert saved.step == 8


def test_the_storage_alone_will_do_for_one_rank(tmp_path: Path) -> None:
    needs("torch_checkpointing", "torch_checkpointing==0.1.1")
    from torch_checkpointing import CheckpointManager

    from headrace.checkpoint.frameworks.torch_checkpointing import RepositoryStorageConfig

    config = CheckpointManager.Config.with_sync_save()
    config.storage_config = RepositoryStorageConfig(str(tmp_path), run="exp")
    manager = CheckpointManager(config)
    weights = torch.randn(3_000_000)
    manager.save("step_1", {"model": {"w": weights, "b": torch.ones(3)}})
    written = sum(path.stat().st_size for path in tmp_path.rglob("*.pack"))
    manager.save("step_2", {"model": {"w": weights, "b": torch.zeros(3)}})
    again = sum(path.stat().st_size for path in tmp_path.rglob("*.pack")) - written
    assert again < written / 2  # what did not change is not written again
    with pytest.raises(FileExistsError):
        manager.save("step_2", {"model": {"w": weights}})
    into = {"model": {"w": torch.zeros(3_000_000), "b": torch.ones(3)}}
    manager.load("step_2", into=into)
    assert torch.equal(into["model"]["w"], weights)
    assert not into["model"]["b"].any()
    with pytest.raises(FileNotFoundError):
        manager.load("step_3", into=into)
    manager.close()


def test_files_are_read_back_in_part_and_listed(tmp_path: Path) -> None:
    needs("torch_checkpointing", "torch_checkpointing==0.1.1")
    from headrace.checkpoint.frameworks.torch_checkpointing import RepositoryStorageConfig

    storage, folder = RepositoryStorageConfig(str(tmp_path), run="exp").create_storage(), Path("step_9")
    aside = Path("tmp_step_9")
    assert not storage.exists(folder)
    storage.write(aside / "empty", b"")
    storage.write(aside / "model.pt", bytes(range(256)) * 1000)
    with pytest.raises(ZeroDivisionError), storage.stream_write(aside / "half") as stream:
        stream.write(b"half of it")
        raise ZeroDivisionError
    assert storage.read(aside / "model.pt")[:3] == b"\0\1\2"
    storage.rename(aside, folder, is_directory=True)
    assert storage.ls(folder) == ["empty", "model.pt"]
    assert storage.isdir(folder)
    assert storage.exists(folder / "model.pt")
    assert not storage.exists(folder / "half")
    assert storage.read(folder / "empty") == b""
    assert storage.getsize(folder / "model.pt") == 256_000
    with storage.stream_read(folder / "model.pt") as stream:
        assert stream.seek(-3, 2) == 255_997
        assert stream.read() == bytes([253, 254, 255])
        assert stream.seek(1000) == 1000
        assert stream.read(4) == bytes([232, 233, 234, 235])
    storage.rmdir(folder)
    assert storage.exists(folder)  # a step goes when its run's retention says so


def test_damage_in_a_file_of_torch_checkpointing_is_found(tmp_path: Path) -> None:
    needs("torch_checkpointing", "torch_checkpointing==0.1.1")
    from torch_checkpointing import CheckpointManager

    from headrace.checkpoint.frameworks.torch_checkpointing import RepositoryManager
    from headrace.dataio.core.errors import CorruptionError

    manager = RepositoryManager(str(tmp_path), run="exp", config=CheckpointManager.Config.with_sync_save())
    with pytest.raises(NotFoundError, match="run exp has no step: there is no checkpoint repository"):
        manager.load("latest", into={"model": {"w": torch.zeros(3)}})
    with pytest.raises(UsageError, match="names no step"):
        manager.save("newest", {"model": {"w": torch.zeros(3)}})
    manager.save("step_1", {"model": {"w": torch.randn(1_000_000)}})
    flip(next(tmp_path.rglob("*.pack")), 2_000_000)
    with pytest.raises(CorruptionError, match=r"tensor 'model_0.pt'"):
        manager.load("step_1", into={"model": {"w": torch.zeros(1_000_000)}})
    manager.close()


def test_torch_checkpointing_saves_behind_the_trainer_from_its_own_process(tmp_path: Path) -> None:
    needs("torch_checkpointing", "torch_checkpointing==0.1.1")
    from torch_checkpointing import AsyncCheckpointSaverConfig, CheckpointManager, CheckpointStagerConfig

    from headrace.checkpoint.frameworks.torch_checkpointing import RepositoryManager

    staging = CheckpointStagerConfig(
        use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
    )
    config = CheckpointManager.Config(save=AsyncCheckpointSaverConfig(staging_config=staging))
    manager = RepositoryManager(str(tmp_path), run="exp", config=config)
    future = manager.save("step_4", {"model": {"w": torch.arange(1000.0)}})
    future.result(120)
    into = {"model": {"w": torch.zeros(1000)}}
    manager.load("latest", into=into)
    assert torch.equal(into["model"]["w"], torch.arange(1000.0))
    manager.close()
