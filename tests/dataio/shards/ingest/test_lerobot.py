"""What LeRobot's metadata says: cameras, paths and episodes. Metadata that breaks a rule is refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.dataio.core.errors import CorruptionError, NotFoundError, UnsupportedError
from headrace.dataio.shards.ingest import lerobot_episodes, lerobot_plan
from headrace.dataio.shards.ingest.lerobot import LeRobotInfo, is_lerobot, read_info
from headrace.dataio.shards.ingest.lerobot_episodes import Episode, Window, read_episodes
from headrace.dataio.shards.ingest.lerobot_plan import lerobot_plan as plan_of
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from tests.support import lerobot_set
from tests.support.lerobot_set import FRONT, WRIST, LeRobotSet

INFO: dict[str, Any] = {
    "codebase_version": "v3.0",
    "fps": 30,
    "total_episodes": 2,
    "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    "features": {
        FRONT: {"dtype": "video", "shape": [48, 64, 3]},
        WRIST: {"dtype": "video", "shape": [48, 64, 3]},
        "action": {"dtype": "float32", "shape": [6]},
        "note": {"dtype": "string", "shape": [1]},
        "timestamp": {"dtype": "float32", "shape": [1]},
    },
}
ROWS: list[dict[str, Any]] = [
    {
        "episode_index": number,
        "tasks": ["pick"],
        "length": 10,
        "data/chunk_index": 0,
        "data/file_index": 0,
        "dataset_from_index": 10 * number,
        "dataset_to_index": 10 * number + 10,
        **{f"videos/{camera}/{part}_index": 0 for camera in (FRONT, WRIST) for part in ("chunk", "file")},
        **{f"videos/{camera}/from_timestamp": number / 3 for camera in (FRONT, WRIST)},
        **{f"videos/{camera}/to_timestamp": (number + 1) / 3 for camera in (FRONT, WRIST)},
    }
    for number in range(2)
]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(str(tmp_path / "set")) as opened:
        yield opened


def put_info(store: Store, **changed: Any) -> None:
    document = {name: value for name, value in {**INFO, **changed}.items() if value is not None}
    store.put("meta/info.json", json.dumps(document).encode())


def put_episodes(store: Store, rows: list[dict[str, Any]], name: str = "chunk-000/file-000") -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    store.put(f"meta/episodes/{name}.parquet", sink.getvalue().to_pybytes())


def read(store: Store) -> list[Episode]:
    return list(read_episodes(store, read_info(store)))


def test_cameras_and_columns_are_those_of_the_features(store: Store) -> None:
    put_info(store)
    info = read_info(store)
    assert [tuple(camera) for camera in info.cameras] == [(FRONT, "front.mp4"), (WRIST, "wrist.mp4")]
    assert info.columns == ("action", "timestamp")
    assert info.row_bytes == 6 * 4 + 4
    assert info.video_key(info.cameras[1], 2, 17) == f"videos/{WRIST}/chunk-002/file-017.mp4"
    assert info.data_key(0, 1000) == "data/chunk-000/file-1000.parquet"


def test_cameras_with_the_same_last_part_have_their_whole_names(store: Store) -> None:
    put_info(store, features={"left.Eye": {"dtype": "video"}, "right.eye": {"dtype": "video"}})
    assert [camera.ext for camera in read_info(store).cameras] == ["left_eye.mp4", "right_eye.mp4"]
    put_info(store, features={"a.b.eye": {"dtype": "video"}, "a_b.eye": {"dtype": "video"}})
    with pytest.raises(UnsupportedError, match=r"a_b_eye, a_b_eye.*rename a camera"):
        read_info(store)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"codebase_version": "v1.6"}, UnsupportedError, "format 'v1.6' is not read.*convert"),
        ({"codebase_version": None}, CorruptionError, "has no codebase_version"),
        ({"fps": 0}, CorruptionError, "fps must be a positive number, not 0"),
        ({"fps": True}, CorruptionError, "fps must be"),
        ({"total_episodes": "2"}, CorruptionError, "total_episodes must be an integer"),
        ({"total_episodes": -1}, CorruptionError, "total_episodes must be an integer"),
        ({"features": []}, CorruptionError, "features must be an object"),
        ({"features": {"a": {}}}, CorruptionError, "'a' has no type"),
        ({"features": {"a": {"dtype": "float32", "shape": [-1]}}}, CorruptionError, "shape of 'a'"),
        (
            {"features": {"top": {"dtype": "image"}}},
            UnsupportedError,
            "'top' are inside the Parquet files.*headrace pack",
        ),
        ({"data_path": "data/file.parquet"}, CorruptionError, "lacks the field chunk_index"),
        ({"data_path": "../{chunk_index}/{file_index}.parquet"}, CorruptionError, "no path below the data set"),
        ({"data_path": "/{chunk_index}/{file_index}.parquet"}, CorruptionError, "no path below the data set"),
        ({"data_path": "meta/{chunk_index}/{file_index}"}, CorruptionError, "leads into the folder meta"),
        ({"data_path": "{chunk_index.__class__}/{file_index}"}, CorruptionError, "may have only the fields"),
        ({"data_path": "{chunk_index:099999999d}/{file_index}"}, CorruptionError, "may have only the fields"),
        ({"data_path": "{{}}/{chunk_index}/{file_index}"}, CorruptionError, "may have only the fields"),
        ({"data_path": "{episode_index}/{chunk_index}/{file_index}"}, CorruptionError, "may have only the fields"),
        ({"video_path": "v/{chunk_index}/{file_index}.mp4"}, CorruptionError, "lacks the field video_key"),
        ({"video_path": None}, CorruptionError, "video_path must be a path"),
    ],
)
def test_a_description_that_breaks_a_rule_is_refused(
    store: Store, changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    put_info(store, **changed)
    with pytest.raises(error, match=f"(?s){message}"):
        read_info(store)


def test_a_camera_cannot_lead_out_of_the_data_set(store: Store) -> None:
    put_info(store, features={"../../other": {"dtype": "video"}}, total_episodes=1)
    row = {name.replace(FRONT, "../../other"): value for name, value in ROWS[0].items() if WRIST not in name}
    put_episodes(store, [row])
    with pytest.raises(CorruptionError, match="no path below the data set"):
        read(store)


def test_only_a_folder_with_such_a_description_is_a_lerobot_data_set(store: Store) -> None:
    assert not is_lerobot(store)
    with pytest.raises(NotFoundError):
        read_info(store)
    store.put("meta/info.json", b"[]")
    assert not is_lerobot(store)
    put_info(store)
    assert is_lerobot(store)


def test_episodes_have_their_rows_windows_and_tasks(store: Store) -> None:
    put_info(store)
    put_episodes(store, ROWS[:1])
    put_episodes(store, ROWS[1:], "chunk-000/file-001")
    videos = [f"videos/{camera}/chunk-000/file-000.mp4" for camera in (FRONT, WRIST)]
    assert read(store)[1] == Episode(
        1, 10, ("pick",), "data/chunk-000/file-000.parquet", tuple(Window(key, 1 / 3, 2 / 3) for key in videos)
    )


def test_files_of_the_list_are_read_in_the_order_of_their_numbers(store: Store) -> None:
    put_info(store)
    put_episodes(store, ROWS[1:], "chunk-1000/file-000")
    put_episodes(store, ROWS[:1], "chunk-999/file-000")
    assert [episode.index for episode in read(store)] == [0, 1]


def _with(**changed: Any) -> Callable[[], list[dict[str, Any]]]:
    return lambda: [ROWS[0], {**ROWS[1], **changed}]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (lambda: ROWS[:1], "1 episodes are listed, but meta/info.json counts 2"),
        (_with(episode_index=0), "episode 0: it comes after episode 0"),
        (_with(dataset_from_index=5, dataset_to_index=15), "its rows begin at 5, and the last episode ends at 10"),
        (_with(dataset_to_index=19), "it has 9 rows, and its length is 10"),
        (_with(length=0, dataset_to_index=10), "length must be an integer from 1"),
        (_with(**{"data/file_index": -1}), "data/file_index must be an integer"),
        (_with(**{f"videos/{FRONT}/from_timestamp": 0.1}), "begins at 0.1 s of videos.*front.*ends at 0.33"),
        (_with(**{f"videos/{FRONT}/to_timestamp": 0.1}), "goes from 0.33.* s to 0.1 s"),
        (_with(**{f"videos/{FRONT}/to_timestamp": float("nan")}), "must be a number, not nan"),
        (_with(**{f"videos/{FRONT}/to_timestamp": 1e300}), "goes from"),
        (_with(tasks=["x"] * 1001), "more than 1000 tasks"),
        (lambda: [{**row, "episode_index": 0.5 + n} for n, row in enumerate(ROWS)], "episode_index must be an integer"),
        (lambda: [{n: v for n, v in row.items() if n != "length"} for row in ROWS], "there is no column 'length'"),
    ],
)
def test_a_list_of_episodes_that_breaks_a_rule_is_refused(
    store: Store, rows: Callable[[], list[dict[str, Any]]], message: str
) -> None:
    put_info(store)
    put_episodes(store, rows())
    with pytest.raises(CorruptionError, match=message):
        read(store)


def test_two_cameras_cannot_have_one_file(store: Store) -> None:
    features = {"a": {"dtype": "video"}, "a1": {"dtype": "video"}}
    put_info(store, features=features, total_episodes=1, video_path="v/{video_key}{chunk_index}-{file_index}.mp4")
    row = {name: value for name, value in ROWS[0].items() if "observation" not in name}
    for name, chunk in (("a", 10), ("a1", 0)):
        row |= {f"videos/{name}/chunk_index": chunk, f"videos/{name}/file_index": 0}
        row |= {f"videos/{name}/from_timestamp": 0.0, f"videos/{name}/to_timestamp": 1.0}
    put_episodes(store, [row])
    with pytest.raises(CorruptionError, match="two of its cameras have the same file"):
        read(store)


@pytest.mark.parametrize("data", [b"", b"PAR1", b"PAR1" + bytes(100) + b"PAR1"])
def test_a_list_that_is_no_parquet_file_is_refused(store: Store, data: bytes) -> None:
    put_info(store)
    store.put("meta/episodes/chunk-000/file-000.parquet", data)
    with pytest.raises(CorruptionError, match=r"file-000\.parquet is not a readable Parquet file"):
        read(store)


def test_a_data_set_without_a_list_names_the_folder(store: Store) -> None:
    put_info(store)
    with pytest.raises(NotFoundError, match="no Parquet file below meta/episodes/"):
        read(store)


@pytest.mark.parametrize("version", ["v2.0", "v2.1"])
def test_version_2_has_one_file_for_each_episode(store: Store, version: str) -> None:
    data, video = "data/{episode_chunk:03d}/e_{episode_index:06d}.parquet", "v/{video_key}/{episode_index}.mp4"
    put_info(store, codebase_version=version, data_path=data, video_path=video, chunks_size=1)
    lines = [{"episode_index": number, "tasks": ["pick"], "length": 10} for number in range(2)]
    store.put("meta/episodes.jsonl", b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    assert read(store)[1] == Episode(
        1, 10, ("pick",), "data/001/e_000001.parquet", (Window(f"v/{FRONT}/1.mp4"), Window(f"v/{WRIST}/1.mp4"))
    )
    store.put("meta/episodes.jsonl", b'{"episode_index": 0, "length": 10}\n[]\n')
    with pytest.raises(CorruptionError, match="line 2: it must be an object"):
        read(store)


# --- units


def plan(store: Store, settings: object = None) -> lerobot_plan.LeRobotPlan:
    info = read_info(store)
    return plan_of(store, info, read_episodes(store, info), settings)


def test_episodes_are_divided_by_their_videos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lerobot_set.write(tmp_path, LeRobotSet(codecs={FRONT: "libx264", WRIST: "libx264"}))
    with open_store(str(tmp_path)) as store:
        (whole,) = plan(store).units
        assert [episode.index for episode in whole.episodes()] == [0, 1, 2, 3, 4]
        monkeypatch.setattr(lerobot_plan, "UNIT_VIDEOS", 2)
        units = plan(store).units
        assert [[episode.index for episode in unit.episodes()] for unit in units] == [[0, 1], [2], [3], [4]]
        assert [[video.key[-5] for video in unit.videos] for unit in units] == [[*"00"], [*"01"], [*"11"], [*"12"]]
        monkeypatch.setattr(lerobot_plan, "UNIT_ROWS", 1)
        assert len(plan(store).units) == 5
        assert plan(store) == plan(store)
        sent = [msgspec.msgpack.decode(msgspec.msgpack.encode(unit), type=type(unit)) for unit in units]
        assert sent == list(units)
        assert plan(store).name != plan(store, "other").name


def test_episodes_whose_files_are_missing_are_left_out(tmp_path: Path) -> None:
    lerobot_set.write(tmp_path, LeRobotSet(codecs={FRONT: "libx264"}))
    (tmp_path / "data/chunk-000/file-001.parquet").unlink()
    (tmp_path / f"videos/{FRONT}/chunk-000/file-000.mp4").unlink()
    with open_store(str(tmp_path)) as store:
        found = plan(store)
        assert [[episode.index for episode in unit.episodes()] for unit in found.units] == [[3]]
        assert sorted(Path(item.path).name for item in found.missing) == ["file-000.mp4", "file-001.parquet"]


def test_a_plan_takes_few_bytes_for_each_of_many_episodes(store: Store) -> None:
    put_info(store, total_episodes=20_000)
    info = read_info(store)
    keys = [info.video_key(camera, 0, number) for camera in info.cameras for number in range(20)]
    for key in (*keys, info.data_key(0, 0)):
        store.put(key, b"")
    units = plan_of(store, info, _many(info), None).units
    assert sum(unit.count for unit in units) == 20_000
    assert sum(len(unit.packed) for unit in units) < 100 * 20_000


def _many(info: LeRobotInfo) -> Iterator[Episode]:
    for number in range(20_000):
        start = number % 1000 * 7.1 + number / 1e5
        windows = tuple(
            Window(info.video_key(camera, 0, number // 1000), start, start + 7.1) for camera in info.cameras
        )
        yield Episode(number, 213, (f"task {number % 7}",), info.data_key(0, 0), windows)


def test_pages_bound_the_memory(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lerobot_episodes, "_PAGE_BYTES", 100)
    put_info(store)
    put_episodes(store, ROWS)
    with pytest.raises(CorruptionError, match="256 episodes take more than"):
        read(store)


# --- the data sets of the tests


def test_the_data_sets_of_the_tests_are_laid_out_as_lerobot_does(tmp_path: Path) -> None:
    golden = Path(__file__).parents[3] / "golden" / "lerobot-0.4.4"
    what = LeRobotSet(
        lengths=(8, 11, 14), codecs={FRONT: "libx264", WRIST: "libx264"}, per_file={FRONT: 3, WRIST: 3, "data": 3}
    )
    lerobot_set.write(tmp_path, what)
    names = {str(path.relative_to(golden)) for path in golden.rglob("*.*") if path.suffix != ".md"}
    assert names == {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")}
    ours, theirs = (json.loads((root / "meta/info.json").read_text()) for root in (tmp_path, golden))
    sizes = {"data_files_size_in_mb", "video_files_size_in_mb"}
    assert {**theirs, "features": {}} == {**theirs, **ours, "features": {}}
    assert theirs.keys() - ours.keys() == sizes
    assert ours["features"].keys() == theirs["features"].keys() - {"next.reward"}
    for name, feature in ours["features"].items():
        assert (feature["dtype"], feature["shape"]) == tuple(theirs["features"][name][k] for k in ("dtype", "shape"))
    for name in (name for name in names if name.endswith(".parquet")):
        found, expected = (pq.read_schema(root / name) for root in (tmp_path, golden))
        for column in found.names:
            if not column.startswith("stats/"):
                assert str(found.field(column).type) == str(expected.field(column).type), f"{name}: {column}"
    read = [[(e.index, e.length, e.data, e.windows) for e in _episodes(root)] for root in (tmp_path, golden)]
    assert read[0] == read[1]


def _episodes(root: Path) -> list[Episode]:
    with open_store(str(root)) as store:
        return read(store)
