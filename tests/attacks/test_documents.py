"""A version document that is sealed right and is a lie, a bomb or both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.dataio.core import limits
from tests.attacks import forge, peak

pytestmark = pytest.mark.slow

MIB = 700
"""The largest document is 16 MiB of JSON; parsed it takes some thirty times as much."""

Document = dict[str, Any]


def changed(change: Callable[[Document], object]) -> Callable[[Path], None]:
    return lambda folder: forge.change_document(folder, change)


def text(old: bytes, new: bytes) -> Callable[[Path], None]:
    def forge_text(folder: Path) -> None:
        before = forge.as_text(forge.document(folder))
        assert before.count(old) == 1
        forge.with_document(folder, before.replace(old, new))

    return forge_text


def with_mounts(mounts: list[Any], key: str = "mounts/m1/a.tar") -> Callable[[Path], None]:
    def change(document: Document) -> None:
        document["mounts"] = mounts
        document["shards"][0]["key"] = key

    return changed(change)


NAME = b' "name": "good"'
ATTACKS: dict[str, tuple[Callable[[Path], None], str]] = {
    "depth bomb": (text(NAME, NAME + b',\n "x": ' + b"[" * 100_000 + b"]" * 100_000), "nested deeper"),
    "open depth bomb": (text(NAME, NAME + b',\n "x": ' + b'{"a":' * 100_000), "nested deeper"),
    "nan": (text(NAME, NAME + b',\n "x": NaN'), "NaN"),
    "a name twice": (text(NAME, NAME + b',\n "samples": 1'), "'samples' occurs twice"),
    "a digest inside": (text(NAME, NAME + b',\n "name": "other"'), "'name' occurs twice"),
    "digits": (text(NAME, NAME + b',\n "x": ' + b"1" * 100_000), "100000 digits"),
    "oversize": (text(NAME, NAME + b',\n "x": "' + b"x" * limits.JSON_DOCUMENT_BYTES + b'"'), "limit"),
    "as large as may be": (text(NAME, NAME + b',\n "x": [' + b"[]," * 5_000_000 + b"1]"), ""),
    "negative size": (changed(lambda d: d["shards"][0].update(size=-1)), "contradicts"),
    "negative rows": (changed(lambda d: d["index"][0].update(rows=-2)), "contradicts"),
    "not utf-8": (text(b'"name": "good"', b'"name": "\xff\xfe"'), ""),
    "samples that are not there": (changed(lambda d: d.update(samples=10**18)), "contradicts"),
    "a number as text": (changed(lambda d: d.update(samples="2")), "document"),
    "a shard twice": (changed(lambda d: d["shards"].append(d["shards"][0])), "contradicts"),
    "another version": (changed(lambda d: d.update(version=2)), "contradicts"),
    "a size of 400 digits": (text(b' "format": 1', b' "format": ' + b"1" * 400), "400 digits"),
    "a key that leaves": (changed(lambda d: d["index"][0].update(key="../../../etc/passwd")), ""),
    "a mount that is not there": (with_mounts([]), "contradicts"),
    "a mount that is no place": (with_mounts([{"name": "m1", "url": "pipe:rm", "options": {}}]), ""),
    "a mount of an unknown scheme": (with_mounts([{"name": "m1", "url": "x://y", "options": {}}]), "mount"),
    "a mount of mounts": (
        with_mounts([{"name": "m1", "url": "/tmp", "options": {"mounts": {"m2": {"url": "/etc"}}}}]),
        "mount",
    ),
    "a mount of an odd name": (with_mounts([{"name": "../m", "url": "/tmp", "options": {}}], "mounts/../m/x"), ""),
    "too many mounts": (
        with_mounts([{"name": f"m{i}", "url": f"/tmp/{i}", "options": {}} for i in range(100)]),
        "contradicts",
    ),
}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> peak.Outcome:
    folder = tmp_path_factory.mktemp("forged")
    copies = forge.forged(folder, [attack for attack, _ in ATTACKS.values()])
    return peak.run("tests.attacks.calls:read_dataset", copies)


@pytest.mark.parametrize("attack", [name for name in ATTACKS if name != "as large as may be"])
def test_a_forged_document_is_a_named_error(outcome: peak.Outcome, attack: str) -> None:
    raised = list(outcome.raised.values())[1 + list(ATTACKS).index(attack)]
    assert raised is not None
    assert raised[1] in ("corruption", "capacity", "usage", "unsupported")
    assert ATTACKS[attack][1] in raised[2]


def test_a_good_document_is_read_and_no_forged_one_fills_the_memory(outcome: peak.Outcome) -> None:
    assert len(outcome.raised) == 1 + len(ATTACKS)
    assert next(iter(outcome.raised.values())) is None
    assert outcome.mib < MIB
