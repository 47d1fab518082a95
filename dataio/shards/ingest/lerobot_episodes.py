"""Reads the list of episodes of a LeRobot data set, one page at a time.

Purpose: in version 3, Parquet files below `meta/episodes` say which rows of which data file, and which seconds of which
videos, belong to an episode. In version 2, `meta/episodes.jsonl` lists the episodes, and each has its own files.

Invariants:

* Episodes come in the order of their numbers. Each number occurs once.
* Memory is bounded by one page of `_PAGE` episodes, whatever the number of episodes. The files are copied to disk
  first, one at a time, because their row groups are small, and their statistics are most of them.
* Rows and windows of neighbouring episodes do not overlap, and no two cameras of an episode have one file. Indexes are
  integers, times are finite.
* Every key is below the data set (`lerobot.PathTemplate`).

Failure behaviour: a list that cannot be read, or that breaks an invariant, raises `CorruptionError`, which names the
file and the episode. Nothing is guessed, since a wrong boundary would give the wrong pictures without a notice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CorruptionError, NotFoundError
from headrace.dataio.core.files import scratch_folder
from headrace.dataio.core.json import parse_json
from headrace.dataio.shards.ingest.lerobot import (
    EPISODES_FILE,
    EPISODES_FOLDER,
    MAX_EPISODES,
    Camera,
    LeRobotInfo,
    checked_int,
)
from headrace.dataio.shards.ingest.lerobot_rows import check_footer
from headrace.dataio.shards.ingest.stored_copies import copy_object
from headrace.dataio.store.base import ObjectInfo, Store

MAX_LENGTH = limits.VIDEO_FRAMES
"""The most frames of an episode."""
_PAGE = 256
_PAGE_BYTES = 64 * limits.MIB
_MAX_FILES = 100_000
_MAX_TASKS, _TASK_CHARACTERS = 1000, 64 * limits.KIB
_MAX_SECONDS = 1e7
_LINE_BYTES = 1 * limits.MIB
_HINT = "LeRobot did not write it so; make the data set again, or correct the file"
_COLUMNS = (
    *("episode_index", "tasks", "length", "data/chunk_index", "data/file_index"),
    *("dataset_from_index", "dataset_to_index"),
)


class Window(msgspec.Struct, frozen=True, array_like=True):
    """The part of a video that belongs to an episode: from `start` to `end`, in seconds on the file's own time line.

    If `end` is None, it is the whole file.
    """

    key: str
    start: float = 0.0
    end: float | None = None


class Episode(msgspec.Struct, frozen=True, array_like=True):
    """One episode: its number, its length in frames, its tasks in words, and its files.

    `data` is the key of the Parquet file with its rows. `windows` are in the order of the cameras.
    """

    index: int
    length: int
    tasks: tuple[str, ...]
    data: str
    windows: tuple[Window, ...]


def read_episodes(store: Store, info: LeRobotInfo) -> Iterator[Episode]:
    """Yield the episodes of the data set whose root is the root of `store`.

    Args:
        store (Store): the data set.
        info (LeRobotInfo): what its `meta/info.json` says.

    Raises:
        NotFoundError: there is no list of episodes.
        CorruptionError: the list is damaged or inconsistent, or does not have as many episodes as `info` says.
    """
    listed = _from_lines(store, info) if info.version == 2 else _from_parquet(store, info)
    count = 0
    for episode in _in_order(listed, info):
        count += 1
        yield episode
    if count != info.episodes:
        raise CorruptionError(
            f"{store.location.url}: {count} episodes are listed, but meta/info.json counts {info.episodes}",
            hint="if it is being recorded, wait until it is finished; else copy the folder meta again",
        )


# --- version 3


def _from_parquet(store: Store, info: LeRobotInfo) -> Iterator[tuple[str, Episode, int]]:
    """Yield the name of the place, the episode, and the number of its first row in the whole data set."""
    files = _episode_files(store)
    if not files:
        raise NotFoundError(f"{store.location.url}: there is no Parquet file below {EPISODES_FOLDER}", hint=_HINT)
    for file in files:
        with scratch_folder("headrace-lerobot-") as folder:
            path = Path(folder, "episodes.parquet")
            copy_object(store, file, path)
            for row in _rows(path, file.key, _COLUMNS + tuple(_window_columns(info.cameras))):
                yield _episode(file.key, row, info)


def _episode_files(store: Store) -> list[ObjectInfo]:
    files = []
    for file in store.list(EPISODES_FOLDER):
        if file.key.endswith(".parquet"):
            files.append(file)
        if len(files) > _MAX_FILES:
            raise CorruptionError(f"{EPISODES_FOLDER}: more than {_MAX_FILES} files", hint=_HINT)
    return sorted(files, key=lambda file: ([int(n) for n in re.findall(r"\d{1,18}", file.key)], file.key))


def _window_columns(cameras: Iterable[Camera]) -> Iterator[str]:
    for camera in cameras:
        for name in ("chunk_index", "file_index", "from_timestamp", "to_timestamp"):
            yield f"videos/{camera.feature}/{name}"


def _rows(path: Path, name: str, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            check_footer(file.metadata, name)
            if missing := set(columns) - set(file.schema_arrow.names):
                raise CorruptionError(f"{name}: there is no column {min(missing)!r}", hint=_HINT)
            for batch in file.iter_batches(_PAGE, columns=list(columns), use_threads=False):
                if batch.nbytes > _PAGE_BYTES:
                    raise CorruptionError(f"{name}: {_PAGE} episodes take more than 64 MiB", hint=_HINT)
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise CorruptionError(f"{name} is not a readable Parquet file: {error}", hint=_HINT) from error


def _episode(name: str, row: dict[str, Any], info: LeRobotInfo) -> tuple[str, Episode, int]:
    where = f"{name}, episode {row['episode_index']!r:.20}"
    index, length = _index_and_length(row, where)
    chunk, number = (checked_int(row[f"data/{one}_index"], f"{where}: data/{one}_index") for one in ("chunk", "file"))
    first = checked_int(row["dataset_from_index"], f"{where}: dataset_from_index", 1 << 53)
    end = checked_int(row["dataset_to_index"], f"{where}: dataset_to_index", 1 << 53)
    if end - first != length:
        raise CorruptionError(f"{where}: it has {end - first} rows, and its length is {length}", hint=_HINT)
    windows = tuple(_window(where, row, camera, info) for camera in info.cameras)
    return where, Episode(index, length, _tasks(row, where), info.data_key(chunk, number), windows), first


def _window(where: str, row: dict[str, Any], camera: Camera, info: LeRobotInfo) -> Window:
    name = f"videos/{camera.feature}"
    chunk, number = (
        checked_int(row[f"{name}/{one}_index"], f"{where}: {name}/{one}_index") for one in ("chunk", "file")
    )
    start, end = row[f"{name}/from_timestamp"], row[f"{name}/to_timestamp"]
    for time in (start, end):
        if isinstance(time, bool) or not isinstance(time, int | float) or not math.isfinite(time):
            raise CorruptionError(f"{where}: a time stamp of {name} must be a number, not {time!r:.50}", hint=_HINT)
    if not 0 <= start < end <= _MAX_SECONDS:
        raise CorruptionError(f"{where}: {name} goes from {start} s to {end} s", hint=_HINT)
    return Window(info.video_key(camera, chunk, number), float(start), float(end))


# --- version 2


def _from_lines(store: Store, info: LeRobotInfo) -> Iterator[tuple[str, Episode, int]]:
    first = 0
    with scratch_folder("headrace-lerobot-") as folder:
        path = Path(folder, "episodes.jsonl")
        copy_object(store, store.stat(EPISODES_FILE), path)
        for number, row in enumerate(_lines(path), 1):
            where = f"{EPISODES_FILE}, line {number}"
            index, length = _index_and_length(row, where)
            chunk = index // info.chunk_size
            windows = tuple(Window(info.video_key(camera, chunk, index)) for camera in info.cameras)
            yield where, Episode(index, length, _tasks(row, where), info.data_key(chunk, index), windows), first
            first += length


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(_LINE_BYTES + 1):
            number += 1
            try:
                row = parse_json(line, max_bytes=_LINE_BYTES)
            except ValueError as error:
                raise CorruptionError(f"{EPISODES_FILE}, line {number}: not JSON: {error}", hint=_HINT) from error
            if not isinstance(row, dict):
                raise CorruptionError(f"{EPISODES_FILE}, line {number}: it must be an object", hint=_HINT)
            yield row


# --- both


def _index_and_length(row: dict[str, Any], where: str) -> tuple[int, int]:
    index = checked_int(row.get("episode_index"), f"{where}: episode_index", MAX_EPISODES)
    return index, checked_int(row.get("length"), f"{where}: length", MAX_LENGTH, 1)


def _tasks(row: dict[str, Any], where: str) -> tuple[str, ...]:
    tasks = row.get("tasks") or []
    if not isinstance(tasks, list) or not all(isinstance(task, str) for task in tasks):
        raise CorruptionError(f"{where}: tasks must be a list of texts", hint=_HINT)
    if len(tasks) > _MAX_TASKS or sum(map(len, tasks)) > _TASK_CHARACTERS:
        raise CorruptionError(
            f"{where}: more than {_MAX_TASKS} tasks, or more than {_TASK_CHARACTERS} characters in them", hint=_HINT
        )
    try:
        "".join(tasks).encode()
    except UnicodeEncodeError as error:
        raise CorruptionError(f"{where}: a task is not Unicode text", hint=_HINT) from error
    return tuple(tasks)


def _in_order(listed: Iterable[tuple[str, Episode, int]], info: LeRobotInfo) -> Iterator[Episode]:
    """Yield the episodes, and check that no two of them have the same number, rows or frames."""
    last_index, last_row = -1, 0
    ends = dict[str, float]()
    for where, episode, first in listed:
        if episode.index <= last_index:
            raise CorruptionError(f"{where}: it comes after episode {last_index}", hint=_HINT)
        if first < last_row:
            raise CorruptionError(
                f"{where}: its rows begin at {first}, and the last episode ends at {last_row}", hint=_HINT
            )
        if len({w.key for w in episode.windows}) < len(episode.windows):
            raise CorruptionError(f"{where}: two of its cameras have the same file", hint=_HINT)
        last_index, last_row = episode.index, first + episode.length
        ends = {w.key: _end_of(w, ends.get(w.key, 0.0), where, info) for w in episode.windows}
        yield episode


def _end_of(window: Window, last: float, where: str, info: LeRobotInfo) -> float:
    """Return the end of a window, which must not begin before `last`, the end of the last one in the same file."""
    if window.start < last - 0.5 / info.fps:
        raise CorruptionError(
            f"{where}: it begins at {window.start} s of {window.key}, and the last episode ends at {last} s", hint=_HINT
        )
    return math.inf if window.end is None else window.end
