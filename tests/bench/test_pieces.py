"""`headrace bench pieces`: every step can be measured, and those that stand side by side do the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.bench.workloads import pieces
from headrace.dataio.core.errors import UsageError
from headrace.loaders.decode.dali import dali_installed


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pieces")
    pieces.make(folder, lambda *_: None, seconds=1)
    return folder


@pytest.mark.parametrize("name", pieces.CANDIDATES)
def test_every_step_gives_figures(made: Path, name: str) -> None:
    if name.endswith("DALI") and not dali_installed():
        pytest.skip("DALI is not installed")
    found = pieces.measure(name, made, seconds=0.0)
    assert found["cpu_ms"] >= 0 < found["wall_ms"]
    assert ("padding" in found) == ("packed" in name)


def test_clips_of_one_video_are_as_many_apart_as_together(made: Path) -> None:
    pairs = [name for name in pieces.CANDIDATES if name.endswith(", apart")]
    assert len(pairs) == 3
    for name in pairs:
        apart, together = (pieces.CANDIDATES[n](made)[1] for n in (name, name.replace(", apart", ", together")))
        assert apart == together >= 1


def test_a_name_that_no_step_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'nix'"):
        pieces.main(["--only", "nix", "--directory", str(tmp_path)])
