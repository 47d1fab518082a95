"""`headrace bench encodings`: sizes of what would be stored, and every encoding comes back as it was."""

from __future__ import annotations

import pytest

from headrace.bench.workloads import encodings


def test_a_state_in_training_is_measured_by_kind_and_as_a_whole() -> None:
    found = {kind: encodings.measure(kind, 11, 32) for kind in encodings.KINDS}
    weights, whole = found[encodings.WEIGHTS], found[encodings.KINDS[-1]]
    assert 0 < weights["after_1"] < weights["after_10"] < 1
    assert 0 < whole["after_1"] <= whole["after_10"] <= whole["planes"] < 1
    assert all(0 < found[kind]["planes"] < found[kind]["zstd"] <= 1 for kind in encodings.KINDS[:2])
    assert "after_40" not in weights, "eleven steps have none forty before"


def test_an_encoding_that_does_not_come_back_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "headrace.bench.workloads.encodings.codec.decompress", lambda stored, code, raw: memoryview(bytes(raw))
    )
    with pytest.raises(AssertionError, match="other bytes"):
        encodings.encoded(bytes(range(256)) * 8, encodings.ZSTD)
