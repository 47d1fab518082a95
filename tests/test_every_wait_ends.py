"""All public calls against a server that drips: each ends within its limits, with an error that says what it was."""

from __future__ import annotations

import asyncio
import contextlib
import io
import threading
import time
import uuid
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from headrace.checkpoint import Checkpointer
from headrace.checkpoint.dcp import RepositoryReader, RepositoryWriter
from headrace.dataio import Dataset, append, cli, index, open_store, pack, preview, verify
from headrace.dataio.core import limits
from headrace.dataio.core.errors import AccessDeniedError, HeadraceError, TransientError
from headrace.dataio.sidecar import status_server
from headrace.dataio.store import fsspec as fsspec_store
from headrace.dataio.store import retry, s3, s3_config
from headrace.dataio.store.base import Store
from headrace.dataio.testing.fault_proxy import Fault, FaultProxy
from headrace.dataio.testing.s3_server import S3Server
from headrace.loaders import AudioLoader
from tests.conftest import use_s3_server

pytestmark = pytest.mark.s3
SECONDS = 0.3
BOUND = 45.0
"""For all calls of one test side by side, on a machine that may be busy: without a deadline none of them would end."""
DRIPS = [Fault.DRIP_HEAD, Fault.DRIP_BODY, Fault.CONTINUE]
Call = Callable[[], object]


def _sound() -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, 8000, 0, "NONE", ""))
        out.writeframes(bytes(8000))
    return file.getvalue()


@pytest.fixture(scope="module")
def prepared(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A bucket's folder with sounds, a dataset and a checkpoint."""
    with pytest.MonkeyPatch.context() as patch:
        use_s3_server(s3_server, patch)
        url = f"s3://headrace/{uuid.uuid4().hex}"  # the tests of a module may be begun twice: workers steal them
        folder = tmp_path_factory.mktemp("sounds")
        for n in range(3):
            (folder / f"{n}.wav").write_bytes(_sound())
        with open_store(url) as store:
            for path in folder.iterdir():
                store.put(f"raw/{path.name}", path.read_bytes())
        pack([folder], f"{url}/set", workers=1).close()
        with Checkpointer(f"{url}/run", run="exp", sidecar=None) as checkpointer:
            checkpointer.save(1, {"w": torch.ones(100_000)}).result(60)
        yield url


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short limits, also where a call takes none."""
    policy = retry.Policy(attempts=1)
    for module in (retry, s3):
        monkeypatch.setattr(module, "Policy", lambda: policy)
    monkeypatch.setattr(s3_config, "CONNECT_SECONDS", SECONDS)
    monkeypatch.setattr(s3_config, "READ_SECONDS", SECONDS)
    monkeypatch.setattr(limits, "LEAST_RATE", limits.GIB)


@pytest.fixture(params=["s3fs", "obstore"])
def client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "s3fs":
        pytest.importorskip("obstore", reason="the extra s3 is not installed")
    monkeypatch.setenv("HEADRACE_S3", request.param)
    return str(request.param)


@pytest.fixture
def dripping(
    prepared: str, s3_server: S3Server, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FaultProxy]:
    """Every request meets the fault that the test injects."""
    with FaultProxy(s3_server.endpoint) as proxy:
        use_s3_server(s3_server, monkeypatch)
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


def outcomes(calls: dict[str, Call]) -> dict[str, BaseException | object]:
    """What each call returned or raised, all of them side by side; asserts that all ended."""
    found = dict[str, BaseException | object]()

    def one(name: str, call: Call) -> None:
        try:
            found[name] = call()
        except BaseException as error:
            found[name] = error

    threads = [threading.Thread(target=one, args=each, daemon=True, name=each[0]) for each in calls.items()]
    until = time.monotonic() + BOUND
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    assert not [thread.name for thread in threads if thread.is_alive()], "these still wait"
    return found


def of_a_store(store: Store) -> dict[str, Call]:
    buffers = [memoryview(bytearray(3)) for _ in range(2)]
    big = memoryview(bytearray(2 * limits.MIB))
    return {
        "get": lambda: store.get("raw/0.wav"),
        "get_into": lambda: store.get_into("raw/0.wav", 5, memoryview(bytearray(600))),
        "get_ranges_into": lambda: store.get_ranges_into("raw/0.wav", [(0, buffers[0]), (7000, buffers[1])]),
        "get_pieces": lambda: store.get_pieces("raw/0.wav", 0, big[:600], lambda at, piece: None),
        "list": lambda: list(store.list("raw/")),
        "list_folders": lambda: list(store.list_folders()),
        "stat": lambda: store.stat("raw/0.wav"),
        "exists": lambda: store.exists("raw/0.wav"),
        "put": lambda: store.put("new/put", b"x"),
        "put_if_absent": lambda: store.put_if_absent("new/absent", b"x"),
        "put_multipart": lambda: store.put_multipart("new/multipart", [bytes(9 * limits.MIB)]),
        "delete_many": lambda: store.delete_many(["new/none"]),
        "abort_upload": lambda: store.abort_upload("new/none", "upload"),
    }


@pytest.mark.parametrize("drip", DRIPS, ids=lambda fault: fault.name)
def test_every_operation_of_a_store_ends(prepared: str, dripping: FaultProxy, client: str, drip: Fault) -> None:
    dripping.inject(drip, times=1_000_000)
    with open_store(prepared) as store:
        found = outcomes(of_a_store(store))
    assert dripping.fired[drip] > len(found) // 2  # on a busy machine a request may be over before the proxy sees it
    # an answer without a body cannot drip one
    bodiless = {"stat", "exists", "put", "put_if_absent", "abort_upload"} if drip is Fault.DRIP_BODY else set()
    wrong = {name: out for name, out in found.items() if not isinstance(out, TransientError) and name not in bodiless}
    assert not wrong


@pytest.mark.parametrize("drip", DRIPS, ids=lambda fault: fault.name)
def test_every_read_of_a_web_server_ends(
    prepared: str, dripping: FaultProxy, monkeypatch: pytest.MonkeyPatch, drip: Fault
) -> None:
    monkeypatch.setattr(fsspec_store, "_REQUEST_SECONDS", SECONDS)
    monkeypatch.setattr(fsspec_store, "_LISTING_SECONDS", SECONDS)
    dripping.inject(drip, times=1_000_000)
    with open_store(f"{dripping.endpoint}/{prepared.removeprefix('s3://')}") as store:
        found = outcomes({name: call for name, call in of_a_store(store).items() if name in _READS})
    assert dripping.fired[drip] > len(found) // 2  # on a busy machine a request may be over before the proxy sees it
    assert not {name: out for name, out in found.items() if not isinstance(out, HeadraceError)}
    if drip is not Fault.DRIP_BODY:  # else the headers say that access is denied
        assert not {name: out for name, out in found.items() if not isinstance(out, TransientError)}


_READS = {"get", "get_into", "get_ranges_into", "get_pieces", "list", "stat", "exists"}


@pytest.mark.parametrize("variable", ["AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_EC2_METADATA_SERVICE_ENDPOINT"])
def test_credentials_that_drip_are_given_up(
    prepared: str, dripping: FaultProxy, client: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "false")
    monkeypatch.setenv(variable, dripping.endpoint)
    dripping.inject(Fault.DRIP_HEAD, times=1_000_000)
    with open_store(prepared) as store:
        calls = of_a_store(store)
        found = outcomes({name: calls[name] for name in ("get", "list", "put")})
    assert dripping.fired[Fault.DRIP_HEAD]
    assert not {name: o for name, o in found.items() if not isinstance(o, TransientError | AccessDeniedError)}


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("drip", DRIPS, ids=lambda fault: fault.name)
def test_every_public_call_ends(prepared: str, dripping: FaultProxy, tmp_path: Path, drip: Fault) -> None:
    short: dict[str, Any] = {"config_kwargs": {"read_timeout": SECONDS, "connect_timeout": SECONDS}}
    (tmp_path / "0.wav").write_bytes(_sound())
    ours, run = f"{prepared}/set", f"{prepared}/run"
    dripping.inject(drip, times=1_000_000)

    def checkpointer() -> Checkpointer:
        return Checkpointer(run, run="exp", sidecar=None, storage_options=short)

    def saved() -> object:
        handle = checkpointer().save(2, {"w": torch.ones(10)})
        return handle.result(BOUND)

    calls: dict[str, Call] = {
        "pack to it": lambda: pack([tmp_path / "0.wav"], f"{prepared}/new", workers=1, storage_options=short),
        "pack from it": lambda: pack([f"{prepared}/raw"], tmp_path / "new", workers=1, source_options=short),
        "append": lambda: append([tmp_path / "0.wav"], ours, workers=1, storage_options=short),
        "index": lambda: index([f"{ours}/shards/*.tar"], tmp_path / "indexed", workers=1, source_options=short),
        "Dataset": lambda: Dataset(ours, storage_options=short),
        "verify": lambda: verify(ours, storage_options=short),
        "preview": lambda: preview(Dataset(ours, storage_options=short)),
        "AudioLoader": lambda: next(iter(AudioLoader(ours, batch_size=1, window=0.1, sidecar=None))),
        "save": saved,
        "restore": lambda: checkpointer().restore({"w": torch.ones(10)}),
        "steps": lambda: checkpointer().steps(),
        "close": lambda: checkpointer().close(),
    }
    commands = [
        *([name, ours] for name in ("info", "ls", "log", "verify", "order")),
        *(
            ["cat", ours, "0"],
            ["tag", ours, "name"],
            ["filter", ours, "duration > 0"],
            ["remove", ours, "0", "--apply"],
            ["delete", ours],
        ),
        *(["merge", ours, ours], ["diff", ours, "1"], ["export", ours, "0", str(tmp_path)], ["doctor", run]),
        *(["ckpt", name, run] for name in ("ls", "check", "gc", "tags")),
        *(["ckpt", *more, run, "--run", "exp"] for more in (["show", "--step=1"], ["retain", "--last=1"])),
        ["ckpt", "tag", run, "name", "--run", "exp", "--step=1"],
    ]
    for argv in commands:
        calls[f"headrace {argv[0]} {argv[1]}"] = lambda argv=argv: cli.main(argv)  # type: ignore[misc]
    saving = RepositoryWriter(run, run="dcp", step=1)
    calls["dcp.save"] = lambda: dcp.save({"w": torch.ones(10)}, storage_writer=saving, no_dist=True)
    reading = RepositoryReader(run, run="exp", step=1)
    calls["dcp.load"] = lambda: dcp.load({"w": torch.ones(10)}, storage_reader=reading, no_dist=True)
    found = outcomes(calls)
    assert dripping.fired[drip] > len(found) // 2  # on a busy machine a request may be over before the proxy sees it
    wrong = {name: out for name, out in found.items() if out != TransientError.exit_code and not _is_right(name, out)}
    assert not wrong


@pytest.mark.parametrize("drip", DRIPS, ids=lambda fault: fault.name)
def test_what_is_read_once_all_is_open_ends(prepared: str, dripping: FaultProxy, drip: Fault) -> None:
    for path in ("shards/", "packs/"):
        dripping.inject(drip, times=1_000_000, path=path)
    loader = AudioLoader(f"{prepared}/set", batch_size=1, window=0.1, sidecar=None)
    checkpointer = Checkpointer(f"{prepared}/run", run="exp", sidecar=None)
    another = Checkpointer(f"{prepared}/run", run=drip.name, sidecar=None)
    found = outcomes(
        {
            "restore": lambda: checkpointer.restore({"w": torch.ones(100_000)}),
            "save": lambda: another.save(1, {"w": torch.ones(1000)}).result(BOUND),
            "batch": lambda: next(iter(loader)),
        }
    )
    assert (
        dripping.fired[drip] >= 2
    )  # of the restore and the batch; on a busy machine the save may end before its pack is sent
    assert [type(out) for name, out in found.items() if name != "save"] == [TransientError] * 2, found
    if drip is not Fault.DRIP_BODY:  # of a PUT's answer there is none
        assert isinstance(found["save"], TransientError)
    for opened in (loader, checkpointer, another):
        opened.close()


@pytest.mark.parametrize("part", [b"GET /livez HTTP/1.1\r\nX: ", b"G"])
def test_the_status_server_waits_for_no_slow_client(part: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_server, "HEAD_SECONDS", SECONDS)

    async def drip() -> int:
        server = status_server.StatusServer(dict, dict, lambda: True)
        reader, writer = await asyncio.open_connection("127.0.0.1", await server.start(0))
        writer.write(part)
        dripped = 0
        while not reader.at_eof():
            with contextlib.suppress(TimeoutError, ConnectionError):
                writer.write(b"a")
                dripped += 1
                await asyncio.wait_for(reader.read(1), 0.02)
        writer.close()
        server.close()
        return dripped

    assert asyncio.run(asyncio.wait_for(drip(), BOUND)) > 1


def _is_right(name: str, out: object) -> bool:
    if name.startswith("dcp"):  # torch wraps what a rank raised
        return "gave up after" in str(out)
    return isinstance(out, TransientError) or (name == "close" and out is None)
