"""`headrace bench raw`: every way of reading delivers the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.bench.core.results import Part, Samples
from headrace.bench.workloads import raw


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # webdataset leaves tars open
def test_every_candidate_delivers_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members = {"video.bin": 30_000, "sound.bin": 5_000, "text.bin": 60}
    monkeypatch.setitem(raw.KINDS, "media", raw.Kind(16, members))
    monkeypatch.setattr(raw, "EPOCHS", 3)
    raw.make(tmp_path, raw.KINDS["media"], 40, lambda *_: None)
    found = [raw.measure(name, str(tmp_path), "media") for name in raw.CANDIDATES]
    assert len(found) == 12
    assert len({figures["digest"] for figures in found}) == 1
    assert all(figures["samples_per_s"] > 0 for figures in found)


def test_candidates_that_deliver_other_bytes_are_found_out() -> None:
    samples = {name: Samples({"digest": [float(n)]}) for n, name in enumerate((raw.PLAIN, raw.ALONE))}
    with pytest.raises(AssertionError, match="the same bytes"):
        raw.require_equal_digests(Part("raw", candidates=samples))
    equal = Part("raw", candidates={name: Samples({"digest": [1.0]}) for name in samples})
    raw.require_equal_digests(equal)
    assert all(not found.metrics for found in equal.candidates.values()), "a digest is no figure"
