"""The S3 store against a real server: the contract, bad input, and faults on the wire."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import http.server
import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from headrace.dataio.core import limits
from headrace.dataio.core.errors import (
    AccessDeniedError,
    AmbiguousWriteError,
    CapacityError,
    NotFoundError,
    SlowDownError,
    TransientError,
    UnsupportedError,
    UsageError,
)
from headrace.dataio.store import bucket, ranges, s3
from headrace.dataio.store.base import Store
from headrace.dataio.store.bucket_client import Consumer, LoopThread
from headrace.dataio.store.bucket_errors import from_answer
from headrace.dataio.store.open import open_location, open_store
from headrace.dataio.store.probe import certify
from headrace.dataio.store.retry import Policy
from headrace.dataio.store.s3 import S3Store
from headrace.dataio.store.s3_client import S3Client, connect
from headrace.dataio.store.s3_config import parse
from headrace.dataio.testing.conformance import StoreConformance, StoreMachine, some_bytes
from headrace.dataio.testing.fault_proxy import Fault, FaultProxy
from headrace.dataio.testing.s3_server import S3Server
from tests.support.waiting import wait_for

pytestmark = pytest.mark.s3
MIB = 1 << 20
CLIENTS = ["s3fs", "obstore"]


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The library that talks to S3 in this test and its child processes: each of them in turn."""
    if request.param != "s3fs":
        pytest.importorskip("obstore", reason="the extra s3 is not installed")
    monkeypatch.setenv("HEADRACE_S3", request.param)
    return str(request.param)


class TestS3ThroughS3fs(StoreConformance):
    many = 1050
    client = "s3fs"

    @pytest.fixture
    def store_url(self, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setenv("HEADRACE_S3", self.client)
        return s3_url


class TestS3ThroughObstore(TestS3ThroughS3fs):
    client = "obstore"
    # deletes and multipart uploads go through the same client as above
    test_a_killed_writer_leaves_what_was_there = None  # type: ignore[assignment]

    @pytest.fixture
    def store_url(self, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
        pytest.importorskip("obstore", reason="the extra s3 is not installed")
        monkeypatch.setenv("HEADRACE_S3", self.client)
        return s3_url


def test_the_store_agrees_with_a_model(s3_url: str, client: str) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    class Machine(StoreMachine):
        def open_empty(self) -> Store:
            return open_store(f"{s3_url}/{uuid.uuid4().hex}")

    examples = 5 if client == "s3fs" else 3
    quick = settings(
        max_examples=examples, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(Machine, settings=quick)


# bad input


def test_a_missing_bucket_is_named(client: str, s3_url: str) -> None:
    with open_store("s3://no-such-bucket/x") as store:
        for operation in (
            lambda: store.get("k"),
            lambda: store.put("k", b""),
            lambda: list(store.list()),
            lambda: list(store.list_folders()),
        ):
            with pytest.raises(NotFoundError, match="bucket 'no-such-bucket'"):
                operation()


@pytest.mark.parametrize("wrong", [{"key": "stranger"}, {"secret": "another-secret-xyz"}])
def test_wrong_credentials_are_access_denied_and_never_shown(client: str, s3_url: str, wrong: dict[str, str]) -> None:
    options = {"key": os.environ["AWS_ACCESS_KEY_ID"], "secret": os.environ["AWS_SECRET_ACCESS_KEY"]} | wrong
    with open_store(s3_url, storage_options=options) as store:
        for operation in (
            lambda: store.get("k"),
            lambda: store.put("k", b""),
            lambda: list(store.list()),
            lambda: list(store.list_folders()),
            lambda: store.put_if_absent("k", b""),
            lambda: store.stat("k"),
            lambda: store.put_multipart("k", [bytes(9 * MIB)]),
        ):
            with pytest.raises(AccessDeniedError) as caught:
                operation()
            assert options["secret"] not in f"{caught.value!r} {caught.value} {caught.value.hint}"
        assert not store.location.shareable
        assert options["secret"] not in f"{store!r} {store.location}"
        with pytest.raises(UsageError, match="secrets"):
            open_location(store.location)


def test_without_credentials_the_error_says_which_variables(
    client: str, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with open_store(s3_url) as store, pytest.raises(AccessDeniedError, match="AWS_ACCESS_KEY_ID"):
        store.get("k")


def test_an_unreachable_endpoint_fails_after_bounded_attempts(
    client: str, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultProxy("http://127.0.0.1:9") as proxy:
        gone = proxy.endpoint
    with open_store(s3_url, storage_options={"endpoint_url": gone}) as store:
        began = time.monotonic()
        with pytest.raises(TransientError, match=rf"{gone}.*gave up after \d attempts"):
            store.get("k")
        assert time.monotonic() - began < 150  # the bound is 20 s on an idle machine
        with pytest.raises(TransientError) as caught:
            store.put_if_absent("k", b"")
        assert not isinstance(caught.value, AmbiguousWriteError)


def test_the_store_is_not_used_after_it_was_closed(client: str, s3_url: str) -> None:
    store = open_store(s3_url)
    store.put("k", b"")
    store.close()
    store.close()
    with pytest.raises(UsageError, match="closed"):
        store.get("k")


def test_a_forked_child_gets_an_error_for_its_parents_store_and_can_open_its_own(
    client: str, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if client != "s3fs":
        monkeypatch.delenv("HEADRACE_S3")  # obstore's threads are not in the child, so s3fs serves there
    program = (
        "import os\n"
        "from headrace.dataio.store.open import open_store\n"
        "from headrace.dataio.core.errors import UsageError\n"
        f"store = open_store({s3_url!r}); store.put('k', b'1')\n"
        f"print(type(store.inner.inner._client).__name__, flush=True)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try: store.get('k')\n"
        "    except UsageError: pass\n"
        f"    assert open_store({s3_url!r}).get('k') == b'1'\n"
        "    raise SystemExit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
        "assert store.get('k') == b'1'\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], stdout=subprocess.PIPE, timeout=150)
    assert done.returncode == 0
    assert done.stdout.split()[0] == (b"S3Client" if client == "s3fs" else b"ObstoreS3Client")


@pytest.mark.parametrize(
    "option", [{"client_kwargs": {"use_dualstack": True}}, {"config_kwargs": {"tcp_keepalive": True}}]
)
def test_what_obstore_has_no_equal_of_goes_through_s3fs_unless_obstore_is_insisted_on(
    s3_url: str, option: dict[str, object]
) -> None:
    pytest.importorskip("obstore")
    assert type(connect(parse(s3_url, option, {"AWS_REGION": "r"}))).__name__ == "S3Client"
    assert type(connect(parse(s3_url, {}, {"AWS_REGION": "r"}))).__name__ == "ObstoreS3Client"
    with pytest.raises(UnsupportedError, match=r"no equivalent of the option (use_dualstack|tcp_keepalive)"):
        connect(parse(s3_url, {**option, "client": "obstore"}, {"AWS_REGION": "r"}))
    with pytest.raises(UsageError, match="no S3 client"):
        parse(s3_url, {}, {"HEADRACE_S3": "curl"})


def test_without_obstore_s3fs_serves(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    assert type(connect(parse(s3_url, {}))) is S3Client
    with pytest.raises(UnsupportedError, match=r"not installed.*s3"):
        connect(parse(s3_url, {"client": "obstore"}))


def test_what_the_environment_says_to_obstore_alone_has_no_say(
    client: str, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "AWS_SKIP_SIGNATURE": "true",
        "AWS_ENDPOINT": "http://127.0.0.1:9",
        "AWS_BUCKET": "other",
        "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9",
    }.items():
        monkeypatch.setenv(name, value)
    keys = {"key": os.environ["AWS_ACCESS_KEY_ID"], "secret": os.environ["AWS_SECRET_ACCESS_KEY"]}
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of-another-identity")
    with open_store(s3_url, storage_options={"endpoint_url": os.environ["AWS_ENDPOINT_URL"], **keys}) as store:
        store.put("k", b"1")
        assert store.get("k") == b"1"
        assert [info.key for info in store.list()] == ["k"]


@pytest.fixture
def recorder() -> Iterator[tuple[str, list[bytes]]]:
    """An endpoint that answers 200 to everything, and the heads of the requests it got."""
    heads: list[bytes] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_PUT(self) -> None:
            heads.append(f"{self.command} {self.path}\n{self.headers}".encode().lower())
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("ETag", '"1"')
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", heads
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_conditional_write_is_one_single_put(client: str, s3_url: str, recorder: tuple[str, list[bytes]]) -> None:
    endpoint, heads = recorder
    with S3Store(parse(s3_url, {"endpoint_url": endpoint})) as store:
        assert store.put_if_absent("k", bytes(9 * MIB))
    (head,) = heads
    assert b"if-none-match: *" in head
    assert b"uploadid" not in head
    assert client == "s3fs" or b"x-amz-content-sha256: unsigned-payload" in head


def test_a_body_too_large_for_obstores_time_out_goes_through_s3fs(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    obstore = pytest.importorskip("headrace.dataio.store.obstore", reason="the extra s3 is not installed")
    monkeypatch.setattr(obstore, "_LARGEST_PUT", 4)
    with S3Store(parse(s3_url, {"client": "obstore"})) as store:
        store.put("k", b"12345")
        assert store._client._obstore is None  # type: ignore[attr-defined]
        store.put("k", b"1234")
        assert store._client._obstore is not None  # type: ignore[attr-defined]


def test_an_overloaded_server_is_given_the_pause_it_asked_for() -> None:
    config = parse("s3://b", {}, {})
    for status, code in ((503, "SlowDown"), (429, "TooManyRequests"), (503, "")):
        error = from_answer(status, code, "", "7", config, "reading")
        assert isinstance(error, SlowDownError)
        assert error.seconds == 7.0
    late = from_answer(503, "SlowDown", "", "Wed, 21 Oct 2026 07:28:00 GMT", config, "reading")
    assert isinstance(late, SlowDownError)
    assert late.seconds is None
    assert not isinstance(from_answer(500, "InternalError", "", None, config, "reading"), SlowDownError)


def test_a_silent_server_is_given_up_after_the_time_out(
    client: str, s3_url: str, silent_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"endpoint_url": silent_endpoint, "config_kwargs": {"read_timeout": 0.3, "connect_timeout": 0.3}}
    monkeypatch.setattr(limits, "LEAST_RATE", 64 * MIB)
    with S3Store(parse(s3_url, options)) as store:
        for operation in (
            lambda: store.get("k"),
            lambda: store.put("k", b"1"),
            lambda: store.put("k", bytes(9 * MIB)),
            lambda: list(store.list()),
            lambda: list(store.list_folders()),
        ):
            with pytest.raises(TransientError, match=r"(?i)timed? ?out"):
                operation()


def test_a_forgotten_store_ends_with_its_thread_and_not_in_the_thread_that_collects_it(
    client: str, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped, stop = list[int](), LoopThread.stop
    monkeypatch.setattr(LoopThread, "stop", lambda it: (stop(it), stopped.append(threading.get_ident())))
    store = open_store(s3_url)
    store.put("k", b"")
    before = {t for t in threading.enumerate() if t.name == "headrace-bucket"}
    del store
    gc.collect()
    wait_for(lambda: stopped)
    assert threading.get_ident() not in stopped
    assert len({t for t in threading.enumerate() if t.name == "headrace-bucket"}) < len(before)


ENDS_WHILE_OBSTORE_HANDS_OVER = """
import asyncio, os, sys, threading, time
from headrace.dataio.store.open import open_store

class Late:
    def __del__(self, sleep=time.sleep):
        sleep(0.8)

def hand_over(loop, *arguments, real=asyncio.BaseEventLoop.call_soon_threadsafe, **keywords):
    handle = real(loop, *arguments, **keywords)
    if isinstance(threading.current_thread(), threading._DummyThread):
        os.write(1, b"handed over\\n")
        time.sleep(0.4)  # a thread of obstore's whose turn does not come
    return handle

asyncio.BaseEventLoop.call_soon_threadsafe = hand_over
sys.late = Late()  # keeps the interpreter busy with ending for longer than that
store = open_store(sys.argv[1])
store.put("k", b"1")
if sys.argv[2] == "closed":
    store.close()
os.write(1, b"end\\n")
"""


@pytest.mark.parametrize("how", ["closed", "left open"])
def test_the_interpreter_does_not_end_while_a_thread_of_obstores_is_in_it(
    how: str, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a thread is made to exit when it wants to go on, through frames that cannot be unwound: the process aborts."""
    pytest.importorskip("obstore", reason="the extra s3 is not installed")
    monkeypatch.setenv("HEADRACE_S3", "obstore")
    command = [sys.executable, "-c", ENDS_WHILE_OBSTORE_HANDS_OVER, s3_url, how]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert ended.stdout.count("handed over") >= 1, ended
    assert ended.returncode == 0, ended


def test_a_key_that_another_program_wrote_is_passed_over_when_it_is_no_key(s3_url: str, s3_server: S3Server) -> None:
    root = parse(s3_url, {"client": "s3fs"})
    with S3Store(root) as store:
        store.put("a/b", b"1")
        client = store._client
        client.run(client.call("put_object", "", Key=f"{root.prefix}/folder/", Body=b""))
        assert [info.key for info in store.list()] == ["a/b"]


@pytest.fixture
def silent_endpoint() -> Iterator[str]:
    """A port that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_an_interrupted_call_ends_at_once_and_lets_go_of_the_callers_buffer(
    client: str, s3_url: str, silent_endpoint: str
) -> None:
    class Interrupt(BaseException):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    store, buffer = open_store(s3_url, storage_options={"endpoint_url": silent_endpoint}), bytearray(10)
    timer = threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    try:
        timer.start()
        with pytest.raises(Interrupt):
            store.get_into("k", 0, memoryview(buffer))
        buffer.append(0)  # a bytearray that something still points into cannot grow
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
        store.close()


def test_closing_a_store_ends_the_calls_of_other_threads(s3_url: str, silent_endpoint: str) -> None:
    store = S3Store(parse(s3_url, {"endpoint_url": silent_endpoint}))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.get, "k")
        while store._client._thread._loop is None:
            time.sleep(0.01)
        store.close()
        with pytest.raises(UsageError, match="closed while it was used"):
            waiting.result(timeout=150)


# faults on the wire


def test_a_lost_answer_to_a_conditional_put_still_reports_won(client: str, behind: Store, proxy: FaultProxy) -> None:
    proxy.inject(Fault.LOSE_ANSWER, method="PUT")
    assert behind.put_if_absent("k", b"mine")
    assert proxy.fired == {Fault.LOSE_ANSWER: 1}
    assert not behind.put_if_absent("k", b"another's")


def test_a_lost_answer_to_a_lost_race_reports_lost(client: str, behind: Store, proxy: FaultProxy) -> None:
    assert behind.put_if_absent("k", b"his")
    proxy.inject(Fault.LOSE_ANSWER, method="PUT")
    assert not behind.put_if_absent("k", b"mine")
    assert proxy.fired == {Fault.LOSE_ANSWER: 1}


def test_a_conditional_put_that_never_arrives_is_sent_again(client: str, behind: Store, proxy: FaultProxy) -> None:
    proxy.inject(Fault.REFUSE, method="PUT", times=2)
    assert behind.put_if_absent("k", b"mine")
    assert proxy.fired == {Fault.REFUSE: 2}


def test_a_conditional_put_that_cannot_be_read_back_is_ambiguous_and_never_won(
    client: str, s3_url: str, proxy: FaultProxy
) -> None:
    proxy.inject(Fault.LOSE_ANSWER, method="PUT", times=100)
    proxy.inject(Fault.REFUSE, method="GET", times=100)
    once = S3Store(parse(s3_url, {"endpoint_url": proxy.endpoint}))
    with once as store, pytest.raises(AmbiguousWriteError, match="could not tell"):
        store.put_if_absent("k", b"mine")
    assert set(proxy.fired) == {Fault.LOSE_ANSWER, Fault.REFUSE}


@pytest.mark.parametrize("fault", [Fault.RESET_BODY, Fault.CUT_BODY, Fault.SLOW_DOWN, Fault.REFUSE, Fault.LOSE_ANSWER])
def test_a_read_survives(client: str, behind: Store, proxy: FaultProxy, fault: Fault) -> None:
    body = some_bytes(3 * MIB)
    behind.put("k", body)
    proxy.inject(fault, method="GET", times=2)
    assert behind.get("k") == body
    proxy.inject(fault, method="GET", times=2)
    buffer = bytearray(2 * MIB)
    behind.get_into("k", 5, memoryview(buffer))
    assert buffer == body[5 : 5 + 2 * MIB]
    assert proxy.fired == {fault: 4}


@pytest.mark.parametrize("fault", [Fault.SLOW_DOWN, Fault.REFUSE, Fault.LOSE_ANSWER])
def test_a_write_survives(client: str, behind: Store, proxy: FaultProxy, fault: Fault) -> None:
    proxy.inject(fault, method="PUT", times=2)
    behind.put("k", b"body")
    assert proxy.fired == {fault: 2}
    assert behind.get("k") == b"body"


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "uploads"), ("PUT", "partNumber=2"), ("POST", "uploadId")],
    ids=["begin", "part", "end"],
)
@pytest.mark.parametrize("fault", [Fault.SLOW_DOWN, Fault.LOSE_ANSWER])
def test_an_upload_survives(behind: Store, proxy: FaultProxy, fault: Fault, method: str, path: str) -> None:
    body = some_bytes(20 * MIB)
    proxy.inject(fault, method=method, path=path)
    assert behind.put_multipart("k", [body]) == len(body)
    assert proxy.fired == {fault: 1}
    assert behind.get("k") == body


def test_the_error_of_an_object_of_one_part_holds_no_view_of_the_part(client: str, s3_url: str) -> None:
    """The error may end in a cycle. Python 3.13 then prints a BufferError for a stream of which there is a view."""
    with FaultProxy("http://127.0.0.1:9") as proxy:
        gone = proxy.endpoint
    with (
        S3Store(parse(s3_url, {"endpoint_url": gone}), Policy(attempts=1)) as store,
        pytest.raises(TransientError) as caught,
    ):
        store.put_multipart("k", [b"abc"])
    variables = [value for frame, _ in traceback.walk_tb(caught.tb) for value in frame.f_locals.values()]
    streams = [value for value in variables if isinstance(value, io.BytesIO)]
    assert streams
    for stream in streams:
        stream.close()  # a BufferError if a view of it is left


def test_an_upload_that_fails_for_good_is_aborted(s3_url: str, proxy: FaultProxy) -> None:
    proxy.inject(Fault.SLOW_DOWN, path="partNumber=2", times=100)
    impatient = Policy(attempts=2, first=0.01)
    with S3Store(parse(s3_url, {"endpoint_url": proxy.endpoint}), impatient) as store:
        with pytest.raises(TransientError, match=r"503 SlowDown.*gave up after 2 attempts"):
            store.put_multipart("k", [some_bytes(20 * MIB)])
        assert proxy.fired == {Fault.SLOW_DOWN: 2}
        assert not store.exists("k")
        left = store._client.run(store._client.call("list_multipart_uploads", "", Prefix=parse(s3_url, {}).prefix))
        assert not left.get("Uploads")


def test_a_writer_killed_before_it_completes_an_upload_leaves_what_was_there(
    s3_url: str, tmp_path: os.PathLike[str]
) -> None:
    mark = os.path.join(tmp_path, "mark")
    with open_store(s3_url) as store:
        store.put("k", b"old")
        program = (
            "from headrace.dataio.store.open import open_store\n"
            f"open_store({s3_url!r}).put_multipart('k', [bytes(20 << 20)])"
        )
        environment = os.environ | {"HEADRACE_CRASH": "store.s3.uploaded", "HEADRACE_CRASH_MARK": mark}
        assert subprocess.run([sys.executable, "-c", program], env=environment).returncode == -9
        with open(mark) as file:
            assert file.read() == "store.s3.uploaded\n"
        assert store.get("k") == b"old"


def test_a_listing_goes_on_after_a_failed_page(behind: Store, proxy: FaultProxy) -> None:
    for key in ("a", "b", "c"):
        behind.put(key, b"")
    proxy.inject(Fault.RESET_BODY, path="list-type=2")
    assert [info.key for info in behind.list()] == ["a", "b", "c"]
    assert proxy.fired == {Fault.RESET_BODY: 1}


def test_a_bit_flipped_on_the_way_shows_why_callers_check_digests(
    client: str, behind: Store, proxy: FaultProxy
) -> None:
    body = some_bytes(1000)
    behind.put("k", body)
    proxy.inject(Fault.FLIP_BIT, method="GET")
    buffer = bytearray(1000)
    behind.get_into("k", 0, memoryview(buffer))
    assert proxy.fired == {Fault.FLIP_BIT: 1}
    assert sum(a != b for a, b in zip(buffer, body, strict=True)) == 1


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_fifty_writers_have_one_winner_in_every_of_many_rounds(s3_url: str) -> None:
    with open_store(s3_url) as store:
        assert all(race.fair for race in certify(store, "", writers=50, rounds=10))


# bounds


def test_a_multipart_upload_keeps_a_bounded_number_of_parts_in_flight(
    s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, active, seen = s3.Upload._send_part, 0, []

    async def counted(self: s3.Upload, number: int, block: io.BytesIO) -> dict[str, object]:
        nonlocal active
        active += 1
        seen.append(active)
        try:
            return await part(self, number, block)
        finally:
            active -= 1

    monkeypatch.setattr(s3.Upload, "_send_part", counted)
    with open_store(s3_url) as store:
        assert store.put_multipart("k", [bytes(90 * MIB)]) == 90 * MIB
    assert len(seen) == 12
    assert 2 <= max(seen) <= s3.IN_FLIGHT


def test_an_object_above_what_a_multipart_upload_can_hold_is_a_capacity_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "PART_BYTES", 4)
    monkeypatch.setattr(s3, "_PARTS_PER_SIZE", 2)
    most = 2 * (4 + 8 + 16 + 32)
    sizes = [block.getbuffer().nbytes for block in s3.blocks([bytes(most)], "k")]
    assert sizes == [4, 4, 8, 8, 16, 16, 32, 32]
    with pytest.raises(CapacityError, match="k: an object may have at most"):
        list(s3.blocks([bytes(most), b"1"], "k"))


def test_a_put_above_the_limit_of_one_request_is_a_capacity_error(
    client: str, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket, "PUT_BYTES", 4)
    with open_store(s3_url) as store, pytest.raises(CapacityError, match="put_multipart"):
        store.put("k", b"12345")


def test_sorting_for_a_server_that_lists_by_folder_is_bounded(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "_SORTED_LISTING", 2)
    with open_store(s3_url) as store:
        store.put("a", b"")
        store.put("b", b"")
        assert [info.key for info in store.list()] == ["a", "b"]
        store.put("c", b"")
        with pytest.raises(CapacityError, match="longer prefix"):
            list(store.list())


def test_an_object_replaced_during_a_read_of_several_spans_is_never_mixed(
    client: str, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, replaced = type(connect(parse(s3_url, {}))), asyncio.Event()
    stream, new = kind.stream, b"n" * (ranges.SPAN_BYTES + 5)

    async def replace_between(
        self: S3Client, doing: str, key: str, start: int, stop: int, consume: Consumer
    ) -> str | None:
        if start == 0:
            version = await stream(self, doing, key, start, stop, consume)
            if not replaced.is_set():
                await self.put("", key, memoryview(new))
                replaced.set()
            return version
        await replaced.wait()
        return await stream(self, doing, key, start, stop, consume)

    monkeypatch.setattr(kind, "stream", replace_between)
    buffer = bytearray(len(new))
    with S3Store(parse(s3_url, {})) as store:
        store.put("k", b"o" * len(new))
        with pytest.raises(TransientError, match="replaced while it was read"):
            store.get_into("k", 0, memoryview(buffer))
        store.get_into("k", 0, memoryview(buffer))
        assert buffer == new
