"""The messages of `media_worker`: decode a file to its end, or make pictures of it.

Purpose: callers import only these messages, so they never load libav.
Invariants: messages are msgpack with checked types. A path names a file that the caller wrote whole, with the right
checksum.
Failure behaviour: a malformed message raises `msgspec.MsgspecError`. Faults of a file are part of the answer.
"""

from __future__ import annotations

import msgspec


class DecodeJob(msgspec.Struct, frozen=True, kw_only=True, tag="decode"):
    """Decode these streams to their end.

    A stream of None is not decoded. `frames` and `samples` are the counts in the index.
    """

    path: str
    video_stream: int | None = None
    frames: int = 0
    audio_stream: int | None = None
    samples: int = 0


class Decoded(msgspec.Struct, frozen=True, kw_only=True, tag="decoded"):
    """The faults of the file, in words. It is empty if everything decodes as the index says."""

    faults: tuple[str, ...]


class PicturesJob(msgspec.Struct, frozen=True, kw_only=True, tag="pictures"):
    """Make `count` pictures evenly spread over a video, each at most `width` by `height` pixels.

    Without a video stream, make the outline of the audio from `count` peaks.
    """

    path: str
    video_stream: int | None = None
    audio_stream: int | None = None
    samples: int = 0
    rotation: int = 0
    count: int = 4
    width: int = 320
    height: int = 120


class Pictures(msgspec.Struct, frozen=True, kw_only=True, tag="pictures"):
    """JPEG files in the order of time, or peaks from 0 to 1.

    `fault` gives the reason if there are fewer than asked for.
    """

    jpegs: tuple[bytes, ...] = ()
    width: int = 0
    height: int = 0
    peaks: tuple[float, ...] = ()
    fault: str = ""


Job = DecodeJob | PicturesJob
Answer = Decoded | Pictures

HELLO = b"headrace media 1"
WORKER = "headrace.dataio.shards.workers.media_worker"
encode = msgspec.msgpack.Encoder().encode
decode_job = msgspec.msgpack.Decoder(Job).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
