"""Collective agreement before a save or a restore: every rank is ready, and all receive one message from rank 0.

Invariant: every rank takes part in every exchange, also after it has failed, so no rank waits for another's exception.
Then all ranks continue with the same message, or all raise. An agreement is one all-reduce of 530 bytes plus one byte
per rank, without pickle. The reduction is the maximum, byte by byte; ranks other than 0 send zeros as the message.
Tables are gathered only when one has changed, and reasons only when a rank has failed.
Failure behaviour: a failed rank raises its own error; the others raise `TransientError` with that rank and its
reason, or an error of the same type where the caller says that it concerns all ranks. Ranks that request different
steps raise `UsageError`. If torch.distributed fails, for example because only some ranks called, `TransientError` says
so. A rank that waits for `_WARN_SECONDS` logs what it waits for.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, Self, cast

import torch
import torch.distributed as dist

from headrace.dataio.core.errors import CapacityError, HeadraceError, TransientError, UsageError
from headrace.dataio.core.limits import GIB
from headrace.dataio.core.log import get_logger

_log = get_logger(__name__)
_MESSAGE_BYTES = 512
_REASON_BYTES = 512
_NUMBER = struct.Struct(">Q")
_WARN_SECONDS = 60.0
EXCHANGE_BYTES = GIB
"""The maximum number of bytes that one rank may send, and that it may receive, in one `all_to_all`."""
_CALL_EVERYWHERE = "call save and restore on every rank, not only on rank 0"
Alike = tuple[type[HeadraceError], ...]
"""Types of errors that concern all ranks, such as damage in the store."""


class Request(Protocol):
    """A message in flight."""

    def wait(self) -> object: ...


@dataclass(slots=True)
class Ranks:
    """This process's rank and the world size.

    `_table` and `_tables`: this rank's and all tables of the last `gather`.
    """

    rank: int
    world_size: int
    _table: bytes = b""
    _tables: list[bytes] = field(default_factory=list)
    _group: dist.ProcessGroup | None = None

    @classmethod
    def from_environment(cls, rank: int | None, world_size: int | None) -> Ranks:
        """From the arguments, else from torch.distributed if it is initialised, else a job of one rank."""
        joined = dist.is_available() and dist.is_initialized()
        if world_size is None:
            world_size = dist.get_world_size() if joined else 1
        if rank is None:
            rank = dist.get_rank() if joined and world_size > 1 else 0
        if not 0 <= rank < world_size:
            raise UsageError(f"rank {rank} does not exist in a world of {world_size}", hint="ranks count from 0")
        if world_size > 1 and (not joined or dist.get_world_size() != world_size):
            raise UsageError(
                f"a world of {world_size} ranks, and torch.distributed is not initialised for it",
                hint="call torch.distributed.init_process_group first",
            )
        return cls(rank, world_size)

    def agree(self, number: int, message: bytes, error: Exception | None, alike: Alike = ()) -> bytes:
        """Return rank 0's message on all ranks; raise on all ranks if the numbers differ or a rank has an error.

        If a rank has an error of a type in `alike`, the other ranks raise that type too.
        """
        if self.world_size > 1:
            try:
                with self._warns_if_slow():
                    message = self._exchange(number, message, error, alike)
            except HeadraceError:
                if error is None:
                    raise
        if error is not None:
            raise error
        return message

    @contextlib.contextmanager
    def agreed(self, number: int = 0, alike: Alike = ()) -> Iterator[None]:
        """Raise on all ranks if the block fails on one. The block must not wait for other ranks. `alike`: see `agree`."""
        error = None
        try:
            yield
        except Exception as caught:  # any error must be reported to the other ranks
            error = caught
        self.agree(number, b"", error, alike)

    def gather(self, table: bytes) -> list[bytes]:
        """Every rank's table, by rank. If no table has changed, this costs one small all-reduce."""
        if self.world_size == 1:
            return [table]
        changed = not self._tables or table != self._table
        flag, *size = _maximum(bytes([changed]) + _NUMBER.pack(len(table)))
        if flag:
            longest = _NUMBER.unpack(bytes(size))[0]
            framed = (_NUMBER.pack(len(table)) + table).ljust(_NUMBER.size + longest, b"\0")
            self._table, self._tables = table, [_unframed(each) for each in _all(framed, self.world_size)]
        return self._tables

    def maximum(self, sent: bytes) -> bytes:
        """The maximum over all ranks, byte by byte. All ranks must give the same number of bytes."""
        return _maximum(sent) if self.world_size > 1 else sent

    def all(self, own: bytes) -> list[bytes]:
        """The bytes of every rank, by rank. All ranks must give the same number of bytes."""
        return _all(own, self.world_size) if own else [b""] * self.world_size

    def all_to_all(self, sent: Mapping[int, bytes]) -> dict[int, bytes]:
        """Send a message to each rank that `sent` names; return the messages to this rank, by sender. Collective.

        Empty messages are not delivered. All ranks raise `CapacityError` if one of them would send or receive more than
        `EXCHANGE_BYTES`.
        """
        if self.world_size == 1:
            return {rank: data for rank, data in sent.items() if data}
        with explained():
            return self._all_to_all(sent)

    def isend(self, data: torch.Tensor, rank: int, tag: int) -> Request:
        """Start to send main memory to a rank. The first call, or that of `group`, is collective."""
        return cast("Request", dist.isend(data, rank, self.group(), tag))

    def irecv(self, data: torch.Tensor, rank: int, tag: int) -> Request:
        """Start to receive into main memory from a rank. The first call, or that of `group`, is collective."""
        return cast("Request", dist.irecv(data, rank, self.group(), tag))

    def _all_to_all(self, sent: Mapping[int, bytes]) -> dict[int, bytes]:
        parts = [sent.get(rank, b"") for rank in range(self.world_size)]
        sizes = torch.tensor([len(part) for part in parts], dtype=torch.int64, device=_device())
        incoming_sizes = torch.empty_like(sizes)
        dist.all_to_all_single(incoming_sizes, sizes)
        lengths = incoming_sizes.tolist()
        self._require_room(max(sum(map(len, parts)), sum(lengths)))
        joined = torch.frombuffer(bytearray(b"".join(parts)) or bytearray(1), dtype=torch.uint8)
        outgoing = joined[: sum(map(len, parts))].to(_device())
        incoming_bytes = torch.empty(sum(lengths), dtype=torch.uint8, device=outgoing.device)
        dist.all_to_all_single(incoming_bytes, outgoing, lengths, sizes.tolist())
        received, ends = bytes(incoming_bytes.cpu().numpy()), list(itertools.accumulate(lengths))
        return {
            rank: received[end - length : end]
            for rank, (length, end) in enumerate(zip(lengths, ends, strict=True))
            if length
        }

    def _require_room(self, size: int) -> None:
        """Raise `CapacityError` on all ranks if one of them would send or receive too many bytes. Collective."""
        if _maximum(bytes([size > EXCHANGE_BYTES]))[0]:
            excess = f"rank {self.rank} has {size}" if size > EXCHANGE_BYTES else "another rank has more"
            raise CapacityError(
                f"the ranks cannot exchange what they hold of the state: {excess} bytes; the limit is {EXCHANGE_BYTES}",
                hint="save fewer and larger tensors, for example stack those of a list",
            )

    def group(self) -> dist.ProcessGroup | None:
        """A process group that sends main memory; None for the default group.

        The first call is collective and creates it.
        """
        if self._group is None and "gloo" not in str(dist.get_backend_config()):
            self._group = dist.new_group(backend="gloo")
        return self._group

    def _exchange(self, number: int, message: bytes, error: Exception | None, alike: Alike) -> bytes:
        own_message = message if self.rank == 0 and error is None else b""
        assert len(own_message) <= _MESSAGE_BYTES
        number = max(number, 0)
        flags = bytes(int(rank == self.rank and error is not None) for rank in range(self.world_size))
        numbers = _NUMBER.pack(number) + _NUMBER.pack(~number & (1 << 64) - 1)
        sent = flags + numbers + struct.pack(">H", len(own_message)) + own_message.ljust(_MESSAGE_BYTES, b"\0")
        combined = _maximum(sent)
        failed = [rank for rank in range(self.world_size) if combined[rank]]
        if failed:
            reason = self._reasons(error)[failed[0]]
            if error is None:
                raise _error_on(failed[0], reason, alike)
        if error is None and combined[self.world_size :][: len(numbers)] != numbers:
            raise UsageError(
                "the ranks request different steps", hint="call save and restore with the same step everywhere"
            )
        tail = combined[self.world_size + len(numbers) :]
        return tail[2 : 2 + struct.unpack(">H", tail[:2])[0]]

    @contextlib.contextmanager
    def _warns_if_slow(self) -> Iterator[None]:
        """Log a warning if the block takes long, which means that other ranks have not called."""
        waited = "rank %d has waited %.0f s for other ranks to join its save or restore: %s"
        timer = threading.Timer(_WARN_SECONDS, _log.warning, (waited, self.rank, _WARN_SECONDS, _CALL_EVERYWHERE))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()

    def _reasons(self, error: Exception | None) -> list[str]:
        """The error text of each rank; "" for ranks without an error. Collective."""
        reason = f"{type(error).__name__}: {error}".encode(errors="replace") if error is not None else b""
        sent = _all(reason[:_REASON_BYTES].ljust(_REASON_BYTES, b"\0"), self.world_size)
        return [each.rstrip(b"\0").decode(errors="ignore") for each in sent]


class PendingError(contextlib.AbstractContextManager["PendingError"]):
    """Keeps an error of its body until the next exchange."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, tb: object) -> bool:
        if isinstance(error, Exception):
            self.error = error
        return isinstance(error, Exception)

    def raise_kept(self) -> None:
        """Raise the error, if any. Call it inside an exchange."""
        if self.error is not None:
            raise self.error


def _error_on(rank: int, reason: str, alike: Alike) -> HeadraceError:
    """The error of a rank that learns that another rank has failed."""
    name, _, text = reason.partition(": ")
    for kind in alike:
        if kind.__name__ == name:
            return kind(f"rank {rank}: {text}")
    return TransientError(
        f"rank {rank} could not take part: {reason}", hint="see that rank's log for the complete error"
    )


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn an error of torch.distributed into one that names the likely mistake."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise TransientError(
            f"the ranks could not agree on a save or a restore: {reason:.300}",
            hint=f"{_CALL_EVERYWHERE}; if all did, another rank has failed: see its output",
        ) from error


@explained()
def _maximum(sent: bytes) -> bytes:
    tensor = torch.frombuffer(bytearray(sent), dtype=torch.uint8).to(_device())
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return bytes(tensor.cpu().numpy())


@explained()
def _all(sent: bytes, world_size: int) -> list[bytes]:
    message = torch.frombuffer(bytearray(sent), dtype=torch.uint8).to(_device())
    gathered = [torch.empty_like(message) for _ in range(world_size)]
    dist.all_gather(gathered, message)
    return [bytes(each.cpu().numpy()) for each in gathered]


def _unframed(framed: bytes) -> bytes:
    length = _NUMBER.unpack_from(framed)[0]
    return framed[_NUMBER.size : _NUMBER.size + length]


def _device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"
