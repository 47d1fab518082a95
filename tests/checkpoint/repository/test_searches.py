"""Searches for a step among removed steps, damaged documents and replaced timelines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.repository import collect, timeline
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.retention import Keep
from headrace.dataio.core.limits import JSON_DOCUMENT_BYTES
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from tests.checkpoint.repository.test_pack_users import saved
from tests.support.checkpoint_states import RUN, Wrapped, begin, load, make, save, tiny_state


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(str(tmp_path / "ck")) as store:
        yield store


def test_the_step_of_an_attempt_is_found_among_removed_steps(store: Store) -> None:
    """A tombstone is all that is left of most of them. The packs of the first one are still needed."""
    steps = saved(store, 30, frozen=3)
    collect.retain(store, RUN, Keep(last=2))
    for base in steps:
        found = repository.step_of_attempt(store, RUN, base.attempt)
        assert found is not None
        assert found.step == base.step


@pytest.mark.parametrize("step", [b"-5", b"9" * 30, b"9" * 4200, b"9" * 5000, b'"x"', b"null", b"1e300"])
def test_the_latest_step_is_found_whatever_number_newest_json_names(store: Store, step: bytes) -> None:
    steps = saved(store, 3)
    store.put(names.newest(RUN, 1), b'{"version":1,"nonce":"x","step":' + step + b"}")
    assert repository.find(store, RUN, "latest") == steps[-1]


def test_the_latest_step_is_found_although_newest_json_is_too_large(store: Store) -> None:
    steps = saved(store, 3)
    store.put(names.newest(RUN, 1), bytes(JSON_DOCUMENT_BYTES + 1))
    assert repository.find(store, RUN, "latest") == steps[-1]


class Hooked(Wrapped):
    """Calls `hook` once, before the first listing of a folder that has the given prefix."""

    def __init__(self, inner: Store, prefix: str, hook: Callable[[], object]) -> None:
        super().__init__(inner)
        self.prefix, self.hook = prefix, [hook]

    def list_folders(self, prefix: str = "", *, after: str = "") -> Iterator[str]:
        if prefix == self.prefix and self.hook:
            self.hook.pop()()
        return super().list_folders(prefix, after=after)


def test_a_late_step_of_a_timeline_that_was_replaced_is_not_the_latest(store: Store) -> None:
    """Its saver slept between its look for newer timelines and its decision, while the reader searched."""
    one = save(store, make(store, tiny_state(1), step=1, number=begin(store)))
    newest: list[Base] = []

    def replace() -> None:
        number = begin(store, one)
        newest.append(save(store, make(store, tiny_state(2), step=2, number=number, bases=(one,))))
        with mock.patch.object(timeline, "newest_after", return_value=None):
            save(store, make(store, tiny_state(3), step=2, number=1, bases=(one,)))

    hooked = Hooked(store, names.timeline_steps(RUN, 1), replace)
    assert repository.find(hooked, RUN, "latest") == newest[0]


def test_objects_whose_names_have_digits_of_other_scripts_change_nothing(store: Store) -> None:
    """They name no object of a repository. Read as numbers, they would name objects that are missing."""
    base = saved(store, 1)[0]
    zero, five = "\N{ARABIC-INDIC DIGIT ZERO}", "\N{ARABIC-INDIC DIGIT FIVE}"
    new = {"new": b"n" * 100}
    store.put(f"runs/{RUN}/timelines/{zero * 5}{five}.json", b"x")
    store.put(f"runs/{RUN}/{zero * 5}{five}/{zero * 11}{five}/COMMIT", b"x")
    store.put(names.step(RUN, 1, 1) + f"{base.attempt}/rank-{zero * 4}{five}.manifest", b"x")
    last = save(store, make(store, new, step=2, bases=(base,)))
    assert repository.find(store, RUN, "latest") == last
    collect.retain(store, RUN, Keep(last=1))
    assert not list(store.list(names.packs(base.attempt)))
    assert load(store, last) == new
