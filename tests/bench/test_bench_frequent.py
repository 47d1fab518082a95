"""`headrace bench frequent` saves after every step, and its killed trainers restore the values of their step."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from headrace.bench.core.processes import environment_variables, server
from headrace.bench.workloads import frequent, frequent_kills
from headrace.dataio.core.errors import CapacityError
from headrace.dataio.core.limits import MIB
from headrace.dataio.store.posix import PosixStore

FORKS = pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path, since it contains sockets."""
    with tempfile.TemporaryDirectory(prefix="mr-") as made:
        yield Path(made)


@pytest.fixture
def tiers(folder: Path) -> str:
    (made := folder / "tiers").mkdir()
    return str(made)


@pytest.fixture
def far_url(tmp_path: Path) -> Iterator[str]:
    """A repository in a store whose rate is below that of the saves."""
    (tmp_path / "bench").mkdir()
    with server(tmp_path, 40e6, 0.005, writable=True) as running, environment_variables(running.environ):
        yield "s3://bench/checkpoints"


@pytest.mark.parametrize("name", [frequent.LAZY, frequent.EAGER, frequent.DCP])
def test_every_step_is_saved_and_becomes_durable(name: str, tmp_path: Path) -> None:
    figures = frequent.measure(name, str(tmp_path), 16, 0.0, 3)
    assert figures["durable"] == 1
    assert figures["behind_max"] <= 3
    assert set(figures) == set(frequent.METRICS)


@needs_openssl
def test_with_a_local_tier_every_step_is_durable_and_a_slow_store_gets_some(
    folder: Path, tiers: str, far_url: str
) -> None:
    figures = frequent.measure(frequent.TIER, str(folder), 16, 0.05, 8, far_url, tiers)
    assert figures["durable"] == 1
    assert 0 <= figures["uploaded"] < 1  # on a busy machine, the first upload may end after the last step
    assert figures["store_behind_max"] >= 1
    assert set(figures) == {*frequent.METRICS, *frequent.STORE_METRICS, *frequent.BUDDY_METRICS}
    assert not list(folder.iterdir()) or [path.name for path in folder.iterdir()] == ["tiers"]


@FORKS
def test_killed_trainers_lose_few_steps(tmp_path: Path) -> None:
    figures = frequent_kills.measure_kills(str(tmp_path), str(tmp_path / "checkpoints"), 4, 0.02, 4, "", 0)
    assert figures["kills"] == 4
    assert figures["steps_lost_max"] >= figures["steps_lost_mean"] >= 0
    assert set(figures) == set(frequent_kills.METRICS)
    assert not list((tmp_path / "checkpoints").iterdir()), "the next round needs the space"


@FORKS
@needs_openssl
def test_a_lost_node_loses_few_steps_of_those_that_its_buddy_gets(folder: Path, tiers: str, far_url: str) -> None:
    figures = frequent_kills.measure_losses(str(folder), far_url, 4, 0.1, 1, tiers, 64 * MIB)
    assert figures["kills"] == 1
    assert figures["steps_lost_max"] >= figures["steps_lost_mean"] >= 0
    assert set(figures) == set(frequent_kills.METRICS)


@FORKS
def test_a_save_that_fails_is_noticed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk. Otherwise, the steps of the failed saves would count as steps that the kill has lost."""
    monkeypatch.setattr(PosixStore, "put_multipart", Mock(side_effect=CapacityError("no space left")))
    url = str(tmp_path / "checkpoints")
    with pytest.raises(RuntimeError, match="a trainer failed"):
        frequent_kills.measure_kills(str(tmp_path), url, 1, 0.3, 20, "", 0)
    assert "no space left" in capfd.readouterr().err


@FORKS
def test_a_trainer_that_restores_other_values_is_noticed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer expects other values, since the tensors in the store began elsewhere."""
    import torch

    from headrace.checkpoint import Checkpointer

    url = str(tmp_path / "checkpoints")
    monkeypatch.setattr(frequent_kills, "_new_repository", lambda url: url)
    with Checkpointer(url, run="r", sidecar=None) as checkpointer:
        tensors = {f"layer_{n}": torch.full((1 << 18,), 7.0) for n in range(4)}
        optimizer = torch.optim.SGD(list(tensors.values()), lr=1.0, foreach=True)
        checkpointer.save(3, {"model": tensors, "optimizer": optimizer}).result()
    with pytest.raises(RuntimeError, match="a trainer failed"):
        frequent_kills.measure_kills(str(tmp_path), url, 4, 0.02, 2, "", 0)
    assert "step 3 was restored with other values" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--node-losses", "2"], "--node-losses needs --local-tier"), (["--delay", "20"], "--delay and --rate are those")],
)
def test_options_that_go_together_are_asked_for(arguments: list[str], message: str) -> None:
    from headrace.dataio.core.errors import UsageError

    with pytest.raises(UsageError, match=message):
        frequent.frequent(arguments)
