"""`headrace bench pack`: MB/s, files/s, CPU seconds and peak memory of packing the same files into tar shards.

The peer is webdataset's ShardWriter, without an index and with one made by PyAV. Imports of the measured process do
not count, because their cost does not grow with the number of files. Processes that it starts do count.

Invariant: every candidate writes tar shards of about `SHARD_BYTES` to local disk and fsyncs them within the measured
time. Digests show that the members equal the files.

Failure behaviour: wrong members or an exception end the process, and `headrace.bench.core.measure` reports it.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import os
import shutil
import tarfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from headrace.bench.core.command import Job, benchmark
from headrace.bench.core.measure import Candidate, Meter, Progress, alternate
from headrace.bench.core.results import Metric, Part
from headrace.dataio.core.cli import argument, positive_int

SHARD_BYTES = 16 << 20
_MADE = 8
METRICS = {
    "mb_per_s": Metric("MB/s", "MB/s", "higher"),
    "files_per_s": Metric("files/s", "1/s", "higher"),
    "mb_per_core_s": Metric("MB/s a core", "MB/s", "higher"),
    "files_per_core_s": Metric("files/s a core", "1/s", "higher"),
    "cpu_s_per_1k": Metric("CPU s per 1k files", "s"),
    "peak_mib": Metric("peak MiB", "MiB"),
}


@benchmark(
    "pack",
    "Packing into tar shards on local disk, compared with webdataset's ShardWriter.",
    argument("--files", type=positive_int, default=160, help="files to pack (default: %(default)s)"),
)
def pack(job: Job, part: Part) -> None:
    """Measure all candidates in turn.

    They pack the same copies of generated clips and, if there are any, of real ones.
    """
    from headrace.bench.core.data import REAL_CLIPS

    size = make_files(job.scratch / "clips", job.args.files, job.progress, REAL_CLIPS)
    real = "made and real" if REAL_CLIPS.is_dir() else "made"
    part.title = f"Pack: {job.args.files} files, {size / 1e6:.0f} MB, copies of {real} clips, local disk"
    part.settings = {"files": job.args.files, "bytes": size, "shard_bytes": SHARD_BYTES}
    part.metrics, part.against = METRICS, PEER
    candidates = [
        Candidate(name, "headrace.bench.workloads.pack:measure", (name, str(job.scratch))) for name in CANDIDATES
    ]
    alternate(candidates, job.rounds, job.progress, part.candidates)


def make_files(folder: Path, count: int, progress: Progress, media: Path | None = None) -> int:
    """Fill `folder` with `count` files, and return their bytes.

    The files are copies, in turn, of generated clips and of the files in `media` that can be probed.
    """
    from headrace.bench.core.data import make_clip

    originals = []
    for number in range(min(_MADE, count)):
        progress("making clips", number / _MADE)
        originals.append(make_clip(folder.parent / "originals", number, width=320, height=240))
    originals += _usable(media) if media is not None and media.is_dir() else []
    folder.mkdir(parents=True)
    for number in range(count):
        original = originals[number % len(originals)]
        shutil.copyfile(original, folder / f"{number:06d}{original.suffix}")
    return sum(path.stat().st_size for path in folder.iterdir())


def _usable(media: Path) -> list[Path]:
    """Return the files that are not damaged on purpose. Headrace would skip damaged files, and the others would not."""
    from headrace.dataio.core.errors import HeadraceError
    from headrace.dataio.shards.media.probe import probe

    usable = []
    for path in sorted(media.iterdir()):
        try:
            probe(path)
        except HeadraceError:
            continue
        usable.append(path)
    return usable


def measure(candidate: str, directory: str) -> dict[str, float]:
    """Pack `directory`/clips into `directory`/packed, which is emptied first.

    Figures "a core" are per CPU second of the process and its children.
    """
    clips, packed = Path(directory, "clips"), Path(directory, "packed")
    shutil.rmtree(packed, ignore_errors=True)
    packed.mkdir()
    files = sorted(clips.iterdir())
    megabytes = sum(path.stat().st_size for path in files) / 1e6
    for module in CANDIDATES[candidate].imports:
        importlib.import_module(module)
    meter = Meter()
    CANDIDATES[candidate].run(files, packed)
    if candidate != OURS:  # Headrace's store has synced already
        _sync(packed)
    read = meter.read()
    check_members(files, packed)
    return {
        "mb_per_s": megabytes / read["wall_s"],
        "files_per_s": len(files) / read["wall_s"],
        "mb_per_core_s": megabytes / read["cpu_s"],
        "files_per_core_s": len(files) / read["cpu_s"],
        "cpu_s_per_1k": 1000 * read["cpu_s"] / len(files),
        "peak_mib": read["peak_mib"],
    }


def check_members(files: list[Path], packed: Path) -> None:
    """Raise `AssertionError` unless the tars under `packed` hold exactly the contents of `files`."""
    expected = Counter(_digest(path.read_bytes()) for path in files)
    packed_counts: Counter[bytes] = Counter()
    for shard in packed.rglob("*.tar"):
        with tarfile.open(shard, "r:") as tar:
            for member in tar:
                content = tar.extractfile(member)
                assert content is not None, f"{member.name} of {shard} is not a file"
                packed_counts[_digest(content.read())] += 1
    if packed_counts != expected:
        raise AssertionError(
            f"{packed_counts.total()} members, {expected.total()} files, {(packed_counts & expected).total()} of them equal"
        )


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def _sync(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def _headrace(files: list[Path], packed: Path) -> None:
    from headrace.dataio import pack

    pack([str(files[0].parent)], str(packed / "dataset"), shard_bytes=SHARD_BYTES, strict=True).close()


def _shard_writer(files: list[Path], packed: Path, *, probed: bool) -> None:
    import webdataset as wds

    rows = []
    with wds.ShardWriter(str(packed / "%06d.tar"), maxsize=SHARD_BYTES, verbose=0, encoder=False) as writer:
        for path in files:
            content = path.read_bytes()
            row = _facts(content) if probed else {}
            rows.append({"key": path.stem, "shard": writer.fname, **row})
            writer.write({"__key__": path.stem, path.suffix[1:]: content})
    if probed:
        (packed / "index.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _facts(content: bytes) -> dict[str, Any]:
    """Collect the facts of a typical hand-written index.

    These are the streams, the packet count, the key frames with pts, and one decoded frame.
    """
    import av

    with av.open(io.BytesIO(content), "r") as container:
        stream = next(iter((*container.streams.video, *container.streams.audio)))
        keys, packets, decoded = [], 0, 0
        for packet in container.demux(stream):
            if packet.size:
                packets += 1
                if stream.type == "video" and packet.is_keyframe:
                    keys.append((packets - 1, packet.pts))
            if not decoded:
                decoded = len(packet.decode())
        row = {"codec": stream.codec_context.name, "packets": packets, "keys": keys, "duration": container.duration}
        if isinstance(stream, av.VideoStream):
            row |= {"width": stream.width, "height": stream.height, "fps": str(stream.average_rate)}
        return row


@dataclass(frozen=True)
class Packer:
    """A candidate: its imports before the measurement, and the function that packs files into a folder."""

    imports: tuple[str, ...]
    run: Callable[[list[Path], Path], None]


_IMPORTS = (
    "headrace.dataio.shards.ingest.pack",
    "headrace.dataio.shards.query.tables",
    "headrace.dataio.store.posix",
    "headrace.dataio.store.retry",
    "importlib.metadata",
    "pyarrow.parquet",
)
"""The modules that `pack` imports, also those that it imports when it needs them."""
OURS, PEER = "headrace", "ShardWriter + PyAV"
CANDIDATES = {
    OURS: Packer(_IMPORTS, _headrace),
    "ShardWriter, no index": Packer(("webdataset",), partial(_shard_writer, probed=False)),
    PEER: Packer(("webdataset", "av"), partial(_shard_writer, probed=True)),
}
