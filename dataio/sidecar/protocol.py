"""The messages of the sidecar's socket.

Invariants: every message is one tagged msgpack map of at most `limits.MESSAGE_BYTES`; nothing in it is code, and
nothing is secret: a location travels without credentials, since each side uses its own. A request carries an `id` that
its answer repeats. `Stage` carries two file descriptors and `Opened` at most one; no other message carries any.
Failure behaviour: what does not decode raises `UsageError`, and the connection it came from ends.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from headrace.dataio.core import limits
from headrace.dataio.core.errors import HeadraceError, UsageError
from headrace.dataio.store.base import Location

VERSION = 1
NORMAL, PREEMPTION = 0, 1
"""Priorities of a staged checkpoint."""
RANGES = 1024
"""Ranges in one `Open` or `Announce`."""

Text = Annotated[str, msgspec.Meta(max_length=4096)]
Name = Annotated[str, msgspec.Meta(max_length=64)]
Key = Annotated[str, msgspec.Meta(max_length=limits.OBJECT_KEY_BYTES)]
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Id = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e10)]
Trace = Annotated[str, msgspec.Meta(max_length=64)]
"""A W3C `traceparent`: the trace context of the request; empty for none."""
Files = Annotated[list[Id], msgspec.Meta(max_length=4096)]


class Message(msgspec.Struct, frozen=True, tag_field="t"):
    """Base of all messages."""


class Where(msgspec.Struct, frozen=True):
    """A store's location without secrets."""

    url: Text
    options: dict[str, Any]


# from the client


class Hello(Message, frozen=True, tag="hello"):
    """First message of a connection."""

    version: int
    pid: int


class Open(Message, frozen=True, tag="open"):
    """Answered by `Opened`, `Bypassed` or `Failed` once [offset, offset + length) of each range is in the cache, or
    after `deadline` seconds. `have` is the file that the client holds for this object, 0 for none: it is not sent
    again."""

    id: Id
    where: Where
    key: Key
    ranges: Annotated[list[tuple[Size, Size]], msgspec.Meta(max_length=RANGES)]
    deadline: Annotated[float, msgspec.Meta(ge=0, le=3600)]
    have: Id = 0
    trace: Trace = ""


class Announce(Message, frozen=True, tag="announce"):
    """(key, offset, length) that will be read next, soonest first; replaces the last announcement, or, with `gone`,
    goes on from
    it: without so many of its first, and with these behind the others. At most `RANGES` in all. Not answered."""

    where: Where
    upcoming: Annotated[list[tuple[Key, Size, Size]], msgspec.Meta(max_length=RANGES)]
    trace: Trace = ""
    gone: Size | None = None


class Touched(Message, frozen=True, tag="touched"):
    """Files that were read without a request. Not answered."""

    files: Files


class Closed(Message, frozen=True, tag="closed"):
    """One hold on each of these files ended. Not answered."""

    files: Files


class Stage(Message, frozen=True, tag="stage"):
    """A checkpoint: descriptors of the arena and of the put plan come along. Answered by `Staged` or `Failed`."""

    id: Id
    kind: Name
    about: Text = ""
    """A description for the status page."""
    trace: Trace = ""
    priority: Annotated[int, msgspec.Meta(ge=0, le=1)] = NORMAL
    wait: Annotated[float, msgspec.Meta(ge=0, le=86400)] = 0.0
    """Seconds to wait for room for the arena."""


class Follow(Message, frozen=True, tag="follow"):
    """Ask for the events of a job staged earlier, perhaps by another process. Answered by `Staged` or `Failed`."""

    id: Id
    token: Name


class Recall(Message, frozen=True, tag="recall"):
    """Bring the object `key` of the store `source` from the buddy into the node's tier; with an empty key the records
    of all steps. Answered by `Recalled` or `Failed` (docs/design/0005)."""

    id: Id
    source: Text
    key: Key


class AskStatus(Message, frozen=True, tag="status?"):
    """Answered by `Status`."""

    id: Id


class Report(Message, frozen=True, tag="report"):
    """Totals of one loader or checkpointer since it began (docs/design/0003), so a lost report does no harm. Not
    answered."""

    source: Id
    group: Name
    run: Name = ""
    wall: Seconds = 0.0
    wait: Seconds = 0.0
    idle: Seconds = 0.0
    steps: Size = 0
    samples: Size = 0
    read: Size = 0
    stall: Seconds = 0.0
    saves: Size = 0
    step: Id | None = None
    committed: Seconds = 0.0


# from the daemon


class Welcome(Message, frozen=True, tag="welcome"):
    """The handshake is done. `reports`: whether `Report` is understood; `goes_on`: whether an `Announce` that goes on
    from the last one is."""

    version: int
    pid: int
    reports: bool = False
    goes_on: bool = False


class Refused(Message, frozen=True, tag="refused"):
    """The handshake failed; the connection ends."""

    code: Name
    message: Text


class Opened(Message, frozen=True, tag="opened"):
    """The ranges are in `file`, whose read-only descriptor comes along unless the client has it. (first, end) runs of
    `present` are there as well; what is there stays there. `once`: the cache has dropped the file already, so close it
    after this read; no `Forget` follows. `also`: of some other files that the client holds, what is there by now."""

    id: Id
    file: Id
    size: Size
    present: list[tuple[Size, Size]]
    once: bool = False
    also: list[tuple[Id, list[tuple[Size, Size]]]] = []


class Bypassed(Message, frozen=True, tag="bypassed"):
    """The cache has no room: the client reads the store itself."""

    id: Id


class Forget(Message, frozen=True, tag="forget"):
    """The cache has dropped this file: close it when its views are gone."""

    file: Id


class Staged(Message, frozen=True, tag="staged"):
    """The daemon owns the job."""

    id: Id
    token: Name


class Progress(Message, frozen=True, tag="progress"):
    """Bytes done and in all of a job."""

    token: Name
    done: Size
    total: Size


class Released(Message, frozen=True, tag="released"):
    """The trainer may write to the arena again."""

    token: Name


class Done(Message, frozen=True, tag="done"):
    """A job succeeded. `result` is a JSON object."""

    token: Name
    result: str


class JobFailed(Message, frozen=True, tag="job failed"):
    """A job failed."""

    token: Name
    code: Name
    message: Text
    hint: Text = ""


class Recalled(Message, frozen=True, tag="recalled"):
    """Whether the object is in the local tier now."""

    id: Id
    there: bool


class Failed(Message, frozen=True, tag="failed"):
    """A request failed."""

    id: Id
    code: Name
    message: Text
    hint: Text = ""


class Status(Message, frozen=True, tag="status"):
    """The daemon's state as a JSON object."""

    id: Id
    status: str


FromClient = Hello | Open | Announce | Touched | Closed | Stage | Follow | Recall | AskStatus | Report
FromDaemon = (
    Welcome
    | Refused
    | Opened
    | Bypassed
    | Forget
    | Staged
    | Recalled
    | Progress
    | Released
    | Done
    | JobFailed
    | Failed
    | Status
)
JobEvent = Progress | Released | Done | JobFailed

_encoder = msgspec.msgpack.Encoder()
_from_client: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)
_from_daemon: msgspec.msgpack.Decoder[FromDaemon] = msgspec.msgpack.Decoder(FromDaemon)


def encode(message: Message) -> bytes:
    """The message's bytes, without its frame."""
    return _encoder.encode(message)


def decode_from_client(payload: bytes) -> FromClient:
    try:
        return _from_client.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UsageError(f"a client sent an invalid message: {error}") from None


def decode_from_daemon(payload: bytes) -> FromDaemon:
    try:
        return _from_daemon.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UsageError(f"the sidecar sent an invalid message: {error}") from None


def where(location: Location) -> Where:
    return Where(location.url, dict(location.options))


def location(where: Where) -> Location:
    return Location(where.url, where.options, True)


def error_fields(error: BaseException) -> tuple[str, str, str]:
    """Code, message and hint to send for `error`, cut to what a message may hold."""
    if isinstance(error, HeadraceError):
        return error.code[:64], error.message[:4096], error.hint[:4096]
    return HeadraceError.code, f"{type(error).__name__}: {error}"[:4096], ""


def error_of(code: str, message: str, hint: str) -> HeadraceError:
    """The error class with this code, or `HeadraceError` for an unknown one."""
    classes: list[type[HeadraceError]] = [HeadraceError]
    for cls in classes:
        if cls.code == code:
            return cls(message, hint=hint)
        classes.extend(cls.__subclasses__())
    return HeadraceError(message, hint=hint)
