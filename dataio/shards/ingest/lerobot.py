"""Reads what a LeRobot data set says about itself in `meta/info.json`: its cameras, its columns, and where its files lie.

Purpose: robots' recordings are often published in LeRobot's format. In version 3, one Parquet file has the rows of many
episodes, and one MP4 file has the pictures of one camera in many episodes. In version 2, each episode has its own
files. `read_info` reads both. `headrace.dataio.shards.ingest.lerobot_episodes` reads the list of episodes.

Invariants:

* All names come from untrusted JSON. A path template may contain only the fields that the format defines, and its
  result is a key below the data set. So a data set names no file outside itself.
* Python's own formatting is never used on a template, because it can read attributes and fill the memory.
* The name of a camera's file is the last part of the feature's name: `observation.images.front` is `front.mp4`. If two
  cameras have the same last part, every camera gets its whole name, with `_` in place of dots.
* Features that are pictures inside Parquet files are refused, because they cannot be read in place.

Failure behaviour: `read_info` raises `NotFoundError` without the file, `UnsupportedError` for another version or for
embedded pictures, and `CorruptionError` for everything that the format does not allow. Messages name the file.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from headrace.dataio.core import limits
from headrace.dataio.core.errors import (
    AccessDeniedError,
    CapacityError,
    CorruptionError,
    NotFoundError,
    UnsupportedError,
)
from headrace.dataio.core.json import parse_json
from headrace.dataio.store.base import Store, is_key

INFO = "meta/info.json"
EPISODES_FOLDER = "meta/episodes/"
"""Version 3: Parquet files below this folder list the episodes."""
EPISODES_FILE = "meta/episodes.jsonl"
"""Version 2: this file lists the episodes, one JSON object a line."""
MAX_EPISODES = 10_000_000
MAX_CAMERAS = 64
_MAX_FEATURES = 1024
_MAX_NAME = 200
_MAX_FPS = 100_000
_MAX_INDEX = 10**9
_VERSION = re.compile(r"v(2\.[01]|3\.\d{1,3})")
_FIELD = re.compile(r"\{(\w{1,32})(?::0?(\d{0,2})d)?\}")
_NOT_IN_NAMES = re.compile(r"[^0-9a-z_-]")
_ITEM_BYTES = {"bool": 1, "uint8": 1, "int8": 1, "int16": 2, "uint16": 2, "float16": 2, "int32": 4, "float32": 4}
"""The bytes of one value of a column, by the name of its type. Other types take 8."""
_EPISODE_FIELDS = {2: ("episode_chunk", "episode_index"), 3: ("chunk_index", "file_index")}


class Camera(NamedTuple):
    """A feature that is a video, and the extension of the member that has its frames."""

    feature: str
    ext: str


class PathTemplate(NamedTuple):
    """A checked path template: literal texts and the (field, width) between them."""

    literals: tuple[str, ...]
    fields: tuple[tuple[str, int], ...]

    def key(self, values: Mapping[str, int | str]) -> str:
        """Return the key of a file, or raise `CorruptionError` if that is not a key below the data set."""
        parts = [self.literals[0]]
        for (name, width), literal in zip(self.fields, self.literals[1:], strict=True):
            value = values[name]
            parts += [f"{value:0{width}d}" if isinstance(value, int) else value, literal]
        key = "".join(parts)
        if not is_key(key):
            raise CorruptionError(f"{key!r:.300} is no path below the data set", hint=_MAKE_AGAIN)
        return key


@dataclass(frozen=True, slots=True)
class LeRobotInfo:
    """What `meta/info.json` says.

    * `version`: 2 (that is 2.0 or 2.1) or 3.
    * `fps`: frames and rows per second.
    * `cameras`: the videos of each episode, ordered by their extensions.
    * `columns`: the names of the low-dimensional columns. `row_bytes` is about what one row takes.
    * `episodes`: the number of episodes.
    * `chunk_size`: version 2 puts this many episodes into one folder.
    """

    version: int
    fps: float
    cameras: tuple[Camera, ...]
    columns: tuple[str, ...]
    row_bytes: int
    episodes: int
    chunk_size: int
    data_path: PathTemplate
    video_path: PathTemplate | None
    robot: str | None

    def data_key(self, chunk: int, number: int) -> str:
        """Return the key of the Parquet file with these indexes. In version 2, `number` is that of the episode."""
        return self.data_path.key(self._values(chunk, number))

    def video_key(self, camera: Camera, chunk: int, number: int) -> str:
        """Return the key of a video of this camera. In version 2, `number` is that of the episode."""
        assert self.video_path is not None
        return self.video_path.key({**self._values(chunk, number), "video_key": camera.feature})

    def _values(self, chunk: int, number: int) -> dict[str, int | str]:
        return dict(zip(_EPISODE_FIELDS[self.version], (chunk, number), strict=True))


_MAKE_AGAIN = "LeRobot did not write it so; make the data set again, or correct the file"


def is_lerobot(store: Store) -> bool:
    """Return whether the store has a data set in LeRobot's format at its root, in any version."""
    try:
        document = parse_json(store.get(INFO, max_bytes=limits.JSON_DOCUMENT_BYTES))
    except (NotFoundError, AccessDeniedError, UnsupportedError, CapacityError, ValueError):
        return False  # S3 denies access to an object that does not exist, if the bucket may not be listed
    return isinstance(document, dict) and isinstance(document.get("codebase_version"), str)


def read_info(store: Store) -> LeRobotInfo:
    """Read and check `meta/info.json`.

    Args:
        store (Store): the data set. Its root is the folder that has `meta`.

    Returns:
        LeRobotInfo: the cameras, columns and paths.

    Raises:
        NotFoundError: there is no such file.
        UnsupportedError: it has another version, or its pictures are embedded in Parquet files.
        CorruptionError: it does not have the form that LeRobot writes.
    """
    data = store.get(INFO, max_bytes=limits.JSON_DOCUMENT_BYTES)
    try:
        document = parse_json(data)
    except ValueError as error:
        raise CorruptionError(f"{INFO} is not JSON: {error}", hint=_MAKE_AGAIN) from error
    if not isinstance(document, dict):
        raise _wrong("it must be an object")
    version = _version(document)
    features = _features(document)
    cameras = _cameras([name for name, kind, _ in features if kind == "video"])
    columns = [(name, size) for name, kind, size in features if kind not in ("video", "string", "language")]
    fields = _EPISODE_FIELDS[version]
    return LeRobotInfo(
        version=version,
        fps=_fps(document),
        cameras=cameras,
        columns=tuple(name for name, _ in columns),
        row_bytes=sum(size for _, size in columns),
        episodes=checked_int(document.get("total_episodes"), f"{INFO}: total_episodes", MAX_EPISODES),
        chunk_size=checked_int(document.get("chunks_size", 1000), f"{INFO}: chunks_size", least=1),
        data_path=_template(document, "data_path", fields),
        video_path=_template(document, "video_path", (*fields, "video_key")) if cameras else None,
        robot=document["robot_type"] if isinstance(document.get("robot_type"), str) else None,
    )


def checked_int(value: object, what: str, most: int = _MAX_INDEX, least: int = 0) -> int:
    """Return `value` if it is an integer from `least` to `most`, else raise `CorruptionError`, which names `what`."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise CorruptionError(f"{what} must be an integer from {least} to {most}, not {value!r:.50}", hint=_MAKE_AGAIN)
    return value


def _wrong(reason: str) -> CorruptionError:
    return CorruptionError(f"{INFO}: {reason}", hint=_MAKE_AGAIN)


def _version(document: dict[str, Any]) -> int:
    version = document.get("codebase_version")
    if not isinstance(version, str):
        raise _wrong("it has no codebase_version")
    if not (match := _VERSION.fullmatch(version)):
        raise UnsupportedError(
            f"{INFO}: LeRobot's format {version!r:.50} is not read", hint="convert the data set to v3.0 with LeRobot"
        )
    return int(match[1][0])


def _fps(document: dict[str, Any]) -> float:
    fps = document.get("fps")
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not (0 < fps <= _MAX_FPS and math.isfinite(fps)):
        raise _wrong(f"fps must be a positive number, not {fps!r:.50}")
    return float(fps)


def _features(document: dict[str, Any]) -> list[tuple[str, str, int]]:
    """Return the name, the type and the bytes a row of each feature, ordered by name."""
    features = document.get("features")
    if not isinstance(features, dict) or not features or len(features) > _MAX_FEATURES:
        raise _wrong(f"features must be an object of up to {_MAX_FEATURES} entries")
    found = []
    for name, feature in sorted(features.items()):
        kind = feature.get("dtype") if isinstance(feature, dict) else None
        if not isinstance(kind, str) or not name.isprintable() or not 0 < len(name) <= _MAX_NAME:
            raise _wrong(f"the feature {name!r:.50} has no type, or a name that is too long")
        if kind == "image":
            raise UnsupportedError(
                f"{INFO}: the pictures of {name!r} are inside the Parquet files, so they cannot be read in place",
                hint="let LeRobot convert them to video, or write them to files and use `headrace pack`",
            )
        found.append((name, kind, _size(name, feature)))
    return found


def _size(name: str, feature: dict[str, Any]) -> int:
    shape = feature.get("shape", [1])
    if not isinstance(shape, list) or len(shape) > 8:
        raise _wrong(f"the shape of {name!r} must be a list")
    count = math.prod(checked_int(one, f"{INFO}: the shape of {name!r}", 1 << 20) for one in shape)
    return count * _ITEM_BYTES.get(feature["dtype"], 8)


def _cameras(features: list[str]) -> tuple[Camera, ...]:
    if len(features) > MAX_CAMERAS:
        raise UnsupportedError(f"{INFO}: more than {MAX_CAMERAS} cameras", hint="leave some out with LeRobot")
    last = [_cleaned(name.rpartition(".")[2]) for name in features]
    names = last if max(Counter(last).values(), default=0) < 2 else [_cleaned(name) for name in features]
    if len(set(names)) < len(names):
        raise UnsupportedError(
            f"{INFO}: two cameras would have the same file name: {', '.join(sorted(names))}",
            hint="rename a camera with LeRobot",
        )
    return tuple(sorted((Camera(f, f"{n}.mp4") for f, n in zip(features, names, strict=True)), key=lambda c: c.ext))


def _cleaned(name: str) -> str:
    return _NOT_IN_NAMES.sub("_", name.lower()) or "_"


def _template(document: dict[str, Any], name: str, allowed: tuple[str, ...]) -> PathTemplate:
    """Parse a path template. It has each of the `allowed` fields, and no other."""
    text = document.get(name)
    if not isinstance(text, str) or len(text) > limits.OBJECT_KEY_BYTES:
        raise _wrong(f"{name} must be a path")
    literals, fields, at = [], list[tuple[str, int]](), 0
    for match in _FIELD.finditer(text):
        literals.append(text[at : match.start()])
        fields.append((match[1], int(match[2] or 0)))
        at = match.end()
    literals.append(text[at:])
    names = [field for field, _ in fields]
    if any(set(literal) & set("{}") for literal in literals) or not set(names) <= set(allowed):
        raise _wrong(f"{name} {text!r:.300} may have only the fields {', '.join(allowed)}")
    if missing := set(allowed) - {"episode_chunk", *names}:
        raise _wrong(f"{name} {text!r:.300} lacks the field {min(missing)}, so files could not be told apart")
    template = PathTemplate(tuple(literals), tuple(fields))
    probe = template.key({field: "camera" if field == "video_key" else 0 for field in allowed})
    if probe.startswith("meta/"):
        raise _wrong(f"{name} {text!r:.300} leads into the folder meta")
    return template
