"""`headrace bench raw`: every way of reading delivers the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.bench.core import command
from headrace.bench.core.results import Part, Samples
from headrace.bench.workloads import raw


def test_every_candidate_delivers_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw, "MEMBERS", {"video.bin": 30_000, "sound.bin": 5_000, "text.bin": 60})
    monkeypatch.setattr(raw, "EPOCHS", 3)
    raw.make(tmp_path, 40, lambda *_: None)
    found = [
        raw.measure(name, tmp_path)
        for name in (
            raw.PLAIN,
            raw.PLAIN_TWO,
            raw.PLAIN_CHECKED,
            raw.PLAIN_CHECKED_TWO,
            raw.PLAIN_CHECKED_HELD,
            raw.ALONE,
            raw.TWO,
            raw.LOADER,
            raw.SIDECAR,
            raw.LOADER_SIDECAR,
        )
    ]
    assert len({figures["digest"] for figures in found}) == 1
    assert all(figures["samples_per_s"] > 0 for figures in found)


def test_candidates_that_deliver_other_bytes_are_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def figures(candidates: object, rounds: int, tell: object, samples: dict[str, Samples]) -> None:
        samples |= {name: Samples({"digest": [float(n)]}) for n, name in enumerate((raw.PLAIN, raw.ALONE))}

    monkeypatch.setattr(raw, "alternate", figures)
    monkeypatch.setattr(raw, "make", lambda *_: None)
    args = command.parser("raw", "")
    raw._options(args)
    job = command.Job(1, tmp_path, lambda *_: None, args.parse_args([]))
    with pytest.raises(AssertionError, match="the same bytes"):
        raw.fill(job, Part(raw.PLAIN))
