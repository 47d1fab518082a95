"""The examples in the docstrings of `pack`, `append`, `index` and `Recipe` run."""

from __future__ import annotations

import doctest
import tarfile
from pathlib import Path

import pytest

from headrace import dataio
from tests.support.written_media import MakeWav


@pytest.mark.parametrize("name", ["pack", "append", "index", "Recipe"])
def test_the_example_of_a_docstring_runs(name: str, make_wav: MakeWav, tmp_path: Path) -> None:
    folders = {one: str(tmp_path / one) for one in ("folder", "more", "tars", "scratch")}
    tone, chord = tmp_path / "folder" / "tone.wav", tmp_path / "more" / "chord.wav"
    make_wav(tone)
    make_wav(chord)
    (tmp_path / "tars").mkdir()
    with tarfile.open(tmp_path / "tars" / "0.tar", "w") as archive:
        archive.add(tone, tone.name)
    known = {one: getattr(dataio, one) for one in ("pack", "append", "index", "Recipe")} | folders
    (found,) = doctest.DocTestFinder(recurse=False).find(known[name], name, globs=known)
    assert found.examples
    assert doctest.DocTestRunner().run(found).failed == 0
