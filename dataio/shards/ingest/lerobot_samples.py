"""Makes the samples of one unit of a LeRobot data set, and the objects of their joined shard.

Purpose: `EpisodeIndexer.index` reads the files of a unit, and describes each episode as a sample:

| member | what it is |
| --- | --- |
| `rows.safetensors` | the rows of the episode, one tensor for each column |
| `json` | the task as `caption`, and the number, the length and the rate of the episode |
| `<camera>.mp4` | a whole video file, of which the episode is a window |

Invariants:

* Every file of the unit is read once, from beginning to end. The last data files are remembered as videos are
  (`lerobot_videos`), because the next unit often needs them.
* A window has exactly as many frames as the episode has rows. Otherwise its pictures and its rows would not belong
  together, and the episode is skipped.
* The rows and the JSON of all episodes are one object, the first of the joined shard. So samples are in the order of
  their episodes.
* Equal files give equal objects and samples, in any process.

Failure behaviour: an episode that cannot be used is skipped, with the reason. A video that cannot be read skips all of
its episodes. With `strict`, the first of them raises its error. A file that changes raises `TransientError`.
"""

from __future__ import annotations

import contextlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec
from msgspec.structs import replace

from headrace.dataio.core.errors import CorruptionError, HeadraceError, UnsupportedError
from headrace.dataio.core.files import scratch_folder
from headrace.dataio.core.log import get_logger
from headrace.dataio.shards.ingest.lerobot import Camera
from headrace.dataio.shards.ingest.lerobot_episodes import Episode
from headrace.dataio.shards.ingest.lerobot_plan import LeRobotUnit
from headrace.dataio.shards.ingest.lerobot_rows import EpisodeRows
from headrace.dataio.shards.ingest.lerobot_videos import VideoFile, VideoFiles, episode_window
from headrace.dataio.shards.ingest.probe_pool import ProbePool
from headrace.dataio.shards.ingest.report import Skipped, skip_error
from headrace.dataio.shards.ingest.stored_copies import copy_object
from headrace.dataio.shards.media.describe import PROMOTED_STRING
from headrace.dataio.shards.media.text_members import text_of
from headrace.dataio.shards.pieces import Hasher, piece_size
from headrace.dataio.shards.sample import Member, Sample, VideoInfo
from headrace.dataio.store.base import ObjectInfo, Store
from headrace.dataio.store.joined import JoinedObject, write_files, write_list

ROWS_EXT, JSON_EXT = "rows.safetensors", "json"
_KEPT_DATA = 2
_FAULTS = (CorruptionError, UnsupportedError)
_log = get_logger(__name__)


class EpisodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What applies to every episode.

    `prefix` is put in front of the files' keys to get those of the dataset's store with its mounts. `first` is the number
    of the first joined shard. `text_field` is the field of the JSON that is the text.
    """

    cameras: tuple[Camera, ...]
    fps: float
    robot: str | None
    prefix: str
    first: int = 0
    strict: bool = False
    text_field: str = "caption"


class IndexedEpisodes(NamedTuple):
    """The samples of a unit, in order, and the key and the size of their shard ("" and 0 without samples)."""

    shard: str
    size: int
    samples: list[Sample]
    skipped: list[Skipped]
    notes: list[str]


class _Usable(NamedTuple):
    """An episode that can be used, and what was found about it."""

    episode: Episode
    rows: bytes
    json: bytes
    videos: tuple[VideoInfo, ...]
    text: str | None
    fields: dict[str, Any]


class EpisodeIndexer:
    """Indexes units of the data set in `source`, and writes the objects of joined shards to `target`.

    It is a context manager. One thread may use it.
    """

    def __init__(self, source: Store, target: Store, settings: EpisodeSettings, pool: ProbePool) -> None:
        self._source, self._target, self._settings = source, target, settings
        self._videos, self._undo = VideoFiles(source, pool), contextlib.ExitStack()
        folder = self._undo.enter_context(scratch_folder("headrace-lerobot-"))
        self._data = _DataFiles(source, Path(folder))

    def index(self, unit: LeRobotUnit) -> IndexedEpisodes:
        """Read the files of a unit, store the objects of its shard, and return its samples."""
        episodes, skipped = unit.episodes(), list[Skipped]()
        camera_of = {w.key: c.ext for e in episodes for w, c in zip(e.windows, self._settings.cameras, strict=True)}
        videos = self._videos.probe([(one, camera_of[one.key]) for one in unit.videos])
        usable = list(self._usable(episodes, videos, {one.key: one for one in unit.data}, skipped))
        notes = [f"{self._url(one.key)}: {note}" for one in unit.videos for note in videos[one.key].notes]
        if not usable:
            return IndexedEpisodes("", 0, [], skipped, notes)
        needed = {w.key for found in usable for w in found.episode.windows}
        shard = _Shard([one for one in unit.videos if one.key in needed], usable, self._settings.prefix)
        key, size = shard.write(self._target, self._settings.first + unit.number)
        return IndexedEpisodes(key, size, list(self._samples(usable, shard, key, videos)), skipped, notes)

    def _usable(
        self,
        episodes: Sequence[Episode],
        videos: dict[str, VideoFile],
        data: dict[str, ObjectInfo],
        skipped: list[Skipped],
    ) -> Iterator[_Usable]:
        """Yield the episodes that can be used, and add the others to `skipped`."""
        with contextlib.ExitStack() as stack:
            name, rows = "", None
            for episode in episodes:
                try:
                    windows = self._windows(episode, videos)
                    if rows is None or name != episode.data:
                        stack.close()
                        name, rows = "", None
                        rows = stack.enter_context(EpisodeRows(self._data.path(data[episode.data]), episode.data))
                        name = episode.data
                    yield self._described(episode, rows.read(episode.index, episode.length), windows)
                except _FAULTS as error:
                    skipped.append(self._skip(episode, error))

    def _windows(self, episode: Episode, videos: dict[str, VideoFile]) -> tuple[VideoInfo, ...]:
        found = []
        if len({place.key for place in episode.windows}) < len(episode.windows):
            raise UnsupportedError("the videos of two of its cameras are one file")
        for place, camera in zip(episode.windows, self._settings.cameras, strict=True):
            file = videos[place.key]
            if file.video is None:
                assert file.fault is not None
                raise skip_error(Skipped(place.key, file.fault.code, file.fault.reason))
            part = episode_window(file.video, place, episode.length, self._settings.fps)
            found.append(replace(part, ext=camera.ext))
        return tuple(found)

    def _skip(self, episode: Episode, error: HeadraceError) -> Skipped:
        item = Skipped(f"{self._source.location.url}: {key_of(episode)}", error.code, error.message)
        if self._settings.strict:
            raise skip_error(item) from error
        _log.info("skipped %s: %s", item.path, item.reason)
        return item

    def _described(self, episode: Episode, rows: bytes, videos: tuple[VideoInfo, ...]) -> _Usable:
        document: dict[str, Any] = {
            **({"caption": episode.tasks[0]} if episode.tasks else {}),
            "episode_index": episode.index,
            "fps": self._settings.fps,
            "frames": episode.length,
            **({"robot_type": self._settings.robot} if self._settings.robot else {}),
            "tasks": list(episode.tasks),
        }
        fields = {n: v for n, v in document.items() if not isinstance(v, list) and len(str(v)) <= PROMOTED_STRING}
        return _Usable(
            *(episode, rows, json.dumps(document, ensure_ascii=False).encode(), videos),
            text=self._text(document),
            fields=fields,
        )

    def _text(self, document: dict[str, Any]) -> str | None:
        try:
            return text_of(document, self._settings.text_field)
        except UnsupportedError:
            return None  # the field is a number, for example

    def _samples(
        self, usable: Sequence[_Usable], shard: _Shard, key: str, videos: dict[str, VideoFile]
    ) -> Iterator[Sample]:
        for found, at in zip(usable, shard.starts, strict=True):
            members = [_member(ROWS_EXT, at, found.rows), _member(JSON_EXT, at + len(found.rows), found.json)]
            for place, video in zip(found.episode.windows, found.videos, strict=True):
                file = videos[place.key]
                members.append(Member(video.ext, shard.places[place.key], file.size, file.xxh3, file.pieces))
            first, *others = found.videos or (None,)
            seconds = found.episode.length / self._settings.fps
            yield Sample(
                id=0,
                key=key_of(found.episode),
                shard=key,
                members=tuple(sorted(members, key=lambda member: member.offset)),
                duration=seconds if first is None else float(first.duration_pts * first.time_base),
                video=first,
                videos=tuple(one for one in others if one is not None),
                text=found.text,
                fields=found.fields,
            )

    def _url(self, key: str) -> str:
        return f"{self._source.location.url.rstrip('/')}/{key}"

    def close(self) -> None:
        """Delete the copies."""
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def key_of(episode: Episode) -> str:
    """Return the key of the sample of an episode."""
    return f"episode_{episode.index:08d}"


class _Shard:
    """The objects of a joined shard: first the rows and the JSON of the episodes, then the videos.

    `starts` are the offsets of the episodes' rows, and `places` those of the videos, by their keys.
    """

    def __init__(self, videos: Sequence[ObjectInfo], usable: Sequence[_Usable], prefix: str) -> None:
        self._files = b"".join(part for found in usable for part in (found.rows, found.json))
        self._videos = [JoinedObject(key=prefix + v.key, size=v.size, modified=v.modified) for v in videos]
        self.starts, at = list[int](), 0
        for found in usable:
            self.starts.append(at)
            at += len(found.rows) + len(found.json)
        self.places = dict[str, int]()
        for video in videos:
            self.places[video.key] = at
            at += video.size

    def write(self, target: Store, number: int) -> tuple[str, int]:
        """Store the objects, and return the key and the size of the shard."""
        return write_list(target, number, [write_files(target, number, self._files), *self._videos])


class _DataFiles:
    """Local copies of the last data files, in `folder`."""

    def __init__(self, store: Store, folder: Path) -> None:
        self._store, self._folder = store, folder
        self._kept, self._count = OrderedDict[ObjectInfo, Path](), 0

    def path(self, info: ObjectInfo) -> Path:
        """Return the path of a copy of this file. It exists until two other files were copied."""
        if info not in self._kept:
            while len(self._kept) >= _KEPT_DATA:
                self._kept.popitem(last=False)[1].unlink(missing_ok=True)
            self._count += 1
            path = self._folder / f"{self._count}.parquet"
            copy_object(self._store, info, path)
            self._kept[info] = path
        return self._kept[info]


def _member(ext: str, offset: int, data: bytes) -> Member:
    hasher = Hasher(piece_size(len(data)))
    hasher.update(data)
    return Member(ext, offset, len(data), hasher.whole(), hasher.pieces())
