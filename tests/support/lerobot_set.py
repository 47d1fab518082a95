"""Small data sets in LeRobot's format: videos of several cameras, several episodes in a file, and rows in Parquet.

The files are laid out as LeRobot 0.4 lays them out. The pixels of a frame tell its episode and its number, and the
brightness tells its camera. The rows hold the same numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.support.numbered_video import BITS, SIDE, number_in, picture

FRONT, WRIST = "observation.images.front", "observation.images.wrist"
CODECS = {FRONT: "libx264", WRIST: "libsvtav1"}
TASKS = ("pick the cube", "open the drawer")
FRAMES = 64
"""Frame `f` of episode `e` shows the number `e * FRAMES + f`, so episodes are shorter than this."""
_OPTIONS = {
    "libx264": {"g": "2", "crf": "30", "bf": "2"},
    "libx265": {"g": "2", "crf": "30", "x265-params": "log-level=none"},
    "libsvtav1": {"g": "2", "crf": "30", "preset": "12", "svtav1-params": "lp=1"},
}
_LONG = {"crf": "8", "preset": "ultrafast"}


@dataclass(frozen=True)
class LeRobotSet:
    """A data set to write.

    `lengths` are those of the episodes in frames. `per_file` is the number of episodes in each file of a camera, or of
    "data". `noise` is the strength of a noise that makes files long.
    """

    lengths: Sequence[int] = (20, 23, 7, 31, 12)
    codecs: Mapping[str, str] = field(default_factory=lambda: CODECS)
    per_file: Mapping[str, int] = field(default_factory=lambda: {FRONT: 3, WRIST: 2, "data": 4})
    fps: int = 30
    version: str = "v3.0"
    height: int = 64
    noise: int = 0

    @property
    def is_old(self) -> bool:
        """Whether every episode has its own files."""
        return self.version == "v2.1"

    def file_of(self, name: str, episode: int) -> int:
        """The number of the file of a camera, or of "data", that has this episode."""
        return episode if self.is_old else episode // self.per_file[name]

    def path_of(self, name: str, number: int) -> str:
        """The path of a file of a camera, or of "data"."""
        last = f"episode_{number:06d}" if self.is_old else f"chunk-000/file-{number:03d}"
        if name == "data":
            return f"data/{'chunk-000/' if self.is_old else ''}{last}.parquet"
        return f"videos/chunk-000/{name}/{last}.mp4" if self.is_old else f"videos/{name}/{last}.mp4"

    def task(self, episode: int) -> str:
        """The task of an episode."""
        return TASKS[episode % len(TASKS)]


def write(root: Path, what: LeRobotSet | None = None) -> LeRobotSet:
    """Write the data set into a new folder, and return its description."""
    what = what or LeRobotSet()
    ends = {name: _write_videos(root, what, name) for name in what.codecs}
    _write_data(root, what)
    _write_episodes(root, what, ends)
    info = _info(what)
    (root / "meta/info.json").write_text(json.dumps(info, indent=4))
    return what


def frame_numbers(clip: Any) -> list[tuple[int, int]]:
    """The (episode, frame) of each frame of a clip, uint8 (T, 3, H, W)."""
    return [divmod(number_in(frame), FRAMES) for frame in np.moveaxis(np.asarray(clip), 1, -1)]


def state_of(what: LeRobotSet, episode: int) -> np.ndarray:
    """The column `observation.state` of an episode, float32 (frames, 6)."""
    frames = np.arange(what.lengths[episode])
    return (1000.0 * episode + frames[:, None] + np.arange(6) / 8).astype(np.float32)


def action_of(what: LeRobotSet, episode: int) -> np.ndarray:
    """The column `action` of an episode, float32 (frames, 6)."""
    return -state_of(what, episode)


# --- videos


def _write_videos(root: Path, what: LeRobotSet, name: str) -> list[tuple[float, float]]:
    """Write the videos of a camera, and return the window of each episode in seconds."""
    windows: list[tuple[float, float]] = []
    episodes = range(len(what.lengths))
    for number in sorted({what.file_of(name, episode) for episode in episodes}):
        parts, at = [], 0.0
        for episode in (e for e in episodes if what.file_of(name, e) == number):
            parts.append(_encode(root / f"part-{name}-{episode}.mp4", what, name, episode))
            seconds = what.lengths[episode] / what.fps
            windows.append((at, at + seconds))
            at += seconds
        _concatenate(parts, root / what.path_of(name, number))
    return windows


def _encode(path: Path, what: LeRobotSet, name: str, episode: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    codec, offset = what.codecs[name], 40 * list(what.codecs).index(name)
    noise = np.random.default_rng([episode, offset])
    with av.open(str(path), "w") as output:
        stream: Any = output.add_stream(
            codec, rate=what.fps, options=_OPTIONS.get(codec, {}) | ({"crf": "8"} if what.noise else {})
        )
        stream.width, stream.height, stream.pix_fmt = BITS * SIDE, what.height, "yuv420p"
        stream.codec_context.thread_count = 1
        for frame in range(what.lengths[episode]):
            pixels = picture(episode * FRAMES + frame, what.height, offset).astype(np.int16)
            if what.noise:
                pixels = pixels + noise.integers(-what.noise, what.noise + 1, pixels.shape)
            image = av.VideoFrame.from_ndarray(pixels.clip(0, 255).astype(np.uint8), format="rgb24")
            image.pts = frame
            output.mux(stream.encode(image.reformat(format="yuv420p")))
        output.mux(stream.encode(None))
    return path


def _concatenate(parts: Sequence[Path], path: Path) -> None:
    """Copy the packets of several files into one, as ffmpeg's concat demuxer gives them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    listing = path.with_suffix(".ffconcat")
    listing.write_text("ffconcat version 1.0\n" + "".join(f"file '{part}'\n" for part in parts))
    with (
        av.open(str(listing), "r", format="concat", options={"safe": "0"}) as source,
        av.open(str(path), "w", options={"movflags": "faststart"}) as output,
    ):
        stream = output.add_stream_from_template(source.streams.video[0], opaque=True)
        stream.time_base = source.streams.video[0].time_base
        for packet in source.demux(source.streams.video[0]):
            if packet.dts is not None:
                packet.stream = stream
                output.mux(packet)
    for used in (listing, *parts):
        used.unlink()


# --- tables and metadata


def _write_data(root: Path, what: LeRobotSet) -> None:
    firsts = np.concatenate([[0], np.cumsum(what.lengths)])
    for number in sorted({what.file_of("data", episode) for episode in range(len(what.lengths))}):
        tables = [
            _rows(what, episode, int(firsts[episode]))
            for episode in range(len(what.lengths))
            if what.file_of("data", episode) == number
        ]
        path = root / what.path_of("data", number)
        path.parent.mkdir(parents=True, exist_ok=True)
        with pq.ParquetWriter(path, tables[0].schema) as writer:
            for table in tables:  # one row group for each episode
                writer.write_table(table)


def _rows(what: LeRobotSet, episode: int, first: int) -> pa.Table:
    count = what.lengths[episode]
    frames = np.arange(count)
    vectors = {"observation.state": state_of(what, episode), "action": action_of(what, episode)}
    columns: dict[str, Any] = {
        name: pa.FixedSizeListArray.from_arrays(pa.array(one.ravel()), 6) for name, one in vectors.items()
    }
    columns |= {
        "next.done": pa.array(frames == count - 1),
        "note": pa.array(["a note"] * count),
        "timestamp": pa.array((frames / what.fps).astype(np.float32)),
        "frame_index": pa.array(frames),
        "episode_index": pa.array(np.full(count, episode)),
        "index": pa.array(frames + first),
        "task_index": pa.array(np.full(count, episode % len(TASKS))),
    }
    return pa.table(columns)


def _write_episodes(root: Path, what: LeRobotSet, windows: Mapping[str, list[tuple[float, float]]]) -> None:
    rows = [_episode(what, episode, windows) for episode in range(len(what.lengths))]
    (root / "meta").mkdir(parents=True, exist_ok=True)
    if what.is_old:
        lines = [{name: row[name] for name in ("episode_index", "tasks", "length")} for row in rows]
        (root / "meta/episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return
    folder = root / "meta/episodes/chunk-000"
    folder.mkdir(parents=True)
    with pq.ParquetWriter(folder / "file-000.parquet", pa.Table.from_pylist(rows).schema) as writer:
        for at in range(0, len(rows), 2):
            writer.write_table(pa.Table.from_pylist(rows[at : at + 2]))
    tasks = pa.table({"task_index": pa.array(range(len(TASKS))), "__index_level_0__": pa.array(TASKS)})
    columns = [_pandas("task_index", "task_index", "int64"), _pandas(None, "__index_level_0__", "object")]
    index = {"index_columns": ["__index_level_0__"], "column_indexes": [], "columns": columns}
    pq.write_table(tasks.replace_schema_metadata({"pandas": json.dumps(index)}), root / "meta/tasks.parquet")


def _pandas(name: str | None, field_name: str, kind: str) -> dict[str, Any]:
    """How pandas describes a column of its own."""
    pandas_type = "unicode" if kind == "object" else kind
    return {"name": name, "field_name": field_name, "pandas_type": pandas_type, "numpy_type": kind, "metadata": None}


def _episode(what: LeRobotSet, episode: int, windows: Mapping[str, list[tuple[float, float]]]) -> dict[str, Any]:
    first = int(np.sum(what.lengths[:episode]))
    row: dict[str, Any] = {"episode_index": episode, "tasks": [what.task(episode)], "length": what.lengths[episode]}
    row |= {"data/chunk_index": 0, "data/file_index": what.file_of("data", episode)}
    row |= {"dataset_from_index": first, "dataset_to_index": first + what.lengths[episode]}
    for name, ends in windows.items():
        row |= {f"videos/{name}/chunk_index": 0, f"videos/{name}/file_index": what.file_of(name, episode)}
        row |= {f"videos/{name}/from_timestamp": ends[episode][0], f"videos/{name}/to_timestamp": ends[episode][1]}
    mean = state_of(what, episode).mean(0).tolist()
    return row | {"stats/action/mean": mean, "meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0}


def _info(what: LeRobotSet) -> dict[str, Any]:
    def column(dtype: str, *shape: int) -> dict[str, Any]:
        return {"dtype": dtype, "shape": list(shape or (1,)), "names": None}

    features = {name: column("video", what.height, BITS * SIDE, 3) for name in what.codecs}
    features |= {"observation.state": column("float32", 6), "action": column("float32", 6)}
    features |= {"next.done": column("bool"), "note": column("string"), "timestamp": column("float32")}
    features |= {name: column("int64") for name in ("frame_index", "episode_index", "index", "task_index")}
    old = {
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    }
    new = {
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    }
    return {
        "codebase_version": what.version,
        "robot_type": "so101",
        "total_episodes": len(what.lengths),
        "total_frames": sum(what.lengths),
        "total_tasks": len(TASKS),
        "chunks_size": 1000,
        "fps": what.fps,
        "splits": {"train": f"0:{len(what.lengths)}"},
        **(old if what.is_old else new),
        "features": features,
    }
