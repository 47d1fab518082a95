"""Object keys of the repository, and the ids of attempts. No other module builds or parses a key.

An attempt id is a ULID: 26 characters that sort by time of creation (48 bits of milliseconds, 80 random bits).
Invariant: building and parsing a key are inverse. Numbers are zero-padded, so listing order is numeric order. Two ids
never collide in practice, so an id names one attempt of one save.
Failure behaviour: `UsageError` for a run name, a step or an id that cannot be part of a key. Parsing an unknown key
returns None, so other objects in the same directory or bucket are ignored.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from headrace.dataio.core.clock import SYSTEM_CLOCK, Clock
from headrace.dataio.core.errors import UsageError

REPO = "repo.json"
RUNS = "runs/"
LEASES = "leases/"
PACKS = "packs/"
GC = "gc/"
STEP_LIMIT = 10**12
GROUP_RANKS = 100
"""The number of ranks in a group. A larger job writes one object for each group of its ranks (`group`).

The keys of a group's manifests have a common prefix, so that one short listing finds them.
"""
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_STEP_KEY = re.compile(r"runs/([^/]+)/(\d{6})/(\d{12})/(.+)", re.ASCII)
_ATTEMPT_KEY = re.compile(r"([0-9A-Z]{26})/(?:rank-(\d{5})\.manifest|(fate)|group-(\d{3}))", re.ASCII)
_TIMELINE_KEY = re.compile(r"runs/([^/]+)/timelines/(\d{6})\.json", re.ASCII)
_STEP_FOLDER = re.compile(r"\d{12}", re.ASCII)
_TIMELINE_FOLDER = re.compile(r"\d{6}", re.ASCII)
_PACK_NAME = re.compile(r"\d{1,6}-[0-9a-f]{8}-\d{1,6}", re.ASCII)
_PACK_KEY = re.compile(rf"packs/([0-9A-Z]{{26}})/({_PACK_NAME.pattern})\.pack", re.ASCII)


def check_run(run: str, kind: str = "run") -> str:
    """Return `run` if it is a valid name of a run or tag.

    A name consists of letters, digits, dots, dashes and underscores, and has at most 128 characters.
    """
    if not isinstance(run, str) or not _RUN.fullmatch(run):
        raise UsageError(
            f"{run!r:.200} cannot name a {kind}", hint="use letters, digits, '.', '-' and '_', at most 128 of them"
        )
    return run


def is_run(name: str) -> bool:
    """Whether `name` can be the name of a run."""
    return _RUN.fullmatch(name) is not None


def check_step(step: object) -> int:
    """Return `step` if it is an integer in [0, 10**12); raise `UsageError` otherwise."""
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < STEP_LIMIT:
        raise UsageError(f"{step!r} is not a step", hint="steps are integers from 0 to 10**12 - 1")
    return step


def run(name: str) -> str:
    """The common prefix of the keys of all objects of a run."""
    return f"{RUNS}{name}/"


def timelines(run: str) -> str:
    return f"runs/{run}/timelines/"


def timeline(run: str, number: int) -> str:
    return f"runs/{run}/timelines/{number:06d}.json"


def timeline_steps(run: str, number: int) -> str:
    return f"runs/{run}/{number:06d}/"


def description(run: str, digest: str) -> str:
    """The key of a description. `digest`: the hexadecimal BLAKE3 digest of its bytes."""
    return f"runs/{run}/descriptions/{digest}.json"


def newest(run: str, number: int) -> str:
    """The key of the object that names a recent step of the timeline (`Newest`)."""
    return f"runs/{run}/{number:06d}/newest.json"


def step_of_folder(folder: str) -> int | None:
    """The step whose objects are in this folder of a timeline, or None."""
    return int(folder) if _STEP_FOLDER.fullmatch(folder) else None


def timeline_of_folder(folder: str) -> int | None:
    """The timeline whose steps are in this folder of a run, or None."""
    return int(folder) if _TIMELINE_FOLDER.fullmatch(folder) else None


def step_folder(at: int) -> str:
    """The inverse of `step_of_folder`."""
    return f"{at:012d}"


def step(run: str, number: int, at: int) -> str:
    return f"runs/{run}/{number:06d}/{at:012d}/"


def commit(run: str, number: int, at: int) -> str:
    return f"runs/{run}/{number:06d}/{at:012d}/COMMIT"


def attempt(run: str, number: int, at: int, attempt_id: str) -> str:
    return f"runs/{run}/{number:06d}/{at:012d}/{attempt_id}/"


def manifest(run: str, number: int, at: int, attempt_id: str, rank: int) -> str:
    return f"{attempt(run, number, at, attempt_id)}rank-{rank:05d}.manifest"


def manifests_of(run: str, number: int, at: int, attempt_id: str, ranks: range) -> str:
    """A common prefix of the keys of these ranks' manifests."""
    prefix, last = (manifest(run, number, at, attempt_id, rank) for rank in (ranks[0], ranks[-1]))
    while not last.startswith(prefix):
        prefix = prefix[:-1]
    return prefix


def groups(run: str, number: int, at: int, attempt_id: str) -> str:
    """The common prefix of the keys of an attempt's groups."""
    return f"{attempt(run, number, at, attempt_id)}group-"


def group(run: str, number: int, at: int, attempt_id: str, index: int) -> str:
    return f"{groups(run, number, at, attempt_id)}{index:03d}"


def is_grouped(world_size: int) -> bool:
    """Whether a job of this many ranks commits in groups."""
    return world_size > GROUP_RANKS


def group_count(world_size: int) -> int:
    """The number of groups in a job of this many ranks. The last group may be smaller."""
    return -(-world_size // GROUP_RANKS)


def ranks_of_group(index: int, world_size: int) -> range:
    return range(index * GROUP_RANKS, min((index + 1) * GROUP_RANKS, world_size))


def decision(run: str, number: int, at: int, attempt_id: str) -> str:
    return f"{attempt(run, number, at, attempt_id)}fate"


def lease(attempt_id: str, holder: str = "") -> str:
    """The key of a lease. `holder`: random digits of a process whose lease names other bases than the saver's lease."""
    return f"{leases_of(attempt_id)}{'-' if holder else ''}{holder}.json"


def leases_of(attempt_id: str) -> str:
    """The common prefix of the keys of all leases on an attempt."""
    return f"{LEASES}{attempt_id}"


def packs(attempt_id: str) -> str:
    """The common prefix of the keys of an attempt's packs."""
    return f"{PACKS}{attempt_id}/"


def pack(attempt_id: str, name: str) -> str:
    return f"{PACKS}{attempt_id}/{name}.pack"


def pack_name(rank: int, worker: str, number: int) -> str:
    """The name of a pack. `worker`: 8 random hexadecimal digits.

    Each writing process chooses its own, so that two processes never write the same pack.
    """
    return f"{rank}-{worker}-{number}"


def is_pack_name(name: str) -> bool:
    return _PACK_NAME.fullmatch(name) is not None


def parse_pack_key(key: str) -> tuple[str, str] | None:
    """(attempt, name) of a pack's key, or None."""
    match = _PACK_KEY.fullmatch(key)
    return (match[1], match[2]) if match else None


@dataclass(frozen=True, slots=True)
class StepKey:
    """The parts of a key below a step.

    `kind` is commit, fate (a decision), manifest or group. `attempt` is empty for COMMIT. `rank` is the rank of a
    manifest, or the number of a group.
    """

    run: str
    timeline: int
    step: int
    kind: str
    attempt: str = ""
    rank: int = -1


def parse_step_key(key: str) -> StepKey | None:
    """Parse a key below `runs/`; None if it is not part of a step."""
    match = _STEP_KEY.fullmatch(key)
    if match is None:
        return None
    run, number, at, rest = match[1], int(match[2]), int(match[3]), match[4]
    if rest == "COMMIT":
        return StepKey(run, number, at, "commit")
    inner = _ATTEMPT_KEY.fullmatch(rest)
    if inner is None:
        return None
    if inner[3]:
        return StepKey(run, number, at, "fate", inner[1])
    if inner[4]:
        return StepKey(run, number, at, "group", inner[1], int(inner[4]))
    return StepKey(run, number, at, "manifest", inner[1], int(inner[2]))


def parse_timeline_key(key: str) -> tuple[str, int] | None:
    """(run, number) of a timeline's key, or None."""
    match = _TIMELINE_KEY.fullmatch(key)
    return (match[1], int(match[2])) if match else None


_DIGITS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_PATTERN = re.compile(rf"[0-7][{_DIGITS}]{{25}}")


def new_id(clock: Clock = SYSTEM_CLOCK) -> str:
    """A new ULID."""
    return id_from_bytes(int(clock.time() * 1000).to_bytes(6, "big") + os.urandom(10))


def id_from_bytes(raw: bytes) -> str:
    """The id that 16 bytes represent."""
    number = int.from_bytes(raw, "big")
    return "".join([_DIGITS[number >> shift & 31] for shift in range(125, -1, -5)])


def time_of(attempt_id: str) -> float:
    """When the id was made, in seconds since the epoch, by the clock of the process that made it."""
    return (
        sum(_DIGITS.index(digit) << shift for digit, shift in zip(attempt_id[:10], range(45, -1, -5), strict=True))
        / 1e3
    )


def bytes_of_id(text: str) -> bytes:
    """The inverse of `id_from_bytes`."""
    number = 0
    for character in check_id(text):
        number = number << 5 | _DIGITS.index(character)
    return number.to_bytes(16, "big")


def is_id(text: str) -> bool:
    """Whether `text` is an id."""
    return _PATTERN.fullmatch(text) is not None


def check_id(text: str) -> str:
    """Return `text` if it is an id; raise `UsageError` otherwise."""
    if not is_id(text):
        raise UsageError(
            f"{text!r} is not an attempt id", hint="attempt ids have 26 characters, as in `headrace ckpt ls`"
        )
    return text
