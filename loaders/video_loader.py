"""`VideoLoader`: batches of video clips, with the sound of the same stretch if it is wanted.

Purpose: check the options, and bring plan and processor together; `headrace.loaders.loader` does the rest.
Invariants: those of `headrace.loaders.loader`. With buckets, a video is sorted by its size as shown (after rotation, if
the loader rotates) and by the number of frames that it holds, spaced as the clip spaces them.
Failure behaviour: `NotFoundError`, `AccessDeniedError`, `UsageError` before anything is started; while iterating, the
loader's.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from dataclasses import replace as replace_field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace

from headrace.dataio.core.errors import UsageError
from headrace.dataio.shards.dataset import Dataset
from headrace.dataio.shards.media.container import IMAGE_EXTENSIONS
from headrace.dataio.shards.sample import Sample
from headrace.loaders.clip import Clip, counts
from headrace.loaders.config import LoaderConfig, configured_by
from headrace.loaders.decode import registry
from headrace.loaders.decode.base import GPU_BATCH, Color
from headrace.loaders.fetch import byte_ranges
from headrace.loaders.interfaces import Processor
from headrace.loaders.loader import Loader
from headrace.loaders.processors.video import ClipProcessor, ClipSpec, Cut, together
from headrace.loaders.processors.wrappers import by_stream
from headrace.loaders.sampling.permutation import I64
from headrace.loaders.sampling.plan import Bucketing, Stream, column, samples_with
from headrace.loaders.validation import check_choice, check_count, check_type, checked

if TYPE_CHECKING:  # few loaders need these, so they are imported where they are used
    from headrace.loaders.audio.spec import AudioSpec
    from headrace.loaders.sampling.buckets import Buckets
    from headrace.loaders.sampling.mixture import Mixture

MAX_SIDE = 16_384


@dataclass(frozen=True)
class VideoConfig(LoaderConfig):
    """The options of `VideoLoader`, besides those of `LoaderConfig`.

    Args:
        url_or_dataset (str | os.PathLike | Dataset | Mixture): a dataset's URL or folder, an open dataset, or a mixture
            of them.
        batch_size (int | None): clips in a rank's batch; left out with `buckets`.
        clip (Clip | None): the frames of a clip. Default: `Clip()`, 16 frames.
        size (tuple[int, int] | None): height and width in pixels. A clip is scaled to cover it, then cropped. None
            keeps the source's size, which all clips of a batch must then share. Default: None.
        audio (bool | AudioSpec): adds sound; True is `AudioSpec()`. Default: False.
        buckets (Buckets | None): batches of one shape each, within a budget, in place of `batch_size` and `size`.
            Default: None.
        crop (str): "center", or "random" for another part of each clip. Default: "center".
        flip_prob (float): probability that a clip is mirrored, 0 to 1. Default: 0.0.
        antialias (bool): filter when scaling down. Default: True.
        rotate (bool): turn frames as their metadata says. Default: False.
        color (str): "bt601": all decoders give the same pixels, on CPUs to the bit. "tagged": as the file says. "fast":
            as the file says, converted and scaled in one pass. Default: "bt601".
        normalize (tuple | None): `(mean, std)` of three numbers each, for pixels in 0 to 1: subtract the mean, divide
            by the deviation. Default: None.
        dtype (str | torch.dtype | None): "uint8", "float16", "bfloat16" or "float32"; floats are pixels in 0 to 1.
            Default: "uint8", with `normalize` "float32".
        layout (str): the axes of a clip: "TCHW", "CTHW" or "THWC". Default: "TCHW".
        decoder (str): "auto" (NVDEC by DALI on a GPU, else PyAV), "dali" (DALI also on the CPU, for formats that it
            decodes there), "pyav", or one that `register_decoder` added. Default: "auto".
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
        """The format of a finished clip, checked."""
        check_type("clip", self.clip, Clip, "clip=Clip(frames=16)")
        if self.buckets is not None:
            from headrace.loaders.sampling.buckets import Buckets

            check_type("buckets", self.buckets, Buckets, "Buckets((Bucket((height, width)), ...), budget=...)")
        check_choice("color", self.color, ("bt601", "tagged", "fast"))
        registry.check_option(self.decoder)
        clip, sound = self.clip or Clip(), _audio_spec(self.audio)
        if sound is not None:
            sound.samples(clip)
        return ClipSpec(
            clip=clip,
            size=_size(self.size),
            rotate=checked("rotate", self.rotate, bool),
            audio=sound,
            cut=Cut(self.crop, self.flip_prob),
            antialias=checked("antialias", self.antialias, bool),
            color=self.color,
        )


class VideoLoader(Loader):
    """Batches of video clips from a dataset. A picture is a clip of one frame; give `Clip(frames=1)` for them.

    Iterating yields the rest of the current epoch, then the next epoch. An evaluation always begins from its start,
    unless a state was loaded.

    Yields:
        A dict:

        - "video": (B, T, 3, H, W), contiguous, on `device`; None in a batch without samples.
        - "id": int64 (B,), numbers of the samples. "key" and "text": lists.
        - "clip": float64 (B,), seconds at which each clip begins.
        - With `audio`, "audio": float32 (B, C, S), or "mel": float32 (B, C, n_mels, frames); and "audio_samples": int64
          (B,), how many of S are sound and not zeros after it.
        - Each of `columns`: a list.
        - Of a mixture, "source": the names of the samples' sources.
        - With buckets, "bucket": the number of the batch's bucket.
        - In an evaluation, "sizes": the samples given to each rank, damaged ones included; "dry": the ranks given none.

    Args:
        The arguments are those of `VideoConfig` and `LoaderConfig`; `help(VideoLoader.__init__)` lists them.

    Raises:
        NotFoundError, AccessDeniedError, UsageError: when the loader is made.
        CorruptionError: while iterating, too many samples are damaged, or one and all its neighbours.
        HeadraceError: while iterating, the store's errors.

    Example:
        >>> loader = VideoLoader(clips, batch_size=2, clip=Clip(frames=4), size=(32, 32))
        >>> next(iter(loader))["video"].shape
        torch.Size([2, 4, 3, 32, 32])
        >>> loader.close()
    """

    @configured_by(VideoConfig)
    def __init__(self, config: VideoConfig) -> None:
        spec, buckets, decoder = config.clip_spec(), config.buckets, config.decoder
        output = config.output(config.normalize, config.dtype, config.layout)
        delivery = config.delivery(output, group=GPU_BATCH)
        self._spec, self._decoder = spec, decoder

        def find(dataset: Dataset) -> tuple[I64, Any]:
            left_out = IMAGE_EXTENSIONS if spec.clip.frames > 1 else ()
            ids = samples_with(dataset, "video_ext", "video", without=left_out)
            parts: Any = spec.clip.per_video
            if spec.clip.start == "every":
                parts = counts(spec.clip, column(dataset, "frames", ids), column(dataset, "duration", ids))
            return ids, parts

        def start_processor() -> Processor:
            subprocess_decoder = config.subprocess_decoder(delivery.num_threads)
            video_decoder = subprocess_decoder or registry.open_decoder(
                decoder, output.device.type, output.device.index or 0
            )
            decode_audio = subprocess_decoder.decode_audio if subprocess_decoder else None
            each = [ClipProcessor(one, video_decoder, decode_audio) for one in _clip_specs(spec, buckets, plan.buckets)]
            return config.finish(by_stream(each), spec.audio, output.device, plan.names)

        sampling = config.sampling(config.batch_size)
        plan, owned = config.open_plan(config.url_or_dataset, find, spec.clip, sampling, _bucketing(buckets, spec))
        shares_decoding = registry.candidates(decoder, output.device.type)[0].shares_decoding
        if shares_decoding and not config.decode_in_subprocess:
            specs = _clip_specs(spec, buckets, plan.buckets)
            delivery = replace(delivery, group_slots=together(specs, transformed=config.transform is not None))
        super().__init__(plan, start_processor, delivery=delivery, bad_samples=config.bad_samples, owned=owned)

    def explain(self, sample: int | Sample = 0) -> str:
        """Explain what is done with a sample, and by which rules: its stream, decoder, colours and size, and what is
        read of it.

        Args:
            sample: a sample, or its number.
        """
        check_type("sample", sample, (int, Sample), "its number, or a Sample")
        one = self.dataset.sample(sample) if isinstance(sample, int) else sample
        device = self._delivery.output.device.type
        lines = registry.explain(one, color=self._spec.color, option=self._decoder, device=device)
        if one.video is None:
            return lines
        inside = self._spec.audio is not None and one.audio is not None and one.audio.ext == one.video.ext
        return f"{lines}\n{byte_ranges.explain(one, self._spec.clip, sound=inside)}"


def _audio_spec(audio: bool | AudioSpec) -> AudioSpec | None:
    """The sound that is wanted, if any."""
    if audio is False or audio is None:
        return None
    from headrace.loaders.audio.spec import AudioSpec

    check_type("audio", audio, (bool, AudioSpec), "True, or AudioSpec(...)")
    return AudioSpec() if audio is True else audio


def _size(size: tuple[int, int] | None) -> tuple[int, int] | None:
    if size is None:
        return None
    check_type("size", size, (tuple, list), "size=(height, width)")
    sides: Sequence[int] = size
    if len(sides) != 2:
        raise UsageError(f"size={size!r} is not two numbers", hint="give size=(height, width)")
    height, width = sides
    return check_count("size's height", height, MAX_SIDE), check_count("size's width", width, MAX_SIDE)


def _bucketing(buckets: Buckets | None, spec: ClipSpec) -> Bucketing | None:
    """How videos are sorted into buckets."""
    if buckets is None:
        return None
    if spec.size is not None:
        raise UsageError("with buckets each bucket has its size", hint="leave size out")
    if spec.clip.start == "every" and any(bucket.frames for bucket in buckets.buckets):
        raise UsageError(
            "start='every' counts clips of one length; buckets that name their frames have several",
            hint="leave the buckets' frames out, or use another start",
        )
    frames = spec.clip.frames

    def sort(stream: Stream) -> I64:
        height, width, rotation = (column(stream.dataset, name, stream.ids) for name in ("height", "width", "rotation"))
        turned = (rotation % 180 == 90) & spec.rotate
        heights, widths = np.where(turned, width, height), np.where(turned, height, width)
        return buckets.assign(heights.astype(np.int64), widths.astype(np.int64), _lengths(stream, spec.clip), frames)

    return Bucketing(buckets.batches(frames), sort, buckets.numbers(frames))


def _lengths(stream: Stream, clip: Clip) -> npt.NDArray[np.float64]:
    """Frames of each video, spaced as the clip spaces them."""
    if clip.rate is not None:
        return column(stream.dataset, "duration", stream.ids) * float(clip.rate)
    return np.floor((column(stream.dataset, "frames", stream.ids) - 1) / clip.stride) + 1


def _clip_specs(spec: ClipSpec, buckets: Buckets | None, streams: Sequence[int]) -> list[ClipSpec]:
    """The format of each stream's clips; `streams` are the numbers of their buckets."""
    if buckets is None:
        return [spec]
    chosen = [buckets.buckets[number] for number in streams]
    return [
        replace(spec, size=one.size, clip=replace_field(spec.clip, frames=one.frames or spec.clip.frames))
        for one in chosen
    ]
