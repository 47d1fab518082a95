"""The clips that the demo makes where no real ones are."""

from __future__ import annotations

from pathlib import Path

import av
import pytest

from headrace.bench.core.data import find_clips, make_clip
from headrace.dataio.core.errors import UsageError


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_every_kind_of_made_clip_decodes_to_the_frames_it_was_made_of(tmp_path: Path, number: int) -> None:
    path = make_clip(tmp_path, number, seconds=1)
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(frames) == 25
    assert (frames[0] != frames[12]).any()


def test_a_folder_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a folder with clips"):
        find_clips(tmp_path, tmp_path)
