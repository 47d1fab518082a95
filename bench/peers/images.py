"""Images for the loader benchmark: synthetic JPEGs, and the candidates that decode them.

The upper bound ("floor") is our decoder alone: images read from files, decoded and cropped by the same number of
threads, without batches, plan or digests. Most pipelines use Pillow. SPDL decodes with FFmpeg, DALI with libjpeg-turbo.

Invariants: an image depends only on its number. Each candidate delivers every image once, uint8 (B, 3, size, size):
scaled with an antialiased filter to cover the size, and cropped around the centre. The filter is bilinear, except in
SPDL, where it is FFmpeg's default (bicubic).

Failure behaviour: an exception of a library ends the candidate's process.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.bench.core.measure import Progress
from headrace.bench.peers import loaders
from headrace.bench.peers.loaders import THREADS, decoding, peers_with, peers_with_own_python
from headrace.bench.peers.source import FLOOR, OURS, Peer, Source, repeat_files
from headrace.bench.peers.video import decode_only, load

DISTINCT = 96
"""The number of images that are encoded. A dataset repeats them under other names."""
QUALITY = 90


@dataclass(frozen=True, kw_only=True)
class Images:
    """JPEGs with sides between two lengths. A candidate delivers them as `size` x `size`."""

    name: str
    shortest: int
    longest: int
    size: int
    shard_bytes: int = 64 << 20
    per_file: int = 1
    long_files: bool = False
    """Whether readers seek in the files. Images are short, so readers read them whole."""
    batch: int = 64
    buffer: int = 1024
    default: int = 4_800

    @property
    def folder(self) -> str:
        return self.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of an image that a candidate delivers."""
        return 3, self.size, self.size

    @property
    def dtype(self) -> str:
        return "uint8"

    def sides(self, number: int) -> tuple[int, int]:
        """Return the height and width of image `number`."""
        lengths = self.longest - self.shortest + 1
        return self.shortest + 7919 * number % lengths, self.shortest + 6271 * number % lengths

    def described(self, files: int) -> str:
        """Return one line that describes an epoch."""
        return f"{files} JPEGs of {self.shortest} to {self.longest} pixels a side; to {self.size}²"

    def write(self, folder: Path, count: int, progress: Progress) -> None:
        """Write `count` images, of which only the first `DISTINCT` are encoded."""
        from PIL import Image

        def write_image(path: Path, number: int) -> None:
            progress(f"making {self.name}", number / DISTINCT)
            Image.fromarray(_pixels(*self.sides(number), number)).save(path, quality=QUALITY)

        repeat_files(folder, "jpg", count, DISTINCT, write_image)

    def ours(self) -> dict[str, Peer]:
        """Headrace and the floor."""
        return {OURS: Peer(_headrace), FLOOR: Peer(_decoder_only)}

    def peers(self) -> dict[str, Peer]:
        """The other candidates."""
        return {
            **peers_with("Pillow", pillow, "PIL"),
            "Pillow, 2 threads": Peer(decoding(pillow, loaders.threads), ("PIL",)),
            "SPDL, 2 threads": Peer(decoding(_spdl, loaders.spdl), ("spdl",)),
            "DALI on the CPU, 2 threads": Peer(_dali, ("nvidia.dali",)),
            **peers_with_own_python("Pillow", pillow),
        }


KINDS = (Images(name="pictures", shortest=360, longest=640, size=224),)


def _pixels(height: int, width: int, number: int) -> np.ndarray:
    """Draw waves, edges and a little noise."""
    rng = np.random.default_rng(number)
    y, x = np.mgrid[:height, :width].astype(np.float32)
    canvas = np.full((height, width, 3), 127, np.float32)
    for _ in range(12):
        waves = np.sin(x * rng.uniform(-0.3, 0.3) + y * rng.uniform(-0.3, 0.3) + rng.uniform(0, 6))
        inside = (np.abs(x - rng.uniform(0, width)) < rng.uniform(20, width)) & (y > rng.uniform(0, height))
        canvas += rng.uniform(-30, 30, 3).astype(np.float32) * np.where(inside, 1, waves)[..., None]
    return np.clip(canvas + rng.normal(0, 5, (height, width, 1)), 0, 255).astype(np.uint8)


# --- the candidates


def _headrace(source: Source, kind: Images) -> Iterator[torch.Tensor]:
    from headrace.loaders import Clip

    return (batch[:, 0] for batch in load(source, Clip(1), kind.size, kind.batch))


def _decoder_only(source: Source, kind: Images) -> Iterator[torch.Tensor]:
    from headrace.loaders import Clip

    return (clips[:, 0] for clips in decode_only(source, kind, Clip(1), kind.size))


def pillow(data: bytes, kind: Images) -> torch.Tensor:
    """Decode, scale and crop as users of Pillow do: (1, 3, size, size)."""
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        height, width = _covering(image.height, image.width, kind.size)
        top, left = (height - kind.size) // 2, (width - kind.size) // 2
        scaled = image.convert("RGB").resize((width, height), Image.Resampling.BILINEAR)
        cropped = scaled.crop((left, top, left + kind.size, top + kind.size))
        return torch.from_numpy(np.array(cropped)).permute(2, 0, 1)[None].contiguous()


def _spdl(named: tuple[str, bytes | str], kind: Images) -> torch.Tensor:
    """Decode, then scale and crop in FFmpeg's filter graph, as SPDL does."""
    io_: Any = importlib.import_module("spdl.io")
    size = kind.size
    chain = f"scale={size}:{size}:force_original_aspect_ratio=increase,crop={size}:{size},format=rgb24"
    config = io_.decode_config(decoder_options={"threads": "1"})
    frames = io_.decode_packets(io_.demux_image(named[1]), filter_desc=chain, decode_config=config)
    return io_.to_torch(io_.convert_frames(frames)).permute(2, 0, 1)[None].contiguous()  # type: ignore[no-any-return]


def _dali(source: Source, kind: Images) -> Iterator[torch.Tensor]:
    """DALI on the CPU, with its own decoder, scaler and threads. It gets the bytes of the files one batch ahead."""
    dali, fn, types = (importlib.import_module(f"nvidia.dali{name}") for name in ("", ".fn", ".types"))
    names, pool = source.files(), ThreadPoolExecutor(THREADS)
    batches = [names[at : at + kind.batch] for at in range(0, len(names), kind.batch)]

    def read(batch: list[str]) -> list[Any]:
        return [np.frombuffer(data, np.uint8) for data in pool.map(source.read, batch)]

    @dali.pipeline_def(batch_size=kind.batch, num_threads=THREADS, device_id=None)  # type: ignore[untyped-decorator]
    def pipeline() -> Any:
        files = fn.external_source(source=map(read, batches), dtype=types.UINT8, ndim=1)
        scaled = fn.resize(
            fn.decoders.image(files),
            resize_shorter=kind.size,
            interp_type=types.INTERP_LINEAR,
            antialias=True,
        )
        return fn.transpose(fn.crop(scaled, crop=(kind.size, kind.size)), perm=[2, 0, 1])

    with pool:
        running = pipeline()
        running.build()
        for _ in batches:
            (out,) = running.run()
            yield torch.from_numpy(np.array(out.as_tensor()))


def _covering(height: int, width: int, size: int) -> tuple[int, int]:
    scale = size / min(height, width)
    return max(size, round(height * scale)), max(size, round(width * scale))
