"""How a loader begins: with as little as its first batch takes."""

from __future__ import annotations

import gc
import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace import loaders
from headrace.dataio import Dataset, pack
from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.shards.query.page_reader import PageReader
from headrace.dataio.shards.query.tables import PartReader
from headrace.loaders import Clip, VideoLoader


@pytest.fixture(scope="module")
def alike(made_dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A dataset all of whose samples are of one kind, which its version says."""
    folder = tmp_path_factory.mktemp("alike")
    (folder / "clips").mkdir()
    for sample in made_dataset:
        if [member.ext for member in sample.members] == ["mp4"]:
            (folder / "clips" / f"{sample.key}.mp4").write_bytes(made_dataset.read(sample, "mp4"))
    with pack([folder / "clips"], folder / "ds", workers=1) as packed:
        assert len(packed) == 4
        return packed.url


def test_a_loader_reads_of_the_index_what_its_first_batches_need(alike: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[object] = []
    made = PageReader.__init__

    def counted(self: PageReader, *arguments: object) -> None:
        opened.append(self)
        made(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(PageReader, "__init__", counted)
    monkeypatch.setattr(PartReader, "__init__", lambda *_: pytest.fail("a table was read"))
    with VideoLoader(alike, 2, clip=Clip(2), size=(16, 16)) as loader:
        assert opened == []
        next(iter(loader))
    assert len(opened) == 1


def test_a_damaged_index_is_an_error_of_the_first_batch_and_no_damaged_sample(alike: str, tmp_path: Path) -> None:
    shutil.copytree(alike.removeprefix("file://"), tmp_path / "ds")
    for part in Dataset(alike).document.index:
        assert part.pages is not None
        data = bytearray((tmp_path / "ds" / part.key).read_bytes())
        data[part.pages.offset + 10] ^= 1
        (tmp_path / "ds" / part.key).write_bytes(data)
    with VideoLoader(str(tmp_path / "ds"), 2, clip=Clip(2), size=(16, 16)) as loader:
        for _ in range(2):
            with pytest.raises(CorruptionError, match="BLAKE3"):
                next(iter(loader))
        assert loader.quarantine == ()


def test_garbage_is_collected_again_after_an_import_unless_it_was_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    during: list[bool] = []
    module = sys.modules["headrace.loaders.clip"]

    def importing(name: str) -> object:
        during.append(gc.isenabled())
        return module

    monkeypatch.delitem(sys.modules, "headrace.loaders.clip")
    monkeypatch.setattr(importlib, "import_module", importing)
    assert loaders.__getattr__("Clip") is Clip
    assert gc.isenabled()
    gc.disable()
    try:
        assert loaders.__getattr__("Clip") is Clip
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert during == [False, False]


@pytest.mark.parametrize("frozen", [True, False])
def test_what_was_imported_is_old_to_the_collector_and_what_was_frozen_stays_so(frozen: bool) -> None:
    code = f"""
import gc, sys
from headrace import loaders
if {frozen}:
    gc.freeze()
before = gc.get_freeze_count()
young = len(gc.get_objects(0)) + len(gc.get_objects(1))
loaders.VideoLoader
assert gc.isenabled()
assert gc.get_freeze_count() > before // 2 if {frozen} else gc.get_freeze_count() <= before
assert {frozen} or len(gc.get_objects(0)) + len(gc.get_objects(1)) <= young
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


_PROGRAM = """
import sys
from headrace.loaders import Clip, VideoLoader
with VideoLoader(sys.argv[1], 2, clip=Clip(2), size=(16, 16), sidecar=None) as loader:
    next(iter(loader))
print([name for name in sys.argv[2].split() if name in sys.modules])
"""
_NOT_NEEDED_OF_SAMPLES_ALL_ALIKE = """
pyarrow headrace.dataio.shards.index.rows headrace.dataio.shards.query.tables
"""
_FILES = """
import sys
from headrace.loaders import FileLoader
with FileLoader(sys.argv[1], 2, files=["mp4"], sidecar=None) as loader:
    next(iter(loader))
print([name for name in sys.argv[2].split() if name in sys.modules])
"""
_NOT_NEEDED = """
dateutil duckdb fsspec numpy.ma nvidia.dali nvtx pyarrow.compute pyarrow.fs pyarrow.parquet
headrace.dataio.cache.engine headrace.dataio.cache.readers.cached headrace.dataio.shards.changes headrace.dataio.shards.diff
headrace.dataio.shards.ingest.report
headrace.dataio.sidecar.connection headrace.dataio.sidecar.protocol headrace.dataio.sidecar.reader
headrace.dataio.store.s3 headrace.dataio.store.fsspec headrace.loaders.audio_loader headrace.loaders.decode.subprocess_decoder
headrace.loaders.decode.subprocess_worker headrace.loaders.file_loader headrace.loaders.sampling.force
headrace.loaders.sampling.buckets
headrace.loaders.sampling.interleave headrace.loaders.sampling.mixed_buckets headrace.loaders.sampling.mixture
headrace.loaders.sampling.packing headrace.loaders.sampling.quality headrace.loaders.quarantine.shared_list
headrace.loaders.audio.decode headrace.loaders.audio.frames headrace.loaders.audio.mel headrace.loaders.audio.spec
headrace.loaders.processors.audio
"""


def test_a_first_batch_imports_nothing_that_it_does_without(made_dataset: Dataset) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, made_dataset.url, _NOT_NEEDED], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


@pytest.mark.parametrize("program", [_PROGRAM, _FILES], ids=["clips", "files"])
def test_where_samples_are_all_alike_arrow_is_not_loaded(alike: str, program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program, alike, _NOT_NEEDED_OF_SAMPLES_ALL_ALIKE],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
