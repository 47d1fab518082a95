"""The messages of the sidecar's socket.

Invariants: every message is one tagged msgpack map of at most `limits.MESSAGE_BYTES`. No message contains code or
secrets; a location is sent without credentials, because each side uses its own. A request has an `id`, which its answer
repeats. `Stage` has two file descriptors and `Opened` at most one; no other message has any. The keys of the maps never
change: a field whose name differs from its key sets the key with `name=`.
Failure behaviour: an invalid message raises `UsageError`, and its connection is closed.
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
"""Maximum number of ranges in one `Open` or `Announce`."""

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
    """Base class of all messages."""


class Where(msgspec.Struct, frozen=True):
    """A store's location without secrets."""

    url: Text
    options: dict[str, Any]


# from the client


class Hello(Message, frozen=True, tag="hello"):
    """The first message of a connection. Answered by `Welcome` or `Refused`."""

    version: int
    pid: int


class Open(Message, frozen=True, tag="open"):
    """Request ranges, (offset, length), of an object.

    Answered by `Opened` once the ranges are in the cache, or by `Bypassed` or `Failed`, at the latest after `deadline`
    seconds. `have` is the file that the client holds for this object, 0 for none. Its descriptor is not sent again.
    """

    id: Id
    where: Where
    key: Key
    ranges: Annotated[list[tuple[Size, Size]], msgspec.Meta(max_length=RANGES)]
    deadline: Annotated[float, msgspec.Meta(ge=0, le=3600)]
    have: Id = 0
    trace: Trace = ""


class Announce(Message, frozen=True, tag="announce"):
    """Announce the next reads, (key, offset, length), soonest first. Not answered.

    The list replaces the last announcement. With `dropped` it is incremental: remove that many ranges from the start of
    the last list, and append these.
    """

    where: Where
    upcoming: Annotated[list[tuple[Key, Size, Size]], msgspec.Meta(max_length=RANGES)]
    trace: Trace = ""
    dropped: Size | None = msgspec.field(default=None, name="gone")


class Touched(Message, frozen=True, tag="touched"):
    """Files that were read without a request. Not answered."""

    files: Files


class Closed(Message, frozen=True, tag="closed"):
    """One hold on each of these files has ended. Not answered."""

    files: Files


class Stage(Message, frozen=True, tag="stage"):
    """Stage a checkpoint. The message has the descriptors of the arena and of the put plan, in this order.

    Answered by `Staged` or `Failed`.
    """

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
    """Fetch the object `key` of the store `source` from the buddy into the node's tier (docs/design/0005).

    With an empty key, fetch the records of all steps. Answered by `Recalled` or `Failed`.
    """

    id: Id
    source: Text
    key: Key


class AskStatus(Message, frozen=True, tag="status?"):
    """Request the daemon's status. Answered by `Status`."""

    id: Id


class Report(Message, frozen=True, tag="report"):
    """Totals of one loader or checkpointer since it began (docs/design/0003). Not answered.

    A later report contains the totals of a lost one. `wall`, `wait`, `idle` and `stall` are in seconds, `read` is in
    bytes, and `committed` is the Unix time at which `step` was committed.
    """

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
    """The handshake is done.

    `reports`: the daemon understands `Report`. `incremental`: it understands an `Announce` with `dropped`.
    """

    version: int
    pid: int
    reports: bool = False
    incremental: bool = msgspec.field(default=False, name="goes_on")


class Refused(Message, frozen=True, tag="refused"):
    """The handshake failed; the connection ends."""

    code: Name
    message: Text


class Opened(Message, frozen=True, tag="opened"):
    """The ranges are in `file`. Its read-only descriptor is attached, unless the client has it.

    `present`: the runs of bytes, (first, end), that are in the file; a run that is present stays present. `once`: the
    cache does not keep the file, so close it after this read; no `Forget` follows. `also`: the present runs of some other
    files that the client holds.
    """

    id: Id
    file: Id
    size: Size
    present: list[tuple[Size, Size]]
    once: bool = False
    also: list[tuple[Id, list[tuple[Size, Size]]]] = []


class Bypassed(Message, frozen=True, tag="bypassed"):
    """The cache has no room. The client reads the store directly."""

    id: Id


class Forget(Message, frozen=True, tag="forget"):
    """The cache has dropped this file: the client should close it when its last view is released."""

    file: Id


class Staged(Message, frozen=True, tag="staged"):
    """The daemon owns the job."""

    id: Id
    token: Name


class Progress(Message, frozen=True, tag="progress"):
    """The bytes that a job has processed so far, and their total."""

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
    found: bool = msgspec.field(name="there")


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
    """Code, message and hint to send for `error`, cut to the limits of a message."""
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
