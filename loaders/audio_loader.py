"""`AudioLoader`: batches of sound, as samples or as log-mel spectrograms.

Purpose: check the options, and bring plan and processor together; `headrace.loaders.loader` does the rest.
Invariants: those of `headrace.loaders.loader`.
Failure behaviour: `NotFoundError`, `AccessDeniedError`, `UsageError` before anything is started; while iterating, the
loader's.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

from headrace.dataio.core.errors import UsageError
from headrace.dataio.shards.dataset import Dataset
from headrace.loaders.audio.spec import AudioSpec, Features, Window, counts
from headrace.loaders.config import LoaderConfig, configured_by
from headrace.loaders.decode.base import GPU_BATCH
from headrace.loaders.interfaces import Processor
from headrace.loaders.loader import Loader
from headrace.loaders.processors.audio import PieceProcessor, WindowProcessor, lengths
from headrace.loaders.processors.wrappers import by_stream
from headrace.loaders.sampling.buckets import Durations
from headrace.loaders.sampling.packing import Pack, Packed, PackedStream, Packing
from headrace.loaders.sampling.permutation import I64
from headrace.loaders.sampling.plan import Bucketing, Stream, column, samples_with
from headrace.loaders.validation import check_type

if TYPE_CHECKING:
    from headrace.loaders.sampling.mixture import Mixture


@dataclass(frozen=True)
class AudioConfig(LoaderConfig):
    """The options of `AudioLoader`, besides those of `LoaderConfig`.

    Args:
        url_or_dataset (str | os.PathLike | Dataset | Mixture): a dataset's URL or folder, an open dataset, or a mixture
            of them.
        batch_size (int | None): windows in a rank's batch, or rows with `packing`; left out with `buckets`.
        window (Window | float | None): which stretch of a recording; a number is `Window(seconds)`. Default:
            `Window()`.
        sample_rate (int): Hz, to which the sound is resampled. Default: 16000.
        channels (int): 1 or 2. Default: 1.
        downmix (str): how other numbers of channels are brought to `channels`: "mix" or "first", as in `AudioSpec`.
            Default: "mix".
        features (str | LogMel): "waveform" for samples, `LogMel(...)` for spectrograms. Default: "waveform".
        packing (Packing | None): whole recordings, several in a row, in place of windows. Default: None.
        buckets (Durations | None): batches of one length each, within a budget, in place of `batch_size` and the
            window's length. Default: None.
    """

    url_or_dataset: str | os.PathLike[str] | Dataset | Mixture
    batch_size: int | None = None
    _: KW_ONLY
    window: Window | float | None = None
    sample_rate: int = 16_000
    channels: int = 1
    downmix: Literal["mix", "first"] = "mix"
    features: Features = "waveform"
    packing: Packing | None = None
    buckets: Durations | None = None


class AudioLoader(Loader):
    """Batches of windows of sound from a dataset: from audio files, and from the sound of videos.

    With `packing`, "audio" is (B, C, capacity). The other entries are lists of one list (or tensor) for each row, with
    a value for each recording; "pieces", int64 (n, 2), says where each begins and ends. With spectrograms the capacity
    counts columns: "mel" is (B, C, n_mels, capacity), and a piece holds the columns of its recording alone. Damaged
    recordings are left out.

    Yields:
        A dict:

        - "audio": float32 (B, C, S) with S = seconds times sample rate; or "mel": float32 (B, C, n_mels, 1 + S //
          hop_length).
        - "id": int64 (B,), numbers of the samples. "key" and "text": lists.
        - "start": float64 (B,), seconds from the sound's first sample to the window.
        - "audio_samples": int64 (B,), how many of S are sound and not zeros after it.
        - Each of `columns`, "source", "bucket", "sizes" and "dry", as in `VideoLoader`.

    Args:
        The arguments are those of `AudioConfig` and `LoaderConfig`; `help(AudioLoader.__init__)` lists them.
        `transform` gets and returns {"audio": (C, S)} or {"mel": (C, n_mels, frames)}.

    Raises:
        NotFoundError, AccessDeniedError, UsageError: when the loader is made.
        CorruptionError: while iterating, too many samples are damaged, or one and all its neighbours.
        HeadraceError: while iterating, the store's errors.

    Example:
        >>> loader = AudioLoader(clips, batch_size=2, window=0.5, sample_rate=16_000)
        >>> next(iter(loader))["audio"].shape
        torch.Size([2, 1, 8000])
        >>> loader.close()
    """

    @configured_by(AudioConfig)
    def __init__(self, config: AudioConfig) -> None:
        packing, buckets, features = config.packing, config.buckets, config.features
        check_type("packing", packing, Packing, "Packing(samples in a row)")
        check_type("buckets", buckets, Durations, "Durations((2, 5, 15), budget=600)")
        if packing is not None and (config.window is not None or buckets is not None):
            raise UsageError("packing takes recordings whole", hint="leave window and buckets out")
        window = _window(config.window)
        spec = AudioSpec(
            config.sample_rate,
            channels=config.channels,
            seconds=window.seconds,
            downmix=config.downmix,
            features=features,
        )
        spec.samples()
        output = config.output()
        delivery = config.delivery(output, group=1 if features == "waveform" else GPU_BATCH)

        def find(dataset: Dataset) -> tuple[I64, Any]:
            ids = samples_with(dataset, "audio_codec", "sound")
            parts: Any = window.per_sample
            if window.start == "every":
                seconds = column(dataset, "samples", ids) / column(dataset, "sample_rate", ids)
                parts = counts(window, seconds)
            return ids, parts

        def start_processor() -> Processor:
            isolated = config.subprocess_decoder(delivery.num_threads)
            if packing is not None:
                inner: Processor = PieceProcessor(spec, packing, isolated)
            else:
                windows = _windows(window, buckets, plan.buckets)
                inner = by_stream(
                    [WindowProcessor(one, replace(spec, seconds=one.seconds), isolated) for one in windows]
                )
            return config.finish(inner, spec, output.device, plan.names)

        pack, described, bad_samples = None, cast(Any, window), config.bad_samples
        if packing is not None:
            PieceProcessor(spec, packing)  # checks that they go together
            described = [packing.capacity, packing.lookahead, packing.long, packing.repack_each_epoch, spec.sample_rate]
            described += [] if features == "waveform" else [features.hop_length]
            bad_samples = replace(config, on_error="skip").bad_samples
            pack = Pack(packing, partial(lengths, spec=spec))
        sampling, bucketing = config.sampling(config.batch_size), _bucketing(buckets, window)
        plan, owned = config.open_plan(config.url_or_dataset, find, described, sampling, bucketing, pack)
        super().__init__(plan, start_processor, delivery=delivery, bad_samples=bad_samples, owned=owned)

    @property
    def packed(self) -> tuple[Packed, ...]:
        """With `packing`, each source's sequences in the current epoch: their number, `waste` and how many were
        `dropped`."""
        streams = self._plan.of(self.epoch).streams
        return tuple(stream.sequences for stream in streams if isinstance(stream, PackedStream))


def _window(window: Window | float | None) -> Window:
    if isinstance(window, Window):
        return window
    return Window() if window is None else Window(window)


def _bucketing(buckets: Durations | None, window: Window) -> Bucketing | None:
    """How recordings are sorted by their lengths."""
    if buckets is None:
        return None
    if window.start == "every":
        raise UsageError(
            "start='every' counts windows of one length, and buckets have several", hint="use another start"
        )

    def sort(stream: Stream) -> I64:
        samples, rate = (column(stream.dataset, name, stream.ids) for name in ("samples", "sample_rate"))
        return buckets.assign(samples / rate)

    return Bucketing(buckets.batches(), sort, buckets.numbers())


def _windows(window: Window, buckets: Durations | None, streams: Sequence[int]) -> list[Window]:
    """The window of each stream; `streams` are the numbers of their buckets."""
    if buckets is None:
        return [window]
    return [replace(window, seconds=buckets.seconds[number]) for number in streams]
