"""Processes of one run killed at random moments and at random named points, with deduplication, retention, tags and readers.

After each kill, every step that was reported as committed and that the policy keeps can be restored bit for bit. A step that was
not reported is complete or absent. `check` reports no problem, and the next save works.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import Base, StepName
from headrace.checkpoint.repository import check, collect, commit, tags, timeline
from headrace.checkpoint.repository import steps as repository
from headrace.dataio.core.crashpoints import declared
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from tests.support import checkpoint_kills
from tests.support.checkpoint_kills import Journal, Task, read_journal, state_of
from tests.support.checkpoint_states import RUN, begin, load, make, save

pytestmark = pytest.mark.slow

POINTS = sorted(
    name
    for name in declared()
    if name.startswith(("ckpt.", "gc.", "store.")) and name not in ("ckpt.mid-stage", "ckpt.group-written")
)
PER_REPOSITORY = 25
"""Kills in one repository: later ones find what the earlier ones left."""


class Repository:
    """A run that is killed again and again, and what it promised."""

    def __init__(self, url: str, folder: Path, seed: int) -> None:
        self._url, self._folder = url, folder
        self._chance = random.Random(seed)
        self._last = self._chance.choice([1, 2, 3])
        self._journal = str(folder / "journal")
        self._said = Journal(self._journal)
        self._longest = 0.8
        self._two = False
        self.kills, self.count = 0, Counter[str]()

    def round(self, number: int) -> None:
        """One or more workers; the trainer, and perhaps others, die somewhere."""
        tasks = [self._task("trainer", number)]
        for kind, share in (("trainer", 0.15), ("collector", 0.4), ("reader", 0.4), ("tagger", 0.15)):
            if self._chance.random() < share:
                tasks.append(self._task(kind, number))
        self._two |= [task.kind for task in tasks].count("trainer") > 1
        began = time.monotonic()
        running = [checkpoint_kills.start(task) for task in tasks]
        steps_to_delete = {0} | {i for i in range(1, len(running)) if self._chance.random() < 0.5}
        if not tasks[0].crash:
            time.sleep(self._chance.uniform(0, self._longest))
        for i in steps_to_delete:
            if not tasks[i].crash:
                running[i].kill()
        for task, process in zip(tasks, running, strict=True):
            process.communicate()
            self._heard(task, process.wait())
        self._longest = 0.7 * self._longest + 0.3 * min(1.5 * (time.monotonic() - began), 3.0)

    def _task(self, kind: str, number: int) -> Task:
        crash = self._chance.choice(POINTS) if kind in ("trainer", "collector") and self._chance.random() < 0.4 else ""
        return Task(
            kind,
            self._url,
            self._journal,
            self._last,
            crash=crash,
            nth=self._chance.choice([1, 1, 2, 3, 6]),
            mark=str(self._folder / "marks"),
            name=f"tag-{number}",
        )

    def _heard(self, task: Task, code: int) -> None:
        killed = code == -signal.SIGKILL
        self.kills += killed
        self.count[f"{task.kind} {'killed' if killed else 'ended' if not code else 'failed'}"] += 1
        broken = [line for line in read_journal(self._journal) if line[0] == "broken"]
        assert not broken, "\n".join(" ".join(line) for line in broken)
        assert code in (0, 3, -signal.SIGKILL), (task, code, read_journal(self._journal)[-3:])

    def check(self, store: Store) -> None:
        """The oracle."""
        if repository.read_repo(store) is None:
            assert not checkpoint_kills.committed(self._journal)
            return
        if repository.pending_deletes(
            store
        ):  # by a collector that was killed: refused to readers until the next one has been
            collect.collect(store, ())
        report = check.check(store)
        assert report.clean, report.problems
        there = {StepName(line.timeline, line.step): line.attempt for line in report.steps}
        going = repository.pending_deletes(store)  # spared now, since somebody dead still holds it
        for name, attempt in there.items():
            if (RUN, name.timeline, name.step) in going:
                continue
            assert load(store, Base(name.timeline, name.step, attempt)) == state_of(name.timeline, name.step)
        self._check_promises(store, there)
        self._check_tags(store, there)
        self._save_next(store)

    def _check_promises(self, store: Store, there: dict[StepName, str]) -> None:
        promised = checkpoint_kills.committed(self._journal)
        branch = list(repository.visible(store, RUN))
        segments = timeline.branch(store, RUN)
        upto = {segment.timeline: segment.upto for segment in segments}
        for base in promised:
            found = commit.find_commit(store, names.commit(RUN, base.timeline, base.step))
            assert found is None or found.tombstone or found.attempt == base.attempt, f"{base} became {found}"
            inside = base.timeline in upto and ((last := upto[base.timeline]) is None or base.step <= last)
            newer = sum(b.step >= base.step for b in branch)
            if StepName(base.timeline, base.step) not in there:
                least = (
                    self._last if inside and not self._two else 1
                )  # one of two trainers may take the branch back a little
                assert newer >= least, f"{base} is lost; the branch is {branch}"
        self.count["promised"] = len(promised)
        self.count["removed"] = len(promised) - len(there)

    def _check_tags(self, store: Store, there: dict[StepName, str]) -> None:
        given = [words for words in read_journal(self._journal) if words[0] == "tagged"]
        named = {(tag.timeline, tag.step, tag.attempt) for tag in tags.all_tags(store)}
        for _, number, step, attempt in given:
            assert (int(number), int(step), attempt) in named
            assert there.get(StepName(int(number), int(step))) == attempt, f"step {step} was removed, but has a tag"
        self.count["tagged"] = len(given)

    def _save_next(self, store: Store) -> None:
        base = repository.find(store, RUN, "latest")
        number, step = begin(store, base), base.step + 1 if base else 1
        made = make(store, state_of(number, step), step=step, number=number, bases=(base,) if base else ())
        saved = save(store, made)
        self._said.say("committed", number, step, saved.attempt)
        assert repository.find(store, RUN, "latest") == saved
        assert load(store, saved) == state_of(number, step)

    def end(self, store: Store) -> None:
        """What the dead left goes, once their leases are over."""
        collect.collect(store, ())
        self.check(store)


def killing(url: str, folder: Path, seed: int, kills: int) -> Counter[str]:
    run = Repository(url, folder, seed)
    with open_store(url) as store:
        for number in range(20 * kills):  # not every one is hit: it ended before, or never came to its point
            run.round(number)
            run.check(store)
            if run.kills >= kills:
                break
        run.end(store)
    assert run.kills >= kills
    marks = folder / "marks"
    fired = Counter(marks.read_text().split() if marks.exists() else ())
    print(f"seed {seed} {url.partition(':')[0]}: {run.kills} kills, {dict(run.count)}, at points {dict(fired)}")
    return run.count


def test_a_few_kills_lose_nothing(tmp_path: Path) -> None:
    count = killing(f"file://{tmp_path / 'store'}", tmp_path, seed=0, kills=3)
    assert count["promised"]


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(1, 21))
def test_five_hundred_kills_on_a_directory_lose_nothing(seed: int, tmp_path: Path) -> None:
    killing(f"file://{tmp_path / 'store'}", tmp_path, seed, PER_REPOSITORY)


@pytest.mark.soak
@pytest.mark.s3
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(101, 121))
def test_five_hundred_kills_on_s3_lose_nothing(seed: int, s3_url: str, tmp_path: Path) -> None:
    killing(s3_url, tmp_path, seed, PER_REPOSITORY)
