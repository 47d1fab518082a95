"""The subprocess that decodes for a trainer. It answers requests on standard input until the input ends.

Purpose: a decoder that crashes or hangs on a file affects this process and not the trainer.
Invariants: each message frame gets one answer: msgpack of checked types, with the array's bytes unchanged. The process
is killed when its parent dies. The module does not import torch, so the process starts in a fraction of a second.
Failure behaviour: an error of a request is a normal answer. Any other error ends the process, which the parent detects.
"""

from __future__ import annotations

import os
import signal
import sys
from fractions import Fraction
from typing import IO, Any

import msgspec
import numpy as np

from headrace.dataio.core.errors import CapacityError, CorruptionError, HeadraceError, UnsupportedError
from headrace.dataio.shards.media.messages import dec_hook, enc_hook
from headrace.dataio.shards.sample import AudioInfo, VideoInfo
from headrace.dataio.shards.workers.worker import die_with_parent, read_frame, write_frame
from headrace.loaders.audio.decode import decode_audio
from headrace.loaders.audio.spec import AudioSpec
from headrace.loaders.clip import Wanted
from headrace.loaders.decode.base import Color, Fit, Planes, Request
from headrace.loaders.decode.pyav import clip_of
from headrace.loaders.fetch.partial_file import Media, MissingPieceError, SentFile, SentPieces

HELLO = b"headrace decode 1"
ERRORS = {kind.code: kind for kind in (CorruptionError, UnsupportedError, CapacityError)}


class ClipTask(msgspec.Struct, tag="see"):
    """Decode a clip."""

    data: bytes | SentPieces
    info: VideoInfo
    wanted: Wanted
    color: Color
    fit: Fit | None = None
    planes: Planes | None = None


class AudioTask(msgspec.Struct, tag="listen"):
    """Decode a window of audio."""

    data: bytes | SentPieces
    info: AudioInfo
    start: Fraction
    spec: AudioSpec
    samples: int
    from_first: bool


class Failed(msgspec.Struct, tag="failed"):
    """The error of a sample."""

    code: str
    message: str
    hint: str


class Done(msgspec.Struct, tag="done"):
    """A decoded array. `numbers` holds the time stamps of a clip, or the number of samples that are real audio.

    `color` is the matrix and range of planes.
    """

    shape: tuple[int, ...]
    numbers: tuple[int, ...]
    data: bytes
    color: tuple[int, int] | None = None


class Missing(msgspec.Struct, tag="missing"):
    """The task needs this piece of the file as well."""

    piece: int


Task = ClipTask | AudioTask
Answer = Failed | Done | Missing
encode_task = msgspec.msgpack.Encoder(enc_hook=enc_hook).encode
decode_task = msgspec.msgpack.Decoder(Task, dec_hook=dec_hook).decode
encode_answer = msgspec.msgpack.Encoder().encode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


def answer(task: Task) -> Answer:
    """Run the task. Errors of the sample become answers."""
    try:
        return _decode_clip(task) if isinstance(task, ClipTask) else _decode_audio(task)
    except HeadraceError as error:
        return Failed(error.code, error.message, error.hint)
    except MissingPieceError as error:
        return Missing(error.number)


def _decode_clip(task: ClipTask) -> Answer:
    request = Request(_media(task.data), task.info, task.wanted, color=task.color, fit=task.fit, planes=task.planes)
    return _done(*clip_of(request))


def _decode_audio(task: AudioTask) -> Answer:
    audio, audio_samples = decode_audio(
        _media(task.data), task.info, task.start, task.spec, task.samples, task.from_first
    )
    return _done(audio, (audio_samples,))


def _media(data: bytes | SentPieces) -> Media:
    return SentFile(data) if isinstance(data, SentPieces) else memoryview(data)


def _done(array: np.ndarray[Any, Any], numbers: tuple[int, ...], color: tuple[int, int] | None = None) -> Done:
    return Done(array.shape, numbers, np.ascontiguousarray(array).tobytes(), color)


def serve(source: IO[bytes], out: IO[bytes]) -> None:
    """Answer requests until `source` ends."""
    write_frame(out, HELLO)
    while (frame := read_frame(source)) is not None:
        write_frame(out, encode_answer(answer(decode_task(frame))))


def main() -> None:
    """Serve requests on standard input, with the answers on standard output."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles interrupts
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), 1
        )  # so that the parent cannot mistake a library's output for an answer
        serve(sys.stdin.buffer, out)


if __name__ == "__main__":
    main()
