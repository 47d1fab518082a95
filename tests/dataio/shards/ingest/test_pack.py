"""Media in, a dataset out: the same bytes, in every reader, on both stores; or a clear refusal."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tarfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.dataio import Dataset, pack
from headrace.dataio.core.errors import ConflictError, CorruptionError, NotFoundError, TransientError, UsageError
from headrace.dataio.shards import tar
from headrace.dataio.shards.ingest import unit_packer
from headrace.dataio.shards.ingest.grouping import Group
from headrace.dataio.shards.ingest.probe_pool import ProbePool
from headrace.dataio.shards.ingest.report import Progress
from headrace.dataio.shards.media.messages import PrepareResult
from headrace.dataio.shards.query import part_writer
from headrace.dataio.store.base import Buffer, Store
from headrace.dataio.store.open import open_store
from tests.support.written_media import MakeClip, MakeWav, ReadTar

pytestmark = pytest.mark.slow

MIB = 1 << 20


def contents(store: Store) -> dict[str, str]:
    """Shards and index of a store with their digests."""
    keys = [info.key for prefix in ("shards/", "index/") for info in store.list(prefix)]
    return {key: hashlib.sha256(store.get(key)).hexdigest() for key in keys}


@pytest.fixture
def clips(tmp_path: Path, make_clip: MakeClip, make_wav: MakeWav) -> Path:
    """A folder of five samples."""
    root = tmp_path / "clips"
    for i in range(4):
        make_clip(root / "video" / f"{i}.mp4", frames=4 + i)
        (root / "video" / f"{i}.json").write_text(f'{{"label": {i}, "nested": {{}}}}')
    (root / "video" / "0.txt").write_text("the first\n")
    make_wav(root / "sound" / "tone.wav")
    return root


def test_all_real_media_come_back_equal_through_every_reader(
    media: Path, store_url: str, tmp_path: Path, read_with_webdataset: ReadTar
) -> None:
    originals = {p.stem: p for p in sorted(media.iterdir()) if p.suffix != ".md"}
    with pack(media, store_url, shard_bytes=2 * MIB) as packed:
        assert packed.report is not None
        assert not packed.report.skipped
        assert packed.report.files == packed.report.samples == len(originals)
        assert packed.report.ignored == (str(media / "README.md"),)
    with Dataset(store_url) as dataset:
        assert len(dataset.document.shards) > 1
        assert list(dataset.keys) == sorted(originals)
        for sample in dataset:
            assert dataset.read(sample, sample.members[0].ext) == originals[sample.key].read_bytes()
        seen: dict[str, bytes] = {}
        for shard in dataset.document.shards:
            local = tmp_path / "shard.tar"
            local.write_bytes(dataset.store.get(shard.key))
            with tarfile.open(local) as file:
                for info in file:
                    payload = file.extractfile(info)
                    assert payload is not None
                    assert payload.read() == originals[Path(info.name).stem].read_bytes()
            for found in read_with_webdataset(local):
                ext = next(name for name in found if not name.startswith("__"))
                seen[found["__key__"]] = found[ext]
        assert seen == {key: path.read_bytes() for key, path in originals.items()}


def scan(data: bytes, name: str) -> list[tar.TarMember]:
    return list(tar.scan(lambda offset, length: data[offset : offset + length], len(data), name))


def test_the_index_says_where_the_tar_has_them(clips: Path, tmp_path: Path) -> None:
    with pack(clips, tmp_path / "Clips für uns", shard_bytes=20_000) as dataset:
        assert dataset.name == "Clips für uns"
        indexed = [(s.shard, f"{s.key}.{m.ext}", m.offset, m.length) for s in dataset for m in s.members]
        scanned = []
        for shard in dataset.document.shards:
            data = dataset.store.get(shard.key)
            assert len(data) == shard.size
            scanned += [(shard.key, e.name, e.offset, e.length) for e in scan(data, shard.key)]
    assert indexed == scanned


def test_shards_keep_to_their_size_and_a_larger_sample_gets_its_own(clips: Path, tmp_path: Path) -> None:
    with pack(clips, tmp_path / "ds", shard_bytes=12_000) as dataset:
        shards = dataset.document.shards
        assert len(shards) > 1
        assert all(shard.size <= 12_000 or shard.samples == 1 for shard in shards)
        following = [shards[i].size + shards[i + 1].size for i in range(len(shards) - 1)]
        assert all(size > 12_000 for size in following)  # none was closed early


def test_text_fields_and_captions_reach_the_sample(clips: Path, tmp_path: Path) -> None:
    with pack(clips, tmp_path / "ds", captions={"video/1": "the second", "video/0": "unused"}) as dataset:
        first, second = dataset.find("video/0"), dataset.find("video/1")
        assert (first.text, dict(first.fields)) == ("the first", {"label": 0})
        assert second.text == "the second"
        assert [m.ext for m in second.members] == ["json", "mp4", "txt"]
        assert dataset.read(second, "txt") == b"the second"
        assert dataset.read(first, "txt") == b"the first\n"


def test_a_caption_for_no_sample_is_a_mistake(clips: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="caption for 'video/9'"):
        pack(clips, tmp_path / "ds", captions={"video/9": "x"})


def test_the_same_input_gives_the_same_bytes_wherever_and_whenever(clips: Path, tmp_path: Path) -> None:
    with pack(clips, tmp_path / "one", shard_bytes=15_000, workers=1) as one:
        first = contents(one.store)
    moved = tmp_path / "elsewhere"
    for path in sorted(clips.rglob("*"), reverse=True):  # another order of creation, other times
        if path.is_file():
            target = moved / path.relative_to(clips)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
            os.utime(target, (1, 1))
    with pack(moved, tmp_path / "two", shard_bytes=15_000, workers=2) as two:
        assert contents(two.store) == first
    assert len(first) > 2


def test_nothing_of_the_machine_is_in_the_documents(clips: Path, tmp_path: Path) -> None:
    with pack(clips, tmp_path / "ds") as dataset:
        for info in dataset.store.list(""):
            if info.key.endswith(".json"):
                assert str(tmp_path).encode() not in dataset.store.get(info.key)


def test_bad_files_are_skipped_and_listed_and_the_rest_is_packed(clips: Path, tmp_path: Path) -> None:
    (clips / "empty.mp4").touch()
    (clips / "video" / "text.mp4").write_text("not a video")
    (clips / "broken.mp4").symlink_to("nowhere")
    (clips / "video" / "3.json").write_text("{")
    with pack(clips, tmp_path / "ds") as dataset:
        assert list(dataset.keys) == ["sound/tone", "video/0", "video/1", "video/2"]
        report = dataset.report
    assert report is not None
    skipped = {os.path.relpath(s.path, clips): (s.code, s.reason) for s in report.skipped}
    assert skipped["empty.mp4"] == ("corruption", "the file is empty (zero length)")
    assert skipped["broken.mp4"] == ("corruption", "cannot be read: No such file or directory")
    assert skipped["video/text.mp4"][1].startswith("not a readable media file")
    assert skipped["video/3.json"][1].startswith("not JSON")
    assert len(skipped) == 4
    assert (report.samples, report.files) == (4, 8)


@pytest.mark.parametrize("bad", ["empty.mp4", "video/0.mp4"])
def test_strict_stops_with_the_first_bad_file_and_leaves_no_dataset(clips: Path, tmp_path: Path, bad: str) -> None:
    (clips / bad).write_bytes(b"")
    with pytest.raises(CorruptionError, match=rf"{bad}: the file is empty"):
        pack(clips, tmp_path / "ds", strict=True)
    with pytest.raises(NotFoundError, match="no dataset"):
        Dataset(tmp_path / "ds")
    (clips / bad).unlink()
    pack(clips, tmp_path / "ds", strict=True).close()


def test_a_file_that_hangs_its_prober_is_skipped(clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    log = tmp_path / "log"
    stub = f"""
import time
from headrace.dataio.shards.media import describe
from headrace.dataio.shards.workers import worker
real = describe.describe
def faulty_describe(files, text_field):
    if any("2.mp4" in path for _, path in files):
        open({str(log)!r}, "w").close()
        time.sleep(600)
    return real(files, text_field)
describe.describe = faulty_describe
worker.serve_probes()
"""
    monkeypatch.setattr(
        unit_packer,
        "ProbePool",
        lambda workers, **_: ProbePool(
            workers, lambda g: 0.5 if g.key == "video/2" else 60.0, [sys.executable, "-c", stub]
        ),
    )
    with pack(clips, tmp_path / "ds") as dataset:
        assert list(dataset.keys) == ["sound/tone", "video/0", "video/1", "video/3"]
        assert dataset.report is not None
        assert [s.code for s in dataset.report.skipped] == ["deadline"]
    assert log.exists()


def test_nothing_usable_is_an_error_with_the_first_reason(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with pytest.raises(UsageError, match="nothing to pack: no media files were found"):
        pack(tmp_path / "in", tmp_path / "ds")
    assert not (tmp_path / "ds" / "dataset.json").exists()
    (tmp_path / "in" / "a.mp4").touch()
    with pytest.raises(UsageError, match=r"nothing to pack: .*a\.mp4: the file is empty"):
        pack(tmp_path / "in", tmp_path / "ds")


def test_files_without_media_are_told_the_way_into_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.npy").write_bytes(b"latents")
    with pytest.raises(UsageError, match="nothing to pack: none of 1 file is media") as caught:
        pack(tmp_path / "in", tmp_path / "ds")
    assert "`headrace index`" in caught.value.hint


def test_a_file_that_changes_while_it_is_packed_stops_the_packing(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ProbePool.prepare

    def prepare_and_change(self: ProbePool, *arguments: Any) -> Iterator[tuple[Group, PrepareResult]]:
        for group, answer in real(self, *arguments):
            if group.key == "video/1":
                path = clips / "video" / "1.mp4"
                path.write_bytes(path.read_bytes()[::-1])
            yield group, answer

    monkeypatch.setattr(ProbePool, "prepare", prepare_and_change)
    with pytest.raises(TransientError, match=r"1\.mp4 changed while it was being packed"):
        pack(clips, tmp_path / "ds")
    with pytest.raises(NotFoundError):
        Dataset(tmp_path / "ds")
    assert not list(open_store(tmp_path / "ds").list("shards/"))


def test_packing_into_an_existing_dataset_is_a_conflict(clips: Path, store_url: str) -> None:
    with pack(clips, store_url) as dataset:
        before = {info.key: info.size for info in dataset.store.list("")}
        with pytest.raises(ConflictError, match=r"already holds a dataset \(version 1\) \(.*--append"):
            pack(clips / "video", store_url)
        assert {info.key: info.size for info in dataset.store.list("")} == before


def test_of_two_packers_that_race_one_wins_and_its_bytes_are_intact(
    clips: Path, make_clip: MakeClip, store_url: str
) -> None:
    others = clips.parent / "others"
    for i in range(4):
        make_clip(others / "video" / f"{i}.mp4", frames=9)
    barrier = threading.Barrier(2)
    outcomes: list[Dataset | Exception] = []

    def race(source: Path) -> None:
        def wait_for_the_other(done: Progress) -> None:
            if done.samples == 1:
                barrier.wait(60)

        try:
            outcomes.append(pack(source, store_url, shard_bytes=8000, workers=1, progress=wait_for_the_other))
        except Exception as error:
            outcomes.append(error)

    threads = [threading.Thread(target=race, args=(source,)) for source in (clips, others)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    datasets = [o for o in outcomes if isinstance(o, Dataset)]
    assert [type(o) for o in outcomes if not isinstance(o, Dataset)] == [ConflictError]
    (winner,) = datasets
    with winner, Dataset(store_url) as dataset:
        assert dataset.digest == winner.digest
        for sample in dataset:
            for member in sample.members:
                dataset.read(sample, member.ext)  # raises if the loser had overwritten it


def test_progress_counts_every_sample_and_byte(clips: Path, tmp_path: Path) -> None:
    (clips / "empty.mp4").touch()
    seen: list[Progress] = []
    pack(clips, tmp_path / "ds", progress=seen.append).close()
    assert [p.samples for p in seen] == [1, 2, 3, 4, 5, 6]
    assert (seen[-1].samples_total, seen[-1].bytes, seen[-1].skipped) == (6, seen[-1].bytes_total, 1)


def test_many_index_parts_are_one_dataset(clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_writer, "PART_ROWS", 2)
    with pack(clips, tmp_path / "ds", shard_bytes=1) as dataset:
        assert [part.rows for part in dataset.document.index] == [2, 2, 1]
        assert len(dataset.document.shards) == 5
        assert [s.id for s in dataset] == [0, 1, 2, 3, 4]
        assert list(dataset.keys) == ["sound/tone", "video/0", "video/1", "video/2", "video/3"]


def test_a_shard_size_that_is_none_is_a_mistake(clips: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="shard_bytes"):
        pack(clips, tmp_path / "ds", shard_bytes=0)


def test_memory_does_not_grow_with_the_files(tmp_path: Path, make_wav: MakeWav) -> None:
    """A member of 40 MB goes through in pieces of bounded size."""
    make_wav(tmp_path / "in" / "a.wav")
    with (tmp_path / "in" / "a.bin").open("wb") as file:
        file.truncate(40 * 10**6)
    largest = 0

    class Measuring:
        def __init__(self, store: Store) -> None:
            self.put_multipart_of_store = store.put_multipart

        def __call__(self, key: str, parts: Iterable[Buffer]) -> int:
            nonlocal largest

            def measured() -> Iterator[Buffer]:
                nonlocal largest
                for piece in parts:
                    largest = max(largest, len(piece))
                    yield piece

            return self.put_multipart_of_store(key, measured())

    with open_store(tmp_path / "ds") as store:
        store.put_multipart = Measuring(store)  # type: ignore[method-assign]
        dataset = pack(tmp_path / "in", store)
        assert dataset.report is not None
        assert dataset.report.bytes > 40 * 10**6
    assert 0 < largest <= MIB
