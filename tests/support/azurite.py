"""Azurite, Microsoft's own emulator of Azure Blob Storage, on loopback: `npm install -g azurite`."""

from __future__ import annotations

import base64
import contextlib
import hmac
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path

_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # known to all
_SECONDS = 60.0


def installed() -> bool:
    """Whether Azurite is on the PATH."""
    return shutil.which("azurite-blob") is not None


@contextlib.contextmanager
def start_azurite(folder: Path, container: str) -> Iterator[dict[str, str]]:
    """Start Azurite with one container. Yields the variables with which obstore finds it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["azurite-blob", "--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck", "--silent"]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen([*command, "--blobPort", str(port)], stdout=log, stderr=log, cwd=folder)
    try:
        _wait_for(port, process)
        _create_container(port, container)
        yield {
            "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": _KEY,
            "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/{_ACCOUNT}",
        }
    finally:
        process.kill()
        process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + _SECONDS
    while process.poll() is None and time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.05)
    raise RuntimeError("Azurite did not start")


def _create_container(port: int, name: str) -> None:
    date, version = formatdate(usegmt=True), "2021-08-06"
    signed = (
        f"PUT{chr(10) * 12}x-ms-date:{date}\nx-ms-version:{version}\n/{_ACCOUNT}/{_ACCOUNT}/{name}\nrestype:container"
    )
    signature = base64.b64encode(hmac.digest(base64.b64decode(_KEY), signed.encode(), "sha256")).decode()
    headers = {
        "x-ms-date": date,
        "x-ms-version": version,
        "Authorization": f"SharedKey {_ACCOUNT}:{signature}",
        "Content-Length": "0",
    }
    url = f"http://127.0.0.1:{port}/{_ACCOUNT}/{name}?restype=container"
    urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers), timeout=_SECONDS).close()
