"""An object store in virtual time: latency, a rate limit, lost responses, and requests that are applied late or twice.

Purpose: many processes of a simulation share one `Bucket`. It keeps the contract of `headrace.dataio.store.base`. Like
a real store, it may apply a request minutes after its client has given up, or apply it twice.

Invariants:

* Each request is applied at one moment, half its latency after it was sent, plus its wait for the rate limit. Reads see
  everything that was applied before.
* If a conditional write fails, the client reads the object back, as real back ends do. So `put_if_absent` has one
  winner.
* The faults depend only on the seed of the simulation. `fired` counts them.

Failure behaviour: a refused request raises `TransientError` when it reaches the store. A lost or late one raises it
after `Faults.patience` more seconds. A killed process gets no response, but requests that it has sent may still be
applied.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from headrace.dataio.core import limits
from headrace.dataio.core.errors import AmbiguousWriteError, NotFoundError, TransientError
from headrace.dataio.store.base import (
    Buffer,
    Location,
    ObjectInfo,
    Store,
    check_conditional_size,
    check_folder,
    check_key,
    check_range,
    too_large,
    writable_bytes,
)
from headrace.dataio.testing.simulation.scheduler import Simulation

PAGE = 1000
"""The maximum number of keys or folders in one response to a listing."""
_TRIES = 3
_DIGEST_BYTES = 90
"""An upper limit on the bytes of the digest at the end of a document."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Faults:
    """The probabilities of the faults of a request, each from 0 to 1.

    Attributes:
        refused: The request is not applied, and raises an error at once.
        lost: The request is applied, and its response is lost.
        late: The client gives up, and the request is applied up to `late_seconds` later. Writes only.
        twice: The request is applied at once, and again up to `late_seconds` later. Writes only.
        flipped: The response to a GET has one wrong bit.
        late_seconds: The longest delay of `late` and `twice`, in seconds.
        patience: Seconds until a client gives up.
    """

    refused: float = 0.0
    lost: float = 0.0
    late: float = 0.0
    twice: float = 0.0
    flipped: float = 0.0
    late_seconds: float = 900.0
    patience: float = 10.0


class Bucket:
    """The server side of the store: its objects, its latency and its faults.

    Args:
        simulation: The simulation that provides the time and the random numbers.
        latency: Seconds from a request to its response.
        rate: The maximum number of requests per second; 0 for no limit.
        faults: The probabilities of faults. The attribute may be replaced at any time.
    """

    def __init__(
        self, simulation: Simulation, *, latency: float = 0.02, rate: float = 0.0, faults: Faults | None = None
    ) -> None:
        self.simulation, self.latency, self.rate = simulation, latency, rate
        self.faults = faults or Faults()
        self.objects: dict[str, tuple[bytes, float]] = {}
        self._keys: list[str] = []
        self._free = 0.0
        self._flips = Random(simulation.seed)
        self.requests: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.fired: Counter[str] = Counter()
        self.watch: Callable[[str, str, float], object] | None = None
        """Called with the operation, the key and the time of every request when it is sent."""

    def apply_put(self, key: str, data: bytes, *, if_absent: bool = False) -> bool:
        """Apply a write now. Returns False if the key exists and the write is conditional."""
        if if_absent and key in self.objects:
            return False
        if key not in self.objects:
            bisect.insort(self._keys, key)
        self.objects[key] = (data, self.simulation.clock.time())
        return True

    def apply_delete(self, key: str) -> None:
        if self.objects.pop(key, None) is not None:
            self._keys.pop(bisect.bisect_left(self._keys, key))

    def keys(self, prefix: str, after: str = "") -> list[str]:
        """Return at most `PAGE` keys with this prefix, after the key `after`."""
        at = bisect.bisect_right(self._keys, after) if after else bisect.bisect_left(self._keys, prefix)
        page = self._keys[at : at + PAGE]
        return [key for key in page if key.startswith(prefix)]

    def folders(self, prefix: str, after: str = "") -> list[str]:
        """Return at most `PAGE` names of folders directly below the folder `prefix`, after the folder `after`."""
        at = bisect.bisect_left(self._keys, _end_of_folder(prefix + after) if after else prefix)
        names = list[str]()
        while len(names) < PAGE and at < len(self._keys) and self._keys[at].startswith(prefix):
            name, slash, _ = self._keys[at][len(prefix) :].partition("/")
            if slash:
                names.append(name)
            at = bisect.bisect_left(self._keys, _end_of_folder(prefix + name), at) if slash else at + 1
        return names

    def send(self, operation: str, key: str, apply: Callable[[], T], *, writes: bool = False) -> T:
        """Send one request: wait, apply it, and wait for the response."""
        simulation, faults = self.simulation, self.faults
        self.requests[operation] += 1
        simulation.process.requests += 1
        if self.watch is not None:
            self.watch(operation, key, simulation.now)
        fault = self._draw(writes)
        simulation.sleep(self.latency / 2 + self._queue())
        if fault == "refused":
            raise TransientError(f"{key}: the store refused the request")
        if fault == "late":
            simulation.later(simulation.random.uniform(0, faults.late_seconds), apply)
            simulation.sleep(faults.patience)
            raise TransientError(f"{key}: no answer within {faults.patience:g} s")
        result = apply()
        if fault == "twice":
            simulation.later(simulation.random.uniform(0, faults.late_seconds), apply)
        if fault == "lost":
            simulation.sleep(faults.patience)
            raise TransientError(f"{key}: the answer was lost")
        simulation.sleep(self.latency / 2)
        return result

    def _draw(self, writes: bool) -> str:
        faults, drawn = self.faults, self.simulation.random.random()
        for name in ("refused", "lost", "late", "twice"):
            share = getattr(faults, name)
            if drawn < share:
                if name in ("late", "twice") and not writes:
                    return ""
                self.fired[name] += 1
                return name
            drawn -= share
        return ""

    def flip(self, data: bytes) -> bytes:
        """Return the bytes of a response. With the probability of `Faults.flipped`, one bit is wrong.

        The last bytes are never changed, because they hold the digest of a document. The digest depends on the
        document's text, and the effects of flips must not depend on it.
        """
        if not data or not self.faults.flipped or self._flips.random() >= self.faults.flipped:
            return data
        self.fired["flipped"] += 1
        wrong, bit = bytearray(data), int(self._flips.random() * 8 * max(1, len(data) - _DIGEST_BYTES))
        wrong[bit // 8] ^= 1 << bit % 8
        return bytes(wrong)

    def _queue(self) -> float:
        """Return the seconds that this request waits for the rate limit."""
        if not self.rate:
            return 0.0
        self._free = max(self._free, self.simulation.now) + 1 / self.rate
        return self._free - self.simulation.now


def _end_of_folder(folder: str) -> str:
    """The first string after all keys of the folder: "0" is the character after "/"."""
    return folder + "0"


class SimulatedStore(Store):
    """A client of a `Bucket`. Simulated processes may share it."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket

    @property
    def location(self) -> Location:
        return Location("memory://simulated", {}, shareable=True)

    def get(self, key: str, *, max_bytes: int = limits.SMALL_OBJECT_BYTES) -> bytes:
        data = self._read("GET", check_key(key))
        if len(data) > max_bytes:
            raise too_large(key, len(data), max_bytes)
        return data

    def get_into(self, key: str, offset: int, buffer: memoryview) -> None:
        view = writable_bytes(buffer)
        data = self._read("GET", check_key(key))
        check_range(key, offset, len(view), len(data))
        view[:] = data[offset : offset + len(view)]

    def put(self, key: str, data: Buffer) -> None:
        body = bytes(data)
        self.bucket.bytes["PUT"] += len(body)
        self.bucket.send("PUT", check_key(key), lambda: self.bucket.apply_put(key, body), writes=True)

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        body = bytes(data)
        check_conditional_size(check_key(key), body)
        self.bucket.bytes["PUT"] += len(body)
        for _ in range(_TRIES):
            try:
                won = self.bucket.send(
                    "PUT", key, lambda: self.bucket.apply_put(key, body, if_absent=True), writes=True
                )
                return won or self.bucket.objects.get(key, (b"", 0.0))[0] == body
            except TransientError:
                stored = self._read_back(key)
            if stored is not None:
                return stored == body
        raise AmbiguousWriteError(f"{key}: the store did not answer")

    def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
        body = b"".join(bytes(part) for part in parts)
        self.put(key, body)
        return len(body)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        after = ""
        while True:
            previous = after
            page = self.bucket.send("LIST", prefix, lambda: self._page(prefix, previous))  # noqa: B023 - called at once
            yield from page
            if len(page) < PAGE:
                return
            after = page[-1].key

    def list_folders(self, prefix: str = "", *, after: str = "") -> Iterator[str]:
        if not check_folder(prefix):
            return
        while True:
            previous = after
            page = self.bucket.send("LIST", prefix, lambda: self.bucket.folders(prefix, previous))  # noqa: B023 - called at once
            yield from page
            if len(page) < PAGE:
                return
            after = page[-1]

    def stat(self, key: str) -> ObjectInfo:
        stored = self.bucket.send("HEAD", check_key(key), lambda: self.bucket.objects.get(key))
        if stored is None:
            raise NotFoundError(f"{key} does not exist")
        return ObjectInfo(key, len(stored[0]), float(math.floor(stored[1])))

    def delete_many(self, keys: Iterable[str]) -> None:
        key_list = [check_key(key) for key in keys]
        for at in range(0, len(key_list), PAGE):
            batch = key_list[at : at + PAGE]

            def apply(batch: list[str] = batch) -> None:
                for key in batch:
                    self.bucket.apply_delete(key)

            self.bucket.send("DELETE", batch[0], apply, writes=True)

    def _read(self, operation: str, key: str) -> bytes:
        stored = self.bucket.send(operation, key, lambda: self.bucket.objects.get(key))
        if stored is None:
            raise NotFoundError(f"{key} does not exist")
        self.bucket.bytes[operation] += len(stored[0])
        return self.bucket.flip(stored[0])

    def _read_back(self, key: str) -> bytes | None:
        try:
            return self._read("GET", key)
        except (NotFoundError, TransientError):
            return None

    def _page(self, prefix: str, after: str) -> Sequence[ObjectInfo]:
        infos = []
        for key in self.bucket.keys(prefix, after):
            data, modified = self.bucket.objects[key]
            infos.append(ObjectInfo(key, len(data), float(math.floor(modified))))
        return infos
