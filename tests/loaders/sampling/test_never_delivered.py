"""Samples that no epoch delivers are named: in the log, once for each job, and by `headrace order`."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.bench.core.data import make_clip
from headrace.dataio import pack
from headrace.dataio.cli import main
from headrace.dataio.core import log
from headrace.dataio.core.errors import UsageError
from headrace.dataio.shards.dataset import Dataset
from headrace.loaders import Bucket, Buckets, Clip, Durations, Image, Loader, Mixture, Video, VideoLoader
from headrace.loaders.sampling.never_delivered import describe_small_buckets, small_buckets
from tests.support.pictures import picture

WIDE, TALL, FRAMES = (48, 64), (64, 48), 4
SHAPES = Buckets((Bucket(WIDE), Bucket(TALL)), budget=3 * FRAMES * 48 * 64)  # global batches of three clips
NAMED = "2 clips of {} are never delivered, since a bucket has fewer clips than one global batch: 64x48 has 2, and"
IMAGES = "4 images of {} are left out, since all clips have several frames"


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dataset]:
    """Five wide videos, two tall ones, and four images."""
    media, folder = tmp_path_factory.mktemp("media"), tmp_path_factory.mktemp("mixed")
    for number in range(7):
        width, height = (64, 48) if number < 5 else (48, 64)
        make_clip(media, number, seconds=1, width=width, height=height)
    for number in range(4):
        (media / f"picture{number}.png").write_bytes(picture("png", 96, 32))
    with pack([media], folder / "set", workers=1) as dataset:
        yield dataset


@pytest.fixture(autouse=True)
def nothing_logged_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_logged", set())


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and record.name.endswith("never_delivered")
    ]


def test_clips_of_a_bucket_below_one_batch_are_named_once_in_the_log(
    mixed: Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        with VideoLoader(mixed, buckets=SHAPES, clip=Clip(FRAMES)) as loader:
            keys = [key for epoch in range(2) for batch in loader for key in batch["key"]]
            assert len(loader) == 1
    assert len(keys) == 6
    assert not {"made_05", "made_06"} & {key.rpartition("/")[2] for key in keys}
    images, clips = _warnings(caplog)
    assert clips.startswith(NAMED.format(mixed.url))
    assert images.startswith(IMAGES.format(mixed.url))


def test_only_rank_0_warns(mixed: Dataset, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    VideoLoader(mixed, buckets=SHAPES, clip=Clip(FRAMES), rank=1, world_size=3).close()
    assert _warnings(caplog) == []


def test_nothing_is_logged_if_all_samples_are_delivered(mixed: Dataset, caplog: pytest.LogCaptureFixture) -> None:
    every = Buckets((*SHAPES.buckets, Bucket((32, 96), 1)), budget=SHAPES.budget)
    for drop_last, evaluate in ((False, False), (True, True)):
        with VideoLoader(mixed, buckets=every, clip=Clip(FRAMES), drop_last=drop_last, evaluate=evaluate) as loader:
            assert sum(len(batch["key"]) for batch in loader) == 11
    VideoLoader(mixed, 2, clip=Clip(1), size=WIDE).close()
    VideoLoader(Mixture({"mixed": mixed}), buckets=every, clip=Clip(FRAMES)).close()
    assert _warnings(caplog) == []


def test_images_that_a_loader_without_buckets_leaves_out_are_counted(
    mixed: Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    with VideoLoader(mixed, 7, clip=Clip(FRAMES), size=WIDE) as loader:
        assert len(loader) == 1
    assert [text.startswith(IMAGES.format(mixed.url)) for text in _warnings(caplog)] == [True]
    assert not [record for record in caplog.records if "lack a video" in record.getMessage()], "counted once"
    log._logged.clear()
    Loader(mixed, 2, fields={"video": Video(Clip(FRAMES), WIDE)}).close()
    assert [text.startswith(IMAGES.format(mixed.url)) for text in _warnings(caplog)] == [True, True]
    Loader(mixed, 2, fields={"image": Image(size=WIDE)}).close()
    assert len(_warnings(caplog)) == 2


def test_a_message_names_a_limited_number_of_buckets() -> None:
    small = small_buckets([f"{n}x{n}" for n in range(1, 21)], [0, *[1] * 18, 9], [2] * 20)
    assert [one.bucket for one in small] == list(range(1, 19))
    text = describe_small_buckets("set", small)
    assert text.startswith("18 clips of set are never delivered")
    assert "9x9 has 1, and its global batch 2; and 10 more buckets. Lower the budget" in text


def test_buckets_are_named_by_their_shape_or_length() -> None:
    assert Buckets((Bucket(WIDE), Bucket(TALL, 32)), budget=10**9).names() == ["48x64", "64x48x32"]
    assert Durations((0.5, 15), budget=60).names() == ["0.5 s", "15 s"]


def test_order_has_a_row_for_each_bucket_and_names_what_is_left_out(
    mixed: Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = ["--bucket", "48x64", "--bucket", "64x48", "--frames", "4", "--batch", "3"]
    assert main(["order", mixed.url, *shapes]) == 0
    printed = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:4] for line in printed.splitlines() if line.startswith(("48x64", "64x48"))}
    assert rows == {"48x64": ["5", "3", "100.00%"], "64x48": ["2", "3", "0.00%"]}
    assert NAMED.format(mixed.url) in printed
    assert IMAGES.format(mixed.url) in printed
    assert main(["order", mixed.url, *shapes, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["bucket"], one["clips"]) for one in found["buckets"]] == [(0, 5)]
    assert found["left_out"] == {"images": 4, "buckets": [{"bucket": 1, "name": "64x48", "clips": 2, "batch": 3}]}


def test_order_rounds_the_batches_of_buckets_down_to_a_multiple(
    mixed: Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = ["--bucket", "48x64", "--bucket", "64x48", "--frames", "4", "--budget", str(3 * FRAMES * 48 * 64)]
    assert main(["order", mixed.url, *shapes, "--multiple", "2"]) == 0
    rows = [line.split()[:3] for line in capsys.readouterr().out.splitlines() if line.startswith(("48x64", "64x48"))]
    assert rows == [["48x64", "5", "2"], ["64x48", "2", "2"]]
    assert main(["order", mixed.url, *shapes, "--multiple", "4"]) == 2
    assert "4 are needed" in capsys.readouterr().err


def test_order_prints_its_table_before_the_error_of_buckets_that_fill_no_batch(
    mixed: Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = "no bucket has enough clips for a whole batch"
    arguments = ["order", mixed.url, "--bucket", "48x64", "--bucket", "64x48", "--batch", "9", "--frames", "4"]
    assert main(arguments) == 2
    printed, error = capsys.readouterr()
    rows = [line.split() for line in printed.splitlines() if line.startswith(("48x64", "64x48"))]
    assert rows == [["48x64", "5", "9", "0.00%"], ["64x48", "2", "9", "0.00%"]]
    assert "7 clips of" in printed
    assert f"{problem}: 48x64 has 5, and its global batch 9; 64x48" in error
    assert "drop_last=False" in error
    assert main([*arguments, "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["buckets"] == []
    assert [one["clips"] for one in found["left_out"]["buckets"]] == [5, 2]
    assert found["error"]["message"].startswith(problem)
    with pytest.raises(UsageError, match=f"{problem}: 48x64 has 5, and .*drop_last=False"):
        VideoLoader(mixed, buckets=Buckets(SHAPES.buckets, budget=9 * FRAMES * 48 * 64), clip=Clip(FRAMES))


def test_the_shares_of_a_mixture_in_buckets_count_the_clips_that_can_be_delivered(
    mixed: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(7):
        make_clip(tmp_path / "media", 20 + number, seconds=1, width=64, height=48)
    pack([tmp_path / "media"], tmp_path / "set", workers=1).close()
    shapes = ["--bucket", "48x64", "--bucket", "64x48", "--batch", "2"]
    urls = [mixed.url, str(tmp_path / "set")]
    for frames, share in (("4", 7 / 14), ("1", 11 / 18)):  # of seven videos and four images, and of seven videos
        assert main(["order", *urls, *shapes, "--frames", frames, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["mixture"]["shares"][mixed.url] == pytest.approx(share, abs=1e-4)
    assert main(["order", *urls, "--batch", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mixture"]["shares"][mixed.url] == pytest.approx(11 / 18, abs=1e-4)


def test_suggested_buckets_are_those_of_the_videos_or_of_images_as_clips_of_one_frame(
    mixed: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--suggest-buckets", "3", "--size", "64x64"]
    assert main(["order", mixed.url, *arguments]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("7 samples, 2 shapes")
    assert "4 images are not counted" in printed
    assert main(["order", mixed.url, *arguments, "--frames", "1"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("11 samples, 3 shapes")
    assert "not counted" not in printed
    assert printed.count(", 1)") == 3
    (tmp_path / "0.png").write_bytes(picture("png", 96, 32))
    pack([tmp_path / "0.png"], tmp_path / "set", workers=1).close()
    assert main(["order", str(tmp_path / "set"), *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["frames"], found["images_left_out"]) == (1, 0)
