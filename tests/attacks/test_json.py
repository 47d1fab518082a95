"""A sample's JSON that is no JSON, or too much of it, is refused by the worker that reads it, in bounded memory and time."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.dataio.core import limits
from tests.attacks import peak

pytestmark = pytest.mark.slow

MIB = 160 + 40 * limits.SAMPLE_JSON_BYTES // limits.MIB
"""What a process takes that imports everything, and forty times the largest document."""

ATTACKS: dict[str, tuple[bytes, str, str]] = {
    "deep arrays": (b"[" * 1_000_000, "corruption", "nested deeper than 32 at offset 32"),
    "deep closed arrays": (b"[" * 40_000 + b"]" * 40_000, "corruption", "nested deeper than 32 at offset 32"),
    "deep objects": (b'{"a":' * 500_000, "corruption", "nested deeper than 32 at offset 160"),
    "deep behind a string": (b'{"x": "]]]]\\"", "a": ' + b"[" * 50, "corruption", "nested deeper than 32 at offset 52"),
    "nan": (b'{"a": NaN}', "corruption", "NaN is not JSON"),
    "infinity": (b'{"a": -Infinity}', "corruption", "-Infinity is not JSON"),
    "overflow": (b'{"a": 1e999}', "corruption", "out of range"),
    "digits": (b'{"a": ' + b"9" * 1_000_000 + b"}", "corruption", "1000000 digits"),
    "oversize": (b" " * (limits.SAMPLE_JSON_BYTES + 1), "unsupported", "larger than 4.0 MiB"),
    "no object": (b"[1]", "unsupported", "must be an object"),
    "many strings": (b"[" + b'"",' * 1_300_000 + b"1]", "unsupported", "must be an object"),
    "many lists": (b"[" + b"[]," * 1_300_000 + b"1]", "unsupported", "must be an object"),
    "quadratic string": (b'["' + b'\\"' * 1_900_000 + b"\\", "corruption", "Unterminated"),
    "not utf-8": (b'{"a": "\xff"}', "corruption", "not UTF-8 at offset 7"),
    "surrogate": (b'{"a": "\\ud800"}', "corruption", "surrogates not allowed"),
}


def test_every_json_attack_is_a_named_error_in_bounded_memory(tmp_path: Path) -> None:
    paths = {}
    for number, (name, (data, _, _)) in enumerate(ATTACKS.items()):
        path = tmp_path / f"{number}.json"
        path.write_bytes(data)
        paths[str(path)] = name
    outcome = peak.run("tests.attacks.calls:describe_member", list(paths))
    assert len(outcome.raised) == len(ATTACKS)
    for member, raised in outcome.raised.items():
        _, code, words = ATTACKS[paths[member]]
        assert raised is not None, paths[member]
        assert (raised[1], words in raised[2]) == (code, True), (paths[member], raised)
        assert Path(member).name in raised[2]
    assert outcome.mib < MIB
