"""Divides the episodes of a LeRobot data set into units. Each unit becomes one joined shard.

Purpose: a sample lies in one shard, so the videos of an episode must be in the same joined shard. `lerobot_plan` puts
neighbouring episodes into one unit as long as their videos fit into one shard.

Invariants:

* The plan depends only on the metadata of the data set, the names, sizes and times of its files, the settings and the
  library versions.
* A unit has at most `UNIT_VIDEOS` videos of `UNIT_BYTES` in all, or the videos of one episode if these are larger. Its
  rows take about `UNIT_ROWS` bytes at most, and it has at most `UNIT_EPISODES` episodes. A video that belongs to the
  episodes of two units is in both of their shards.
* A unit holds its episodes compressed, about 15 to 25 bytes for each. So no worker reads the metadata again, and a
  million episodes were planned with a peak of 320 MB of memory.

Failure behaviour: the episodes of a file that does not exist are left out, and the file is in `missing`. Data sets are
often downloaded in part. Errors of the metadata pass through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version

import blake3
import msgspec
import zstandard
from msgspec.structs import replace

from headrace.dataio.core import limits
from headrace.dataio.core.errors import NotFoundError
from headrace.dataio.shards.ingest.lerobot import LeRobotInfo
from headrace.dataio.shards.ingest.lerobot_episodes import Episode
from headrace.dataio.shards.ingest.report import Skipped
from headrace.dataio.shards.ingest.source_stores import FileStat
from headrace.dataio.shards.units.journal import Unit
from headrace.dataio.store.base import ObjectInfo, Store

FORMAT = 1
UNIT_BYTES = 256 * limits.MIB
UNIT_VIDEOS = 255  # and the object with the rows
UNIT_ROWS = 64 * limits.MIB
UNIT_EPISODES = 2048
_MAX_PACKED = 256 * limits.MIB


class LeRobotUnit(Unit, frozen=True, kw_only=True):
    """The episodes of one joined shard.

    `videos` and `data` are the files that they need. `packed` are the episodes, compressed. `count` is their number.
    """

    videos: tuple[ObjectInfo, ...]
    data: tuple[ObjectInfo, ...]
    packed: bytes
    count: int

    def episodes(self) -> list[Episode]:
        """Return the episodes in order."""
        data = zstandard.ZstdDecompressor().decompress(self.packed, max_output_size=_MAX_PACKED)
        return _decode(data)

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(one.size for one in (*self.videos, *self.data))


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Episode]).decode


class LeRobotPlan(msgspec.Struct, frozen=True):
    """The units of a data set. `name` is a digest of everything on which the plan depends."""

    name: str
    units: tuple[LeRobotUnit, ...]
    missing: tuple[Skipped, ...]


def lerobot_plan(
    store: Store,
    info: LeRobotInfo,
    episodes: Iterable[Episode],
    settings: object,
    key_of: Callable[[str], str] = lambda name: name,
    bad: Mapping[int, FileStat] | None = None,
) -> LeRobotPlan:
    """Divide the episodes into units.

    Args:
        store (Store): the data set. Its root is the folder that has `meta`.
        info (LeRobotInfo): what its `meta/info.json` says.
        episodes: its episodes in order.
        settings: everything else on which the index depends, for the plan's name.
        key_of: returns the key of a file in the store from which the units read it. The default is its key in `store`.
        bad: what `stat_of` returned for episodes that could not be used, by their numbers. They are left out while it
            is the same.
    """
    divider = _Divider(store, info, key_of, bad or {})
    units = tuple(divider.units(episodes))
    libraries = [version("headrace"), version("av"), version("pyarrow")]
    hasher = blake3.blake3(msgspec.json.encode(["lerobot", FORMAT, settings, libraries, store.location.url]))
    hasher.update(msgspec.json.encode([info.fps, info.cameras, info.robot]))
    for unit in units:
        hasher.update(msgspec.msgpack.encode(unit))
    return LeRobotPlan(hasher.hexdigest()[:32], units, tuple(divider.missing.values()))


def stat_of(episode: Episode, files: Mapping[str, ObjectInfo]) -> FileStat:
    """Return the sum of the sizes of an episode's files, and the newest of their times."""
    found = [files[key] for key in (episode.data, *(window.key for window in episode.windows))]
    return FileStat(sum(one.size for one in found), max(round(one.modified * 1e9) for one in found))


class _Divider:
    """Collects episodes until the next one does not fit."""

    def __init__(
        self, store: Store, info: LeRobotInfo, key_of: Callable[[str], str], bad: Mapping[int, FileStat]
    ) -> None:
        self._store, self._info, self._key_of, self._bad = store, info, key_of, bad
        self._files = {file.key: file for file in store.list() if not file.key.startswith("meta/")}
        self.missing: dict[str, Skipped] = {}
        self._clear()

    def _clear(self) -> None:
        self._episodes, self._videos, self._data = list[Episode](), dict[str, int](), dict[str, int]()
        self._rows = 0

    def units(self, episodes: Iterable[Episode]) -> Iterator[LeRobotUnit]:
        number = 0
        for episode in episodes:
            if not self._exists(episode):
                continue
            if episode.index in self._bad and self._bad[episode.index] == stat_of(episode, self._files):
                continue
            if self._episodes and not self._fits(episode):
                yield self._unit(number)
                number += 1
            self._add(episode)
        if self._episodes:
            yield self._unit(number)

    def _exists(self, episode: Episode) -> bool:
        """Return whether all files of the episode exist, and note those that do not."""
        lacking = [key for key in (episode.data, *(w.key for w in episode.windows)) if key not in self._files]
        for key in lacking:
            path = f"{self._store.location.url.rstrip('/')}/{key}"
            self.missing.setdefault(key, Skipped(path, NotFoundError.code, "no such file; its episodes are left out"))
        return not lacking

    def _fits(self, episode: Episode) -> bool:
        new = {w.key: self._files[w.key].size for w in episode.windows if w.key not in self._videos}
        size = sum(self._videos.values()) + sum(new.values())
        videos_fit = not new or (len(self._videos) + len(new) <= UNIT_VIDEOS and size <= UNIT_BYTES)
        rows_fit = self._rows + episode.length * self._info.row_bytes <= UNIT_ROWS
        return videos_fit and rows_fit and len(self._episodes) < UNIT_EPISODES

    def _add(self, episode: Episode) -> None:
        self._episodes.append(episode)
        self._videos.update({w.key: self._files[w.key].size for w in episode.windows})
        self._data[episode.data] = 0
        self._rows += episode.length * self._info.row_bytes

    def _unit(self, number: int) -> LeRobotUnit:
        unit = LeRobotUnit(
            number,
            videos=self._objects(list(self._videos)),
            data=self._objects(list(self._data)),
            packed=zstandard.ZstdCompressor().compress(_encode([self._placed(one) for one in self._episodes])),
            count=len(self._episodes),
        )
        self._clear()
        return unit

    def _objects(self, keys: Sequence[str]) -> tuple[ObjectInfo, ...]:
        found = [replace(self._files[key], key=self._key_of(key)) for key in keys]
        return tuple({one.key: one for one in found}.values())  # two names may be links to one file

    def _placed(self, episode: Episode) -> Episode:
        """Return the episode with the keys by which the units read its files."""
        windows = tuple(replace(window, key=self._key_of(window.key)) for window in episode.windows)
        return replace(episode, data=self._key_of(episode.data), windows=windows)
