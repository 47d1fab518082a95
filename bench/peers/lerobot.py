"""A small LeRobot data set of two cameras, and other programs that read it: LeRobot's own reader, Lance, and PyAV alone.

Purpose: `make` writes the data set in version 3 of the format. `lerobot`, `lance` and `decode_only` yield, for each
epoch, the shapes of the batches of random instants: two frames of each camera, the state, and 16 actions.

`lerobot` and `lance` may run in another interpreter, in which only these packages, msgspec and xxhash are installed. So
imports are inside the functions.

Invariant: the first value of the state and of each action is the number of the frame in its episode, and the readers
check it. Readers draw their instants with different generators.

Failure behaviour: a reader that gets wrong rows raises `ValueError`.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

FPS, FRAMES, PER_FILE = 30, 120, 6
"""Frames in a second, frames of an episode, and episodes in a file."""
SIZE = (240, 320)
CAMERAS = ("observation.images.front", "observation.images.wrist")
STEP, ACTIONS = 3, 16
"""The distance of the two frames of a sample, and the number of actions."""
BATCH, WORKERS = 8, 2
LAST = FRAMES - STEP - 1
"""The last frame at which a sample may begin."""
REPO = "bench/robot"


# --- the data set


def make(root: Path, episodes: int) -> None:
    """Write the data set into a new folder. `episodes` is a multiple of `PER_FILE`."""
    for camera, number in itertools.product(range(len(CAMERAS)), range(episodes // PER_FILE)):
        _write_video(root / f"videos/{CAMERAS[camera]}/chunk-000/file-{number:03d}.mp4", 1000 * camera + number)
    _write_tables(root, episodes)
    (root / "meta/info.json").write_text(json.dumps(_info(episodes), indent=4))


def _write_video(path: Path, seed: int) -> None:
    """Write the episodes of one file, with a key frame at every second frame, as LeRobot does."""
    from headrace.bench.core.data import write_video

    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed)
    y, x = np.mgrid[0 : SIZE[0], 0 : SIZE[1]].astype(np.float32)

    def pictures() -> Iterator[np.ndarray]:
        grain = noise.integers(0, 12, (*SIZE, 3))
        for frame in range(PER_FILE * FRAMES):
            waves = [
                np.sin(x * a + y * b + frame / 9) * 100 + 120 for a, b in ((0.02, 0.05), (0.04, 0.01), (0.03, 0.03))
            ]
            yield np.clip(np.stack(waves, axis=-1) + grain, 0, 255).astype(np.uint8)

    options = {"g": "2", "crf": "23", "preset": "veryfast"}
    write_video(path, "libx264", pictures(), options=options, rate=FPS)


def _write_tables(root: Path, episodes: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    frames, rows = np.tile(np.arange(FRAMES), episodes), []
    numbers = np.repeat(np.arange(episodes), FRAMES)
    vectors = np.repeat(frames[:, None], 6, axis=1).astype(np.float32)
    columns: dict[str, Any] = {
        name: pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), 6)
        for name in ("observation.state", "action")
    }
    columns |= {
        "timestamp": pa.array((frames / FPS).astype(np.float32)),
        "frame_index": pa.array(frames),
        "episode_index": pa.array(numbers),
        "index": pa.array(np.arange(len(frames))),
        "task_index": pa.array(np.zeros(len(frames), np.int64)),
    }
    for episode in range(episodes):
        first, at = episode * FRAMES, episode % PER_FILE * FRAMES / FPS
        row: dict[str, Any] = {"episode_index": episode, "tasks": ["a task"], "length": FRAMES}
        row |= {"data/chunk_index": 0, "data/file_index": 0}
        row |= {"dataset_from_index": first, "dataset_to_index": first + FRAMES}
        for name in CAMERAS:
            row |= {f"videos/{name}/chunk_index": 0, f"videos/{name}/file_index": episode // PER_FILE}
            row |= {f"videos/{name}/from_timestamp": at, f"videos/{name}/to_timestamp": at + FRAMES / FPS}
        rows.append(row | {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0})
    for folder in ("data/chunk-000", "meta/episodes/chunk-000"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), root / "data/chunk-000/file-000.parquet", row_group_size=FRAMES)
    pq.write_table(pa.Table.from_pylist(rows), root / "meta/episodes/chunk-000/file-000.parquet")
    tasks = pa.table({"task_index": pa.array([0]), "__index_level_0__": pa.array(["a task"])})
    described = [
        {"name": name, "field_name": field, "pandas_type": kind, "numpy_type": dtype, "metadata": None}
        for name, field, kind, dtype in (
            ("task_index", "task_index", "int64", "int64"),
            (None, "__index_level_0__", "unicode", "object"),
        )
    ]
    pandas = {"index_columns": ["__index_level_0__"], "column_indexes": [], "columns": described}
    pq.write_table(tasks.replace_schema_metadata({"pandas": json.dumps(pandas)}), root / "meta/tasks.parquet")


def _info(episodes: int) -> dict[str, Any]:
    def column(dtype: str, *shape: int) -> dict[str, Any]:
        return {"dtype": dtype, "shape": list(shape or (1,)), "names": None}

    features = {name: column("video", *SIZE, 3) for name in CAMERAS}
    features |= {"observation.state": column("float32", 6), "action": column("float32", 6)}
    features |= {"timestamp": column("float32")}
    features |= {name: column("int64") for name in ("frame_index", "episode_index", "index", "task_index")}
    return {
        "codebase_version": "v3.0",
        "robot_type": "bench",
        "total_episodes": episodes,
        "total_frames": episodes * FRAMES,
        "total_tasks": 1,
        "chunks_size": 1000,
        "fps": FPS,
        "splits": {"train": f"0:{episodes}"},
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
        "features": features,
    }


def instants(episodes: int, per_episode: int, epoch: int) -> list[tuple[int, int]]:
    """Return the random (episode, frame) at which the samples of an epoch begin, in random order."""
    draw = random.Random(epoch)
    chosen = [(episode, draw.randint(0, LAST)) for episode in range(episodes) for _ in range(per_episode)]
    draw.shuffle(chosen)
    return chosen


def check_rows(first: Any, actions: Any) -> None:
    """Raise `ValueError` unless the actions are those of the frame of the state."""
    if not 0 <= int(actions[0]) - int(first) <= STEP:
        raise ValueError(f"the actions begin at row {int(actions[0])}, and the state is that of row {int(first)}")


# --- LeRobot's own reader


def lerobot(folder: str, episodes: int, per_episode: int, port: int) -> Iterator[Iterator[int]]:
    """Yield epochs of `LeRobotDataset` in worker processes. With a port, its files are downloaded first."""
    import torch
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    root = _downloaded(folder, port) if port else Path(folder) / "set/robot"
    times = [0.0, STEP / FPS]
    deltas = dict.fromkeys(CAMERAS, times) | {"action": [(STEP + n) / FPS for n in range(ACTIONS)]}
    dataset = LeRobotDataset(REPO, root=root, delta_timestamps=deltas)
    chosen: list[int] = []
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=BATCH, sampler=chosen, num_workers=WORKERS, persistent_workers=True
    )
    for epoch in itertools.count():
        chosen[:] = [episode * FRAMES + frame for episode, frame in instants(episodes, per_episode, epoch)]
        yield (_checked(batch) for batch in loader)


def _checked(batch: Any) -> int:
    for state, actions in zip(batch["observation.state"][:, 0], batch["action"][:, 0, 0], strict=True):
        check_rows(state, [actions])
    assert all(batch[name].shape[1:] == (2, 3, *SIZE) for name in CAMERAS)
    return len(batch["observation.state"])


def _downloaded(folder: str, port: int) -> Path:
    """Download all files of the data set, eight at the same time, as `snapshot_download` does."""
    source, target = Path(folder) / "set/robot", Path(folder) / "downloaded"
    shutil.rmtree(target, ignore_errors=True)

    def fetch(path: Path) -> None:
        name = path.relative_to(source)
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        url = f"http://127.0.0.1:{port}/{Path(folder).name}/set/robot/{name}"
        with urllib.request.urlopen(url, timeout=60) as answer, (target / name).open("wb") as file:
            shutil.copyfileobj(answer, file)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(fetch, [path for path in source.rglob("*") if path.is_file()]))
    return target


# --- Lance: a table with the video of each episode as a blob


def to_lance(folder: str) -> dict[str, float]:
    """Write the data set as a Lance table: for each episode, its videos as files of their own, and its rows."""
    import lance
    import pyarrow as pa

    root = Path(folder) / "set/robot"
    names = [path.name for path in sorted((root / f"videos/{CAMERAS[0]}/chunk-000").iterdir())]
    rows = np.arange(FRAMES, dtype=np.float32).tolist()
    columns: dict[str, Any] = {}
    for camera in CAMERAS:
        files = [root / f"videos/{camera}/chunk-000" / name for name in names]
        columns[_column(camera)] = pa.array([clip for path in files for clip in _episodes_of(path)], pa.large_binary())
    columns["action"] = pa.array([rows] * len(columns[_column(CAMERAS[0])]), pa.list_(pa.float32()))
    blob = {b"lance-encoding:blob": b"true"}
    fields = [pa.field(_column(name), pa.large_binary(), metadata=blob) for name in CAMERAS]
    schema = pa.schema([*fields, pa.field("action", pa.list_(pa.float32()))])
    lance.write_dataset(pa.table(columns, schema=schema), str(Path(folder) / "table.lance"))
    return {"rows": float(len(columns["action"]))}


def _column(camera: str) -> str:
    return camera.replace(".", "_")  # Lance takes a dot for a field of a struct


def _episodes_of(path: Path) -> Iterator[bytes]:
    """Copy the packets of each episode of a file into a file of its own."""
    import io

    import av

    source: Any
    with av.open(str(path)) as source:
        stream = source.streams.video[0]
        packets = [packet for packet in source.demux(stream) if packet.size]
        for first in range(0, len(packets), FRAMES):
            target = io.BytesIO()
            with av.open(target, "w", format="mp4") as output:
                copy = output.add_stream_from_template(stream)
                begin = min(packet.pts for packet in packets[first : first + FRAMES])
                for packet in packets[first : first + FRAMES]:
                    packet.pts, packet.dts, packet.stream = packet.pts - begin, packet.dts - begin, copy
                    packet.time_base = stream.time_base
                    output.mux(packet)
            yield target.getvalue()


def lance(folder: str, episodes: int, per_episode: int, port: int) -> Iterator[Iterator[int]]:
    """Yield epochs of a Lance table, in threads: blobs are read by the decoder, in ranges."""
    import lance as library

    options = None
    url = str(Path(folder) / "table.lance")
    if port:
        url = f"s3://{Path(folder).name}/table.lance"
        options = {"allow_http": "true", "virtual_hosted_style_request": "false"}
    table = library.dataset(url, storage_options=options)

    def one(place: tuple[int, int]) -> None:
        episode, frame = place
        rows = table.take([episode], columns=["action"]).column("action").to_pylist()[0]
        numbers = [min(frame + STEP + n, FRAMES - 1) for n in range(ACTIONS)]
        check_rows(frame, [rows[number] for number in numbers])
        for camera in CAMERAS:
            (blob,) = table.take_blobs(_column(camera), indices=[episode])
            with _opened(blob) as container:
                _two_frames(container, frame)

    with ThreadPoolExecutor(WORKERS) as pool:
        for epoch in itertools.count():
            yield _batched(pool, one, instants(episodes, per_episode, epoch))


def _batched(pool: ThreadPoolExecutor, one: Any, places: list[tuple[int, int]]) -> Iterator[int]:
    for at in range(0, len(places), BATCH):
        yield len(list(pool.map(one, places[at : at + BATCH])))


# --- decoding alone


def decode_only(folder: str, episodes: int, per_episode: int, port: int) -> Iterator[Iterator[int]]:
    """Yield epochs of PyAV with local files that stay open, in threads, without rows: the least work."""
    del port
    root = Path(folder) / "set/robot"
    local = threading.local()

    def one(place: tuple[int, int]) -> None:
        episode, frame = place
        for camera in CAMERAS:
            path = str(root / f"videos/{camera}/chunk-000/file-{episode // PER_FILE:03d}.mp4")
            files = local.__dict__.setdefault("files", {})
            if path not in files:
                files[path] = _opened(path)
            _two_frames(files[path], episode % PER_FILE * FRAMES + frame)

    with ThreadPoolExecutor(WORKERS) as pool:
        for epoch in itertools.count():
            yield _batched(pool, one, instants(episodes, per_episode, epoch))


def _opened(file: Any) -> Any:
    import av

    container: Any = av.open(file)
    container.streams.video[0].codec_context.thread_count = 1
    return container


def _two_frames(container: Any, frame: int) -> None:
    """Decode the two frames of a sample to RGB."""
    stream = container.streams.video[0]
    wanted = {round(Fraction(number, FPS) / stream.time_base) for number in (frame, frame + STEP)}
    container.seek(min(wanted), stream=stream, backward=True)
    found = 0
    for picture in container.decode(stream):
        if picture.pts in wanted:
            picture.to_ndarray(format="rgb24")
            found += 1
        if picture.pts >= max(wanted):
            break
    if found != len(wanted):
        raise ValueError(f"{found} of the {len(wanted)} frames were found")
