"""Candidates for images: Headrace, the floor, and the peers with Pillow, SPDL or DALI.

The floor is our decoder alone: images read from files, decoded and cropped by as many threads, without batches, plan or
digests. Most pipelines use Pillow. SPDL decodes with FFmpeg, DALI with libjpeg-turbo.
Invariant: each candidate delivers every image once, uint8 (B, 3, size, size): scaled with a bilinear, antialiased
filter to cover the size, and cropped around the centre.
Failure behaviour: exceptions of the libraries, which end the candidate's process.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from headrace.bench.peers import peer_loaders
from headrace.bench.peers.peer_loaders import THREADS, decoding
from headrace.bench.peers.video_peers import FLOOR, OURS
from headrace.bench.workloads.images import Stills
from headrace.bench.workloads.source import Place


def _ours(place: Place, kind: Stills) -> Iterator[torch.Tensor]:
    from headrace.loaders import Clip, VideoLoader

    options: dict[str, Any] = {"sidecar": None, "drop_last": False, "num_threads": THREADS}
    size = (kind.size, kind.size)
    with VideoLoader(place.url("dataset"), kind.batch, clip=Clip(1), size=size, **options) as loader:
        for batch in loader:
            yield batch["video"][:, 0]


def _bare(place: Place, kind: Stills) -> Iterator[torch.Tensor]:
    """The floor: Headrace's decoder without the loader."""
    from headrace.dataio.shards.sample import Sample
    from headrace.loaders.clip import Clip, choose
    from headrace.loaders.decode.base import Decoded, Fit, Request
    from headrace.loaders.decode.pyav import PyAVDecoder

    decoder, clip, cut = PyAVDecoder(), Clip(1), Fit((kind.size, kind.size))

    def one(sample: Sample, data: memoryview) -> torch.Tensor:
        assert sample.video is not None
        wanted = choose(sample.video, clip, 0, 0, sample.id, 0)
        (decoded,) = decoder.decode([Request(data, sample.video, wanted, "bt601", cut)])
        assert isinstance(decoded, Decoded), decoded
        return decoded.frames

    return peer_loaders.alone(one, place, kind)


def pillow(source: bytes, kind: Stills) -> torch.Tensor:
    """Decode, scale and crop as users of Pillow do: (1, 3, size, size)."""
    from PIL import Image

    with Image.open(io.BytesIO(source)) as image:
        height, width = _covering(image.height, image.width, kind.size)
        top, left = (height - kind.size) // 2, (width - kind.size) // 2
        scaled = image.convert("RGB").resize((width, height), Image.Resampling.BILINEAR)
        cut = scaled.crop((left, top, left + kind.size, top + kind.size))
        return torch.from_numpy(np.array(cut)).permute(2, 0, 1)[None].contiguous()


def _spdl(named: tuple[str, bytes | str], kind: Stills) -> torch.Tensor:
    """Decode, then scale and crop in FFmpeg's filter graph, as SPDL does."""
    io_: Any = importlib.import_module("spdl.io")
    size = kind.size
    chain = f"scale={size}:{size}:force_original_aspect_ratio=increase,crop={size}:{size},format=rgb24"
    config = io_.decode_config(decoder_options={"threads": "1"})
    frames = io_.decode_packets(io_.demux_image(named[1]), filter_desc=chain, decode_config=config)
    return io_.to_torch(io_.convert_frames(frames)).permute(2, 0, 1)[None].contiguous()  # type: ignore[no-any-return]


def _dali(place: Place, kind: Stills) -> Iterator[torch.Tensor]:
    """DALI with its own decoder, scaler and threads on the CPU. It gets the bytes of the files, one batch ahead."""
    dali, fn, types = (importlib.import_module(f"nvidia.dali{name}") for name in ("", ".fn", ".types"))
    names, pool = place.clips(), ThreadPoolExecutor(THREADS)
    batches = [names[at : at + kind.batch] for at in range(0, len(names), kind.batch)]

    def read(batch: list[str]) -> list[Any]:
        return [np.frombuffer(data, np.uint8) for data in pool.map(place.read, batch)]

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
        made = pipeline()
        made.build()
        for _ in batches:
            (out,) = made.run()
            yield torch.from_numpy(np.array(out.as_tensor()))


def _covering(height: int, width: int, size: int) -> tuple[int, int]:
    scale = size / min(height, width)
    return max(size, round(height * scale)), max(size, round(width * scale))


ENERGON, MOSAIC = "energon + Pillow, 2 workers", "mosaicml-streaming + Pillow, 2 workers"
PEERS: dict[str, tuple[str, ...]] = {
    "webdataset + Pillow, 0 workers": ("webdataset", "PIL"),
    "webdataset + Pillow, 2 workers": ("webdataset", "PIL"),
    "torchdata StatefulDataLoader + Pillow, 2 workers": ("torchdata", "PIL"),
    "litdata + Pillow, 2 workers": ("litdata", "PIL"),
    "Pillow, 2 threads": ("PIL",),
    "SPDL, 2 threads": ("spdl",),
    "DALI on the CPU, 2 threads": ("nvidia.dali",),
    ENERGON: ("megatron.energon",),
    MOSAIC: ("streaming",),
}
"""Each peer and the packages that it needs."""
CANDIDATES: dict[str, Callable[[Place, Stills], Iterator[torch.Tensor]]] = {
    OURS: _ours,
    FLOOR: _bare,
    "webdataset + Pillow, 0 workers": decoding(pillow, peer_loaders.webdataset, 0),
    "webdataset + Pillow, 2 workers": decoding(pillow, peer_loaders.webdataset, 2),
    "torchdata StatefulDataLoader + Pillow, 2 workers": decoding(pillow, peer_loaders.torchdata),
    "litdata + Pillow, 2 workers": decoding(pillow, peer_loaders.litdata),
    "Pillow, 2 threads": decoding(pillow, peer_loaders.threads),
    "SPDL, 2 threads": decoding(_spdl, peer_loaders.spdl),
    "DALI on the CPU, 2 threads": _dali,
    ENERGON: decoding(pillow, peer_loaders.energon),
    MOSAIC: decoding(pillow, peer_loaders.mosaic),
}
