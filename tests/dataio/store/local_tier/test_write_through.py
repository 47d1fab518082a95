"""Writing through the tier: kept first, then sent, and nothing conditional before that."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from headrace.dataio.core import log
from headrace.dataio.core.errors import CapacityError, CorruptionError, TransientError
from headrace.dataio.core.limits import MIB
from headrace.dataio.store.base import Buffer, UploadLog
from headrace.dataio.store.local_tier.records import TierLimits
from headrace.dataio.store.local_tier.stores import WriteThroughTier
from headrace.dataio.store.local_tier.tier import LocalTier
from headrace.dataio.store.open import open_store
from headrace.dataio.store.wrappers import Wrapper
from tests.support.disks import disk, read_only
from tests.support.local_tier import Counting, is_pack, local_tier


@pytest.fixture(params=["posix", pytest.param("s3", marks=[pytest.mark.s3, pytest.mark.soak])])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Counting]:
    url = request.getfixturevalue("s3_url") if request.param == "s3" else tmp_path / "store"
    with open_store(url) as opened:
        yield Counting(opened)


def parts(size: int = 9 * MIB, seed: int = 7) -> list[bytes]:
    return [bytes([seed + n]) * MIB for n in range(size // MIB)]


class Uploads:
    """A log of uploads, which nothing here writes to."""

    def begun(self, key: str, upload: str) -> None: ...
    def ended(self, key: str, size: int | None) -> None: ...


def test_a_logged_write_goes_through_the_tier_and_its_log_goes_along(tmp_path: Path) -> None:
    logged: list[tuple[str, UploadLog]] = []

    class Logging(Wrapper):
        def put_logged(self, key: str, parts: Iterable[Buffer], log: UploadLog) -> int:
            logged.append((key, log))
            return super().put_logged(key, parts, log)

    with open_store(tmp_path / "store") as inner:
        tier, uploads = local_tier(tmp_path), Uploads()
        with WriteThroughTier(Logging(inner), tier, is_pack) as store:
            assert store.put_logged("packs/1", parts(), uploads) == 9 * MIB
            assert store.put_logged("lease", [b"passes by"], uploads) == 9
            store.flush()
        assert tier.has(inner.location.url, "packs/1")
        assert not tier.has(inner.location.url, "lease")
        assert sorted(logged) == [("lease", uploads), ("packs/1", uploads)]
        assert inner.get("packs/1", max_bytes=16 * MIB) == b"".join(parts())


def test_a_conditional_write_waits_until_what_was_kept_is_in_the_store(remote: Counting, tmp_path: Path) -> None:
    tier, slow = local_tier(tmp_path), threading.Event()

    def wait(operation: str, key: str) -> None:
        if operation == "put_multipart":
            slow.wait(150)

    remote.before = wait
    with WriteThroughTier(remote, tier, is_pack) as store:
        assert store.put_multipart("packs/1", parts()) == 9 * MIB
        assert store.put_multipart("packs/2", parts()) == 9 * MIB
        store.put("lease", b"passes by")
        assert store.get("lease") == b"passes by"
        assert tier.has(remote.location.url, "packs/2")
        assert not store.exists("packs/1")
        done: list[bool] = []
        waiting = threading.Thread(target=lambda: done.append(store.put_if_absent("manifest", b"m")))
        waiting.start()
        time.sleep(0.2)
        assert not done
        assert not store.exists("manifest")
        slow.set()
        waiting.join(60)
        assert done == [True]
    order = [key for operation, key in remote.calls if operation in ("put_multipart", "put_if_absent")]
    assert order == ["packs/1", "packs/2", "manifest"]
    assert remote.get("packs/2") == b"".join(parts())


def test_other_objects_are_not_kept(remote: Counting, tmp_path: Path) -> None:
    tier = local_tier(tmp_path)
    with WriteThroughTier(remote, tier, is_pack) as store:
        store.put_multipart("other/1", parts())
    assert remote.exists("other/1")
    assert tier.used() == 0


def test_an_error_of_sending_stops_the_next_conditional_write(remote: Counting, tmp_path: Path) -> None:
    fired = []

    def fail(operation: str, key: str) -> None:
        if key == "packs/1" and operation == "put_multipart":
            fired.append(key)
            raise TransientError("the store is away")

    remote.before = fail
    with WriteThroughTier(remote, local_tier(tmp_path), is_pack) as store:
        store.put_multipart("packs/1", parts())
        store.put_multipart("packs/2", parts())
        for _ in range(2):
            with pytest.raises(TransientError, match="away"):
                store.put_if_absent("manifest", b"m")
    assert fired == ["packs/1"]
    assert not remote.exists("manifest")


def test_a_kept_file_that_rots_before_it_is_sent_never_becomes_an_object(remote: Counting, tmp_path: Path) -> None:
    tier, fired = local_tier(tmp_path), []

    def rot(operation: str, key: str) -> None:
        if operation == "put_multipart":
            path = tier.path_of(remote.location.url, key)
            with open(path, "r+b") as file:
                file.seek(5 * MIB)
                file.write(b"rotten")
            fired.append(key)

    remote.before = rot
    with WriteThroughTier(remote, tier, is_pack) as store:
        store.put_multipart("packs/1", parts())
        with pytest.raises(CorruptionError, match="differs from what was written"):
            store.put_if_absent("manifest", b"m")
    assert fired == ["packs/1"]
    assert not remote.exists("packs/1")


def test_a_full_tier_is_done_without_in_the_middle_of_an_object(
    remote: Counting, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = local_tier(tmp_path, 70 * MIB)
    log._logged.clear()
    with WriteThroughTier(remote, tier, is_pack) as store:
        store.put_multipart("packs/1", parts())
        assert store.put_multipart("packs/2", parts(80 * MIB)) == 80 * MIB
        assert not store.whole
        store.put_multipart("packs/3", parts())
        assert store.put_if_absent("manifest", b"m")
    assert caplog.text.count("the save goes to the store only") == 1
    assert [remote.get(f"packs/{n}", max_bytes=99 * MIB) for n in (1, 2, 3)] == [
        b"".join(parts(n * MIB)) for n in (9, 80, 9)
    ]
    assert not tier.has(remote.location.url, "packs/2")
    assert tier.used() < 10 * MIB


def test_a_tier_that_vanishes_is_done_without(tmp_path: Path) -> None:
    remote, tier = Counting(open_store(tmp_path / "store")), local_tier(tmp_path)
    log._logged.clear()
    with WriteThroughTier(remote, tier, is_pack) as store:
        store.put_multipart("packs/1", parts())
        assert store.put_if_absent("first", b"1")
        tier.root.rename(tmp_path / "gone")
        store.put_multipart("packs/2", parts())
        assert store.put_if_absent("second", b"2")
    assert remote.get("packs/2") == b"".join(parts())


def test_a_tier_that_vanishes_before_an_object_gets_its_name_is_done_without(remote: Counting, tmp_path: Path) -> None:
    tier = local_tier(tmp_path)

    def vanishing() -> Iterator[Buffer]:
        yield from parts(2 * MIB)
        (tier.root / "objects").rename(tmp_path / "elsewhere")

    with WriteThroughTier(remote, tier, is_pack) as store:
        assert store.put_multipart("packs/1", vanishing()) == 2 * MIB
        assert not store.whole
        assert store.put_if_absent("manifest", b"m")
    assert remote.get("packs/1") == b"".join(parts(2 * MIB))


def test_objects_of_a_save_that_the_tier_cannot_take_do_not_stay(remote: Counting, tmp_path: Path) -> None:
    tier = local_tier(tmp_path, size=4 * MIB)
    with WriteThroughTier(remote, tier, is_pack) as store:
        for number, size in enumerate((2 * MIB, 3 * MIB, MIB)):
            store.put_multipart(f"packs/{number}", parts(size))
        assert store.put_if_absent("manifest", b"m")
        assert not store.whole
    assert [remote.get(f"packs/{n}") for n in (0, 1)] == [b"".join(parts(n * MIB)) for n in (2, 3)]
    assert tier.used() == 0
    with WriteThroughTier(remote, tier, is_pack) as store:
        store.send = False
        store.put_multipart("packs/3", parts(2 * MIB))
        with pytest.raises(CapacityError):
            store.put_multipart("packs/4", parts(3 * MIB))
    assert tier.used() == 0


def test_an_exception_from_the_parts_leaves_nothing(remote: Counting, tmp_path: Path) -> None:
    tier = local_tier(tmp_path)

    def failing() -> Iterator[Buffer]:
        yield b"x" * MIB
        raise ValueError("stop")

    with WriteThroughTier(remote, tier, is_pack) as store, pytest.raises(ValueError, match="stop"):
        store.put_multipart("packs/1", failing())
    assert not tier.has(remote.location.url, "packs/1")
    assert tier.used() == 0
    assert remote.calls == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system with room for 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir(mode=0o700)
    with disk(folder, "size=8m,mode=0700"):
        yield folder


def test_a_disk_that_is_really_full_is_done_without(
    remote: Counting, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = LocalTier(small_disk / "tier", TierLimits(512 * MIB, 2))
    log._logged.clear()
    with WriteThroughTier(remote, tier, is_pack) as store:
        store.put_multipart("packs/1", parts(2 * MIB))
        assert store.put_multipart("packs/2", parts(20 * MIB)) == 20 * MIB
        assert tier.has(remote.location.url, "packs/1")
        assert store.put_if_absent("manifest", b"m")
    assert "No space left on device" in caplog.text
    assert remote.get("packs/2") == b"".join(parts(20 * MIB))
    assert tier.used() == 0


def test_a_disk_that_is_really_read_only_is_done_without(remote: Counting, small_disk: Path) -> None:
    tier = LocalTier(small_disk / "tier", TierLimits(512 * MIB, 2))
    with read_only(small_disk), WriteThroughTier(remote, tier, is_pack) as store:
        assert not store.whole
        store.put_multipart("packs/1", parts(2 * MIB))
        assert store.put_if_absent("manifest", b"m")
    assert remote.get("packs/1") == b"".join(parts(2 * MIB))
