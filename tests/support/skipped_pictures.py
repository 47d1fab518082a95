"""What it saves not to decode H.264 and HEVC pictures that no other refers to: `python -m tests.support.skipped_pictures`.

For each real clip: the share of such pictures, and of their bytes. Then the CPU time of a clip of 16 frames, with and without.
"""

from __future__ import annotations

import tempfile
import time

import av
import torch

from headrace.bench.core.data import REAL_CLIPS
from headrace.dataio import pack
from headrace.dataio.shards.media import bitstream
from headrace.loaders import Clip, VideoLoader
from headrace.loaders.decode import pyav

CLIPS = ("nasa_h264_aac.mp4", "youtube_clip.mp4", "arm_wrestling.mp4", "pancake_h264.mkv", "h265.mp4")
EPOCHS = 30


def is_unreferenced(codec: str, packet: bytes, length_bytes: int) -> bool:
    """Whether the first slice of the packet says that no other picture refers to this one."""
    at = 0
    while at + length_bytes < len(packet):
        header = packet[at + length_bytes]
        if codec == "h264" and header & 31 in (1, 5):
            return not header >> 5 & 3
        if codec == "hevc" and header >> 1 & 63 < 32:
            return header >> 1 & 63 in range(0, 16, 2)
        at += length_bytes + int.from_bytes(packet[at : at + length_bytes], "big")
    return False


def main() -> None:
    for name in CLIPS:
        with av.open(str(REAL_CLIPS / name)) as container:
            video = container.streams.video[0]
            codec = video.codec_context.codec.canonical_name
            units = bitstream.length_size(codec, video.codec_context.extradata)
            packets = [bytes(packet) for packet in container.demux(video) if packet.size]
        unreferenced = [packet for packet in packets if is_unreferenced(codec, packet, units)]
        share, bytes_share = len(unreferenced) / len(packets), sum(map(len, unreferenced)) / sum(map(len, packets))
        print(f"{name}: {share:.0%} of the pictures, {bytes_share:.0%} of the bytes")
    torch.set_num_threads(1)
    dataset = pack([REAL_CLIPS / name for name in CLIPS[:4]], tempfile.mkdtemp())
    for clip in (Clip(16, fps=8), Clip(16)):
        for codecs in (pyav._SKIPPING, frozenset[str]()):
            before, pyav._SKIPPING = pyav._SKIPPING, codecs
            with VideoLoader(dataset, 2, clip=clip, size=(128, 128), seed=3, sidecar=None, num_threads=1) as loader:
                began = time.process_time()
                batches = sum(1 for _ in range(EPOCHS) for _ in loader)
                milliseconds = (time.process_time() - began) / (2 * batches) * 1000
            pyav._SKIPPING = before
            print(f"{clip}: {milliseconds:.1f} ms of CPU a clip, {'without' if codecs else 'with'} them")


if __name__ == "__main__":
    main()
