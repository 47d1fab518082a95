"""What a media worker is asked and what it answers: decode this to its end, or make pictures of it.

Purpose: the messages of `media_worker`; those who ask need only these, so they never load libav.
Invariant: msgpack with checked types. A path names a file that the asker set aside, whole and of the right checksum.
Failure behaviour: `msgspec.MsgspecError` for a malformed message; what is wrong with a file is part of the answer.
"""

from __future__ import annotations

import msgspec


class DecodeJob(msgspec.Struct, frozen=True, kw_only=True, tag="decode"):
    """Decode these streams to their end; None: not this one. `frames` and `samples` are what the index says."""

    path: str
    video_stream: int | None = None
    frames: int = 0
    audio_stream: int | None = None
    samples: int = 0


class Decoded(msgspec.Struct, frozen=True, kw_only=True, tag="decoded"):
    """What is wrong with the file, in words; empty when everything decodes as the index says."""

    faults: tuple[str, ...]


class PicturesJob(msgspec.Struct, frozen=True, kw_only=True, tag="pictures"):
    """`count` pictures evenly over a video, `height` pixels high and at most `width` wide; or a sound's outline
    of `count` peaks."""

    path: str
    video_stream: int | None = None
    audio_stream: int | None = None
    samples: int = 0
    rotation: int = 0
    count: int = 4
    width: int = 320
    height: int = 120


class Pictures(msgspec.Struct, frozen=True, kw_only=True, tag="pictures"):
    """JPEG files in the order of time, or peaks from 0 to 1; `fault` says why there are fewer than asked for."""

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
