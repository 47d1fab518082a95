"""`AudioLoader`: batches of sound, as samples or as log-mel spectrograms.

Purpose: check what is asked for and put plan and work together; `headrace.loaders.loader` does the rest.
Invariants: those of the engine.
Failure behaviour: `NotFoundError`, `AccessDeniedError`, `UsageError` before anything is started; while iterating, the
engine's.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast

from headrace.dataio.core.errors import UsageError
from headrace.dataio.shards.dataset import Dataset
from headrace.loaders import arguments, shapes
from headrace.loaders.common import Asked, Common, explicit
from headrace.loaders.decode.dali import GPU_BATCH
from headrace.loaders.interfaces import Processor
from headrace.loaders.loader import Loader
from headrace.loaders.sampling.buckets import Durations
from headrace.loaders.sampling.packing import Pack, Packed, PackedStream, Packing
from headrace.loaders.sampling.permutation import I64
from headrace.loaders.sampling.plan import column, samples_with
from headrace.loaders.sound.spec import AudioSpec, Features
from headrace.loaders.sound.window import Window, counts
from headrace.loaders.works.pieces import PieceWork, lengths
from headrace.loaders.works.sources import by_stream
from headrace.loaders.works.windows import WindowWork

if TYPE_CHECKING:
    from headrace.loaders.sampling.mixture import Mixture


@explicit
class AudioLoader(Loader):
    """Batches of windows of sound from a dataset: of audio files, and of the sound of videos.

    `window` says which stretches; a number is `Window(seconds)`, None is `Window()`. They are resampled to
    `sample_rate` Hz in `channels` (1 or 2) by `policy` (`AudioSpec`). `features="waveform"` gives samples,
    `LogMel(...)` spectrograms. All else is as in `loaders.VideoLoader`; `transform` gets and returns {"audio": (C, S)}
    or {"mel": (C, bands, frames)}.

    `packing=Packing(capacity)` takes whole recordings instead, several in a row of `capacity` samples: "audio" is (B,
    C, capacity), and the other entries are lists of one list (or tensor) a row with a value for each recording;
    "pieces" int64 (n, 2) says where each begins and ends. Of spectrograms, whose columns are counted then, "mel" is (B,
    C, bands, capacity), and a piece holds those of its recording alone. Damaged recordings are left out.
    `buckets=Durations(...)` takes the place of `batch_size` and of the window's length: each batch is of one length,
    and as large as the budget allows; "bucket" is its number.

    A batch is a dict: "audio" float32 (B, C, S), S = seconds times rate, or "mel" float32 (B, C, bands, 1 + S // hop);
    "id" int64 (B,); "key" and "text" lists; "start" float64 (B,), seconds from the sound's first sample to the
    window's; "audio_samples" int64 (B,), how many of S are real sound and not zeros after it; and the columns.

    Raises `NotFoundError`, `AccessDeniedError`, `UsageError` here; while iterating, the errors of
    `headrace.loaders.batch.sample_builder`.
    """

    def __init__(
        self,
        url_or_dataset: str | os.PathLike[str] | Dataset | Mixture,
        batch_size: int | None = None,
        *,
        window: Window | float | None = None,
        sample_rate: int = 16_000,
        channels: int = 1,
        policy: Literal["mix", "first"] = "mix",
        features: Features = "waveform",
        packing: Packing | None = None,
        buckets: Durations | None = None,
        **common: Unpack[Common],
    ) -> None:
        asked = Asked.of(self, common)
        arguments.of_kind("packing", packing, Packing, "Packing(samples in a row)")
        arguments.of_kind("buckets", buckets, Durations, "Durations((2, 5, 15), budget=600)")
        chosen = window if isinstance(window, Window) else Window() if window is None else Window(window)
        spec = AudioSpec(sample_rate, channels, chosen.seconds, policy, features)
        spec.samples()
        output = arguments.output(asked.device, None)
        delivery = asked.delivery(output, group=1 if features == "waveform" else GPU_BATCH)

        def find(dataset: Dataset) -> tuple[I64, Any]:
            ids = samples_with(dataset, "audio_codec", "sound")
            parts: Any = chosen.per_sample
            if chosen.start == "every":
                seconds = column(dataset, "samples", ids) / column(dataset, "sample_rate", ids)
                parts = counts(chosen, seconds)
            return ids, parts

        def work() -> Processor:
            apart = asked.isolated(delivery)
            if packing is not None:
                inner: Processor = PieceWork(spec, packing, apart)
            else:
                windows = shapes.windows(chosen, buckets, made.buckets)
                inner = by_stream([WindowWork(one, replace(spec, seconds=one.seconds), apart) for one in windows])
            return asked.finished(inner, spec, output.device, made.names)

        pack, what = None, cast(Any, chosen)
        if packing is not None:
            if window is not None or buckets is not None:
                raise UsageError("packing takes recordings whole", hint="leave window and buckets out")
            PieceWork(spec, packing)
            what = [packing.capacity, packing.lookahead, packing.long, packing.anew, spec.sample_rate]
            what += [] if features == "waveform" else [features.hop]
            asked = replace(asked, on_bad="shorter")
            pack = Pack(packing, partial(lengths, spec=spec))
        how, sorting = asked.sampling(batch_size), shapes.sorting_sound(buckets, chosen)
        made, owned = asked.planned(url_or_dataset, find, what, how, sorting, pack)
        super().__init__(made, work, delivery, asked.refusing, owned)

    @property
    def packed(self) -> tuple[Packed, ...]:
        """With `packing`, the sequences of each source in the current epoch: their number, `waste` and what was
        `dropped`."""
        streams = self._plan.of(self.epoch).streams
        return tuple(stream.sequences for stream in streams if isinstance(stream, PackedStream))
