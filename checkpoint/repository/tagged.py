"""Tags as they lie in the repository, and the steps that they name. Giving them is `checkpoint.lifecycle.tags`.

Invariant: a tag names one attempt of one run, in whichever timeline it lies.
Failure behaviour: `NotFoundError` for a tag that is not there, or whose step was removed; `UsageError` for a tag of another run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress

from checkpoint.format import names
from checkpoint.format.documents import Base, Document, Who, read
from checkpoint.repository import commit
from checkpoint.repository.commit import Attempt
from dataio.core.errors import NotFoundError, UsageError
from dataio.store.contract import Store

TAGS = "tags/"
PREFIX = "tag:"
"""Before a name it makes a step: `restore(state, "tag:best")`."""
_KEY = re.compile(r"tags/([^/]+)\.json")


class Tag(Document, frozen=True, kw_only=True):
    """`name` stands for this step."""

    name: str
    run: str
    timeline: int
    step: int
    attempt: str
    created: float
    who: Who

    @property
    def base(self) -> Base:
        return Base(self.timeline, self.step, self.attempt)


def key_of(name: str) -> str:
    """Where the tag lies; `UsageError` for what cannot be a name."""
    return f"{TAGS}{names.check_run(name, 'tag')}.json"


def find(store: Store, name: str) -> Tag:
    """The step that the tag names; whether it is still there is for the reader to see."""
    try:
        return read(store, key_of(name), Tag)
    except NotFoundError:
        raise NotFoundError(f"no tag {name}", hint="`millrace ckpt tags` lists them") from None


def all_tags(store: Store) -> Iterator[Tag]:
    """Every tag, by name."""
    for info in store.list(TAGS):
        if _KEY.fullmatch(info.key):
            with suppress(NotFoundError):  # somebody forgot it just now
                yield read(store, info.key, Tag)


def step_of(store: Store, run: str, name: str) -> Base:
    """The committed step of `run` that the tag names, also in an abandoned timeline."""
    tag = find(store, name)
    if tag.run != run:
        raise UsageError(f"tag {name} is step {tag.step} of run {tag.run}, not of {run}", hint=f"give run={tag.run!r}")
    found = commit.recognise(store, Attempt(run, tag.timeline, tag.step, tag.attempt, 0))
    if found is None or found.tombstone or found.attempt != tag.attempt:
        raise NotFoundError(f"step {tag.step} of run {run}, which tag {name} names, was removed", hint="move the tag")
    return tag.base
