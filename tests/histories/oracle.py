"""What a repository must hold, worked out from what its processes were told, and from nothing of the code under test.

Purpose: processes write one line into a journal before and after everything that they do. `judge` reads the journal and what was
found when all of them were quiet, and returns what does not fit.
Invariants, for each run:
- a step that is seen holds, bit for bit, what one save of this run and step number wrote;
- a step that was reported as committed is there, unless a policy may have removed it or a newer timeline does not follow it;
- the newest step is the newest that was reported, or a later one of the same or a newer timeline;
- a checkpoint that the daemon took over is committed, unless a newer timeline, an error or the loss of its node prevented it;
- a tag names the step that it was given to last, and its data is there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class Journal:
    """Lines of JSON that are whole or not there, in the order in which they were written, from any number of processes."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def say(self, event: str, **about: Any) -> None:
        os.write(self._fd, (json.dumps({"event": event, **about}) + "\n").encode())


def read_journal(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()] if os.path.exists(path) else []


@dataclass
class Save:
    """One call of `save`. `parent`: the save that the trainer went on from."""

    nonce: int
    run: str
    step: int
    trainer: str
    parent: int | None
    number: int
    """Of its line in the journal."""
    node: str = ""
    staged: bool = False
    failed: str = ""
    timeline: int = 0
    """0: it was not reported as committed."""
    attempt: str = ""


@dataclass(frozen=True)
class Found:
    """One step as a reader sees it. `nonce` is None when its bytes are those of no save."""

    timeline: int
    step: int
    nonce: int | None


@dataclass
class Seen:
    """What was found when nothing was running."""

    branch: dict[str, list[Found]] = field(default_factory=dict)
    """Newest first."""
    stored: set[tuple[str, int, int, str]] = field(default_factory=set)
    """(run, timeline, step, attempt) of all committed steps, abandoned timelines too."""
    tags: dict[str, int | None] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """What a full check of the repository says."""


@dataclass
class Told:
    """The journal, put in order."""

    saves: dict[int, Save] = field(default_factory=dict)
    began: dict[str, int] = field(default_factory=dict)
    """The line at which each trainer had restored."""
    chose: dict[str, Any] = field(default_factory=dict)
    """The step that each trainer asked for: a number or "latest"; None for a new start."""
    keeps: dict[str, int] = field(default_factory=dict)
    """The fewest steps that a policy of each run keeps."""
    tags: dict[str, list[int]] = field(default_factory=dict)
    """The save that each tag was given to last, and those of attempts whose outcome is not known."""
    given: set[str] = field(default_factory=set)
    """Tags that were reported."""
    lost: set[str] = field(default_factory=set)
    committed_at: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, lines: Iterable[dict[str, Any]]) -> Told:
        told = cls()
        for number, line in enumerate(lines):
            told._hear(number, line)
        return told

    def _hear(self, number: int, line: dict[str, Any]) -> None:
        match line["event"]:
            case "restored":
                self.began[line["trainer"]] = number
                self.chose[line["trainer"]] = line["asked"]
            case "saving":
                about = {name: line[name] for name in ("nonce", "run", "step", "trainer", "parent", "node")}
                self.saves[line["nonce"]] = Save(number=number, **about)
            case "staged":
                self.saves[line["nonce"]].staged = True
                self.saves[line["nonce"]].attempt = line["attempt"]
            case "committed":
                save = self.saves[line["nonce"]]
                save.timeline, save.attempt = line["timeline"], line["attempt"]
                self.committed_at[save.nonce] = number
            case "failed":
                self.saves[line["nonce"]].failed = line["code"]
            case "policy":
                self.keeps[line["run"]] = min(line["last"], self.keeps.get(line["run"], line["last"]))
            case "tagging":
                self.tags.setdefault(line["name"], []).append(line["nonce"])
            case "tagged":
                self.tags[line["name"]] = [line["nonce"]]
                self.given.add(line["name"])
            case "node lost":
                self.lost.add(line["node"])

    def line_of(self, nonce: int | None) -> Iterator[Save]:
        """The save and those that it follows, newest first, also those of another run from which it was forked."""
        while nonce is not None and nonce in self.saves:
            yield self.saves[nonce]
            nonce = self.saves[nonce].parent


def judge(lines: Iterable[dict[str, Any]], seen: Seen) -> list[str]:
    """What does not fit; empty when all is well."""
    told = Told.of(lines)
    wrong = [f"check: {problem}" for problem in seen.problems]
    runs = {save.run for save in told.saves.values()} | set(seen.branch)
    for run in sorted(runs):
        wrong += _contents(told, run, seen.branch.get(run, []))
        wrong += _newest(told, run, seen.branch.get(run, []))
        wrong += _promised(told, run, seen.branch.get(run, []))
        wrong += _taken_over(told, run, seen)
    return [*wrong, *_tags(told, seen)]


def _contents(told: Told, run: str, branch: list[Found]) -> Iterator[str]:
    for found in branch:
        save = told.saves.get(found.nonce or 0)
        if save is None:
            yield f"{run} step {found.step} of timeline {found.timeline} holds bytes that no save wrote"
        elif (save.run, save.step) != (run, found.step):
            yield f"{run} step {found.step} holds what step {save.step} of {save.run} saved"
    steps = [found.step for found in branch]
    if steps != sorted(set(steps), reverse=True):
        yield f"{run} lists its steps as {steps}"


def _reported(told: Told, run: str) -> list[Save]:
    """Newest first: by timeline, then by step."""
    mine = [save for save in told.saves.values() if save.run == run and save.timeline]
    return sorted(mine, key=lambda save: (save.timeline, save.step), reverse=True)


def _newest(told: Told, run: str, branch: list[Found]) -> Iterator[str]:
    reported = _reported(told, run)
    if not reported:
        return
    last = reported[0]
    if not branch:
        yield f"{run} has no step; step {last.step} of timeline {last.timeline} was committed"
        return
    newest = branch[0]
    where = f"{run} ends at step {newest.step} of timeline {newest.timeline}"
    if newest.timeline > last.timeline:
        if not _may_hide(told, newest, last):
            yield f"{where}, which hides step {last.step} of {last.timeline}"
    elif (newest.timeline, newest.step) < (last.timeline, last.step) and not _went_back(told, newest, last):
        yield f"{where}; step {last.step} of timeline {last.timeline} was committed"


def _went_back(told: Told, newest: Found, last: Save) -> bool:
    """A trainer went on from the step by choice, or before the last one was committed, and died before its own first commit."""
    return any(
        save.parent == newest.nonce and save.trainer != last.trainer and _unaware(told, save.trainer, last)
        for save in told.saves.values()
        if save.run == last.run
    )


def _unaware(told: Told, trainer: str, last: Save) -> bool:
    """The trainer did not go on from the step because it chose another one, or could not know of it."""
    return told.chose.get(trainer) != "latest" or told.began[trainer] < told.committed_at[last.nonce]


def _may_hide(told: Told, newest: Found, last: Save) -> bool:
    """A newer timeline follows the step, or its trainer had chosen its beginning before the step was committed, or by number."""
    save = told.saves.get(newest.nonce or 0)
    if save is None:
        return False
    line = list(told.line_of(save.nonce))
    theirs = {each.nonce for each in told.line_of(last.nonce)}
    if last.nonce in {each.nonce for each in line}:
        return True
    own = [each for each in line if each.nonce not in theirs and each.run == save.run]
    trainer = own[-1].trainer if own else save.trainer  # the one that left the other's line
    return _unaware(told, trainer, last)


def _promised(told: Told, run: str, branch: list[Found]) -> Iterator[str]:
    """The newest steps of the branch are all there, as many as every policy keeps."""
    if not branch:
        return
    there = {found.step: found.nonce for found in branch}
    line = [save for save in told.line_of(branch[0].nonce) if save.run == run]
    followed = dict[int, Save]()  # by step; of two saves with one number on a line, the later one hides the earlier one
    for save in line:
        if save.step not in followed and save.timeline:
            followed[save.step] = save
    newest = sorted(followed.keys() | there.keys(), reverse=True)[: told.keeps.get(run)]
    for save in (followed[step] for step in newest if step in followed):
        if save.step not in there:
            yield f"{run} step {save.step} of timeline {save.timeline} was committed and is gone"
        elif there[save.step] != save.nonce:
            yield f"{run} step {save.step} is another save than the one that was committed"


def _taken_over(told: Told, run: str, seen: Seen) -> Iterator[str]:
    stored = {(name, step, attempt) for name, _, step, attempt in seen.stored}
    newest = max((timeline for name, timeline, _, _ in seen.stored if name == run), default=0)
    for save in told.saves.values():
        if save.run != run or not save.staged or save.failed or save.node in told.lost or run in told.keeps:
            continue
        if (run, save.step, save.attempt) in stored:
            continue
        later = [other for other in told.saves.values() if other.run == run and other.number > save.number]
        if any(other.trainer != save.trainer for other in later) or (save.timeline and save.timeline < newest):
            continue  # another trainer took over, which stops what the first one had not committed
        yield f"{run} step {save.step}: the daemon took it over and it is not committed"


def _tags(told: Told, seen: Seen) -> Iterator[str]:
    for name, possible in told.tags.items():
        if name not in seen.tags:
            if name in told.given:
                yield f"tag {name} is gone"
        elif seen.tags[name] not in possible:
            yield f"tag {name} names {seen.tags[name]}, not one of {possible}"
