"""What SIGHUP changes while clients read: limits of jobs, and credentials of a real S3 server."""

from __future__ import annotations

import random
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.dataio.core.limits import MIB
from headrace.dataio.sidecar import protocol as m
from headrace.dataio.sidecar.client import open_reader
from headrace.dataio.sidecar.wire import close_all
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from headrace.dataio.testing.s3_server import Keys, S3Server, start_seaweedfs
from tests.dataio.sidecar.conftest import RunningDaemon, wait_for

pytestmark = pytest.mark.slow

DATA = random.Random("limits").randbytes(9 * MIB)


def reload(daemon: RunningDaemon, changes: str = "{}") -> None:
    """SIGHUP, until it was obeyed."""
    before = daemon.log.read_text().count("were read again")
    daemon.configuration.write_text(changes)
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGHUP)
    wait_for(lambda: daemon.log.read_text().count("were read again") > before)


def test_a_jobs_bandwidth_is_kept_and_can_be_lifted_in_the_middle_of_a_read(
    daemon: RunningDaemon, store: Store, shards: dict[str, bytes]
) -> None:
    reload(daemon, '{"job_bandwidth": 8388608}')
    (first, one), (second, two), *_ = shards.items()
    reader = open_reader(store, daemon.socket)
    began = time.monotonic()
    assert bytes(reader.read(first, [(0, len(one))])[0]) == one
    assert time.monotonic() - began > 0.9, "the third block goes when the first two were paid for: 8 MiB"
    reload(daemon, '{"job_bandwidth": 262144}')
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.append(bytes(reader.read(second, [(0, len(two))])[0])))
    thread.start()
    wait_for(lambda: any(turn["waiting"] for turn in daemon.status()["fetching"].values()))
    began = time.monotonic()
    reload(daemon)
    thread.join(150)
    assert got == [two]
    assert time.monotonic() - began < 25, "with the limit it would have taken half a minute"
    reader.close()


@pytest.fixture
def server() -> Iterator[S3Server]:
    with start_seaweedfs() as running:
        yield running


def credentials(path: Path, keys: Keys) -> None:
    path.write_text(f"[default]\naws_access_key_id = {keys.access}\naws_secret_access_key = {keys.secret}\n")


def test_reads_go_on_with_renewed_credentials_after_sighup(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = server.create_bucket("renewed")
    old, new = server.keys, Keys("renewed", "0123456789abcdef")
    file = tmp_path / "credentials"
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    with open_store(url) as own:
        for key in ("a", "b", "c"):
            own.put_multipart(key, [key.encode() + DATA])
        where = m.where(own.location)
    credentials(file, old)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    with tempfile.TemporaryDirectory(prefix="mr-") as folder:
        daemon = RunningDaemon(Path(folder), tmp_path / "daemon.log")
        daemon.start()
        try:
            assert isinstance(opened(daemon, where, "a"), m.Opened)
            server.change_keys(new)
            refused = opened(daemon, where, "b")
            assert isinstance(refused, m.Failed), "the old key is refused: the fault fired"
            assert refused.code == "access_denied"
            credentials(file, new)
            reload(daemon)
            assert isinstance(opened(daemon, where, "b"), m.Opened)
            assert isinstance(opened(daemon, where, "c"), m.Opened)
            text = daemon.log.read_text()
            assert old.secret not in text
            assert new.secret not in text
        finally:
            daemon.stop()


def opened(daemon: RunningDaemon, where: m.Where, key: str) -> object:
    """The daemon's own answer, which a reader would make good by reading itself."""
    with daemon.connect() as sidecar:
        try:
            answer, descriptors = sidecar.call(lambda id: m.Open(id, where, key, [(0, len(DATA) + 1)], 30.0, 0))
        except Exception as error:  # the daemon's, sent over
            return m.Failed(0, getattr(error, "code", ""), str(error))
        close_all(descriptors)
        return answer
