"""What a copy does with damage, a full destination, steps that vanish, other copiers, differences and old repositories."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from headrace.checkpoint import Checkpointer, read
from headrace.checkpoint.copies import chunks as chunk_copies
from headrace.checkpoint.copies.copy import COPIED, PRESENT, REMOVED_THERE, Selection, copy, run_copiers
from headrace.checkpoint.format import names
from headrace.checkpoint.format.manifest import DELTAS
from headrace.checkpoint.repository import check, collect
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.fetch import open_step
from headrace.dataio.core.errors import CapacityError, CorruptionError
from headrace.dataio.core.limits import KIB, MIB
from headrace.dataio.store.base import Buffer, Store
from headrace.dataio.store.open import open_store
from headrace.dataio.testing.system import ManualClock
from tests.golden import make as golden
from tests.support.checkpoint_states import RUN, Wrapped, flip, latest, load
from tests.support.copied_runs import assert_copied, filled

GOLDEN = Path(golden.__file__).parent


def test_a_damaged_chunk_is_named_and_its_step_is_not_committed(tmp_path: Path) -> None:
    with open_store(str(tmp_path / "one")) as source, open_store(str(tmp_path / "two")) as store:
        bases = filled(source)
        (pack,) = source.list(names.packs(bases[1].attempt))
        flip(tmp_path / "one" / pack.key, 200 * KIB // 2)
        with pytest.raises(
            CorruptionError, match=r"step 2 of run exp is damaged: rank 0, tensor 'weights', .* at offset"
        ):
            copy(source, store, run=RUN)
        found = latest(store)
        assert found is not None
        assert found.step == 1
        assert check.check(store).clean
        assert [each.state for each in copy(source, store, run=RUN, steps=[1, 3]).steps] == [PRESENT, COPIED]


class Full(Wrapped):
    """A destination that has space for some packs only."""

    space = 400 * KIB

    def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
        body = b"".join(bytes(part) for part in parts)
        if len(body) > self.space:
            raise CapacityError(f"no space for {key}")
        self.space -= len(body)
        return self.inner.put_multipart(key, [body])


def test_a_full_destination_keeps_what_is_complete_and_a_later_copy_continues(tmp_path: Path) -> None:
    with open_store(str(tmp_path / "one")) as source, open_store(str(tmp_path / "two")) as store:
        filled(source)
        full = Full(store)
        with pytest.raises(CapacityError, match="no space"):
            copy(source, full, run=RUN)
        assert [base.step for base in repository.visible(store, RUN)] == [1]
        assert check.check(store).clean
        assert [each.state for each in copy(source, store, run=RUN).steps] == [PRESENT, COPIED, COPIED]
        assert_copied(source, store)


def test_a_clock_that_jumps_does_no_harm(tmp_path: Path) -> None:
    with open_store(str(tmp_path / "one")) as source, open_store(str(tmp_path / "two")) as store:
        filled(source)
        clock = ManualClock()
        copier = run_copiers(source, store, RUN, clock=clock)[0]
        for each in copier.copy(Selection()):
            assert each.state == COPIED
            clock.ahead += -1e6 if each.step % 2 else 3e6
        assert_copied(source, store)
        collect.collect(store, ())
        assert_copied(source, store)


class Vanishing(Wrapped):
    """A source that removes a step when the first of its chunks is read, as if the reader's lease had expired."""

    gone = False

    def get_ranges_into(self, key, ranges):  # type: ignore[no-untyped-def]
        base = latest(self.inner)
        if not self.gone and base is not None and base.attempt in key:
            self.gone = True
            self.inner.delete_many([info.key for info in self.inner.list(names.LEASES)])
            collect.collect(self.inner, [base.of(RUN)])
        self.inner.get_ranges_into(key, ranges)


def test_a_step_that_is_removed_at_the_source_during_the_copy_is_skipped(tmp_path: Path) -> None:
    with open_store(str(tmp_path / "one")) as source, open_store(str(tmp_path / "two")) as store:
        filled(source)
        assert [each.state for each in copy(Vanishing(source), store, run=RUN).steps] == [COPIED, COPIED, REMOVED_THERE]
        assert_copied(source, store)


def test_two_copiers_at_once_make_one_copy(tmp_path: Path) -> None:
    with open_store(str(tmp_path / "one")) as source, open_store(str(tmp_path / "two")) as store:
        filled(source, 6)
        states = list[str]()

        def work() -> None:
            with open_store(str(tmp_path / "two")) as own:
                states.extend(each.state for each in copy(source, own, run=RUN).steps)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(states) == 18
        assert set(states) <= {COPIED, PRESENT}
        assert_copied(source, store)
        collect.collect(store, ())
        assert_copied(source, store)


def test_packs_of_a_killed_copier_that_are_damaged_are_not_used(tmp_path: Path) -> None:
    with open_store(str(tmp_path / "one")) as source, open_store(str(tmp_path / "two")) as store:
        filled(source, 1)
        full = Full(store)
        copier = run_copiers(source, full, RUN)[0]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(full, "put_if_absent", lambda key, data: key.endswith(".manifest") and _fail())
            copier._timelines.copy = lambda: None  # type: ignore[method-assign]
            with pytest.raises(CapacityError):
                list(copier.copy(Selection()))
        (pack,) = store.list(names.PACKS)
        flip(tmp_path / "two" / pack.key, 50 * KIB)
        assert copy(source, store, run=RUN).steps[0].chunks_sent == 3
        assert_copied(source, store)


def _fail() -> bool:
    raise CapacityError("no space")


def test_differences_are_copied_with_their_bases_and_found_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    master = torch.randn(3 * MIB // 2) * 0.02
    states = {}
    with Checkpointer(str(tmp_path / "one"), run="exp", sidecar=None, compression="delta") as checkpointer:
        for step in (1, 2, 3, 4):
            checkpointer._saver.upload_hint = 1e6
            states[step] = master.bfloat16()
            checkpointer.save(step, {"w": states[step]}).result(60)
            master = master + 1e-5 * torch.randn(master.shape) if step != 3 else master
    with open_store(str(tmp_path / "one")) as source, open_store(str(tmp_path / "two")) as store:
        ours = [m for base in repository.visible(source, RUN) for m in open_step(source, RUN, base).manifests]
        assert any(chunk.codec in DELTAS for m in ours for chunk in m.chunks)
        for steps in ([2], [1, 3], [4]):
            report = copy(source, store, run=RUN, steps=steps)
        assert report.bytes_sent == 0
        theirs = [m for base in repository.visible(store, RUN) for m in open_step(store, RUN, base).manifests]
        assert any(chunk.codec in DELTAS for m in theirs for chunk in m.chunks)
        collect.collect(store, [base.of(RUN) for base in repository.visible(store, RUN) if base.step < 3])
        assert check.check(store).clean
    for step in (3, 4):
        with read(str(tmp_path / "two"), run="exp", step=step) as saved:
            assert torch.equal(saved["w"].read(), states[step])


def test_a_repository_of_an_earlier_version_is_copied(tmp_path: Path) -> None:
    url = str(shutil.copytree(GOLDEN / "0.1" / "repository", tmp_path / "old"))
    copied = str(tmp_path / "copy")
    report = copy(url, copied, tags=True)
    assert {each.state for each in report.steps} == {COPIED}
    with open_store(url) as source, open_store(copied) as store:
        for run in repository.runs(source):
            ours, theirs = ([(b.timeline, b.step) for b in repository.visible(each, run)] for each in (source, store))
            assert ours == theirs
        assert check.check(store).clean
    for run, step in golden.STEPS:
        if any((each.run, each.step) == (run, step) for each in report.steps):
            assert golden.tensors_of(copied, run, step) == golden.tensors_of(url, run, step)
    assert report.tags


def test_a_job_that_committed_in_groups_is_copied_in_groups(tmp_path: Path) -> None:
    url, copied = str(shutil.copytree(GOLDEN / "grouped", tmp_path / "old")), str(tmp_path / "copy")
    report = copy(url, copied)
    assert {each.state for each in report.steps} == {COPIED}
    with open_store(url) as source, open_store(copied) as store:
        for run in repository.runs(source):
            for one, other in zip(repository.visible(source, run), repository.visible(store, run), strict=True):
                key = names.groups(run, other.timeline, other.step, other.attempt)
                assert list(store.list(key))
                assert load(source, one, run=run) == load(store, other, run=run)
        assert check.check(store).clean


def test_one_worker_runs_in_the_thread_of_the_caller() -> None:
    pool = chunk_copies.executor(1, "x")
    assert pool.submit(threading.current_thread).result() is threading.current_thread()
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 // 0).result()
    assert isinstance(Store, type)
