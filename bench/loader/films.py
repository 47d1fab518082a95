"""Films: encoded clips one after the other, with a tune beside them, copied and not encoded again.

Invariants: a film is a pure function of the clips and their order. Each clip begins with a key frame and lasts as many whole
frames as it has, so pictures come at an even rate across the seams; sound and pictures end together.
Failure behaviour: PyAV's exceptions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

RATE, IN_PACKET = 48_000, 1024
TUNE_SECONDS = 32
"""As much is encoded, and repeated; a whole number of packets."""


def join(target: Path, clips: Sequence[Path], seconds: int, tune: Path) -> None:
    """`clips`, of `seconds` each, in this order: an MP4 that says at its beginning where everything lies."""
    import av

    with av.open(str(target), "w", options={"movflags": "faststart"}) as made, av.open(str(tune)) as sung:
        with av.open(str(clips[0])) as first:
            pictures: Any = made.add_stream_from_template(first.streams.video[0])
        sound: Any = made.add_stream_from_template(sung.streams.audio[0])
        notes = [bytes(packet) for packet in sung.demux(audio=0) if packet.size][: TUNE_SECONDS * RATE // IN_PACKET]
        sent = 0
        for number, path in enumerate(clips):
            for packet in _shifted(path, number * seconds):
                packet.stream = pictures
                made.mux(packet)
            until = (number + 1) * seconds * RATE // IN_PACKET
            for place in range(sent, until):
                note: Any = av.Packet(notes[place % len(notes)])
                note.stream, note.time_base = sound, Fraction(1, RATE)
                note.pts = note.dts = place * IN_PACKET
                note.duration, note.is_keyframe = IN_PACKET, True
                made.mux(note)
            sent = until


def _shifted(path: Path, seconds: int) -> Iterator[Any]:
    import av

    with av.open(str(path)) as clip:
        for packet in clip.demux(video=0):
            if packet.size and packet.pts is not None and packet.dts is not None:
                later = round(seconds / packet.time_base)
                packet.pts += later
                packet.dts += later
                yield packet


def sing(target: Path) -> None:
    """A tune, as AAC."""
    import av

    with av.open(str(target), "w") as made:
        stream: Any = made.add_stream("aac", rate=RATE, layout="mono")
        stream.bit_rate = 64_000
        for place in range(TUNE_SECONDS * RATE // IN_PACKET + 2):
            at = (place * IN_PACKET + np.arange(IN_PACKET)) / RATE
            wave = np.sin(2 * np.pi * at * (220 + 110 * (place // 24 % 5))) * 0.2
            frame = av.AudioFrame.from_ndarray(wave.astype(np.float32)[None], format="fltp", layout="mono")
            frame.sample_rate, frame.pts = RATE, place * IN_PACKET
            made.mux(stream.encode(frame))
        made.mux(stream.encode(None))
