"""`VideoLoader`: batches of video clips, optionally with the audio of the same time span.

Purpose: check the options, and create the plan and the processor. `headrace.loaders.loader` does the rest.
Invariants: those of `headrace.loaders.loader`. With buckets, the bucket of a video depends on its displayed size and on
its number of frames at the clip's frame spacing. The displayed size is the size after rotation if the loader rotates.
Failure behaviour: the constructor raises `NotFoundError`, `AccessDeniedError` or `UsageError` before it starts
anything. Iteration raises the errors of `headrace.loaders.loader`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from msgspec.structs import replace

from headrace.dataio.core.errors import UsageError
from headrace.dataio.shards.dataset import Dataset
from headrace.dataio.shards.sample import Sample
from headrace.loaders.clip import Clip
from headrace.loaders.config import LoaderConfig, configured_by
from headrace.loaders.decode import registry
from headrace.loaders.decode.base import GPU_BATCH, Color
from headrace.loaders.fetch import byte_ranges
from headrace.loaders.fields.video import Video, clip_specs, clips_of, video_bucketing
from headrace.loaders.interfaces import Processor
from headrace.loaders.loader import BaseLoader
from headrace.loaders.processors.video import ClipProcessor, ClipSpec, together
from headrace.loaders.processors.wrappers import by_stream
from headrace.loaders.sampling.left_out import samples_with_all
from headrace.loaders.sampling.sample_ids import SampleIds
from headrace.loaders.validation import check_type

if TYPE_CHECKING:  # few loaders need these, so they are imported where they are used
    from headrace.loaders.audio.spec import AudioSpec
    from headrace.loaders.sampling.buckets import Buckets
    from headrace.loaders.sampling.mixture import Mixture


@dataclass(frozen=True)
class VideoConfig(LoaderConfig):
    """The options that `VideoLoader` adds to those of `LoaderConfig`.

    Args:
        url_or_dataset (str | os.PathLike | Dataset | Mixture): URL or directory of a dataset, an open dataset, or a
            mixture.
        batch_size (int | None): clips per rank and batch; the global batch has `batch_size` times `world_size` clips. Omit
            it with `buckets`.
        clip (Clip | None): which frames form a clip. Default: `Clip()`, 16 frames.
        size (tuple[int, int] | None): height and width in pixels. A clip is scaled to cover it, then cropped. None
            keeps the source's size, which all clips of a batch must then share. Default: None.
        audio (bool | AudioSpec): deliver audio as well; True means `AudioSpec()`. Default: False.
        buckets (Buckets | None): make each batch of clips of one shape, within a budget. Replaces `batch_size` and
            `size`. Default: None.
        crop (str): "center", or "random" to draw the position for each clip. Default: "center".
        flip_prob (float): probability of flipping a clip horizontally, 0 to 1. Default: 0.0.
        antialias (bool): apply an antialiasing filter when scaling down. Default: True.
        rotate (bool): rotate frames as the file's metadata specifies. Default: False.
        color (str): colour conversion. "bt601": all decoders return the same pixels, bit-identical on CPUs. "tagged":
            use the file's colour metadata. "fast": as "tagged", but convert and scale in one pass. Default: "bt601".
        normalize (tuple | None): `(mean, std)` of three numbers each, for pixels in 0 to 1: subtract the mean, then
            divide by the standard deviation. Default: None.
        dtype (str | torch.dtype | None): "uint8", "float16", "bfloat16" or "float32"; floating-point pixels are scaled
            to 0 to 1. Default: "uint8"; with `normalize`, "float32".
        layout (str): the axes of a clip: "TCHW", "CTHW" or "THWC". Default: "TCHW".
        decoder (str): "auto" (NVDEC through DALI on a GPU, else PyAV), "dali" (DALI on the CPU as well, for the formats
            that it supports there), "pyav", or a decoder added by `register_decoder`. With `decode_in_subprocess`,
            "auto" means PyAV, and only "pyav" may be given. Default: "auto".
    """

    url_or_dataset: str | os.PathLike[str] | Dataset | Mixture
    batch_size: int | None = None
    _: KW_ONLY
    clip: Clip | None = None
    size: tuple[int, int] | None = None
    audio: bool | AudioSpec = False
    buckets: Buckets | None = None
    crop: Literal["center", "random"] = "center"
    flip_prob: float = 0.0
    antialias: bool = True
    rotate: bool = False
    color: Color = "bt601"
    normalize: tuple[Sequence[float], Sequence[float]] | None = None
    dtype: str | torch.dtype | None = None
    layout: str = "TCHW"
    decoder: str = "auto"

    def clip_spec(self) -> ClipSpec:
        """Check the options, and return the format of a clip."""
        check_type("clip", self.clip, Clip, "clip=Clip(frames=16)")
        if self.buckets is not None:
            from headrace.loaders.sampling.buckets import Buckets

            check_type("buckets", self.buckets, Buckets, "Buckets((Bucket((height, width)), ...), budget=...)")
        if self.decode_in_subprocess is not False and self.decoder not in ("auto", registry.FALLBACK):
            registry.check_option(self.decoder)
            raise UsageError(
                f"decoder={self.decoder!r} cannot be used with decode_in_subprocess, which decodes with PyAV",
                hint="leave one of the two out",
            )
        return self.field.spec(_audio_spec(self.audio))

    @property
    def field(self) -> Video:
        """The field of the pixels."""
        return Video(
            self.clip,
            self.size,
            crop=self.crop,
            flip_prob=self.flip_prob,
            antialias=self.antialias,
            rotate=self.rotate,
            color=self.color,
            decoder=self.decoder,
        )


class VideoLoader(BaseLoader):
    """Batches of video clips from a dataset. For images, use `Clip(frames=1)`.

    An iteration yields the remaining batches of the current epoch, so a loop that was left early continues in the next
    one. An evaluation that was left early begins again at its start, unless a state was loaded.

    Yields:
        A dict:

        - "video": (B, T, 3, H, W), contiguous, on `device`; None in a batch without samples.
        - "id": int64 (B,), the samples' ids. "key" and "text": lists.
        - "clip": float64 (B,), start of each clip in seconds.
        - With `audio`, "audio": float32 (B, C, S), or "mel": float32 (B, C, n_mels, frames); and "audio_samples": int64
          (B,), how many of the S samples are real audio and not zero padding.
        - Each of `columns`: a list.
        - With a mixture, "source": the names of the samples' sources.
        - With buckets, "bucket": the index of the batch's bucket in `buckets`.
        - In an evaluation, "samples_per_rank": the number of samples of each rank, including damaged ones;
          "empty_ranks": the ranks without samples.

    Args:
        The arguments are those of `VideoConfig` and `LoaderConfig`; `help(VideoLoader.__init__)` lists them.

    Raises:
        NotFoundError, AccessDeniedError, UsageError: when the loader is created.
        CorruptionError: while iterating, if too many samples are damaged, or a sample and all its substitutes.
        HeadraceError: while iterating, for errors of the store.

    Example:
        >>> loader = VideoLoader(clips, batch_size=2, clip=Clip(frames=4), size=(32, 32))
        >>> next(iter(loader))["video"].shape
        torch.Size([2, 4, 3, 32, 32])
        >>> loader.close()
    """

    @configured_by(VideoConfig)
    def __init__(self, config: VideoConfig) -> None:
        spec, video, buckets, decoder = config.clip_spec(), config.field, config.buckets, config.decoder
        output = config.output(config.normalize, config.dtype, config.layout)
        delivery = config.delivery(output, group=GPU_BATCH)
        if config.decode_in_subprocess is not False:
            decoder = registry.FALLBACK
        self._spec, self._decoder = spec, decoder

        def find(dataset: Dataset) -> tuple[SampleIds, Any]:
            ids = samples_with_all(dataset, [video.condition(buckets)])
            return ids, clips_of(dataset, ids, spec.clip)

        def start_processor() -> Processor:
            subprocess_decoder = config.subprocess_decoder(delivery.num_threads)
            video_decoder = subprocess_decoder or registry.open_decoder(
                decoder, output.device.type, output.device.index or 0
            )
            decode_audio = subprocess_decoder.decode_audio if subprocess_decoder else None
            each = [ClipProcessor(one, video_decoder, decode_audio) for one in clip_specs(spec, buckets, plan.buckets)]
            return config.finish(by_stream(each), spec.audio, output.device, plan.names)

        sampling = config.sampling(config.batch_size)
        plan, owned = config.open_plan(config.url_or_dataset, find, spec.clip, sampling, video_bucketing(buckets, spec))
        shares_decoding = registry.candidates(decoder, output.device.type)[0].shares_decoding
        if shares_decoding:
            specs = clip_specs(spec, buckets, plan.buckets)
            delivery = replace(delivery, group_slots=together(specs, transformed=config.transform is not None))
        super().__init__(plan, start_processor, delivery=delivery, bad_samples=config.bad_samples, owned=owned)

    def explain(self, sample: int | Sample = 0) -> str:
        """Explain how the loader decodes a sample, and why.

        The text names its stream, decoder, colours and size, and the byte ranges that are read.

        Args:
            sample: a sample, or its id.
        """
        check_type("sample", sample, (int, Sample), "its number, or a Sample")
        one = self.dataset.sample(sample) if isinstance(sample, int) else sample
        device = self._delivery.output.device
        lines = registry.explain(
            one, color=self._spec.color, option=self._decoder, device=device.type, device_id=device.index or 0
        )
        if one.video is None:
            return lines
        inside = self._spec.audio is not None and one.audio is not None and one.audio.ext == one.video.ext
        return f"{lines}\n{byte_ranges.explain(one, self._spec.clip, with_audio=inside)}"


def _audio_spec(audio: bool | AudioSpec) -> AudioSpec | None:
    """The format of the audio, or None without audio."""
    if audio is False or audio is None:
        return None
    from headrace.loaders.audio.spec import AudioSpec

    check_type("audio", audio, (bool, AudioSpec), "True, or AudioSpec(...)")
    return AudioSpec() if audio is True else audio
