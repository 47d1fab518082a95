"""Describes the streams of a media file that loaders decode, and counts their frames exactly.

Purpose: `probe` opens MP4, MOV, MKV, WebM, AVI and M4A, WAV, FLAC, MP3, Ogg, and describes one video and one audio
stream.

Invariants:

* `headrace.dataio.shards.media.streams` opens the file safely and picks the streams.
* Frames are counted, never taken from a header. If each shown packet is one frame, the shown packets are counted, and
  their pts give the order. Otherwise the whole stream is decoded and its frames are counted. This is necessary for AVI
  (which stores no pts), packed MPEG-4, packets without pts, and a start inside a group of pictures. The first key frame
  in the index may then come after the first shown frame. If the file has no key frame, the first frame is listed as
  one. Loaders then begin at the file's first packet.
* A key frame is a frame that the container marks as one, and at which decoding can begin
  (`bitstream.is_random_access`). A point from which H.264 recovers gradually is not a key frame.
* A key frame's index is the number of frames that decoding from the start outputs before it. A key frame that an edit
  list cuts off is decoded but not shown. It has the index of the first shown frame after it.
* In files that may be read in part (`headrace.dataio.shards.pieces`), a key frame's offset is the offset of its packet
  as libav gives it.
* The index has the time of the first audio sample and the offsets of some audio packets. Both are as libav gives them
  when it reads the file from the beginning. Audio packets of Matroska that begin before time zero are left out, because
  Matroska stores no usable time for them. Samples are counted as the decoder outputs them, mostly without decoding them
  (`headrace.dataio.shards.media.audio_counter`). If the decoder reports an error, no packets are marked, and loaders
  let libav find the packets.
* At least one frame was decoded. A file that cannot be decoded at all is rejected. `probe` does not look for damage
  further inside the video. Such a file passes, and the loader that finds the damage quarantines the sample.
* At most `limits.VIDEO_FRAMES` frames and `limits.AUDIO_VALUES` audio values are counted.

Failure behaviour: `probe` raises `UnsupportedError` for a file that is not regular, has another format or no streams,
or exceeds a limit. It raises `CorruptionError` for a file that is empty, truncated, or cannot be demuxed or decoded.
`probe` does not protect its caller if libav hangs, crashes or fills the memory. Run it in a `ProbePool`.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import av.error
import msgspec
from av.video.frame import VideoFrame

from headrace.dataio.core import limits
from headrace.dataio.core.errors import AccessDeniedError, CorruptionError, NotFoundError, UnsupportedError
from headrace.dataio.shards.media.audio_counter import AudioCounter, UncountableError
from headrace.dataio.shards.media.container import demuxed
from headrace.dataio.shards.media.images import color_of
from headrace.dataio.shards.media.streams import (
    AUDIO_DECODE_OPTIONS,
    LIGHT_DECODING,
    check_file,
    check_frame_count,
    check_video,
    configure_decoder,
    open_container,
    open_described,
    pick_audio,
    pick_video,
    zero_offset_from,
)
from headrace.dataio.shards.media.video_packets import Count, VideoPackets
from headrace.dataio.shards.sample import AudioInfo, KeyFrame, VideoInfo

_MIN_FRAME_RATE = Fraction(1, 1000)


class Probe(msgspec.Struct, frozen=True):
    """The result of `probe`.

    `duration` is in seconds. If there is a video, it is the duration of the video. `notes` are remarks for the user,
    such as which streams were left out, and why.
    """

    container: str
    duration: float
    video: VideoInfo | None
    audio: AudioInfo | None
    notes: tuple[str, ...] = ()


def probe(source: str | os.PathLike[str] | bytes, *, ext: str | None = None) -> Probe:
    """Describe a media file.

    Args:
        source: the path of the file, or its bytes.
        ext: the extension of the member. The default is the path's suffix.

    Returns:
        The description of the streams that loaders decode.

    Raises:
        NotFoundError, AccessDeniedError: the file cannot be opened.
        UnsupportedError: the file is not in one of the formats, has no streams, or is above a limit.
        CorruptionError: the file is empty or truncated, or nothing in it can be decoded.

    Messages do not repeat the path.
    """
    if isinstance(source, bytes):
        return _probe_open(check_file(io.BytesIO(source), len(source)), ext or "")
    path = Path(source)
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):
            raise UnsupportedError("not a regular file")
        with path.open("rb") as file:
            check_file(file, info.st_size)
    except FileNotFoundError as error:
        raise NotFoundError("no such file") from error
    except PermissionError as error:
        raise AccessDeniedError("no permission to read the file") from error
    except OSError as error:
        raise CorruptionError(f"cannot be read: {error.strerror or error}") from error
    return _probe_open(f"file:{path}", path.suffix[1:].lower() if ext is None else ext)


def _probe_open(source: Any, ext: str) -> Probe:
    try:
        return _probe_streams(source, ext, by_packets=True)
    except UncountableError:
        return _probe_streams(source, ext, by_packets=False)


def _probe_streams(source: Any, ext: str, *, by_packets: bool) -> Probe:
    with open_described(source) as container:
        video, audio = pick_video(container), pick_audio(container)
        if video is None and audio is None:
            raise UnsupportedError("the file has no video or audio stream that can be decoded")
        if video is not None:
            check_video(video)
        counter = AudioCounter(container.size, by_packets=by_packets)
        try:
            packets, first_frame = _demux(source, container, video, audio, counter)
        except av.error.FFmpegError as error:
            raise CorruptionError(f"cannot be demuxed to its end: {error.strerror}") from error
        video_info = None if packets is None else _video_info(source, ext, container, video, packets, first_frame)
        audio_info = None if audio is None else counter.info(ext, audio)
        return _result(container, video_info, audio_info, counter, 0 if packets is None else len(packets.unclean))


def _result(
    container: Any, video: VideoInfo | None, audio: AudioInfo | None, counter: AudioCounter, unclean: int
) -> Probe:
    notes, audio_errors = [], counter.errors
    if counter.early:
        notes.append(f"{counter.early} audio packets begin before time zero and are left out")
    if unclean:
        notes.append(
            f"decoding cannot begin at {unclean} of its key frames (for example with intra refresh), so it begins "
            "at earlier key frames, which is slower; --transcode h264 helps"
        )
    if audio is None and audio_errors:
        if video is None:
            raise CorruptionError("no audio can be decoded")
        notes.append("the audio stream cannot be decoded and is left out")
    elif audio_errors:
        notes.append(f"{audio_errors} audio packets cannot be decoded")
    if video is not None:
        seconds = float(video.duration_pts * video.time_base)
    elif audio is not None:
        seconds = audio.samples / audio.sample_rate
    elif counter.early:
        raise UnsupportedError("all of its audio begins before time zero; shift it, for example with ffmpeg -c copy")
    else:
        raise CorruptionError("the file has no frames")
    return Probe(container.format.name, seconds, video, audio, tuple(notes))


def _demux(
    source: Any, container: Any, video: Any, audio: Any, counter: AudioCounter
) -> tuple[VideoPackets | None, VideoFrame | None]:
    """Read the file once: collect what all video packets say, decode the first frame, and count all audio."""
    video_packets, first_frame, is_first = None, None, True
    if video is not None:
        configure_decoder(video, LIGHT_DECODING)
        video_packets = VideoPackets(video)
    if audio is not None:
        configure_decoder(audio, AUDIO_DECODE_OPTIONS)
    with demuxed(container, *(s for s in (video, audio) if s is not None)) as packets:
        for packet in packets:
            if packet.stream is audio:  # not stream_index, which is always 0 for a flush packet
                if is_first:
                    counter.zero, is_first = zero_offset_from(packet, source, container), False
                counter.feed(packet)
                continue
            assert video_packets is not None
            if first_frame is None:
                first_frame = _first_frame(packet, is_first=not video_packets.packets)
            if packet.size:
                video_packets.add(packet)
    return video_packets, first_frame


def _first_frame(packet: Any, *, is_first: bool) -> VideoFrame | None:
    """Return the first frame that the decoder outputs, or None if it needs a further packet.

    Of the stream's first packet, the decoder must output the frame at once, even if later packets are shown before it.
    """
    if is_first and packet.size:
        context = packet.stream.codec_context
        frames = [*_decode(packet), *_flush(packet.stream)]
        context.flush_buffers()
        if frames:
            return frames[0]
    return next(_decode(packet), None)


def _flush(stream: Any) -> Iterator[VideoFrame]:
    """Yield the frames that the decoder still has."""
    try:
        yield from stream.decode(None)
    except av.error.FFmpegError:
        return


def _decode(packet: Any) -> Iterator[VideoFrame]:
    try:
        yield from packet.decode()
    except av.error.FFmpegError:
        return  # the loader handles damaged packets; the caller checks that at least one frame decodes


def _video_info(
    source: Any, ext: str, container: Any, stream: Any, packets: VideoPackets, first_frame: VideoFrame | None
) -> VideoInfo:
    if first_frame is None:
        raise CorruptionError(f"no frame of the video stream can be decoded within {limits.FRAME_PIXELS} pixels")
    has_empty_packets = "avi" in container.format.name
    counted = packets.count() if packets.whole_pictures or not has_empty_packets else None
    frames, keys, start, end = counted or _count_by_decoding(source, stream, packets)
    keys = packets.with_offsets(keys, container.size)
    rate = stream.average_rate or stream.guessed_rate or Fraction(0)
    if end <= start:  # the last frame's own duration is unknown
        end = start + 1
    if rate < _MIN_FRAME_RATE:
        rate = Fraction(frames, 1) / ((end - start) * stream.time_base)
    return VideoInfo(
        ext=ext,
        stream=stream.index,
        codec=stream.codec_context.codec.canonical_name,
        width=first_frame.width,
        height=first_frame.height,
        fps=Fraction(rate).limit_denominator(1_000_000),
        frames=frames,
        time_base=Fraction(stream.time_base),
        start_pts=start,
        duration_pts=end - start,
        pixel_format=first_frame.format.name,
        rotation=round(-first_frame.rotation / 90) % 4 * 90,  # libav counts counter-clockwise
        key_frames=keys,
        color=color_of(first_frame),
    )


def _count_by_decoding(source: Any, stream: Any, packets: VideoPackets) -> Count:
    unclean = set(packets.unclean)
    keys, times, end, count = [], [], 0, 0
    with open_container(source) as container:
        reopened = container.streams[stream.index]
        configure_decoder(reopened, LIGHT_DECODING)
        with demuxed(container, reopened) as demuxed_packets:
            for packet in demuxed_packets:
                for frame in _decode(packet):
                    pts = frame.pts if frame.pts is not None else frame.dts
                    if pts is not None:
                        times.append(pts)
                        end = max(end, pts + (frame.duration or 0))
                        if frame.key_frame and pts not in unclean:
                            keys.append(KeyFrame(pts, count))
                    count += 1
                    check_frame_count(count)
    start = min(times, default=0)
    return Count(count, tuple(keys) or (KeyFrame(start, 0),), start, end)
