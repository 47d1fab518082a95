"""A client's dialogue with the daemon, recorded byte for byte and played again to a later daemon.

Purpose: a trainer and a daemon of two versions understand each other. A recording holds what each side sent, as plain maps.
Only what must differ (paths, process numbers) is filled in when it is played.
"""

from __future__ import annotations

import base64
import contextlib
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from headrace.checkpoint.saving import plan
from headrace.dataio.sidecar import protocol as m
from headrace.dataio.sidecar import wire
from headrace.dataio.sidecar.jobs.memfd import sealed
from headrace.dataio.store.open import open_store
from tests.support.checkpoint_states import begin as begin
from tests.support.checkpoint_states import make

HERE = "<store>"
STEPS = "<repository>"
STATE = {"weights": bytes(range(256)) * 16, "step": b"7"}
_SECONDS = 60.0


class Client:
    """One connection that sends frames as they are given, and receives what the daemon answers."""

    def __init__(self, path: str) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.connect(path)
        self._framer, self._frames = wire.Framer(), list[wire.Frame]()

    def send(self, payload: bytes, descriptors: tuple[int, ...] = ()) -> None:
        data = memoryview(wire.frame(payload, len(descriptors)))
        sent = wire.send(self._sock, data, descriptors)
        self._sock.sendall(data[sent:])

    def receive(self) -> wire.Frame:
        until = time.monotonic() + _SECONDS
        while not self._frames:
            assert select.select([self._sock], [], [], max(until - time.monotonic(), 0))[0], (
                "the daemon does not answer"
            )
            data, descriptors = wire.receive(self._sock)
            assert data, "the daemon closed the connection"
            self._frames += self._framer.feed(data, descriptors)
        return self._frames.pop(0)

    def close(self) -> None:
        self._sock.close()


@contextlib.contextmanager
def daemon() -> Iterator[str]:
    """The socket of a real daemon."""
    with tempfile.TemporaryDirectory(prefix="mr-") as folder:
        path = os.path.join(folder, "s", "sidecar.sock")
        command = [
            sys.executable,
            "-m",
            "headrace.dataio.cli",
            "sidecar",
            "run",
            "--socket",
            path,
            "--http-port",
            "off",
        ]
        command += ["--cache-dir", os.path.join(folder, "cache"), "--cache-bytes", "4MiB"]
        with open(os.path.join(folder, "log"), "wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            until = time.monotonic() + _SECONDS
            while not os.path.exists(path):
                assert process.poll() is None, Path(folder, "log").read_text()
                assert time.monotonic() < until
                time.sleep(0.01)
            yield path
        finally:
            process.terminate()
            process.wait(_SECONDS)


def filled(value: Any, places: dict[str, str]) -> Any:
    """`value` with the paths of this machine in place of their names."""
    if isinstance(value, dict):
        return {key: filled(each, places) for key, each in value.items()}
    if isinstance(value, list):
        return [filled(each, places) for each in value]
    return places.get(value, value) if isinstance(value, str) else value


def plain(value: Any) -> Any:
    """As JSON can hold it."""
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def raw(value: Any) -> Any:
    """The reverse of `plain`."""
    if isinstance(value, dict):
        if value.keys() == {"base64"}:
            return base64.b64decode(value["base64"])
        return {key: raw(each) for key, each in value.items()}
    return [raw(each) for each in value] if isinstance(value, list) else value


def record(dataset: Path) -> dict[str, Any]:
    """Shake hands, read a shard, announce and report, hand over a checkpoint, ask for the status."""
    shard = next(path for path in sorted((dataset / "shards").iterdir()))
    key, size = f"shards/{shard.name}", shard.stat().st_size
    where = m.Where(HERE, {})
    with tempfile.TemporaryDirectory() as steps, open_store(steps) as store:
        begin(store)
        made = make(store, STATE, step=7)
    planned = msgspec.msgpack.decode(plan.encode(made.plan))
    planned["location"]["url"] = STEPS
    says = [
        m.Hello(m.VERSION, os.getpid()),
        m.Open(1, where, key, [(0, 512), (1024, 4096)], 30.0, trace="00-" + "1" * 32 + "-" + "2" * 16 + "-01"),
        m.Announce(where, [(key, 0, size)]),
        m.Touched([1]),
        m.Report(4, "loader", "exp", 1.5, 0.25, 0.0, 3, 24, 4096, 0.0, 0, 2, 0.0),
        m.Closed([1]),
        m.Stage(2, "checkpoint", "step 7 of run exp", wait=30.0),
        m.AskStatus(3),
    ]
    told = [plain(msgspec.msgpack.decode(m.encode(message))) for message in says]
    answers: list[Any] = []
    with tempfile.TemporaryDirectory() as steps, daemon() as path:
        with open_store(steps) as store:
            begin(store)
        places = {HERE: f"file://{dataset}", STEPS: f"file://{steps}"}
        arena = bytes(made.arena)
        for _, payload, content in play(path, told, places, planned, arena):
            answers.append(plain(payload))
            assert content is None or content == [shard.read_bytes()[:512], shard.read_bytes()[1024 : 1024 + 4096]]
    return {
        "told": told,
        "answered": answers,
        "read": {"key": key, "ranges": [[0, 512], [1024, 4096]]},
        "plan": plain(planned),
        "arena": base64.b64encode(arena).decode(),
        "messages": everything(),
    }


def play(
    path: str, told: list[Any], places: dict[str, str], planned: Any, arena: bytes
) -> Iterator[tuple[str, dict[str, Any], list[bytes] | None]]:
    """Say it all to the daemon at this socket; each answer's tag, its map, and what its descriptor holds of the ranges."""
    client = Client(path)
    try:
        for message in told:
            filled_in = filled(raw(message), places)
            descriptors: tuple[int, ...] = ()
            if message["t"] == "stage":
                data = msgspec.msgpack.encode(filled(planned, places))
                descriptors = (sealed("arena", arena), sealed("plan", data))
            client.send(msgspec.msgpack.encode(filled_in), descriptors)
            for fd in descriptors:
                os.close(fd)
            if message["t"] in ("announce", "touched", "report", "closed"):
                continue
            while True:
                frame = client.receive()
                answer = msgspec.msgpack.decode(frame.payload)
                content = None
                if frame.descriptors:
                    content = [os.pread(frame.descriptors[0], length, at) for at, length in message["ranges"]]
                    wire.close_all(frame.descriptors)
                yield answer["t"], answer, content
                if message["t"] != "stage" or answer["t"] in ("done", "job failed", "failed"):
                    break
    finally:
        client.close()


def everything() -> list[dict[str, Any]]:
    """One message of every kind with all its fields, as bytes."""
    samples: list[m.Message] = [
        m.Hello(1, 4711),
        m.Open(
            5, m.Where("s3://bucket/ds", {"region": "eu"}), "shards/a.tar", [(0, 10), (99, 1)], 2.5, 17, "00-a-b-01"
        ),
        m.Announce(m.Where("/data", {}), [("shards/a.tar", 0, 10)], "", 3),
        m.Touched([1, 2]),
        m.Closed([3]),
        m.Stage(6, "checkpoint", "step 3", "00-a-b-01", m.PREEMPTION, 12.5),
        m.Follow(7, "token"),
        m.Recall(8, "s3://bucket/ckpt", "packs/a/0.pack"),
        m.AskStatus(9),
        m.Report(10, "saver", "exp", 1.0, 2.0, 3.0, 4, 5, 6, 7.0, 8, 9, 10.0),
        m.Welcome(1, 4711, True, True),
        m.Refused("conflict", "no"),
        m.Opened(5, 17, 4096, [(0, 10)], True, [(18, [(5, 6)])]),
        m.Bypassed(5),
        m.Forget(17),
        m.Staged(6, "token"),
        m.Progress("token", 1, 2),
        m.Released("token"),
        m.Done("token", "{}"),
        m.JobFailed("token", "corruption", "a chunk", "read it again"),
        m.Recalled(8, True),
        m.Failed(9, "not-found", "no such shard", "list them"),
        m.Status(9, "{}"),
    ]
    assert {type(each) for each in samples} == set(m.FromClient.__args__) | set(m.FromDaemon.__args__)
    return [
        {"payload": m.encode(each).hex(), "fields": plain(msgspec.to_builtins(each, builtin_types=(bytes,)))}
        for each in samples
    ]
