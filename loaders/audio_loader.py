"""`AudioLoader`: batches of audio, as waveforms or as log-mel spectrograms.

Purpose: check the options, and create the plan and the processor. `headrace.loaders.loader` does the rest.
Invariants: those of `headrace.loaders.loader`.
Failure behaviour: the constructor raises `NotFoundError`, `AccessDeniedError` or `UsageError` before it starts
anything. Iteration raises the errors of `headrace.loaders.loader`.
"""

from __future__ import annotations

import os
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

from headrace.dataio.core.errors import UsageError
from headrace.dataio.shards.dataset import Dataset
from headrace.loaders.audio.spec import AudioSpec, Features, Window
from headrace.loaders.config import LoaderConfig, configured_by
from headrace.loaders.decode.base import GPU_BATCH
from headrace.loaders.fields.audio import audio_bucketing, windows_in, windows_of
from headrace.loaders.interfaces import Processor
from headrace.loaders.loader import BaseLoader
from headrace.loaders.processors.audio import PieceProcessor, WindowProcessor, lengths
from headrace.loaders.processors.wrappers import by_stream
from headrace.loaders.sampling.buckets import Durations
from headrace.loaders.sampling.columns import HasValue
from headrace.loaders.sampling.left_out import samples_with_all
from headrace.loaders.sampling.packing import Pack, Packed, PackedStream, Packing
from headrace.loaders.sampling.sample_ids import SampleIds
from headrace.loaders.validation import check_type

if TYPE_CHECKING:
    from headrace.loaders.sampling.mixture import Mixture


@dataclass(frozen=True)
class AudioConfig(LoaderConfig):
    """The options that `AudioLoader` adds to those of `LoaderConfig`.

    Args:
        url_or_dataset (str | os.PathLike | Dataset | Mixture): URL or directory of a dataset, an open dataset, or a
            mixture.
        batch_size (int | None): windows in a rank's batch, or rows with `packing`. Omit it with `buckets`.
        window (Window | float | None): which part of a recording to deliver; a number means `Window(seconds)`. Default:
            `Window()`.
        sample_rate (int): output sample rate in Hz. Default: 16000.
        channels (int): number of output channels, 1 or 2. Default: 1.
        downmix (str): how other numbers of channels become `channels`: "mix" or "first", as in `AudioSpec`. Default:
            "mix".
        features (str | LogMel): "waveform" for samples, or `LogMel(...)` for spectrograms. Default: "waveform".
        packing (Packing | None): deliver whole recordings, several in a row, instead of windows. Default: None.
        buckets (Durations | None): make each batch of recordings of one length, within a budget. Replaces `batch_size`
            and the window's length. Default: None.
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


class AudioLoader(BaseLoader):
    """Batches of windows of audio from a dataset: from audio files, and from the audio tracks of videos.

    With `packing`, "audio" is (B, C, capacity). Every other entry is a list with one list (or tensor) for each row,
    which has one value for each piece of a recording. "pieces", int64 (n, 2), holds the start and end of each piece in
    its row. With spectrograms, the capacity counts columns: "mel" is (B, C, n_mels, capacity). The columns of a piece
    depend on its own recording only. Damaged recordings are left out.

    Yields:
        A dict:

        - "audio": float32 (B, C, S) with S = seconds * sample_rate; or "mel": float32 (B, C, n_mels, 1 + S //
          hop_length).
        - "id": int64 (B,), the samples' ids. "key" and "text": lists.
        - "start": float64 (B,), seconds from the first sample of the audio to the window.
        - "audio_samples": int64 (B,), how many of the S samples are real audio and not zero padding.
        - Each of `columns`, "source", "bucket", "samples_per_rank" and "empty_ranks", as in `VideoLoader`.

    Args:
        The arguments are those of `AudioConfig` and `LoaderConfig`; `help(AudioLoader.__init__)` lists them.
        `transform` receives and returns {"audio": (C, S)} or {"mel": (C, n_mels, frames)}.

    Raises:
        NotFoundError, AccessDeniedError, UsageError: when the loader is created.
        CorruptionError: while iterating, if too many samples are damaged, or a sample and all its substitutes.
        HeadraceError: while iterating, for errors of the store.

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

        def find(dataset: Dataset) -> tuple[SampleIds, Any]:
            ids = samples_with_all(dataset, [HasValue("audio_codec")])
            return ids, windows_in(dataset, ids, window)

        def start_processor() -> Processor:
            isolated = config.subprocess_decoder(delivery.num_threads)
            if packing is not None:
                inner: Processor = PieceProcessor(spec, packing, isolated)
            else:
                windows = windows_of(window, buckets, plan.buckets)
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
        sampling, bucketing = config.sampling(config.batch_size), audio_bucketing(buckets, window)
        plan, owned = config.open_plan(config.url_or_dataset, find, described, sampling, bucketing, pack)
        super().__init__(plan, start_processor, delivery=delivery, bad_samples=bad_samples, owned=owned)

    @property
    def packed(self) -> tuple[Packed, ...]:
        """With `packing`, the packed sequences of each source in the current epoch.

        Each has its number of sequences (`len`), its `waste`, and the number of recordings that were `dropped`.
        """
        streams = self._plan.of(self.epoch).streams
        return tuple(stream.sequences for stream in streams if isinstance(stream, PackedStream))


def _window(window: Window | float | None) -> Window:
    if isinstance(window, Window):
        return window
    return Window() if window is None else Window(window)
