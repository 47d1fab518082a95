"""The writer's side of the tier: objects are kept there first, and sent on to the store from there.

Purpose: a save's bytes are safe beside the trainer at the speed of memory, however slow the store is.
Invariants: `put_if_absent` returns only after every object kept before it is in the store, byte for byte as it was given; so
nothing that refers to them can come before them. Other operations pass by, leases among them. Until then a kept object is
not visible in the store: nobody may rely on it earlier.
Failure behaviour: a tier that is full, read-only or gone is done without from that moment, which is said once: what was kept of
the object in the making goes to the store with the rest of it. An error of sending is raised by the next `put_if_absent`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain

import xxhash

from headrace.dataio.core.errors import CapacityError, CorruptionError, HeadraceError
from headrace.dataio.core.log import get_logger, warn_once
from headrace.dataio.store.contract import Buffer, Store
from headrace.dataio.store.tier.kept import Label, Writer
from headrace.dataio.store.tier.shelf import Shelf
from headrace.dataio.store.wrapper import Wrapper

Keeps = Callable[[str], bool]
TROUBLE = (OSError, CapacityError)
"""What makes a writer do without the tier."""
_log = get_logger(__name__)


class Keeping(Wrapper):
    """`inner`, with what `keeps(key)` names kept on `shelf` as well; a context manager that does not close `inner`.

    For one writing thread at a time.
    """

    def __init__(self, inner: Store, shelf: Shelf, keeps: Keeps) -> None:
        super().__init__(inner)
        self._shelf, self._keeps = shelf, keeps
        self._source, self._sent = inner.location.url, list[Future[int]]()
        self._ends = ExitStack()
        self._pool = self._ends.enter_context(ThreadPoolExecutor(1, thread_name_prefix="headrace-send"))
        self.whole = True
        """Whether everything so far was kept."""
        self.send = True
        """Whether what is kept is sent on. Where it is not, an object that cannot be kept is an error."""
        try:
            self._reservation = self._ends.enter_context(shelf.reserve())
        except OSError as error:
            self.without(error)

    def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
        writer = self._begin(key)
        if writer is None:
            return super().put_multipart(key, parts)
        left = iter(parts)
        for part in left:
            try:
                writer.write(part)
            except TROUBLE as error:
                return self._around(key, writer, chain([part], left), error)
        try:
            label = writer.commit()
        except OSError as error:
            return self._around(key, writer, [], error)
        if self.send:
            self._sent.append(self._pool.submit(self.pass_on, label))
        return label.size

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        self.flush()
        return super().put_if_absent(key, data)

    def flush(self) -> None:
        """Wait until all that was kept is in the store; raises why it is not."""
        while self._sent:
            self._sent[0].result()
            self._sent.pop(0)

    def without(self, error: Exception) -> None:
        """Go on without the tier."""
        self.whole = False
        warn_once(_log, f"the tier in {self._shelf.root} cannot be used, the save goes to the store only: {error}")

    def end(self) -> None:
        """Stop sending what was not begun, and give the reservation back."""
        for future in self._sent:
            future.cancel()
        self._ends.close()

    def __exit__(self, *_: object) -> None:
        self.end()

    def _begin(self, key: str) -> Writer | None:
        if not self.whole or not self._keeps(key):
            return None
        try:
            return self._reservation.writer(self._source, key)
        except OSError as error:
            self.without(error)
            return None

    def _around(self, key: str, writer: Writer, rest: Iterable[Buffer], error: Exception) -> int:
        """The object goes to the store directly: what the tier took of it, then the rest."""
        self.without(error)
        try:
            if not self.send:
                raise error if isinstance(error, HeadraceError) else CapacityError(f"keeping {key}: {error}")
            return super().put_multipart(key, chain(writer.written(), rest))
        finally:
            writer.discard()

    def pass_on(self, label: Label) -> int:
        """Send what is kept."""
        return super().put_multipart(label.key, checked(self._shelf, label))


def checked(shelf: Shelf, label: Label) -> Iterator[memoryview]:
    """The object's bytes in pieces of their own; `CorruptionError` at the end when they are not those that were kept."""
    held, digest = shelf.open(label.source, label.key), xxhash.xxh3_128()
    if held is None:
        raise CorruptionError(f"the kept copy of {label.key} is gone", hint="save again")
    for piece in held.pieces():
        digest.update(piece)
        yield piece
    if digest.digest() != label.digest or held.label != label:
        raise CorruptionError(f"the kept copy of {label.key} is not what was written", hint="check the tier's disk")
