"""Every wrapper of a store forwards `list_folders`: the default, over `list`, costs as much as there are objects."""

from __future__ import annotations

import ast
import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.bench.control_plane.repository_actions import Requests
from headrace.checkpoint.gds.restoring import GdsStore
from headrace.checkpoint.gds.saving import SavingStore
from headrace.checkpoint.saving.progress import RecordingStore
from headrace.dataio.cache.objects import KnownSizes
from headrace.dataio.cache.readers.bypass import PartlyFetchedStore
from headrace.dataio.sidecar.store import SidecarStore
from headrace.dataio.store.base import ObjectInfo, Store
from headrace.dataio.store.hedge import Hedge
from headrace.dataio.store.local_tier.stores import TierReader, WriteThroughTier
from headrace.dataio.store.mounts import Mounts
from headrace.dataio.store.posix import PosixStore
from headrace.dataio.store.retry import Retry
from headrace.dataio.store.wrappers import Budget, Limit, MetricsStore, PausableUploads, Trace, Wrapper
from headrace.dataio.testing.faulty_stores import Faulty, Late
from tests.support.checkpoint_states import Wrapped

ROOT = Path(__file__).resolve().parents[1]
NOTHING: Any = None


class _Tier:
    """As much of a tier as its wrappers need to be made."""

    def reserve(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


_tier: Any = _Tier()
WRAPPERS: dict[type[Store], Callable[[Store], Store]] = {
    Wrapper: Wrapper,
    MetricsStore: lambda inner: MetricsStore(inner, "counted"),
    Limit: lambda inner: Limit(inner, Budget(1000)),
    PausableUploads: lambda inner: PausableUploads(inner, lambda: None),
    Trace: lambda inner: Trace(inner, lambda name, about: contextlib.nullcontext()),
    Retry: Retry,
    Hedge: Hedge,
    Mounts: lambda inner: Mounts(inner, {}),
    TierReader: lambda inner: TierReader(inner, _tier, lambda key: True),
    WriteThroughTier: lambda inner: WriteThroughTier(inner, _tier, lambda key: True),
    PartlyFetchedStore: PartlyFetchedStore,
    KnownSizes: lambda inner: KnownSizes(inner, dict),
    SidecarStore: lambda inner: SidecarStore(inner, None, lambda key: True),
    RecordingStore: lambda inner: RecordingStore(inner, NOTHING),
    SavingStore: lambda inner: SavingStore(inner, NOTHING, NOTHING),
    GdsStore: lambda inner: GdsStore(inner, NOTHING),
    Faulty: lambda inner: Faulty(inner, []),
    Requests: lambda inner: Requests(inner, Counter()),
    Late: Late,
    Wrapped: Wrapped,
}
"""How to wrap a store with each wrapper. A new wrapper needs a line."""


class _Counted(PosixStore):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.calls = Counter[str]()

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self.calls["list"] += 1
        return super().list(prefix)

    def list_folders(self, prefix: str = "", *, after: str = "") -> Iterator[str]:
        self.calls["list_folders"] += 1
        return super().list_folders(prefix, after=after)


@pytest.mark.parametrize("kind", WRAPPERS, ids=lambda kind: kind.__name__)
def test_a_wrapper_asks_its_store_for_folders_and_for_no_objects(kind: type[Store], tmp_path: Path) -> None:
    inner = _Counted(tmp_path)
    for name in ("a", "a-b", "b"):
        inner.put(f"runs/{name}/x", b"")
    wrapper = WRAPPERS[kind](inner)
    assert type(wrapper) is kind
    assert list(wrapper.list_folders("runs/", after="a-b")) == ["a", "b"]
    assert inner.calls == {"list_folders": 1}
    if isinstance(wrapper, WriteThroughTier):
        wrapper.end()
    wrapper.close()


def test_no_wrapper_is_left_out() -> None:
    files = itertools.chain(
        *(sorted((ROOT / room).rglob("*.py")) for room in ("dataio", "checkpoint", "loaders", "bench"))
    )
    classes = [
        node for path in files for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
    ]
    own_listing = {"_NamedFiles"}  # it lists names of its own, in memory
    assert _wrappers(classes) - own_listing == {kind.__name__ for kind in WRAPPERS} - {Wrapped.__name__}


def _wrappers(classes: Sequence[ast.ClassDef]) -> set[str]:
    """The names of the stores that another store is given to when they are made, and of the classes derived from them."""
    bases = {node.name: {ast.unparse(base) for base in node.bases} for node in classes}
    stores, wrappers = {"Store"}, {node.name for node in classes if _is_given_a_store(node)}
    for _ in bases:  # each round adds at least one, or is the last that matters
        stores |= {name for name, those in bases.items() if those & stores}
        wrappers |= {name for name, those in bases.items() if those & wrappers & stores}
    return wrappers & stores - {"Store"}


def _is_given_a_store(node: ast.ClassDef) -> bool:
    made = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
    return any(
        given.annotation is not None and ast.unparse(given.annotation) == "Store"
        for init in made
        for given in init.args.args
    )
