"""Where a save goes, and what reading does to that: nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.report.reading import read_report
from headrace.checkpoint.repository import collect, commit, survey, timeline, writers
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.commit import Attempt
from headrace.checkpoint.repository.retention import Keep
from headrace.checkpoint.repository.writers import SaveTarget, WriterState
from headrace.dataio.cli import main
from headrace.dataio.core.errors import ConflictError, NotFoundError
from headrace.dataio.core.limits import SMALL_OBJECT_BYTES
from headrace.dataio.store.base import Buffer, Store
from headrace.dataio.store.open import open_store
from tests.support.checkpoint_states import RUN, Wrapped, make, save, tiny_state


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path) as opened:
        repository.ensure_repo(opened)
        yield opened


class Writer:
    """A writer of the run, with what a Checkpointer and DCP's session remember."""

    def __init__(self, store: Store, may_start_fresh: bool = True) -> None:
        self.store, self.may_start_fresh, self.name = store, may_start_fresh, writers.enter()
        self.timeline = 0
        self.restored: Base | None = None
        self.was_latest = False

    def save(self, *steps: int) -> Base:
        for step in steps:
            state = WriterState(
                self.name,
                self.timeline,
                self.restored,
                was_latest=self.was_latest,
                may_start_fresh=self.may_start_fresh,
            )
            self.timeline, self.restored = writers.place(self.store, RUN, step, state).timeline, None
            made = save(self.store, make(self.store, tiny_state(step), step=step, number=self.timeline))
        return made

    def restore(self, step: int | Base) -> None:
        self.restored = step if isinstance(step, Base) else repository.find(self.store, RUN, step)


def another_process(store: Store, may_start_fresh: bool = True) -> Writer:
    writers.is_new_process()
    return Writer(store, may_start_fresh)


def steps(store: Store) -> list[int]:
    return sorted(base.step for base in repository.visible(store, RUN))


def test_a_newer_step_goes_on_whatever_was_restored_and_retention_sees_no_difference(store: Store) -> None:
    writer = Writer(store)
    writer.save(1, 2, 3)
    writer.restore(1)
    writer.save(4)
    assert (steps(store), timeline.numbers(store, RUN)) == ([1, 2, 3, 4], [1])
    assert collect.retain(store, RUN, Keep(last=100)) is None
    started = another_process(store)
    started.restore(2)
    assert timeline.numbers(store, RUN) == [1], "reading opens nothing"
    started.save(5)
    assert (steps(store), timeline.numbers(store, RUN)) == ([1, 2, 3, 4, 5], [1, 2])
    assert collect.retain(store, RUN, Keep(last=100)) is None


def test_a_step_that_is_there_already_begins_a_branch_after_a_restore(store: Store) -> None:
    writer = Writer(store)
    writer.save(10, 20, 30)
    writer.restore(20)
    assert writer.save(25).timeline == 2
    assert steps(store) == [10, 20, 25]
    assert writer.save(30).timeline == 2
    assert steps(store) == [10, 20, 25, 30]
    done = collect.retain(store, RUN, Keep(last=100))
    assert done is not None
    assert [(step.timeline, step.step) for step in done.tombstones] == [(1, 30)], "what the branch has replaced"


@pytest.mark.parametrize(
    ("restored", "saved", "before"),
    [(1, 4, [1, 2, 3]), (2, 3, [1, 2]), (3, 3, [1, 2, 3]), (4, 3, [1, 2, 3, 4]), (1, 1, [1])],
    ids=["only looked at", "gone back to", "saved again", "saved again, and the one before", "from the first"],
)
def test_what_is_restored_after_a_death_before_the_first_commit(
    store: Store, restored: int, saved: int, before: list[int]
) -> None:
    """No step is hidden before a step is committed, and none before the saved one then."""
    writer = Writer(store)
    writer.save(1, 2, 3, 4)
    writer.restore(restored)
    state = WriterState(writer.name, writer.timeline, writer.restored, may_start_fresh=True)
    assert writers.place(store, RUN, saved, state).timeline == 2
    assert steps(store) == [1, 2, 3, 4], "a timeline without a decided step hides nothing"
    writer.restored = None
    writer.save(saved)
    assert steps(store) == sorted({*before, saved})
    latest = repository.find(store, RUN, "latest")
    assert latest is not None
    assert (latest.timeline, latest.step) == (2, saved)


def test_a_branch_before_the_oldest_step_begins_at_the_restored_one(store: Store) -> None:
    writer = Writer(store)
    writer.save(10, 20)
    writer.restore(10)
    writer.save(5)
    latest = repository.find(store, RUN, "latest")
    assert latest is not None
    assert (latest.step, steps(store)) == (5, [5, 10])


def test_a_new_process_goes_back_as_far_as_its_first_step_says(store: Store) -> None:
    Writer(store).save(10, 20, 30)
    heir = another_process(store)
    heir.restore(10)
    heir.save(20)
    assert steps(store) == [10, 20]


def test_a_new_process_that_restores_nothing_goes_on_or_starts_anew_by_its_first_step(store: Store) -> None:
    Writer(store).save(10, 20)
    another_process(store).save(30)
    assert steps(store) == [10, 20, 30]
    another_process(store, may_start_fresh=False).save(20)
    assert steps(store) == [10, 20]
    another_process(store).save(5)
    assert steps(store) == [5]


def test_a_step_of_an_abandoned_timeline_is_gone_back_to_where_it_lies(store: Store) -> None:
    writer = Writer(store)
    abandoned = writer.save(10, 20, 30)
    writer.restore(10)
    writer.save(20, 50)
    writer.restore(abandoned)
    assert writer.save(60).timeline == 2, "step 60 is newer than all: the tagged step was only looked at"
    writer.restore(abandoned)
    assert writer.save(40).timeline == 3
    assert steps(store) == [10, 20, 30, 40]


def test_a_trainer_that_restored_the_latest_step_keeps_it_when_another_goes_back_meanwhile(store: Store) -> None:
    Writer(store).save(1, 2, 3)
    going_on = another_process(store)
    latest = repository.find(store, RUN, "latest")
    assert latest is not None
    going_on.restore(latest)
    going_on.was_latest = True
    going_back = another_process(store)
    going_back.restore(1)
    going_back.save(2)  # its timeline hides steps 2 and 3
    assert steps(store) == [1, 2]
    writers.is_new_process()
    going_on.save(4)
    assert steps(store) == [1, 2, 3, 4]
    assert repository.find(store, RUN, 3) == latest


def test_a_timeline_whose_document_arrives_long_after_its_trainer_gave_up_hides_no_step(store: Store) -> None:
    writer = Writer(store)
    writer.save(1, 2)
    assert timeline.take(store, RUN, 2, None)  # the request of a trainer that looked before step 1 was committed
    latest = repository.find(store, RUN, "latest")
    assert latest is not None
    assert latest.step == 2
    assert not collect.to_delete(store, RUN, Keep(last=2))
    with pytest.raises(ConflictError, match="taken over by timeline 2"):
        writer.save(3)
    another_process(store).save(3)
    assert steps(store) == [1, 2, 3]


def test_a_repository_that_appears_during_the_search_is_not_taken_for_one_that_lost_its_document(store: Store) -> None:
    class Late(Wrapped):
        """The first look at the document comes before the repository was created."""

        looks = 0

        def get(self, key: str, *, max_bytes: int = SMALL_OBJECT_BYTES) -> bytes:
            if key == names.REPO:
                self.looks += 1
                if self.looks == 1:
                    raise NotFoundError(f"{key} does not exist")
            return super().get(key, max_bytes=max_bytes)

    Writer(store).save(1)
    late = Late(store)
    repository.find(late, "another", "latest")
    assert late.looks == 2


def test_a_trainer_that_starts_anew_and_dies_before_its_first_commit_hides_nothing(store: Store) -> None:
    left = Writer(store).save(10, 20)
    timeline.open_timeline(store, RUN, None)
    heir = another_process(store)
    assert steps(store) == [10, 20]
    heir.restore(left)
    heir.save(30)
    assert steps(store) == [10, 20, 30]


def test_writers_of_one_process_share_a_timeline_and_a_step_is_saved_once(store: Store) -> None:
    first, second = Writer(store), Writer(store, may_start_fresh=False)
    first.save(1)
    second.save(2)
    first.save(3)
    assert (steps(store), timeline.numbers(store, RUN)) == ([1, 2, 3], [1])
    with pytest.raises(ConflictError, match="step 3 of run exp is already saved in timeline 1, which this process"):
        second.save(3)
    with pytest.raises(ConflictError, match="step 2 of run exp is already saved"):
        Writer(store).save(2)


def test_a_writer_that_has_left_is_another_start(store: Store) -> None:
    first = Writer(store)
    first.save(1, 2)
    writers.leave(first.name)
    assert Writer(store).save(1).timeline == 2
    assert steps(store) == [1]


def test_a_writer_goes_on_in_a_timeline_whose_opener_has_left(store: Store) -> None:
    first, second = Writer(store), Writer(store)
    first.save(1)
    second.save(2)
    writers.leave(first.name)
    second.save(3)
    second.restore(2)
    second.save(4)
    assert (steps(store), timeline.numbers(store, RUN)) == ([1, 2, 3, 4], [1])
    joined = writers.of_this_job()
    another_process(store).save(5)
    writers.is_new_process()
    writers.join(joined)
    with pytest.raises(ConflictError, match="timeline 1 was taken over by timeline 2"):
        second.save(6)


def test_a_process_that_was_handed_the_writers_saves_in_their_timeline(store: Store) -> None:
    first = Writer(store)
    first.save(1)
    known = writers.of_this_job()
    child = another_process(store)
    writers.join(known)
    assert child.save(2).timeline == 1


def test_a_writer_whose_run_was_taken_over_stays_out_whatever_it_restores(store: Store) -> None:
    zombie = Writer(store)
    zombie.save(1, 2)
    heir = another_process(store)
    heir.save(3)
    writers.is_new_process()
    for step in (1, 3):
        zombie.restore(step)
        with pytest.raises(ConflictError, match="timeline 1 was taken over by timeline 2, opened by process"):
            zombie.save(4)
    assert steps(store) == [1, 2, 3]
    known = Writer(store)
    state = WriterState(known.name, handed_on=True)
    writers.join([zombie.name])  # saves for this process are made by that one alone
    with pytest.raises(ConflictError, match="timeline 1 was taken over by timeline 2"):
        writers.place(store, RUN, 4, state)


def test_another_writer_of_the_same_process_is_named_as_such(store: Store) -> None:
    first, second = Writer(store), Writer(store)
    first.save(1, 2)
    second.restore(1)
    second.save(2)
    attempt = Attempt(RUN, 1, 3, "01J00000000000000000000000", 1)
    action = commit.decide(attempt, commit.look(store, attempt, lease_alive=True))
    assert isinstance(action, commit.Stop)
    assert "timeline 1 was taken over by timeline 2, which this process opened" in str(action.error)
    assert first.timeline == 1
    state = WriterState(first.name, first.timeline)
    assert writers.place(store, RUN, 3, state) == SaveTarget(2, repository.find(store, RUN, 2))


def test_of_two_writers_that_come_at_once_one_opens_the_timeline(store: Store) -> None:
    meet, met = threading.Barrier(2, timeout=60), list[str]()

    class Meeting(Wrapped):
        def put_if_absent(self, key: str, data: Buffer) -> bool:
            if "timelines/" in key:
                met.append(key)
                meet.wait()
            return self.inner.put_if_absent(key, data)

    found: list[int] = []
    both = [Writer(Meeting(store)), Writer(Meeting(store))]
    threads = [
        threading.Thread(target=lambda w=w: found.append(writers.place(w.store, RUN, 1, WriterState(w.name)).timeline))
        for w in both
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (found, len(met)) == ([1, 1], 2)


def test_a_step_that_is_removed_before_it_is_held_is_not_what_a_timeline_begins_at(store: Store) -> None:
    Writer(store).save(1, 2)
    held: list[Base] = []

    def hold(base: Base) -> None:
        held.append(base)
        if base.step == 2:
            collect.collect(store, [base.of(RUN)])
            raise NotFoundError("step 2 is being removed")

    heir = another_process(store)
    place = writers.place(store, RUN, 3, WriterState(heir.name), hold)
    assert [base.step for base in held] == [2, 1]
    parent = timeline.read_timeline(store, RUN, place.timeline).parent
    assert parent is not None
    assert parent.step == 1

    def never(base: Base) -> None:
        held.append(base)
        raise NotFoundError("it is being removed")

    held.clear()
    with pytest.raises(ConflictError, match="because retention removed its parent step"):
        writers.place(store, RUN, 3, WriterState(another_process(store).name), never)
    assert len(held) == 20


@pytest.mark.parametrize(
    ("restored", "saved", "visible"),
    [(30, 15, [10, 15, 20, 30]), (30, 5, [5, 10, 20, 30]), (20, 15, [10, 15, 20])],
    ids=["between others", "below all", "with an abandoned step"],
)
def test_all_readers_agree_on_the_steps_after_a_save_below_the_restored_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], restored: int, saved: int, visible: list[int]
) -> None:
    """The branch begins at the restored step, so no step up to it is abandoned, and the latest has a lower number."""
    url = str(tmp_path)
    with open_store(url) as store:
        repository.ensure_repo(store)
        Writer(store).save(10, 20, 30)
        going_back = another_process(store)
        going_back.restore(restored)
        going_back.save(saved)
        latest = repository.find(store, RUN, "latest")
        assert latest is not None
        assert (latest.step, steps(store)) == (saved, visible)
        for step in visible:
            assert repository.find(store, RUN, step) is not None
        newest_first = [saved, *(step for step in (30, 20, 10) if step in visible)]
        assert [line.step for line in survey.newest_first(store, RUN)] == newest_first
        for lines in (survey.survey(store, RUN).steps, read_report(store, RUN).runs[0].steps):
            assert sorted(line.step for line in lines if line.current) == visible
        marks = dict.fromkeys({10, 20, 30} - set(visible), "(abandoned branch)") | dict.fromkeys(visible, "")
        assert main(["ckpt", "ls", url]) == 0
        listed = capsys.readouterr().out.splitlines()
        assert {int(line.split()[4]): line.partition("ranks 1")[2].strip() for line in listed} == marks | {
            saved: "(latest)"
        }
        assert main(["ckpt", "tree", url]) == 0
        assert f"timeline 2 from step {restored} of timeline 1: step {saved}  (newest)" in capsys.readouterr().out
        assert collect.retain(store, RUN, Keep(last=len(visible))) is None, (
            "a step that is higher than the latest stays"
        )
        collect.retain(store, RUN, Keep(last=2))
        assert steps(store) == sorted({*newest_first[:2], *(step for step in visible if step > saved)})


def test_of_a_step_that_was_saved_again_only_the_newer_one_is_current(store: Store) -> None:
    writer = Writer(store)
    writer.save(10, 20, 30)
    writer.restore(30)
    writer.save(20)
    expected = [(1, 10, True), (1, 20, False), (1, 30, True), (2, 20, True)]
    for lines in (survey.survey(store, RUN).steps, read_report(store, RUN).runs[0].steps):
        assert sorted((line.timeline, line.step, line.current) for line in lines) == expected
    collect.retain(store, RUN, Keep(last=100))
    assert steps(store) == [10, 20, 30]
    assert repository.find(store, RUN, 20) == repository.find(store, RUN, "latest")
