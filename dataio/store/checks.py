"""Checks of arguments that all back-ends share, so that they refuse the same things in the same words.

Invariant: pure functions; nothing is read or written. Failure behaviour: `UsageError` (of ranges `RangeError`) or
`CapacityError` naming the object and both numbers.
"""

from __future__ import annotations

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CapacityError, RangeError, UsageError
from headrace.dataio.store.contract import Buffer

CONDITIONAL_BYTES = limits.JSON_DOCUMENT_BYTES
"""The most that `put_if_absent` takes: a document, small enough for one request and for being read back."""


def check_conditional_size(name: str, data: Buffer) -> None:
    """Refuse a body of `put_if_absent` above `CONDITIONAL_BYTES`."""
    size = memoryview(data).nbytes
    if size > CONDITIONAL_BYTES:
        raise CapacityError(
            f"{name}: a conditional write takes at most {limits.format_bytes(CONDITIONAL_BYTES)}, "
            f"not {limits.format_bytes(size)}",
            hint="write the content with put or put_multipart and only its name and digest conditionally",
        )


def check_prefix(prefix: str) -> bool:
    """Whether any well-formed key can start with `prefix`."""
    folders = prefix.split("/")[:-1]
    return not any(s in ("", ".", "..") for s in folders) and not any(c < " " or c in "\x7f\\" for c in prefix)


def check_range(name: str, offset: int, length: int, size: int | None = None) -> None:
    """Refuse a range with a negative start, or, where `size` is known, one that ends past the object's end."""
    if offset < 0 or (size is not None and offset + length > size):
        end = "" if size is None else f"; the object has {size} bytes"
        raise RangeError(
            f"{name}: bytes {offset} to {offset + length} are not all there{end}",
            hint="ask for a range inside the object",
        )


def writable_bytes(buffer: memoryview) -> memoryview:
    """`buffer` as writable flat bytes."""
    view = memoryview(buffer)
    if view.readonly or not view.c_contiguous:
        raise UsageError(
            "the buffer to read into must be writable and contiguous", hint="pass memoryview(bytearray(n))"
        )
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def too_large(name: str, size: int, max_bytes: int) -> CapacityError:
    """The error for an object that is larger than its reader admits."""
    return CapacityError(
        f"{name} has {limits.format_bytes(size)}, above the limit of {limits.format_bytes(max_bytes)} for one read",
        hint="read it in ranges, or raise max_bytes",
    )
