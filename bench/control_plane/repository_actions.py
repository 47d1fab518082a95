"""The actions that `headrace.bench.control_plane.repository` measures. Each runs in its own process.

Every function returns:

- the duration of the action in seconds, without the start of the process;
- the peak memory of the process;
- the number of requests to the store, in total and by operation;
- a list of errors.

Invariant: the calls of the back end are counted, so retries count, too. A listing counts one request for each 1,000
names that the caller reads, and a deletion one for each 1,000 keys, as S3 pages them. With SeaweedFS the client sends
more requests, because it reads every listing to its end to sort it.
Failure behaviour: an action with wrong results or an exit code other than 0 returns an error. Other errors are raised.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.bench.core.measure import memory_kib
from headrace.dataio.core.errors import UsageError
from headrace.dataio.store.base import ObjectInfo, Store
from headrace.dataio.store.open import open_store, register_back_end
from headrace.dataio.store.url_policy import scheme_of
from headrace.dataio.store.wrappers import Wrapper

_PAGE = 1000
_BACK_ENDS = {"file": "headrace.dataio.store.posix", "s3": "headrace.dataio.store.s3"}
_OUTPUT_CHARACTERS = 500


class Requests(Wrapper):
    """Counts the requests to a store by operation, in `counts`."""

    def __init__(self, inner: Store, counts: Counter[str]) -> None:
        super().__init__(inner)
        self._counts, self._lock = counts, threading.Lock()

    def _through(self, operation: str, key: str, size: int, work: Callable[[], Any]) -> Any:
        self._count(operation)
        return work()

    def get_ranges_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        self._count("get_into", len(ranges))
        self.inner.get_ranges_into(key, ranges)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self._pages(self.inner.list(prefix))

    def list_folders(self, prefix: str = "", *, after: str = "") -> Iterator[str]:
        return self._pages(self.inner.list_folders(prefix, after=after))

    def delete_many(self, keys: Iterable[str]) -> None:
        all_keys = [*keys]
        self._count("delete_many", -(-len(all_keys) // _PAGE))
        self.inner.delete_many(all_keys)

    def _pages(self, listing: Iterable[Any]) -> Iterator[Any]:
        self._count("list")
        for number, entry in enumerate(listing):
            if number and number % _PAGE == 0:
                self._count("list")
            yield entry

    def _count(self, operation: str, number: int = 1) -> None:
        with self._lock:
            self._counts[operation] += number


def count_requests(url: str) -> Counter[str]:
    """Count the requests of all stores of this URL's scheme that this process opens from now on."""
    counts = Counter[str]()
    scheme = scheme_of(url)
    if scheme not in _BACK_ENDS:
        raise UsageError(f"requests to {scheme}:// are not counted", hint="give a directory or s3://bucket/prefix")

    def opener(url: str, options: Mapping[str, object]) -> Store:
        return Requests(importlib.import_module(_BACK_ENDS[scheme]).open_url(url, options), counts)

    register_back_end(scheme, scheme, opener)
    return counts


class Meter:
    """Measures actions of this process on the repository at `url`."""

    def __init__(self, url: str) -> None:
        self._counts = count_requests(url)

    def measure(self, action: Callable[[], list[str]]) -> dict[str, Any]:
        """Run `action`, which returns a list of errors, and return its figures."""
        with contextlib.suppress(OSError):  # if the peak cannot be reset, it includes earlier actions
            Path("/proc/self/clear_refs").write_text("5")
        self._counts.clear()
        began = time.perf_counter()
        errors = action()
        seconds = time.perf_counter() - began
        counted = {operation: float(number) for operation, number in sorted(self._counts.items())}
        peak = memory_kib("VmHWM") / 1024
        figures = {"seconds": seconds, "peak_mib": peak, "requests": float(self._counts.total()), **counted}
        return {**figures, "errors": errors}


def ckpt(url: str, *arguments: str) -> dict[str, Any]:
    """Run `headrace ckpt`. `arguments`: those of the command line, with "URL" for the URL. Also returns `lines`."""
    from headrace.dataio import cli

    words = ["ckpt", *(url if word == "URL" else word for word in arguments)]
    out, errors = io.StringIO(), io.StringIO()

    def run() -> list[str]:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            code = cli.main(words)
        text = (errors.getvalue() or out.getvalue())[-_OUTPUT_CHARACTERS:]
        return [f"exit code {code}: {text}"] if code else []

    figures = Meter(url).measure(run)
    return figures | {"lines": len(out.getvalue().splitlines())}


def latest(url: str, step: int) -> dict[str, Any]:
    """Find the latest step. Finding another step than `step` is an error."""
    from headrace.bench.control_plane.repository_filling import RUN
    from headrace.checkpoint.repository import steps as repository

    meter = Meter(url)
    with open_store(url) as store:

        def find() -> list[str]:
            base = repository.find(store, RUN, "latest")
            return [] if base is not None and base.step == step else [f"found {base}, not step {step}"]

        return meter.measure(find)


def restore(url: str, step: int, ranks: int) -> dict[str, Any]:
    """Read all tensors of a step of `ranks` ranks in one process, and compare their values."""
    from headrace.bench.control_plane.repository_filling import LENGTH, RUN, SHARDED, elements, own_elements
    from headrace.checkpoint import read

    expected = {name: elements(name, step, 0, ranks * LENGTH) for name in SHARDED} | {"own": own_elements(step, 0)}
    meter = Meter(url)

    def run() -> list[str]:
        with read(url, run=RUN, step=step) as saved:
            restored = {name: saved[name].read().tolist() for name in expected}
        return [f"{name} has wrong values" for name, values in expected.items() if restored[name] != values]

    return meter.measure(run)


def retention(url: str, steps: int, ranks: int) -> dict[str, Any]:
    """Remove the oldest of `steps` steps, commit another step, and remove the next one with the same `Collector`.

    The names of the figures of the second removal begin with "again_".
    """
    from headrace.bench.control_plane.repository_filling import RUN, add_step
    from headrace.checkpoint.repository import collect
    from headrace.checkpoint.repository.retention import Keep

    meter = Meter(url)
    with open_store(url) as store:
        collector = collect.Collector(store, collect.AT_ONCE)

        def remove(step: int) -> list[str]:
            plan = collect.retain(store, RUN, Keep(last=steps - 1), collector=collector)
            removed = [each.step for each in plan.tombstones] if plan is not None else []
            return [] if removed == [step] else [f"removed {removed[:5]}, not step {step}"]

        first = meter.measure(lambda: remove(1))
        add_step(store, steps + 1, ranks)
        second = meter.measure(lambda: remove(2))
    errors = first.pop("errors") + second.pop("errors")
    return {**first, **{f"again_{name}": value for name, value in second.items()}, "errors": errors}
