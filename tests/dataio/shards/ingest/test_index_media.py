"""Real media in tars of every maker, indexed in place, come back byte for byte: here, by `webdataset` and by DALI."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.dataio import Dataset, index, pack
from headrace.dataio.shards.tar import dali_index
from tests.support.written_media import ReadTar

Files = dict[str, bytes]


def _of(media: Path) -> Files:
    """The clips with a text each, so that samples have several members; keys without dots."""
    found = {}
    for path in sorted(media.iterdir()):
        if path.suffix != ".md":
            found[f"set/{path.name}"] = path.read_bytes()
            found[f"set/{path.stem}.txt"] = f"text of {path.name}".encode()
    return {name: found[name] for name in sorted(found)}


def by_webdataset(files: Files, path: Path) -> None:
    import webdataset

    samples: dict[str, dict[str, object]] = {}
    for name, data in files.items():
        key, _, ext = name.rpartition(".")
        samples.setdefault(key, {"__key__": key})[ext] = data
    with webdataset.ShardWriter(str(path.parent / "%06d.tar"), encoder=False, verbose=0) as writer:
        for sample in samples.values():
            writer.write(sample)


def by_tarfile(files: Files, path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def by_gnu_tar(files: Files, path: Path, form: str) -> None:
    folder = path.parent / "files"
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    command = ["tar", f"--format={form}", "--sort=name", "-C", str(folder), "-cf", str(path), "set"]
    subprocess.run(command, check=True)


MAKERS: dict[str, Callable[[Files, Path], None]] = {
    "webdataset": by_webdataset,
    "tarfile": by_tarfile,
    "gnu": lambda files, path: by_gnu_tar(files, path, "gnu"),
    "pax": lambda files, path: by_gnu_tar(files, path, "pax"),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_media_in_a_tar_of_this_maker_reads_back_equal_everywhere(
    maker: str, media: Path, tmp_path: Path, read_with_webdataset: ReadTar
) -> None:
    files = _of(media)
    (tmp_path / "from").mkdir()
    shard = tmp_path / "from" / "000000.tar"
    MAKERS[maker](files, shard)
    with index(str(shard), tmp_path / "set") as dataset:
        assert dataset.report is not None
        assert dataset.report.skipped == ()
        expect_same(dataset, files)
        expect_same_from_others(dataset, shard, files, read_with_webdataset)


def test_packed_media_read_back_equal_everywhere(media: Path, tmp_path: Path, read_with_webdataset: ReadTar) -> None:
    files = _of(media)
    for name, data in files.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(data)
    with pack([str(tmp_path / "in")], tmp_path / "set") as dataset:
        expect_same(dataset, files)
        (shard,) = dataset.document.shards
        expect_same_from_others(dataset, tmp_path / "set" / shard.key, files, read_with_webdataset)


def expect_same(dataset: Dataset, files: Files) -> None:
    found = {f"{s.key}.{m.ext}": dataset.read(s, m.ext) for s in dataset for m in s.members}
    assert found == files
    for sample in dataset:
        assert sample.duration > 0
        assert sample.text is not None
        assert sample.text.startswith("text of")
        assert sample.video is not None or sample.audio is not None


def expect_same_from_others(dataset: Dataset, shard: Path, files: Files, read_with_webdataset: ReadTar) -> None:
    keys = list(dataset.keys)
    theirs = {
        f"{s['__key__']}.{ext}": data for s in read_with_webdataset(shard) for ext, data in s.items() if ext[0] != "_"
    }
    assert theirs == files
    (key,) = (shard.key for shard in dataset.document.shards)
    index_file = shard.parent / "dali.idx"
    index_file.write_text(dali_index(dataset, key))
    assert read_by_dali(shard, index_file, len(keys)) == [
        {ext: files[f"{key}.{ext}"] for ext in EXTENSIONS if f"{key}.{ext}" in files} for key in keys
    ]


EXTENSIONS = ["mp4", "mkv", "mov", "webm", "avi", "wav", "mp3", "txt"]


def read_by_dali(shard: Path, index_file: Path, count: int) -> list[Files]:
    dali = pytest.importorskip("nvidia.dali", reason="DALI is not installed")

    def pipeline() -> tuple[Any, ...]:
        return tuple(
            dali.fn.readers.webdataset(
                paths=[str(shard)],
                index_paths=[str(index_file)],
                ext=EXTENSIONS,
                missing_component_behavior="empty",
                pad_last_batch=True,
            )
        )

    pipe = dali.pipeline_def(pipeline)(batch_size=1, num_threads=1, device_id=None)
    pipe.build()
    found = []
    for _ in range(count):
        outputs = [output.at(0).tobytes() for output in pipe.run()]
        found.append({ext: data for ext, data in zip(EXTENSIONS, outputs, strict=True) if data})
    return found
