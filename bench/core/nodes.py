"""Two nodes on this machine: a daemon with a local tier each. Node A copies its steps to node B, its buddy.

    with two_nodes(folder, certificates) as (a, b):
        a.start()
        ...
        a.lose()  # SIGKILL for all its processes, and its folder is removed
        a.start()  # as a new, empty machine

Invariant: a daemon and the workers that it starts have the variable `HEADRACE_BENCH_NODE` with the node's folder. So
`kill` finds all of them, and no others. They end with the block. The caller kills the trainers that it has started.

Failure behaviour: a daemon that does not start raises `RuntimeError` with the end of its log. `UnsupportedError` without
openssl, which makes the certificates.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.bench.core.processes import DaemonProcess, daemon
from headrace.dataio.core.errors import UnsupportedError

VARIABLE = "HEADRACE_BENCH_NODE"
ADDRESS_A, ADDRESS_B = "127.0.0.1", "127.0.0.2"
_CA = ("-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign,cRLSign")
_NODE = "basicConstraints=critical,CA:FALSE\nextendedKeyUsage=serverAuth,clientAuth\nsubjectAltName=IP:{}\n"


class Node:
    """A node with its own folder. `daemon` is None while it is not running.

    Args:
        folder: The node's folder, which it creates. Its path must be short, because it contains a socket.
        tier: The folder of the local tier.
        environ: Environment variables of the node's processes.
        settings: Options of `headrace sidecar run`.
    """

    def __init__(self, folder: Path, tier: Path, environ: Mapping[str, str], **settings: str) -> None:
        self.folder, self.tier = folder, tier
        self.environ = {**environ, VARIABLE: str(folder)}
        self._settings = {"http_port": "off", "cache_bytes": "1MiB", "tier_dir": str(tier), **settings}
        self._running = contextlib.ExitStack()
        self.daemon: DaemonProcess | None = None

    @property
    def socket(self) -> Path:
        return self.folder / "s" / "sidecar.sock"

    def start(self) -> None:
        """Start the daemon."""
        self.folder.mkdir(exist_ok=True)
        self.tier.mkdir(exist_ok=True, mode=0o700)
        log = self.folder / "log"
        self.daemon = self._running.enter_context(daemon(self.folder, self.environ, log, **self._settings))

    def status(self) -> dict[str, Any]:
        """The tier's part of the daemon's status."""
        assert self.daemon is not None
        with self.daemon.connect() as connection:
            tier = connection.status()["tier"]
        assert isinstance(tier, dict)
        return tier

    def kill(self) -> None:
        """SIGKILL the daemon and all processes that it has started."""
        for pid in _processes_of(self.folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._running.close()
        self.daemon = None

    def lose(self) -> None:
        """Kill the node, and remove everything that it has stored."""
        self.kill()
        for path in (self.folder, self.tier):
            if path.exists():
                shutil.rmtree(path)


def _processes_of(folder: Path) -> list[int]:
    wanted, found = f"{VARIABLE}={folder}".encode(), list[int]()
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with contextlib.suppress(OSError):
                if wanted in (process / "environ").read_bytes().split(b"\0"):
                    found.append(int(process.name))
    return found


@contextlib.contextmanager
def two_nodes(folder: Path, tiers: Path, environ: Mapping[str, str], **settings: str) -> Iterator[tuple[Node, Node]]:
    """Node A, and node B, which is its buddy. None of them is started.

    Args:
        folder: Where the nodes have their folders. Its path must be short.
        tiers: Where they have their tiers.
        environ: Environment variables of their processes.
        settings: Options of both daemons.
    """
    files = certificates(folder / "tls", ADDRESS_A, ADDRESS_B)
    there = f"{ADDRESS_B}:{_free_port(ADDRESS_B)}"
    a = Node(folder / "a", tiers / "tier-a", environ, buddy=there, **tls_options(files, ADDRESS_A), **settings)
    listens = {"buddy_listen": there, "buddy_names": ADDRESS_A}
    b = Node(folder / "b", tiers / "tier-b", environ, **listens, **tls_options(files, ADDRESS_B), **settings)
    try:
        yield a, b
    finally:
        for node in (a, b):
            node.lose()
        shutil.rmtree(files)


def tls_options(files: Path, address: str) -> dict[str, str]:
    """The options by which a daemon shows that it is `address`."""
    names = {"tls_cert": f"{address}.pem", "tls_key": f"{address}.key", "tls_ca": "ca.pem"}
    return {option: str(files / name) for option, name in names.items()}


def certificates(folder: Path, *addresses: str) -> Path:
    """Make a CA and a certificate for each address with openssl, and return the folder."""
    if shutil.which("openssl") is None:
        raise UnsupportedError("buddies need certificates, and openssl is not installed", hint="install openssl")
    folder.mkdir(mode=0o700)
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    _openssl(folder, "req", "-x509", *new_key, "-subj", "/CN=bench", "-days", "2", *_CA, *_out("ca"))
    for address in addresses:
        (folder / "extensions").write_text(_NODE.format(address))
        _openssl(folder, "req", "-new", *new_key, "-subj", f"/CN={address}", *_out(address, "csr"))
        request = ("-req", "-in", f"{address}.csr", "-extfile", "extensions", "-days", "2")
        authority = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial")
        _openssl(folder, "x509", *request, *authority, "-out", f"{address}.pem")
    return folder


def _out(name: str, suffix: str = "pem") -> tuple[str, ...]:
    return "-keyout", f"{name}.key", "-out", f"{name}.{suffix}"


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)


def _free_port(address: str) -> int:
    with socket.socket() as listener:
        listener.bind((address, 0))
        return int(listener.getsockname()[1])
