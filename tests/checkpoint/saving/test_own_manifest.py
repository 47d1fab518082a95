"""A trainer remembers the manifest of its last committed step, so that its next save reads less."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from msgspec import structs

from headrace.checkpoint import Checkpointer
from headrace.checkpoint.format import manifest as manifests
from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import Commit, encode
from headrace.checkpoint.format.manifest import PackName
from headrace.checkpoint.repository import check, collect
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.saving import executor
from headrace.checkpoint.saving.executor import own_manifest_of
from headrace.dataio.core.errors import TransientError
from headrace.dataio.core.limits import SMALL_OBJECT_BYTES
from headrace.dataio.store.base import Buffer
from headrace.dataio.store.open import open_store
from headrace.dataio.store.wrappers import Wrapper
from tests.support.local_tier import Counting


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return {"w": torch.randn(300_000)}


def reads_of(store: Counting, attempt: str) -> list[str]:
    return [key for operation, key in store.calls if operation == "get" and attempt in key]


@pytest.mark.parametrize("kept", [True, False], ids=["its bytes are kept", "only its digest is kept"])
def test_the_next_save_reads_of_the_base_at_most_its_manifest(
    tmp_path: Path, weights: dict[str, torch.Tensor], kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kept:
        monkeypatch.setattr(executor, "_KEPT_MANIFEST_BYTES", 0)
    with open_store(tmp_path) as inner, Checkpointer(store := Counting(inner), run="exp", sidecar=None) as trainer:
        trainer.save(1, weights).result(60)
        own = trainer._executor.own_manifest
        assert own is not None
        assert bool(own.data) == kept
        store.calls.clear()
        second = trainer.save(2, weights).result(60)
        assert [key.endswith(".manifest") for key in reads_of(store, own.attempt)] == ([] if kept else [True])
        assert (second.bytes_deduplicated, second.bytes_written) == (second.bytes_state, 0)
        assert check.check(inner).clean


def test_after_a_failed_save_the_next_one_reads_the_base_again(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    def refuse(operation: str, key: str) -> None:
        if away and key.startswith("packs/"):
            raise TransientError("away")

    with open_store(tmp_path) as inner:
        store, away = Counting(inner, refuse), False
        with Checkpointer(store, run="exp", sidecar=None) as trainer:
            trainer.save(1, weights).result(60)
            own = trainer._executor.own_manifest
            assert own is not None
            away = True
            with pytest.raises(TransientError, match="away"):
                trainer.save(2, {"w": weights["w"] + 1}).result(60)
            away = False
            assert trainer._executor.own_manifest is None
            store.calls.clear()
            third = trainer.save(3, weights).result(60)
            assert any(key.endswith(".fate") or "/fate" in key for key in reads_of(store, own.attempt))
            assert third.bytes_deduplicated == third.bytes_state


def test_a_base_that_was_removed_is_not_used(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    with open_store(tmp_path) as store, Checkpointer(store, run="exp", sidecar=None) as trainer:
        trainer.save(1, weights).result(60)
        assert trainer._executor.own_manifest is not None
        base = repository.find(store, "exp", 1)
        assert base is not None
        store.put(names.commit("exp", base.timeline, 1), encode(Commit(step=1, attempt=base.attempt, tombstone=True)))
        second = trainer.save(2, weights).result(60)
        assert second.bytes_written == second.bytes_state
        assert check.check(store).clean


class LostRace(Wrapper):
    """Another worker of the save stores its manifest first. The store fails when that manifest is read back."""

    stored = ""
    failed = 0

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        if key.endswith(".manifest") and not self.stored:
            own = manifests.decode(bytes(data), key)
            packs = tuple(PackName(pack.attempt, re.sub("[0-9a-f]{8}", "0" * 8, pack.name)) for pack in own.packs)
            assert packs != own.packs
            for pack, before in zip(packs, own.packs, strict=True):
                self.inner.put(pack.key, self.inner.get(before.key))
            assert self.inner.put_if_absent(key, manifests.encode(structs.replace(own, packs=packs)))
            self.stored = key
        return super().put_if_absent(key, data)

    def get(self, key: str, *, max_bytes: int = SMALL_OBJECT_BYTES) -> bytes:
        committed = any(info.key.endswith("COMMIT") for info in self.inner.list("runs/"))
        if key == self.stored and committed and not self.failed:
            self.failed += 1
            raise TransientError("away")
        return super().get(key, max_bytes=max_bytes)


def test_a_manifest_that_does_not_count_is_not_remembered(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    with open_store(tmp_path) as inner, Checkpointer(store := LostRace(inner), run="exp", sidecar=None) as trainer:
        trainer.save(1, weights).result(60)
        assert store.failed == 1
        assert trainer._executor.own_manifest is None
        collect.collect(inner, [])  # the packs of the worker that lost
        second = trainer.save(2, weights).result(60)
        assert second.bytes_deduplicated == second.bytes_state
        assert check.check(inner).clean


@pytest.mark.parametrize("name", ["zz", "", 5])
def test_a_report_with_an_impossible_digest_is_not_used(name: object) -> None:
    own = own_manifest_of({"attempt": "A", "manifest": name}, b"")
    assert own is None or not own.data


def test_the_report_of_an_older_daemon_names_no_manifest() -> None:
    assert own_manifest_of({"attempt": "A", "step": 1}) is None
