"""The server of the tutorial about buckets leaves nothing behind when it is killed with SIGTERM."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from headrace.dataio.store.open import open_store
from headrace.dataio.testing.s3_server import find_seaweedfs, start_seaweedfs
from tests.support import pages


def _sockets(port: int) -> list[Path]:
    """The sockets of a server on these ports. SeaweedFS creates them in /tmp, whatever TMPDIR is."""
    names = [f"seaweedfs-*-grpc-*{number}.sock" for number in range(port, port + 10)]
    return [path for name in names for path in Path("/tmp").glob(name)]


@pytest.mark.process
def test_a_killed_server_leaves_no_folder_and_no_socket() -> None:
    (program,) = (
        block.text
        for block in pages.blocks(pages.ROOT / "docs/tutorials/bucket-in-place.md")
        if block.text.startswith("# server.py\n")
    )
    with tempfile.TemporaryDirectory(prefix="hr") as folder:  # a short path, since sockets lie in it
        server = subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(pages.ROOT), "TMPDIR": folder},
        )
        try:
            variables, deadline = Path(folder, "server.env"), time.monotonic() + 300
            while not (variables.exists() and variables.read_text()):
                assert server.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            (port,) = re.findall(r"AWS_ENDPOINT_URL='http://127\.0\.0\.1:(\d+)'", variables.read_text())
            assert len(list(Path(folder).glob("headrace-s3-*"))) == 1
            assert _sockets(int(port))
            server.send_signal(signal.SIGTERM)
            assert server.wait(timeout=60) == 0
        finally:
            server.kill()
            server.wait()
        assert not list(Path(folder).glob("*headrace-s3-*"))
        assert not _sockets(int(port))


@pytest.mark.process
def test_a_server_accepts_its_own_keys_in_a_shell_with_those_of_an_earlier_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find_seaweedfs()
    with start_seaweedfs() as earlier:
        for name, value in earlier.environment().items():
            monkeypatch.setenv(name, value)
    with start_seaweedfs() as server:
        url = server.create_bucket("bucket")
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        with open_store(url) as store:
            store.put("key", b"value")
            assert store.get("key") == b"value"
