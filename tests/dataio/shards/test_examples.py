"""The examples in the docstrings of the public functions and classes run."""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any

import pytest

from headrace import dataio
from headrace.dataio import pack
from tests.support.written_media import write_clip


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of a dataset of four videos."""
    folder, url = tmp_path_factory.mktemp("media"), tmp_path_factory.mktemp("packed") / "ds"
    for number in range(4):
        write_clip(folder / f"{number}.mp4", frames=4)
    pack([folder], url, workers=1).close()
    return str(url)


@pytest.mark.parametrize("name", ["Dataset", "preview", "verify"])
def test_the_examples_of_the_docstrings_run(name: str, clips: str, tmp_path: Path) -> None:
    known: dict[str, Any] = {one: getattr(dataio, one) for one in ("Dataset", "preview", "verify")}
    known |= {"clips": clips, "folder": str(tmp_path)}
    found = [one for one in doctest.DocTestFinder().find(known[name], name, globs=known) if one.examples]
    assert found
    for one in found:
        assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(one).failed == 0, one.name
