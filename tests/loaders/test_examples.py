"""The examples in the docstrings of the public classes run."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

from headrace import loaders
from headrace.dataio import pack
from headrace.loaders.decode import registry
from tests.support.video_corpus import Made, make


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of a dataset of four videos with sound."""
    folder, url = tmp_path_factory.mktemp("media"), tmp_path_factory.mktemp("packed") / "ds"
    data = make(Made("h264.mp4", "libx264", "mp4", options={"g": "12"}, sound="aac"))
    for number in range(4):
        Path(folder, f"{number}.mp4").write_bytes(data)
    pack([folder], url, workers=1).close()
    return str(url)


@pytest.mark.parametrize("name", loaders.__all__)
def test_the_example_of_a_docstring_runs(
    name: str, clips: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_registered", registry.all_decoders())  # what an example adds is forgotten
    known = {one: getattr(loaders, one) for one in loaders.__all__} | {"clips": clips, "folder": str(tmp_path)}
    (found,) = doctest.DocTestFinder(recurse=False).find(known[name], name, globs=known)
    assert found.examples
    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(found).failed == 0
