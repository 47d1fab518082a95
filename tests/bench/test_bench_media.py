"""`headrace bench media`: its candidates deliver the same samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.bench.workloads import media

pytestmark = pytest.mark.process


def test_candidates_of_one_comparison_deliver_the_same_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "DISTINCT", 2)
    media.make(tmp_path, videos=5, images=70)
    found = {name: media.measure(name, str(tmp_path)) for name in media.CANDIDATES}
    assert found[media.RGB]["digest"] == found[media.IN_PLACE]["digest"] == found[media.VIDEOS]["digest"]
    assert len({figures["digest"] for figures in found.values()}) == 5
    assert all(figures["samples_per_s"] > 0 for figures in found.values())
