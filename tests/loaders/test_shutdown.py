"""A loader ends within a second, from any state, and leaves no thread, descriptor, process or shared memory behind."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.dataio import pack
from headrace.dataio.core.errors import UsageError
from headrace.dataio.shards.dataset import Dataset
from headrace.loaders import AudioLoader, AudioSpec, Clip, VideoLoader, Window
from headrace.loaders import loader as loader_module
from headrace.loaders.batch.prefetcher import Prefetcher
from headrace.loaders.fetch.sample_reader import StoreReader
from tests.support import nursery, video_corpus
from tests.support.long_media import SOUNDS, recorded
from tests.support.waiting import wait_for

SECOND = (
    1.0 if "PYTEST_XDIST_WORKER" not in os.environ else 60.0
)  # other workers may have the cores: no time is promised then


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dataset]:
    folder = tmp_path_factory.mktemp("shutdown")
    for one in video_corpus.ALL[:5]:
        (folder / one.name).write_bytes(video_corpus.make(one))
    with pack([folder], folder / "ds", workers=1) as packed:
        yield packed


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dataset]:
    folder = tmp_path_factory.mktemp("recordings")
    for name, codec in SOUNDS.items():
        recorded(folder / name, codec)
    with pack([folder], folder / "ds", workers=1) as packed:
        yield packed


_OTHERS: set[threading.Thread] = set()
"""Threads that were there before a test began: what other tests of this process left is none of a loader's."""


@pytest.fixture(autouse=True)
def others() -> None:
    _OTHERS.clear()
    _OTHERS.update(threading.enumerate())


def left() -> dict[str, list[str]]:
    """What a process may leave behind."""
    gc.collect()
    deadline = time.monotonic() + SECOND
    while _ours() and time.monotonic() < deadline:  # the cache lets its threads run out
        time.sleep(0.01)
    return {
        "threads": _ours(),
        "descriptors": sorted(_descriptors()),
        "shared memory": _shared(),
        "children": _children(),
    }


def more(after: dict[str, list[str]], before: dict[str, list[str]]) -> dict[str, list[str]]:
    """The threads and processes that exist now and did not before. Those of earlier tests may end in between."""
    new = {kind: list((Counter(after[kind]) - Counter(before[kind])).elements()) for kind in after}
    return {kind: names for kind, names in new.items() if names}


def _shared() -> list[str]:
    """Names in /dev/shm; of this process alone where tests of other processes may make some too."""
    names = os.listdir("/dev/shm") if Path("/dev/shm").is_dir() else []
    alone = "PYTEST_XDIST_WORKER" not in os.environ
    return sorted(name for name in names if alone or f"_{os.getpid()}_" in name or name.startswith("headrace"))


def _ours() -> list[str]:
    found = [thread.name for thread in threading.enumerate() if thread not in _OTHERS]
    return sorted(name for name in found if name.startswith(("headrace", "media")))


def _descriptors() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}").split(":")[0])
        except OSError:
            continue
    return found


def _children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def never(loader: Any) -> None:
    """Not even begun."""


def begun(loader: Any) -> None:
    next(iter(loader))


def in_the_middle(loader: Any) -> None:
    for number, _ in enumerate(loader):
        if number == 2:
            return


def after_the_end(loader: Any) -> None:
    for _ in loader:
        pass


def by_an_error(loader: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        for _ in loader:
            raise ZeroDivisionError


@pytest.mark.parametrize("kind", ["video", "sound", "isolated"])
@pytest.mark.parametrize("state", [never, begun, in_the_middle, after_the_end, by_an_error])
def test_closing_takes_no_second_and_leaves_nothing(state: Callable[[Any], None], kind: str, clips: Dataset) -> None:
    def make() -> Any:
        if kind == "sound":
            return AudioLoader(clips, 1, window=0.2, num_threads=2, sidecar=None)
        spec = AudioSpec(8000, seconds=0.1)
        return VideoLoader(
            clips,
            2,
            clip=Clip(3, per_video=3),
            size=(24, 32),
            audio=spec,
            num_threads=2,
            sidecar=None,
            decode_in_subprocess=kind == "isolated",
        )

    with make() as loader:  # whatever is loaded once and kept, such as DALI
        begun(loader)
    before = left()
    loader = make()
    state(loader)
    start = time.monotonic()
    loader.close()
    assert time.monotonic() - start < SECOND
    assert not more(left(), before)
    assert not before["threads"]


def test_a_loader_that_cannot_start_leaves_nothing_behind(clips: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    before = left()
    opened, closed = [], []

    def reader(store: Any, *_: Any) -> StoreReader:
        opened.append(StoreReader(store))
        monkeypatch.setattr(opened[-1], "close", lambda: closed.append(opened[-1]))
        return opened[-1]

    monkeypatch.setattr(loader_module, "open_shard_reader", reader)
    with VideoLoader(clips, 2, clip=Clip(2), size=(24, 32), num_threads=2, sidecar=None) as loader:
        for _ in range(2):  # and may be tried again
            with monkeypatch.context() as patch:
                patch.setattr("headrace.loaders.decode.registry.open_decoder", lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    begun(loader)
            assert closed == opened
        assert not more(left(), before)
        begun(loader)
    assert closed == opened
    assert len(opened) == 3


@pytest.mark.parametrize("isolate", [-1.0, 1e9, float("nan")])
def test_an_impossible_time_limit_is_refused_before_anything_is_started(isolate: float, clips: Dataset) -> None:
    with pytest.raises(UsageError, match="is not a time limit"):
        VideoLoader(clips, 2, decode_in_subprocess=isolate)


def test_closing_while_every_thread_waits_for_memory_ends_them(clips: Dataset) -> None:
    def hold(sample: dict[str, Any], _: torch.Generator) -> dict[str, Any]:
        wait_for(lambda: loader.memory["waits"])  # an admitted thread goes on when another one waits
        return sample

    before = left()["threads"]
    how: dict[str, Any] = {"clip": Clip(8), "size": (24, 32), "num_threads": 4, "transform": hold}
    with VideoLoader(clips, 4, memory_limit=1, sidecar=None, **how) as loader:
        begun(loader)
        assert loader.memory["limit"] == 1
        assert loader.memory["waits"] > 0
    assert left()["threads"] == before


@pytest.mark.parametrize("kind", ["here", "isolated"])
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ctrl_c_and_kill_end_the_process_and_all_it_started(kind: str, end: signal.Signals, clips: Dataset) -> None:
    url = clips.url.removeprefix("file://")
    shared = set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()
    process = nursery.start("tests.support.endless_loader", url, kind)
    try:
        for _ in range(3):
            assert process.stdout.readline() == "batch\n"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        start = time.monotonic()
        process.send_signal(end)
        process.wait(150)
        assert time.monotonic() - start < 10 * SECOND  # most of which is what the interpreter and torch take to end
        deadline = time.monotonic() + 10
        while any(_alive(child) for child in children) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not [child for child in children if _alive(child)]
    finally:
        process.kill()
        process.communicate()
    if shared:
        assert set(os.listdir("/dev/shm")) <= shared | _of_others()


def _alive(pid: str) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def _of_others() -> set[str]:
    """Names in /dev/shm that another test's process may have made meanwhile."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("torch_", "headrace", "psm_"))}


def test_batches_outlive_the_loader_that_made_them(clips: Dataset) -> None:
    with VideoLoader(clips, 1, clip=Clip(3, per_video=4), size=(24, 32), num_threads=2, sidecar=None) as loader:
        kept = [batch["video"] for batch in loader]
        copies = [video.clone() for video in kept]
        for _ in loader:  # the next epoch writes into other memory
            pass
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))
    with VideoLoader(clips, 1, clip=Clip(3, per_video=4), size=(24, 32), num_threads=1, sidecar=None) as loader:
        seen = {batch["video"].data_ptr() for _ in range(3) for batch in loader}
    assert len(seen) < 60  # 60 batches in far fewer places


def pictures(clips: Dataset, recordings: Dataset) -> Any:
    return VideoLoader(clips, 1, clip=Clip(1, per_video=8), size=(16, 16), num_threads=2, sidecar=None)


def sound(clips: Dataset, recordings: Dataset) -> Any:
    """Cut out of FLAC, M4A, MP3 and WAV, and resampled by what the threads keep for it."""
    return AudioLoader(recordings, 1, window=Window(0.2, per_sample=32), num_threads=2, sidecar=None)


@pytest.fixture(params=[pictures, sound], ids=lambda kind: kind.__name__)
def kept_on(request: pytest.FixtureRequest, clips: Dataset, recordings: Dataset) -> Any:
    return request.param(clips, recordings)


def soak(opened: Any, batches: int) -> None:
    """So many batches, epoch after epoch; nothing grows."""
    with opened as loader:
        taken, marks = 0, []
        while taken < batches:
            for _ in loader:
                taken += 1
                if taken % (batches // 10) == 0:
                    marks.append((_resident(), len(_descriptors()), threading.active_count()))
    early, late = marks[len(marks) // 2 - 2], marks[-1]
    assert late[0] - early[0] < 16 << 20, marks
    assert late[1] - early[1] <= 2 * 2, marks  # a thread may have an excerpt open, and so may libav
    assert late[2] == early[2], marks


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_descriptors_and_threads_stay_flat_over_many_batches(kept_on: Any) -> None:
    soak(kept_on, 600)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_memory_descriptors_and_threads_stay_flat_over_fifty_thousand_batches(kept_on: Any) -> None:
    soak(kept_on, 50_000)


def test_a_forgotten_loader_ends_and_not_in_the_thread_that_collects_it(
    clips: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, close = list[int](), Prefetcher.close
    monkeypatch.setattr(Prefetcher, "close", lambda it: (close(it), closed.append(threading.get_ident())))
    loader = AudioLoader(clips, 1, window=0.2, num_threads=2, sidecar=None)
    begun(loader)
    del loader
    gc.collect()
    wait_for(lambda: closed)
    assert threading.get_ident() not in closed
    assert not left()["threads"]
