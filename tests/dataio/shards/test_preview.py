"""The preview: the contents of the page, its escaping, its histograms, and how a real browser draws it."""

from __future__ import annotations

import base64
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.dataio import Dataset, pack
from headrace.dataio.core.errors import UsageError
from headrace.dataio.shards.preview import MAX_BINS, Histogram, histogram, histogram_svg, preview
from headrace.dataio.shards.workers.decode import run
from headrace.dataio.shards.workers.jobs import Pictures, PicturesJob
from tests.support import headrace_command
from tests.support.browser import Browser, needs_browser


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    from tests.support.written_media import write_clip, write_wav

    root = tmp_path_factory.mktemp("preview")
    write_clip(root / "in/a.mp4", frames=12)
    (root / "in/a.txt").write_text("a <script>alert(1)</script> & more")
    write_clip(root / "in/b.webm", "libvpx", frames=40)
    write_wav(root / "in/c.wav")
    write_clip(root / "in/<img src=x>.mp4", frames=3)
    return pack(root / "in", root / "ds", workers=1, name="<clips>")


@pytest.fixture(scope="module")
def text(dataset: Dataset) -> str:
    return preview(dataset, workers=1, frames=3)


def images(text: str) -> list[bytes]:
    return [base64.b64decode(data) for data in re.findall(r'src="data:image/jpeg;base64,([^"]+)"', text)]


def test_every_sample_has_its_card_with_pictures_or_sound(text: str) -> None:
    assert text.count('class="sample"') == 4
    assert text.count('class="strip sound"') == 1
    assert len(images(text)) == 9
    assert all(data.startswith(b"\xff\xd8") and data.endswith(b"\xff\xd9") for data in images(text))
    assert "h264 64 × 48, 30 fps" in text
    assert "all 4" in text


def test_an_image_is_shown_once(tmp_path: Path) -> None:
    from tests.support.pictures import picture

    (tmp_path / "in").mkdir()
    for kind in ("jpg", "png", "webp"):
        (tmp_path / "in" / f"{kind}.{kind}").write_bytes(picture(kind))
    with pack(tmp_path / "in", tmp_path / "ds", workers=1) as dataset:
        assert len(images(preview(dataset, workers=1))) == 3


def test_names_and_captions_are_escaped(text: str) -> None:
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert "<img src=x>" not in text
    assert "<h1>&lt;clips&gt;</h1>" in text


def test_the_page_needs_nothing_from_elsewhere(text: str) -> None:
    assert not re.search(r"https?://|<script|<link|@import|url\(", text)


def test_the_same_dataset_gives_the_same_page(dataset: Dataset, text: str) -> None:
    assert preview(dataset, workers=2, frames=3) == text


def test_the_page_of_a_view_names_its_condition_and_a_limit_spreads_the_samples(dataset: Dataset) -> None:
    seen = list[tuple[int, int]]()
    text = preview(
        dataset.where("duration < 10 and codec = 'h264'"), limit=1, workers=1, progress=lambda *done: seen.append(done)
    )
    assert "duration &lt; 10 and codec = &#x27;h264&#x27;" in text
    assert "1 of 2, evenly spread" in text
    assert seen == [(1, 1)]


def test_an_empty_view_is_a_page_too(dataset: Dataset) -> None:
    text = preview(dataset.where("duration > 1000"))
    assert 'class="sample"' not in text
    assert "none" in text


def test_a_damaged_member_says_so_and_the_others_are_shown(dataset: Dataset, tmp_path: Path) -> None:
    shutil.copytree(dataset.url.removeprefix("file://"), tmp_path / "ds")
    with Dataset(tmp_path / "ds") as opened:
        sample = opened.find("b")
        with (tmp_path / "ds" / sample.shard).open("r+b") as file:
            file.seek(sample.members[0].offset + 9)
            file.write(b"\xff\xee")
        text = preview(opened, workers=1)
    assert "the checksum does not match" in text
    assert len(images(text)) == 2 * 4


def test_pictures_above_the_limit_are_left_out(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.dataio.shards.preview.PICTURE_BYTES", 1000)
    text = preview(dataset, workers=1)
    assert "the page would become too large" in text
    assert sum(map(len, images(text))) <= 1000


@pytest.mark.parametrize(("limit", "frames"), [(0, 1), (5000, 1), (1, 0), (1, 99)])
def test_limits_are_limited(dataset: Dataset, limit: int, frames: int) -> None:
    with pytest.raises(UsageError, match="a page shows"):
        preview(dataset, limit=limit, frames=frames)


def pictures_of(job: PicturesJob) -> Pictures:
    answer = run(job)
    assert isinstance(answer, Pictures)
    return answer


def test_pictures_are_upright_and_spread_over_time(media: Path) -> None:
    job = PicturesJob(path=str(media / "rotated_90.mov"), video_stream=0, rotation=90, count=2)
    found = pictures_of(job)
    assert len(found.jpegs) == 2
    assert found.height > found.width
    late = pictures_of(PicturesJob(path=str(media / "arm_wrestling.mp4"), video_stream=0, count=4, width=96, height=96))
    assert (late.width, late.height) == (96, 72)
    assert len(set(late.jpegs)) == 4


def test_the_page_says_why_a_sample_cannot_be_decoded(media: Path, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("nothing")
    assert "cannot be decoded" in pictures_of(PicturesJob(path=str(tmp_path / "x"), video_stream=0)).fault
    assert run(PicturesJob(path=str(media / "action.wav"))) == Pictures(fault="it has neither video nor audio")
    assert "damaged" in pictures_of(PicturesJob(path=str(media / "corrupted.mp4"), video_stream=0)).fault


def test_the_command_writes_the_page(dataset: Dataset, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = headrace_command.run("preview", dataset.url, "-o", page, "--where", "has_video", "--limit", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().startswith(f"{tmp_path / 'page.html'}: ")
    assert (tmp_path / "page.html").read_text().count('class="sample"') == 2


@needs_browser
@pytest.mark.parametrize("width", [1280, 400])
def test_a_real_browser_draws_bars_and_pictures_within_the_width(tmp_path: Path, text: str, width: int) -> None:
    (tmp_path / "index.html").write_text(text)
    with Browser(tmp_path / "profile") as browser:
        browser.look((tmp_path / "index.html").as_uri(), width, 2600, "light")
        browser.wait_until("document.readyState === 'complete'")
        decoded = (
            "Promise.all([...document.images].map(image => (image.loading = 'eager', image.decode()))).then(() => true)"
        )
        assert browser.evaluate(decoded)
        picture = browser.screenshot(tmp_path / "shot.png")
    bars = np.all(picture == np.array((0x0B, 0x53, 0x94)), axis=-1)
    assert bars.sum() > 500, "no bars"
    colourful = (picture.max(axis=-1).astype(int) - picture.min(axis=-1)) > 150
    assert (colourful & ~bars).sum() > 2000, "no pictures"
    ground = np.array((0xF6, 0xF8, 0xFA))
    assert np.all(picture[:, -6:] == ground), "something sticks out on the right"


# --- histograms

VALUES = st.lists(st.floats(0, 1e15, allow_subnormal=False), min_size=1, max_size=50)


@given(VALUES)
@example([0.0, 1.07e-217])
@example([1e15, 1e15 + 0.125])
@example([5.0, 5.0 + 1e-12])
def test_every_value_lies_in_one_of_a_few_bins(values: list[float]) -> None:
    found = histogram(values)
    assert 1 <= len(found.counts) <= MAX_BINS
    assert len(found.edges) == len(found.counts) + 1
    assert list(found.edges) == sorted(set(found.edges))
    assert sum(found.counts) == len(values)


def test_edges_are_round() -> None:
    assert histogram([2.1, 9.7]).edges[:3] == (2.0, 2.5, 3.0)
    assert histogram([1, 30_000]).edges[:5] == (1, 2, 5, 10, 20)
    assert histogram([5, 5, 5]).counts.count(3) == 1


def test_negative_and_non_finite_values_are_ignored() -> None:
    assert histogram([float("nan"), float("inf"), -1, 3]).counts.count(1) == 1
    assert histogram([]) == Histogram((), ())
    assert "none" in histogram_svg(histogram([]), str, "nothing")


def test_the_tallest_bar_is_the_fullest_bin() -> None:
    text = histogram_svg(histogram(np.array([1.0] * 9 + [2.0])), lambda v: f"{v:g}", "things")
    assert text.count('class="bar"') >= 2
    assert ">9</text>" in text
