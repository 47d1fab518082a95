"""`headrace delete`: a dataset with all its versions is deleted, and nothing else is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import pytest

from headrace.dataio import Dataset, index, pack
from headrace.dataio.cli import main
from headrace.dataio.core.errors import ConflictError, CorruptionError, NotFoundError, TransientError
from headrace.dataio.shards import deletion
from headrace.dataio.shards.versions import documents, history, paging
from headrace.dataio.shards.versions.documents import Shard
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from headrace.dataio.store.wrappers import Wrapper
from tests.support.written_media import write_wav

pytestmark = pytest.mark.filterwarnings("error")


def run(capsys: pytest.CaptureFixture[str], *args: object, code: int = 0) -> str:
    capsys.readouterr()
    found = main([str(arg) for arg in args])
    captured = capsys.readouterr()
    assert found == code, captured.err
    return captured.out + captured.err


def keys(store: Store) -> set[str]:
    return {info.key for info in store.list()}


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recordings")
    for number in range(6):
        write_wav(folder / f"{number}.wav", seconds=0.1)
        (folder / f"{number}.json").write_text(json.dumps({"number": number}))
    return folder


def packed(recordings: Path, url: str) -> None:
    """A dataset with a saved view, a removal and a tag."""
    with pack(recordings, url, shard_bytes=5000) as dataset:
        dataset.where("number < 3").save("first ones", tag="first")
        dataset.remove(["5"])


@pytest.fixture
def paged(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes every document that is written from now on a paged one, with pages of two entries."""

    def start() -> None:
        monkeypatch.setattr(documents, "WHOLE_BYTES", 0)
        monkeypatch.setattr(paging, "PAGE_SHARDS", 2)
        monkeypatch.setattr(paging, "PAGE_PARTS", 2)

    return start


@pytest.mark.parametrize("is_paged", [False, True])
def test_a_dataset_is_deleted_with_all_its_versions(
    store_url: str, recordings: Path, capsys: pytest.CaptureFixture[str], paged: Callable[[], None], is_paged: bool
) -> None:
    if is_paged:
        paged()
    packed(recordings, store_url)
    with open_store(store_url) as store:
        before = keys(store)
        store.put("notes.txt", b"mine")
        said = run(capsys, "delete", store_url).splitlines()
        assert said[0].endswith(": 3 versions")
        assert said[1].startswith(f"{len(before)} objects with ")
        assert said[1].endswith(" would be deleted")
        assert said[2:] == [
            "nothing was changed; --apply deletes them, after you have stopped the jobs that use the dataset"
        ]
        assert keys(store) == before | {"notes.txt"}
        assert any(key.endswith(".shards") for key in before) == is_paged
        report = json.loads(run(capsys, "delete", store_url, "--apply", "--json"))
        assert (report["versions"], report["objects"], report["left"]) == ([1, 2, 3], len(before), [])
        assert keys(store) == {"notes.txt"}
    assert "there is no dataset" in run(capsys, "delete", store_url, "--apply", code=2)


def test_media_that_were_indexed_in_place_stay(
    tmp_path: Path, recordings: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.dumps({"path": f"{recordings}/{number}.wav", "caption": "a tone"}) for number in range(6)]
    (tmp_path / "list.jsonl").write_text("\n".join(rows))
    index(tmp_path / "list.jsonl", tmp_path / "set").close()
    with open_store(tmp_path / "set") as store:
        assert {key.partition("/")[0] for key in keys(store)} >= {"joined", "files", "index"}
        said = run(capsys, "delete", tmp_path / "set", "--apply")
        assert f"media that stay where they are: 1\n  file://{recordings}" in said
        assert keys(store) == set()
    assert len(list(recordings.iterdir())) == 12


def test_media_below_the_dataset_that_were_indexed_stay(tmp_path: Path, recordings: Path) -> None:
    (folder := tmp_path / "set" / "media").mkdir(parents=True)
    for path in recordings.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    index(folder, tmp_path / "set").close()
    with open_store(tmp_path / "set") as store:
        deletion.plan(store).apply()
        assert keys(store) == {f"media/{path.name}" for path in recordings.iterdir()}


@pytest.mark.parametrize("key", ["files/thesis.pdf", "index/notes.parquet", "shards/../thesis.pdf", "thesis.pdf"])
def test_a_version_that_names_other_files_deletes_none_of_them(tmp_path: Path, recordings: Path, key: str) -> None:
    pack(recordings, tmp_path / "set").close()
    with open_store(tmp_path / "set") as store:
        if ".." not in key:
            store.put(key, b"years of work")
        named = Shard(key=key, size=13, samples=0)

        def with_more(base: documents.VersionDocument) -> documents.VersionDocument:
            return msgspec.structs.replace(base, shards=(*base.shards, named))

        history.commit(store, with_more)
        if ".." in key:
            with pytest.raises(CorruptionError, match="which is not an object's key"):
                deletion.plan(store)
        else:
            deletion.plan(store).apply()
            assert keys(store) == {key}


def test_objects_that_no_version_names_stay_and_are_listed(
    tmp_path: Path, recordings: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack(recordings, tmp_path / "set").close()
    unnamed = f"shards/00000009-{'ab' * 8}.tar"
    with open_store(tmp_path / "set") as store:
        store.put(unnamed, b"of a writer that is still running")
        said = run(capsys, "delete", tmp_path / "set", "--apply")
        assert f"objects that stay, because no version names them: 1\n  {unnamed}\n" in said
        assert keys(store) == {unnamed}


def test_nothing_is_deleted_if_a_version_cannot_be_read(tmp_path: Path, recordings: Path) -> None:
    packed(recordings, str(tmp_path / "set"))
    with open_store(tmp_path / "set") as store:
        store.put("versions/00000002.json", b"{}")
        before = keys(store)
        with pytest.raises(CorruptionError, match=r"versions/00000002\.json"):
            deletion.plan(store).apply()
        assert keys(store) == before


def test_a_version_that_another_writer_makes_in_the_meantime_is_a_conflict(tmp_path: Path, recordings: Path) -> None:
    pack(recordings, tmp_path / "set").close()
    with open_store(tmp_path / "set") as store:
        found = deletion.plan(store)
        with Dataset(tmp_path / "set") as dataset:
            dataset.remove(["0"])
        before = keys(store)
        with pytest.raises(ConflictError, match=r"another writer made version 2 .stop the writers"):
            found.apply()
        assert keys(store) == before


class Failing(Wrapper):
    """Fails after it has deleted this many objects."""

    def __init__(self, inner: Store, most: int) -> None:
        super().__init__(inner)
        self.most = most

    def delete_many(self, keys: Iterable[str]) -> None:
        for key in keys:
            if not self.most:
                raise TransientError("the store does not answer")
            self.most -= 1
            self.inner.delete_many([key])


def test_a_deletion_that_was_interrupted_anywhere_is_continued_by_the_same_command(
    tmp_path: Path, recordings: Path, paged: Callable[[], None]
) -> None:
    paged()
    packed(recordings, str(tmp_path / "set"))
    with open_store(tmp_path / "set") as store:
        all_keys = keys(store)
        for left in range(len(all_keys) - 1, 0, -1):
            with pytest.raises(TransientError):
                deletion.plan(Failing(store, 1)).apply()
            assert len(keys(store)) == left
            assert deletion.plan(store).left == ()
        deletion.plan(store).apply()
        assert keys(store) == set()
        with pytest.raises(NotFoundError, match="there is no dataset"):
            deletion.plan(store)


def test_a_repository_of_checkpoints_is_not_a_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_store(tmp_path / "runs") as store:
        store.put("repo.json", b"{}")
    assert "there is no dataset" in run(capsys, "delete", tmp_path / "runs", "--apply", code=2)
    assert (tmp_path / "runs" / "repo.json").exists()
