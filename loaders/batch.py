"""Clips to batches, by threads, a bounded number of batches ahead, always in order.

Purpose: keep the trainer from waiting without ever running away from it.

Invariants: batches come out in the order they were asked for, whichever clip was finished first. At most `ahead` batches
exist besides the one being delivered. Each thread writes its clip straight into the batch's tensors, so the trainer's
thread copies nothing.
Failure behaviour: the first error of a batch is raised where that batch would be delivered, and again if it is asked for again; a
batch that nothing was finished of for `STALL_SECONDS` is a `DeadlineError`. `close` stops threads after the clip
that each has in hand, from any state.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch

from dataio.core.errors import DeadlineError, UsageError
from loaders.clips import Finished, Place

STALL_SECONDS = 600.0
_THREADS = "millrace-loader"
Make = Callable[[Sequence[Place]], list[Finished]]


@dataclass(frozen=True, slots=True)
class Output:
    """What the tensors of a batch are like. `mean` and `std` (3 values each, for pixels in 0 … 1) make it float32."""

    device: torch.device
    pinned: bool
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None


class Batch:
    """The tensors of one batch, filled in any order by any thread."""

    def __init__(self, size: int, output: Output) -> None:
        self._output = output
        self._lock = threading.Lock()
        self._video: torch.Tensor | None = None
        self._audio: torch.Tensor | None = None
        self.clips: list[Finished | None] = [None] * size

    def put(self, slot: int, clip: Finished) -> None:
        """Write `clip` into its place; its tensors are let go."""
        with self._lock:  # the first clip decides the shape
            if self._video is None:
                self._video = self._empty(clip.video, torch.float32 if self._output.mean else torch.uint8)
            if self._audio is None and clip.audio is not None:
                self._audio = self._empty(clip.audio, torch.float32)
        if clip.video.shape != self._video.shape[1:]:
            raise UsageError(
                f"sample {clip.sample.key!r} has clips of {tuple(clip.video.shape)}, others in its batch of "
                f"{tuple(self._video.shape[1:])}",
                hint="give the loader a size=(height, width)",
            )
        self._video[slot].copy_(_normalised(clip.video, self._output), non_blocking=True)
        if clip.audio is not None and self._audio is not None:
            self._audio[slot].copy_(clip.audio, non_blocking=True)
        none = torch.empty(0)
        self.clips[slot] = Finished(clip.sample, none, clip.start, None, clip.audio_samples, clip.refusals)

    def tensors(self) -> dict[str, Any]:
        """The batch as the trainer sees it, on the current CUDA stream if it is on a GPU."""
        for tensor in (self._video, self._audio):
            if tensor is not None and tensor.is_cuda:  # so that its memory is not reused before this stream is done
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        clips = [clip for clip in self.clips if clip is not None]
        batch: dict[str, Any] = {
            "video": self._video,
            "id": torch.tensor([clip.sample.id for clip in clips], dtype=torch.int64),
            "key": [clip.sample.key for clip in clips],
            "text": [clip.sample.text for clip in clips],
            "clip": torch.tensor([clip.start for clip in clips], dtype=torch.float64),
        }
        if self._audio is not None:
            batch["audio"] = self._audio
            batch["audio_samples"] = torch.tensor([clip.audio_samples for clip in clips], dtype=torch.int64)
        return batch

    def _empty(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        shape = (len(self.clips), *like.shape)
        return torch.empty(shape, dtype=dtype, device=self._output.device, pin_memory=self._output.pinned)


def _normalised(video: torch.Tensor, output: Output) -> torch.Tensor:
    """(T, 3, H, W) as it was, or float32 with each channel's mean taken off and divided by its deviation."""
    if output.mean is None or output.std is None:
        return video
    mean = torch.tensor(output.mean, device=video.device).view(3, 1, 1) * 255
    std = torch.tensor(output.std, device=video.device).view(3, 1, 1) * 255
    return video.to(torch.float32).sub_(mean).div_(std)


class _Threads:
    """A pool whose threads leave torch's own threads to the trainer."""

    def __init__(self, count: int) -> None:
        self._torch_threads = torch.get_num_threads()
        self._lock = threading.Lock()
        self.pool = ThreadPoolExecutor(count, thread_name_prefix=_THREADS, initializer=self._start)

    def _start(self) -> None:
        """Make torch use one thread in this thread only.

        `set_num_threads` sets this thread's number and the one that threads yet to start will take; a helper thread
        puts the latter back.
        """
        with self._lock:
            torch.set_num_threads(1)
            helper = threading.Thread(target=torch.set_num_threads, args=(self._torch_threads,))
            helper.start()
            helper.join()


class Prefetcher:
    """Makes batches ahead of the trainer; used by one thread at a time. It never starts a batch by itself."""

    def __init__(self, make: Make, output: Output, threads: int, group: int = 1) -> None:
        self._make, self._output, self._group = make, output, group
        self._pool = _Threads(threads).pool
        self._stopped = threading.Event()
        self._batches: list[tuple[Batch, list[Future[None]]]] = []
        self._stream: Any = torch.cuda.Stream(output.device) if output.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        """Batches that were started and not delivered."""
        return len(self._batches)

    def start(self, places: Sequence[Place]) -> None:
        """Begin the next batch."""
        batch = Batch(len(places), self._output)
        groups = [range(n, min(n + self._group, len(places))) for n in range(0, len(places), self._group)]
        self._batches.append(
            (batch, [self._pool.submit(self._fill, batch, group, [places[n] for n in group]) for group in groups])
        )

    def next(self) -> Batch:
        """The oldest batch that was started, whole."""
        batch, futures = self._batches[0]
        while True:
            done, waiting = wait(futures, STALL_SECONDS, FIRST_EXCEPTION)
            for future in done:
                future.result()
            if not waiting:
                break
            if not done:
                raise DeadlineError(f"no clip was finished for {STALL_SECONDS:.0f} s", hint="is the store reachable?")
            futures = list(waiting)
        del self._batches[0]
        return batch

    def close(self) -> None:
        """Drop what was started and end the threads."""
        self._stopped.set()
        inside = threading.current_thread().name.startswith(_THREADS)  # a collected loader may be finalised here
        self._pool.shutdown(wait=not inside, cancel_futures=True)
        self._batches.clear()

    def _fill(self, batch: Batch, slots: Sequence[int], places: Sequence[Place]) -> None:
        if self._stopped.is_set():
            return
        if self._output.device.type != "cuda":
            for slot, clip in zip(slots, self._make(places), strict=True):
                batch.put(slot, clip)
            return
        with torch.cuda.stream(self._stream):
            for slot, clip in zip(slots, self._make(places), strict=True):
                batch.put(slot, clip)
            self._stream.synchronize()  # what this stream wrote, every other may read from here on
