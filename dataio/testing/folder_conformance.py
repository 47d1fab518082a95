"""Tests of `Store.list_folders`, which test classes inherit.

Use: `conformance.StoreConformance` inherits them. A server that cannot pass the whole suite, for example one without
conditional writes, is tested with `FolderConformance` alone. The class needs the fixture `store`, an empty, open store.

Invariant: each test checks a sentence of the docstring of `Store.list_folders`.
Failure behaviour: a store that violates the contract fails a test.
"""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from headrace.dataio.core.errors import UsageError
from headrace.dataio.store.base import Store

NAMES = ["a b", "a-b", "a.b", "a", "a0", "ab", "b", "%41", "x=1+y", "ä"]
"""Names whose order by name + "/" differs from their order by name."""
_examples = itertools.count()
_SEGMENTS = st.lists(st.sampled_from([*NAMES, "a-b-c", "0", "z"]), max_size=3)
_KEYS = st.builds(lambda folders, name: "/".join([*folders, name + ".x"]), _SEGMENTS, st.sampled_from(NAMES))
"""Keys whose last segment never equals the name of a folder: no directory can have both."""


def in_key_order(names: list[str]) -> list[str]:
    """Return the names of folders in the order of the keys in them."""
    return sorted(names, key=lambda name: name + "/")


class FolderConformance:
    """One test for each sentence about `list_folders`."""

    def test_folders_are_listed_once_in_the_order_of_their_keys(self, store: Store) -> None:
        for name in NAMES:
            store.put(f"{name}/x", b"1")
            store.put(f"{name}/y/z", b"1")
        assert list(store.list_folders()) == in_key_order(NAMES)
        assert list(store.list_folders("a-b/")) == ["y"]
        assert list(store.list_folders("a-b/y/")) == []

    def test_folders_of_a_nested_folder_are_listed_by_their_own_names(self, store: Store) -> None:
        for name in NAMES:
            store.put(f"top/mid dle/{name}/deep/x", b"1")
        assert list(store.list_folders("top/")) == ["mid dle"]
        assert list(store.list_folders("top/mid dle/")) == in_key_order(NAMES)

    def test_only_folders_after_the_given_one_are_listed(self, store: Store) -> None:
        for name in NAMES:
            store.put(f"runs/{name}/x", b"1")
        ordered = in_key_order(NAMES)
        for after in (*NAMES, "a-", "a/", "aa", "!", "zzz", "0", "ä0"):
            expected = [name for name in ordered if name + "/" > after + "/"]
            assert list(store.list_folders("runs/", after=after)) == expected, after
        assert list(store.list_folders("runs/", after="")) == ordered

    def test_objects_directly_in_a_folder_are_no_folders(self, store: Store) -> None:
        for key in ("top", "a-", "folder/object", "folder/a/x", "folder/a-object", "folder/z"):
            store.put(key, b"1")
        assert list(store.list_folders()) == ["folder"]
        assert list(store.list_folders("folder/")) == ["a"]
        assert list(store.list_folders("folder/object/")) == []

    def test_a_missing_folder_has_no_folders(self, store: Store) -> None:
        assert list(store.list_folders()) == []
        store.put("there/a/x", b"1")
        for prefix in ("not/", "there/no/", "there/a/x/", "the/", "../there/", "/", "there//"):
            assert list(store.list_folders(prefix)) == [], prefix
            assert list(store.list_folders(prefix, after="a")) == [], prefix

    @pytest.mark.parametrize("prefix", ["a", "a/b", "/a"])
    def test_a_prefix_that_names_no_folder_is_a_usage_error(self, store: Store, prefix: str) -> None:
        store.put("a/b/c", b"1")
        with pytest.raises(UsageError, match="does not name a folder"):
            list(store.list_folders(prefix))

    @given(keys=st.lists(_KEYS, max_size=8), below=_SEGMENTS, after=st.sampled_from(["", "!", *NAMES, "zz"]))
    @settings(
        max_examples=15,
        deadline=None,
        suppress_health_check=[
            HealthCheck.function_scoped_fixture,  # each example has its own folder in the store
            HealthCheck.differing_executors,
            HealthCheck.too_slow,
        ],
    )
    def test_the_folders_are_those_of_the_keys(
        self, store: Store, keys: list[str], below: list[str], after: str
    ) -> None:
        top = f"example-{next(_examples)}/"
        for key in keys:
            store.put(top + key, b"1")
        for prefix in (top, top + "".join(name + "/" for name in below)):
            expected = list(Store.list_folders(store, prefix, after=after))  # the base class's, which uses `list`
            assert list(store.list_folders(prefix, after=after)) == expected
