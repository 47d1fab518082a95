"""The timelines of a run as a tree: each timeline under the step at which it forks.

Invariant: the tree has every timeline of the run, also those without a step, and only committed steps are counted.
Failure behaviour: `CorruptionError` for a timeline document that cannot be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository import timeline
from headrace.checkpoint.repository.survey import StepLine
from headrace.dataio.store.base import Store


@dataclass(slots=True)
class TimelineNode:
    """One timeline. `parent`, `fork`: the timeline and the step at which it begins; None for a fresh start.

    `followed`: whether readers follow it. `steps`: its committed steps, in ascending order.
    """

    timeline: int
    created: float
    parent: int | None
    fork: int | None
    followed: bool
    steps: list[int]


@dataclass(slots=True)
class RunTree:
    """The timelines of one run, in the order of their numbers."""

    run: str
    timelines: list[TimelineNode] = field(default_factory=list)


def runs_of(store: Store, run: str | None) -> list[str]:
    """All runs, or only this one."""
    return repository.runs(store) if run is None else [run]


def build(store: Store, run: str, lines: Iterable[StepLine]) -> RunTree:
    """Read the run's timelines. `lines`: the steps of a survey."""
    steps: dict[int, list[int]] = {}
    for line in lines:
        if line.run == run:
            steps.setdefault(line.timeline, []).append(line.step)
    followed, tree = timeline.followed(store, run), RunTree(run)
    for number in timeline.numbers(store, run):
        document = timeline.read_timeline(store, run, number)
        parent = document.parent
        tree.timelines.append(
            TimelineNode(
                number,
                document.created,
                parent.timeline if parent is not None else None,
                parent.step if parent is not None else None,
                number == followed,
                sorted(steps.get(number, ())),
            )
        )
    return tree


def lines(tree: RunTree) -> Iterator[str]:
    """The tree as lines of text. A run may have a long chain of timelines, so the walk is not recursive."""
    yield tree.run
    children: dict[int | None, list[TimelineNode]] = {}
    for node in tree.timelines:
        children.setdefault(node.parent, []).append(node)
    waiting = [(node, 1) for node in reversed(children.get(None, []))]
    while waiting:
        node, depth = waiting.pop()
        yield f"{'  ' * depth}{_label(node)}"
        # a timeline that continues its parent is not indented further, so that a run of many restarts stays readable
        inner = children.get(node.timeline, [])
        waiting += [(child, depth if child is inner[-1] else depth + 1) for child in reversed(inner)]


def _label(node: TimelineNode) -> str:
    origin = "" if node.parent is None else f" from step {node.fork} of timeline {node.parent}"
    steps = "no steps" if not node.steps else f"step {node.steps[0]}"
    if len(node.steps) > 1:
        steps = f"{len(node.steps)} steps from {node.steps[0]} to {node.steps[-1]}"
    return f"timeline {node.timeline}{origin}: {steps}{'  (newest)' if node.followed else ''}"
