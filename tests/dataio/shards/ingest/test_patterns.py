"""What a pattern means, on a directory and in a bucket."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.dataio.core.errors import AccessDeniedError, CapacityError, NotFoundError, UnsupportedError, UsageError
from headrace.dataio.shards.ingest import patterns
from headrace.dataio.store.base import Location, Store
from headrace.dataio.store.mounts import MAX_MOUNTS
from headrace.dataio.store.open import open_store


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("a", ["a"]),
        ("{000..003}.tar", ["000.tar", "001.tar", "002.tar", "003.tar"]),
        ("{8..11}", ["8", "9", "10", "11"]),
        ("{08..11}", ["08", "09", "10", "11"]),
        ("{3..1}", ["3", "2", "1"]),
        ("{0..10..5}x", ["0x", "5x", "10x"]),
        ("{-1..1}", ["-1", "0", "1"]),
        ("{a,b}{1..2}", ["a1", "a2", "b1", "b2"]),
        ("x{a,b{1..2},}y", ["xay", "xb1y", "xb2y", "xy"]),
        ("{a,{b,c}}", ["a", "b", "c"]),
        ("{a}", ["{a}"]),
        ("{a{1,2}}", ["{a1}", "{a2}"]),
        ("a{b", ["a{b"]),
        ("a}b{", ["a}b{"]),
        ("{1..2..0}", ["1", "2"]),
        ("{000...002}", ["{000...002}"]),
    ],
)
def test_braces_expand_as_in_a_shell(text: str, meant: list[str]) -> None:
    assert list(patterns.braces(text)) == meant


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("pipe:aws s3 cp s3://b/x-000.tar -", "s3://b/x-000.tar"),
        ("PIPE: cat x.tar", "such as s3://"),
        ("cat /x.tar |", "such as"),
        ("-", "such as"),
    ],
)
def test_commands_are_refused_with_what_to_give_instead(command: str, hint: str) -> None:
    with pytest.raises(UnsupportedError, match="is a command") as caught:
        patterns.find([command], open_store)
    assert hint in caught.value.hint


@pytest.fixture
def filled(store_url: str) -> Store:
    store = open_store(store_url)
    for key in (
        *("train/000.tar", "train/001.tar", "train/000.parquet", "train/001_stats.json", "train/sub/deep.tar"),
        *("val/a.tar", "val/b.TAR", "val/c.tar.gz", "val/odd name [1].bin", "many/x"),
        *(f"many/{i:03}.tar" for i in range(30)),
    ):
        store.put(key, key.encode())
    return store


def found(filled: Store, *texts: str) -> list[str]:
    """Keys relative to the filled store, whatever stores they were found in."""
    root = filled.location.url.rstrip("/")
    found_shards = patterns.find([f"{root}/{text}" for text in texts], open_store)
    with_roots = [(source.store.location.url, info.key) for source in found_shards.sources for info in source.shards]
    found_shards.close()
    return sorted(f"{url}/{key}"[len(root) + 1 :] for url, key in with_roots)


@pytest.mark.parametrize(
    ("texts", "keys"),
    [
        (["train/000.tar"], ["train/000.tar"]),
        (["train/{000..001}.tar"], ["train/000.tar", "train/001.tar"]),
        (["train/*.tar"], ["train/000.tar", "train/001.tar"]),
        (["train/00?.tar"], ["train/000.tar", "train/001.tar"]),
        (["train/00[!0].tar"], ["train/001.tar"]),
        (["train/00[1-9].tar"], ["train/001.tar"]),
        (["train"], ["train/000.tar", "train/001.tar", "train/sub/deep.tar"]),
        (["train/"], ["train/000.tar", "train/001.tar", "train/sub/deep.tar"]),
        (["train/**.tar"], ["train/000.tar", "train/001.tar", "train/sub/deep.tar"]),
        (["**/deep.tar"], ["train/sub/deep.tar"]),
        (["{train,val}/*.tar"], ["train/000.tar", "train/001.tar", "val/a.tar"]),
        (["val"], ["val/a.tar", "val/b.TAR", "val/c.tar.gz"]),
        (["val/a.tar", "train/000.tar", "val/a.tar"], ["train/000.tar", "val/a.tar"]),
        (["many/{005..028}.tar"], [f"many/{i:03}.tar" for i in range(5, 29)]),
    ],
)
def test_patterns_find_shards(filled: Store, texts: list[str], keys: list[str]) -> None:
    assert found(filled, *texts) == keys


def test_what_is_no_tar_is_ignored_and_what_is_missing_is_told(filled: Store) -> None:
    root = filled.location.url.rstrip("/")
    with_list = patterns.find([f"{root}/train/*::{root}/many/{{028..060}}.tar", f"{root}/val/{{a,z}}.tar"], open_store)
    with_list.close()
    assert [ignored[len(root) :] for ignored in with_list.ignored] == ["/train/000.parquet", "/train/001_stats.json"]
    missing = {item.path[len(root) :]: item.code for item in with_list.missing}
    assert missing == {f"/many/{i:03}.tar": "not_found" for i in range(30, 61)} | {"/val/z.tar": "not_found"}


@pytest.mark.parametrize("text", ["none.tar", "train/{5..9}.tar", "*.tar", "nowhere/", "many/{100..200}.tar"])
def test_a_pattern_that_finds_nothing_is_an_error(filled: Store, text: str) -> None:
    with pytest.raises(NotFoundError, match="matches no tar"):
        found(filled, "train/000.tar", text)


def test_an_object_that_is_named_outright_is_taken_whatever_its_name(filled: Store) -> None:
    assert found(filled, "many/x") == ["many/x"]


def test_many_folders_share_a_store(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for i in range(MAX_MOUNTS + 10):
        store.put(f"a/{i}/x.tar", b"")
    result = patterns.find([str(tmp_path / "a" / f"{{0..{MAX_MOUNTS + 9}}}" / "x.tar")], open_store)
    assert [source.store.location.url for source in result.sources] == [f"file://{tmp_path}/a"]
    assert len(result.sources[0].shards) == MAX_MOUNTS + 10
    result.close()


def test_any_number_of_names_may_be_folders(store_url: str) -> None:
    store = open_store(store_url)
    for i in range(20):
        for name in ("x.tar", "sub/y.tar", "note.txt"):
            store.put(f"set/{i:02}/{name}", b"")
    store.put("set/20/note.txt", b"")
    store.put("set/21", b"a tar by its own name")
    url = store.location.url.rstrip("/")
    result = patterns.find([f"{url}/set/{{00..22}}"], open_store)
    result.close()
    keys = [
        f"{source.store.location.url}/{info.key}"[len(url) + 1 :] for source in result.sources for info in source.shards
    ]
    expected = [f"set/{i:02}/{name}" for i in range(20) for name in ("sub/y.tar", "x.tar")]
    assert sorted(keys) == [*expected, "set/21"]
    assert {item.path.rpartition("/")[2] for item in result.missing} <= {"20", "22"}
    assert any(item.path.endswith("/22") for item in result.missing)
    assert f"{url}/set/05/note.txt" in result.ignored


def test_a_store_that_cannot_be_opened_leaves_no_other_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, closed = list[Store](), list[Store]()

    def opener(root: str) -> Store:
        if root.endswith("/b"):
            raise AccessDeniedError("no access")
        store = open_store(root)
        monkeypatch.setattr(store, "close", lambda: closed.append(store))
        opened.append(store)
        return store

    with pytest.raises(AccessDeniedError):
        patterns.find([f"{tmp_path}/a/x.tar", f"{tmp_path}/b/x.tar"], opener)
    assert opened
    assert closed == opened


def test_more_buckets_than_can_be_mounted_are_refused() -> None:
    with pytest.raises(CapacityError, match="buckets"):
        patterns.find([f"s3://bucket{{0..{MAX_MOUNTS}}}/x.tar"], open_store)


@pytest.mark.parametrize("text", ["{0..9999999}.tar", "{0..999}/{0..99}/{0..99}.tar", "{0..999999999999}"])
def test_more_shards_than_the_limit_are_refused_at_once(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "MAX_SHARDS", 10_000)  # a million take two seconds
    with pytest.raises(CapacityError, match="more than"):
        patterns.find([text], open_store)


@pytest.mark.parametrize(
    "text", ["{a," * 200, "", "file://host/x.tar", "/x\0.tar", "s3://", "s3://user:pw@bucket/x.tar"]
)
def test_what_cannot_be_meant_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        patterns.find([text], open_store)


def test_no_pattern_at_all_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="no pattern"):
        patterns.find([], open_store)


@pytest.mark.parametrize(
    ("inner", "outer", "prefix"),
    [
        ("file:///a/b", "file:///a", "b/"),
        ("file:///a", "file:///a", ""),
        ("file:///ab", "file:///a", None),
        ("file:///a", "file:///a/b", None),
        ("s3://a/b", "s3://a", "b/"),
    ],
)
def test_a_store_below_another_is_recognised(inner: str, outer: str, prefix: str | None) -> None:
    assert patterns.prefix_in(Location(inner, {}, True), Location(outer, {}, True)) == prefix
    assert patterns.prefix_in(Location(inner, {"region": "x"}, True), Location(outer, {}, True)) is None
