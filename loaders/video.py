"""`VideoLoader`: the public loop, one epoch of decoded batches per iteration.

Purpose: put order, bytes, decoders and threads together, and remember one position.

Invariants: what the t-th global batch of an epoch holds depends on the dataset version, the seed, the epoch and the clip,
never on the number of ranks, threads or restarts. `state_dict` is true for the batch that the trainer received last, not for
what was prefetched. Threads start with the first batch and hold no reference to the loader: `close`, the end of a `with` block,
the loader's deletion and the end of the process all end them.
Failure behaviour: damaged samples are replaced and listed in `quarantine`; everything else that goes wrong is raised where the
batch would have been, and leaves the position before that batch.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import pyarrow.compute as pc

from dataio.core import metrics
from dataio.core.errors import UsageError
from dataio.core.trace import span
from dataio.shards.dataset import Dataset
from dataio.sidecar.client import LoaderMeter, open_reader
from loaders import arguments
from loaders import state as states
from loaders.ahead import Ahead, Plan
from loaders.audio import AudioSpec
from loaders.batch import Prefetcher
from loaders.clip import Clip
from loaders.clips import ClipMaker, Look
from loaders.decode.choose import AutoDecoder
from loaders.decode.dali import GPU_BATCH
from loaders.order import Order
from loaders.permutation import I64
from loaders.quarantine import Quarantine, Refusal
from loaders.source import Source


class VideoLoader:
    """Batches of video clips from a dataset.

    `url_or_dataset`: a dataset's URL (its newest `version`, or that one) or an open `Dataset`. `batch_size` is per rank. `size`
    is (height, width): clips are scaled to cover it and cropped around the centre; None keeps the source's size, which all
    clips of a batch must then share. `normalize=(mean, std)`, three numbers each for pixels in 0 … 1, gives float32 instead of
    uint8. `audio=AudioSpec(...)` adds sound, `True` is `AudioSpec()`. `rotate` turns frames as their metadata says. `rank` and
    `world_size` default to torch.distributed's. `sidecar`: "auto", a socket's path, or None. `threads` decode (default: this
    rank's share of the machine's cores, at most 16), `prefetch` batches ahead. After `quarantine_limit` damaged samples it gives
    up.

    Iterating yields the rest of the current epoch; iterating again, the next one. A batch is a dict: "video" (B, T, 3, H, W)
    uint8 or float32, contiguous, on `device`, pinned when it is the CPU's and CUDA is there; "id" int64 (B,) numbers of the
    samples; "key" and "text" lists; "clip" float64 (B,), seconds at which each clip begins; and with audio, "audio" float32
    (B, C, S) and "audio_samples" int64 (B,), how many of S are real sound and not zeros after it.

    With `drop_last=False` the tail of an epoch is shared out as evenly as it goes: a rank may get one clip fewer than
    another, or a batch of none ("video" is then None), so that all ranks see equally many batches.

    Raises `NotFoundError`, `AccessDeniedError`, `UsageError` here; while iterating, what `loaders.clips` says.
    """

    def __init__(
        self,
        url_or_dataset: str | os.PathLike[str] | Dataset,
        batch_size: int,
        *,
        clip: Clip | None = None,
        size: tuple[int, int] | None = None,
        audio: bool | AudioSpec = False,
        device: str = "cpu",
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = True,
        normalize: tuple[Sequence[float], Sequence[float]] | None = None,
        rotate: bool = False,
        sidecar: str | os.PathLike[str] | None = "auto",
        threads: int | None = None,
        prefetch: int = 2,
        quarantine_limit: int = 100,
        version: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        clip = clip or Clip()
        sound = AudioSpec() if audio is True else (audio or None)
        self._look = Look(clip, arguments.checked_size(size), rotate, sound)
        if sound is not None:
            sound.samples(clip)
        self._threads = arguments.checked(
            "threads", arguments.cores() if threads is None else threads, arguments.MAX_THREADS
        )
        self._prefetch = arguments.checked("prefetch", prefetch, arguments.MAX_PREFETCH)
        self._output = arguments.output(device, normalize)
        arguments.checked("batch_size", batch_size, arguments.MAX_BATCH)
        self._dataset, self._owned = _open(url_or_dataset, version, storage_options)
        self._drop_last, self._sidecar = drop_last, sidecar
        try:
            self._plan = self._make_plan(batch_size, clip, seed, shuffle, rank, world_size)
        except BaseException:
            self._close_dataset()
            raise
        self._quarantine = Quarantine(quarantine_limit)
        self._epoch = self._batch = 0
        self._ahead: Ahead | None = None
        self._finalizer: weakref.finalize[[], VideoLoader] | None = None
        self._meter = LoaderMeter()
        self._closed = False

    def _make_plan(
        self, batch_size: int, clip: Clip, seed: int, shuffle: bool, rank: int | None, world_size: int | None
    ) -> Plan:
        rank, world_size = arguments.place_in_world(rank, world_size)
        dataset, ids = self._dataset, _with_video(self._dataset)
        order = Order.of(
            len(ids),
            batch_size * world_size,
            sample_bytes=dataset.total_bytes / len(dataset),
            seed=seed,
            shuffle=shuffle,
            clips=clip.per_video,
        )
        batches = order.full_batches + (not self._drop_last and order.tail > 0)
        if not batches:
            raise UsageError(
                f"{dataset.url} has {order.samples} clips, fewer than one global batch of {order.batch}",
                hint="use a smaller batch_size, more clips per video, or drop_last=False",
            )
        return Plan(dataset, ids, order, clip.per_video, rank, world_size, batches)

    def __len__(self) -> int:
        """Batches in an epoch."""
        return self._plan.batches

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The batches of the current epoch that are still to come."""
        while (batch := self._next()) is not None:
            yield batch

    @property
    def dataset(self) -> Dataset:
        return self._dataset

    @property
    def order(self) -> Order:
        """The order, whose positions are clips: number n of it is clip n % per_video of the n // per_video-th video."""
        return self._plan.order

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._epoch

    @property
    def quarantine(self) -> tuple[Refusal, ...]:
        """The samples that this loader refused, in the order in which their batches were delivered."""
        return self._quarantine.refusals

    def state_dict(self) -> dict[str, Any]:
        """Where the trainer is: plain JSON types, equal on all ranks that received the same batches."""
        return states.dump(self._fingerprint(), states.Position(self._epoch, self._batch, self._quarantine.state()))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go where `state` says, also in the middle of an iteration. Any world size will do, if the global batch is the same.

        Raises `MismatchError` naming the first field that differs, and changes nothing then.
        """
        position = states.load(self._fingerprint(), state)
        if position.batch > self._plan.batches:
            raise UsageError(f"the loader's state is at batch {position.batch} of {self._plan.batches}")
        self._stop()
        self._epoch, self._batch = position.epoch, position.batch
        self._quarantine.load(position.quarantine)

    def close(self) -> None:
        """End the threads and let go of the dataset. Closing twice is allowed."""
        self._closed = True
        self._stop()
        self._close_dataset()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next(self) -> dict[str, Any] | None:
        """The next batch, or None once at the end of every epoch."""
        if self._closed:
            raise UsageError("the loader is closed")
        if self._batch >= self._plan.batches:
            self._epoch, self._batch = self._epoch + 1, 0
            return None
        self._meter.asked()
        try:
            with span("loader.wait", epoch=self._epoch, batch=self._batch):
                self._ahead = self._ahead or self._start()
                batch = self._ahead.next()
            self._quarantine.deliver(refusal for clip in batch.clips if clip for refusal in clip.refusals)
        except BaseException:  # also Ctrl-C: the position stays, the threads end
            self._meter.got(0, steps=0)
            self._stop()
            raise
        metrics.loader_wait_seconds.observe(self._meter.got(len(batch.clips)))
        for clip in batch.clips:
            metrics.loader_samples.labels("substituted" if clip and clip.refusals else "delivered").inc()
        self._batch += 1
        return batch.tensors()

    def _start(self) -> Ahead:
        store, device = self._dataset.store, self._output.device
        source = Source(open_reader(store, self._sidecar, self._meter), store)
        decoder = AutoDecoder(device.type, device.index or 0)
        maker = ClipMaker(self.order, self._look, source, decoder, self._quarantine, self._plan.sample)
        prefetcher = Prefetcher(maker.make, self._output, self._threads, GPU_BATCH if device.type == "cuda" else 1)
        batches = self._plan.from_(self._epoch, self._batch)
        ahead = Ahead(batches, self._look, source, decoder, prefetcher, self._prefetch)
        self._finalizer = weakref.finalize(self, ahead.close)
        return ahead

    def _stop(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._ahead = self._finalizer = None

    def _close_dataset(self) -> None:
        if self._owned:
            self._dataset.close()

    def _fingerprint(self) -> states.Fingerprint:
        dataset = self._dataset
        return states.Fingerprint.of(
            dataset.version, dataset.digest, self._plan.order, self._look.clip, self._drop_last
        )


def _open(
    url_or_dataset: str | os.PathLike[str] | Dataset, version: int | None, options: Mapping[str, Any] | None
) -> tuple[Dataset, bool]:
    """The dataset, and whether it is closed with the loader."""
    if not isinstance(url_or_dataset, Dataset):
        return Dataset(os.fspath(url_or_dataset), version, **(options or {})), True
    if version not in (None, url_or_dataset.version) or options:
        raise UsageError("version and storage_options go with a URL, not with a dataset that is open already")
    return url_or_dataset, False


def _with_video(dataset: Dataset) -> I64:
    """The numbers of the samples that hold video."""
    ids: I64 = np.flatnonzero(pc.is_valid(dataset.columns(["video_codec"])["video_codec"]).to_numpy()).astype(np.int64)
    if not len(ids):
        raise UsageError(f"{dataset.url} holds no video")
    return ids
