"""Writes the data sets of this folder with the libraries themselves: `python record.py mds|litdata|energon FOLDER`.

`expected.json` has what the library reads from its own files: media as SHA-256, arrays as dtype and list.
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

COLUMNS = {
    "clip": "bytes",
    "caption": "str",
    "label": "int",
    "score": "float32",
    "still": "jpeg",
    "meta": "json",
    "tokens": "ndarray",
    "pair": "ndarray:int16:2",
}


def picture(number: int) -> bytes:
    """A JPEG of 24 x 16 pixels."""
    shades = np.add.outer(np.arange(16), np.arange(24)) * 4 + 4 * number
    pixels = np.stack([shades, shades // 2, 255 - shades], -1).astype(np.uint8)
    Image.fromarray(pixels).save(out := io.BytesIO(), "JPEG")
    return out.getvalue()


def video(number: int) -> bytes:
    """Six frames of MPEG-4, 64 x 48 pixels."""
    with av.open(out := io.BytesIO(), "w", format="mp4") as file:
        stream: Any = file.add_stream("mpeg4", rate=6)
        stream.width, stream.height = 64, 48
        for frame in range(6):
            shade = np.full((48, 64, 3), 20 * number + 4 * frame, np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(shade, format="rgb24")))
        file.mux(stream.encode())
    return out.getvalue()


def caption(number: int) -> str:
    return f"a grey square, number {number}"


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_expected(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "expected.json").write_text(json.dumps(rows, indent=1) + "\n")


def mds(folder: Path) -> None:
    """`mds` and `mds-zstd`."""
    from streaming import MDSWriter, StreamingDataset

    still = folder / "still.jpg"
    for name, compression, count in (("mds", None, 8), ("mds-zstd", "zstd:7", 6)):
        with MDSWriter(out=str(folder / name), columns=COLUMNS, compression=compression, size_limit=9000) as out:
            for n in range(count):
                still.write_bytes(picture(n))  # MDS stores the bytes of the file
                row: dict[str, Any] = {"clip": video(n), "caption": caption(n), "label": n % 3, "score": n / 8}
                row |= {"still": Image.open(still), "meta": {"tags": ["a", n]}}
                out.write({**row, "tokens": np.arange(n + 1, dtype=np.uint16), "pair": np.array([n, -n], np.int16)})
        read = StreamingDataset(local=str(folder / name), batch_size=1)
        rows: list[dict[str, Any]] = [dict(read[n]) for n in range(count)]
        for n, row in enumerate(rows):
            row |= {"clip": digest(row["clip"]), "still": digest(picture(n)), "score": float(row["score"])}
            row |= {key: [str(row[key].dtype), row[key].tolist()] for key in ("tokens", "pair")}
        write_expected(folder / name, rows)
        for raw in (folder / name).glob("*.mds") if compression else ():
            raw.unlink()  # what StreamingDataset decompressed
    still.unlink()


def litdata_sample(n: int) -> dict[str, Any]:
    still = Image.open(io.BytesIO(picture(n)))
    still.filename = ""
    about = {"caption": caption(n), "label": n % 3}
    return {"still": still, "raw": bytes([n] * 5), "about": about, "score": n / 8, "even": n % 2 == 0}


def litdata(folder: Path) -> None:
    """`litdata`."""
    from litdata import StreamingDataset, optimize
    from litdata.streaming.serializers import BytesSerializer

    optimize(fn=litdata_sample, inputs=list(range(8)), output_dir=str(folder / "litdata"), chunk_size=5, num_workers=1)
    rows = list[dict[str, Any]]()
    for row in StreamingDataset(str(folder / "litdata"), serializers={"jpeg": BytesSerializer()}):
        about = {f"about_{key}": value for key, value in row.pop("about").items()}
        media = {name: digest(bytes(row.pop(name))) for name in ("still", "raw")}
        rows.append({**about, **row, **media})
    write_expected(folder / "litdata", rows)


def energon(folder: Path) -> None:
    """`energon`."""
    import webdataset as wds

    (folder := folder / "energon").mkdir(parents=True)
    for shard in range(4):
        with wds.TarWriter(str(folder / f"shard_{shard:03}.tar")) as out:
            for n in range(3 * shard, 3 * shard + 3):
                about = json.dumps({"caption": caption(n), "label": n % 3}).encode()
                out.write({"__key__": f"{n:06}", "jpg": picture(n), "json": about})
    command = [sys.executable, str(Path(sys.executable).parent / "energon"), "prepare", "--non-interactive"]
    splits = ["--split-parts", "train:shard_{000..002}.tar", "--split-parts", "val:shard_003.tar"]
    subprocess.run([*command, "--sample-type", "CrudeWebdataset", *splits, str(folder)], check=True)
    from megatron.energon import Cooker, DefaultTaskEncoder, WorkerConfig, get_loader, get_train_dataset, stateless

    class Encoder(DefaultTaskEncoder):
        decoder = None
        cookers = (Cooker(stateless(lambda sample: dict(sample))),)

    workers, encoder = WorkerConfig(rank=0, world_size=1, num_workers=0), Encoder()
    rows = list[dict[str, Any]]()
    for split in ("train", "val"):
        options: dict[str, Any] = {
            "batch_size": None,
            "shuffle_buffer_size": None,
            "max_samples_per_sequence": None,
            "repeat": False,
        }
        options |= {"split_part": split, "worker_config": workers, "task_encoder": encoder}
        for row in get_loader(get_train_dataset(folder, **options)):
            rows.append({"split": split, "key": row["__key__"].split("/")[-1], "jpg": digest(row["jpg"])})
    write_expected(folder, sorted(rows, key=lambda row: row["key"]))


if __name__ == "__main__":
    {"mds": mds, "litdata": litdata, "energon": energon}[sys.argv[1]](Path(sys.argv[2]))
