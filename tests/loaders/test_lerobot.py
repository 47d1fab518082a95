"""Episodes of LeRobot data sets, indexed in place, come out of a loader frame by frame and row by row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch

from headrace.dataio import Dataset, index
from headrace.dataio.store.open import open_store
from headrace.dataio.testing.fault_proxy import FaultProxy
from headrace.dataio.testing.s3_server import S3Server
from headrace.loaders import Clip, Json, Loader, Rows, Safetensors, Text, Video
from tests.support import lerobot_set
from tests.support.lerobot_set import FRONT, WRIST, LeRobotSet, action_of, frame_numbers, state_of

HEVC = {FRONT: "libx265", WRIST: "libx264"}
SETS = {
    "v3": LeRobotSet(),
    "v3 in other codecs": LeRobotSet(codecs=HEVC, per_file={FRONT: 5, WRIST: 1, "data": 2}, fps=50),
    "v2.1": LeRobotSet(version="v2.1", codecs={FRONT: "libx264", WRIST: "libx264"}),
}
ROWS = "rows.safetensors"


def upload(folder: Path, url: str) -> None:
    with open_store(url) as store:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                store.put_multipart(str(path.relative_to(folder)), [path.read_bytes()])


def decoded(path: Path) -> list[np.ndarray]:
    """Every frame of a file, decoded by hand from its beginning."""
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(container.streams.video[0])]


def expected_frames(root: Path, what: LeRobotSet, camera: str) -> dict[tuple[int, int], np.ndarray]:
    """Every frame of a camera by (episode, frame)."""
    frames = dict[tuple[int, int], np.ndarray]()
    for number in sorted({what.file_of(camera, episode) for episode in range(len(what.lengths))}):
        every = iter(decoded(root / what.path_of(camera, number)))
        for episode, length in enumerate(what.lengths):
            if what.file_of(camera, episode) == number:
                frames.update({(episode, frame): next(every) for frame in range(length)})
        assert next(every, None) is None
    return frames


def fields(clip: Clip) -> dict[str, Any]:
    return {
        "front": Video(clip),
        "wrist": Video(file="wrist.mp4", like="front"),
        "state": Rows(ROWS, "observation.state", like="front"),
        "action": Rows(ROWS, "action", like="front", offsets=(0.0, 0.1, 0.2)),
        "caption": Text(),
        "episode": Json("episode_index", dtype="int64"),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_every_frame_and_row_is_that_of_the_data_set(store_url: str, tmp_path: Path, name: str) -> None:
    what = lerobot_set.write(tmp_path / "robot", SETS[name])
    upload(tmp_path / "robot", f"{store_url}/robot")
    index(f"{store_url}/robot", f"{store_url}/set", workers=1, strict=True).close()
    expected = {camera: expected_frames(tmp_path / "robot", what, camera) for camera in (FRONT, WRIST)}
    seen = set[tuple[int, int]]()
    with (
        Dataset(f"{store_url}/set", trust_mounts=True) as dataset,
        Loader(dataset, 1, fields=fields(Clip(1, start="every")), sidecar=None, drop_last=False) as loader,
    ):
        for batch in loader:
            (place,) = frame_numbers(batch["front"][0])
            assert frame_numbers(batch["wrist"][0]) == [place]
            assert batch["episode"].tolist() == [place[0]]
            for field, camera in (("front", FRONT), ("wrist", WRIST)):
                difference = batch[field][0, 0].permute(1, 2, 0).numpy().astype(int) - expected[camera][place]
                assert np.abs(difference).max() <= 1, "the two conversions of colours round differently"
            check_rows(what, place, batch)
            seen.add(place)
    assert seen == {(episode, frame) for episode, length in enumerate(what.lengths) for frame in range(length)}


def check_rows(what: LeRobotSet, place: tuple[int, int], batch: dict[str, Any]) -> None:
    episode, frame = place
    assert batch["caption"] == [what.task(episode)]
    np.testing.assert_array_equal(batch["state"][0, 0], state_of(what, episode)[frame])
    last = what.lengths[episode] - 1
    wanted = [frame + round(what.fps * seconds) for seconds in (0.0, 0.1, 0.2)]
    np.testing.assert_array_equal(batch["action"][0], action_of(what, episode)[[min(n, last) for n in wanted]])
    assert batch["action.pad"].tolist() == [[number > last for number in wanted]]


@pytest.mark.slow
def test_clips_of_many_frames_stay_inside_their_episode(tmp_path: Path) -> None:
    what = lerobot_set.write(tmp_path / "robot")
    found = []
    with (
        index(tmp_path / "robot", tmp_path / "set", workers=1) as dataset,
        Loader(dataset, 1, fields=fields(Clip(7, stride=2)), sidecar=None, drop_last=False) as loader,
    ):
        for _ in range(3):
            found += [(frame_numbers(b["front"][0]), frame_numbers(b["wrist"][0]), b["state"]) for b in loader]
    assert len(found) == 3 * len(what.lengths)
    for front, wrist, state in found:
        assert front == wrist
        ((episode, first), *_) = front
        last = what.lengths[episode] - 1
        assert len(front) == 7
        assert all(number == episode for number, _ in front)
        frames = [frame for _, frame in front]
        assert frames[: (last - first) // 2 + 1] == list(range(first, last + 1, 2))[:7]
        np.testing.assert_array_equal(state[0], state_of(what, episode)[frames])


def test_all_rows_of_an_episode_are_a_file_of_tensors(tmp_path: Path) -> None:
    what = lerobot_set.write(tmp_path / "robot", LeRobotSet(codecs={FRONT: "libx264"}))
    whole = {
        "action": Safetensors(ROWS, "action", collate="list"),
        "done": Safetensors(ROWS, "next.done", collate="list"),
    }
    with (
        index(tmp_path / "robot", tmp_path / "set", workers=1) as dataset,
        Loader(dataset, 5, fields=whole | {"n": Json("episode_index")}, sidecar=None) as loader,
    ):
        (batch,) = loader
    for action, done, episode in zip(batch["action"], batch["done"], batch["n"], strict=True):
        np.testing.assert_array_equal(action, action_of(what, episode))
        assert done.dtype == torch.bool
        assert done.nonzero().tolist() == [[what.lengths[episode] - 1]]


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3_server.endpoint) as running:
        yield running


@pytest.mark.slow
def test_a_clip_takes_only_parts_of_the_long_files(
    tmp_path: Path, s3_url: str, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    codecs = {FRONT: "libx264", WRIST: "libx264"}
    what = LeRobotSet(
        lengths=(20,) * 12, codecs=codecs, per_file={FRONT: 12, WRIST: 12, "data": 12}, height=240, noise=100
    )
    lerobot_set.write(tmp_path, what)
    long = sum(path.stat().st_size for path in tmp_path.rglob("*.mp4"))
    assert long > 6_000_000
    upload(tmp_path, f"{s3_url}/robot")
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    index(f"{s3_url}/robot", f"{s3_url}/set", workers=1, strict=True).close()
    assert long < proxy.answered < 1.05 * long, "each file is read once"
    with Loader(f"{s3_url}/set", 1, fields=fields(Clip(4)), sidecar=None, prefetch_batches=1, num_threads=1) as loader:
        before, count = proxy.answered, len(proxy.requests)
        batch = next(iter(loader))
    assert frame_numbers(batch["front"][0]) == frame_numbers(batch["wrist"][0])
    videos = [request.path for request in list(proxy.requests)[count:] if ".mp4" in request.path]
    assert 2 <= len(videos) <= 8, "the head and the clip, of both cameras, for one or two samples"
    assert proxy.answered - before < long / 2


def test_a_data_set_that_lerobot_wrote(tmp_path: Path) -> None:
    """Three episodes, written by LeRobot 0.4.4 with its defaults (AV1, a key frame in every second frame).

    Its pictures are those of `lerobot_set`. The action is 100 * episode + frame.
    """
    golden = Path(__file__).parents[1] / "golden" / "lerobot-0.4.4"
    seen = list[tuple[int, int]]()
    with (
        index(golden, tmp_path / "set", workers=1, strict=True) as dataset,
        Loader(dataset, 1, fields=fields(Clip(1, start="every")), sidecar=None, drop_last=False) as loader,
    ):
        for batch in loader:
            ((episode, frame),) = frame_numbers(batch["front"][0])
            assert frame_numbers(batch["wrist"][0]) == [(episode, frame)]
            assert batch["episode"].tolist() == [episode]
            assert batch["caption"] == ["pick the cube" if episode % 2 else "place it"]
            assert batch["action"][0, 0].tolist() == [100 * episode + frame] * 6
            seen.append((episode, frame))
    assert sorted(seen) == [(episode, frame) for episode in range(3) for frame in range(8 + 3 * episode)]
