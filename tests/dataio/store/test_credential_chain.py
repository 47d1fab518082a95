"""Credentials that change while a store is open, and secrets that are never shown."""

from __future__ import annotations

import concurrent.futures
import datetime
import http.server
import json
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.dataio.core.errors import AccessDeniedError
from headrace.dataio.store.credential_chain import Keys as Values
from headrace.dataio.store.open import open_store
from headrace.dataio.testing.s3_server import Keys, S3Server, start_seaweedfs
from tests.conftest import use_s3_server

pytestmark = pytest.mark.s3
MIB = 1 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    """A server of this module's own, whose keys are changed."""
    with start_seaweedfs() as running:
        running.create_bucket("headrace")
        yield running


@pytest.fixture(params=["s3fs", "obstore"])
def url(request: pytest.FixtureRequest, server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty place, for each client in turn; the keys of the variables are in force."""
    if request.param != "s3fs":
        pytest.importorskip("obstore", reason="the extra s3 is not installed")
    use_s3_server(server, monkeypatch)
    monkeypatch.setenv("HEADRACE_S3", request.param)
    _set(monkeypatch, new := _new_keys())
    server.change_keys(new)
    return f"s3://headrace/{uuid.uuid4().hex}"


def _new_keys() -> Keys:
    return Keys(f"user-{uuid.uuid4().hex}", f"hidden-{uuid.uuid4().hex}")


def _set(monkeypatch: pytest.MonkeyPatch, keys: Keys) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", keys.access)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", keys.secret)


def _unset(monkeypatch: pytest.MonkeyPatch) -> Keys:
    found = Keys(os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"])
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    return found


def _write(path: Path, keys: Keys, profile: str = "default") -> None:
    text = f"[{profile}]\naws_access_key_id = {keys.access}\naws_secret_access_key = {keys.secret}\n"
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").replace(path)


@pytest.mark.parametrize("options", [{}, {"profile": "train"}], ids=["default", "profile"])
def test_a_credentials_file_that_is_rewritten_takes_effect_in_an_open_store(
    url: str, server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, str]
) -> None:
    file, profile = tmp_path / "credentials", options.get("profile", "default")
    _write(file, _unset(monkeypatch), profile)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    with open_store(url, storage_options=options) as store:
        store.put("k", b"before")
        _write(file, new := _new_keys(), profile)
        server.change_keys(new)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert set(pool.map(store.get, ["k"] * 16)) == {b"before"}
        store.put_multipart("parts", [bytes(9 * MIB)])
        assert store.put_if_absent("mine", b"1")
        assert [info.key for info in store.list()] == ["k", "mine", "parts"]


def test_changed_variables_take_effect_in_an_open_store(
    url: str, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(url) as store:
        assert store.put_if_absent("k", b"1")
        server.change_keys(new := _new_keys())
        for operation in (lambda: store.get("k"), lambda: store.put("k", b"2"), lambda: list(store.list())):
            with pytest.raises(AccessDeniedError, match="AWS_ACCESS_KEY_ID"):
                operation()
        _set(monkeypatch, new)
        assert store.get("k") == b"1"


def test_changed_variables_take_effect_for_threads_that_ask_by_themselves(
    url: str, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(url) as store, concurrent.futures.ThreadPoolExecutor(2) as pool:
        store.put("k", b"1")
        for _ in range(2):
            buffer = bytearray(1)
            pool.submit(store.get_into, "k", 0, memoryview(buffer)).result(60)
            assert (bytes(buffer), pool.submit(store.stat, "k").result(60).size) == (b"1", 1)
            server.change_keys(new := _new_keys())
            with pytest.raises(AccessDeniedError, match="AWS_ACCESS_KEY_ID"):
                pool.submit(store.get_into, "k", 0, memoryview(buffer)).result(60)
            _set(monkeypatch, new)


def test_keys_given_as_options_are_never_replaced_by_others(
    url: str, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = Keys(os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"])
    with open_store(url, storage_options={"key": keys.access, "secret": keys.secret}) as store:
        store.put("k", b"1")
        server.change_keys(new := _new_keys())
        _set(monkeypatch, new)
        with pytest.raises(AccessDeniedError):
            store.get("k")


class _Metadata(http.server.ThreadingHTTPServer):
    """The instance metadata service of a machine with a role: IMDSv2."""

    def __init__(self, keys: Keys) -> None:
        super().__init__(("127.0.0.1", 0), _MetadataHandler)
        self.keys, self.asked = keys, 0


class _MetadataHandler(http.server.BaseHTTPRequestHandler):
    server: _Metadata

    def do_PUT(self) -> None:
        self._say("token")

    def do_GET(self) -> None:
        if not self.path.endswith("/role"):
            return self._say("role")
        self.server.asked += 1
        expires = datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=5)
        answer = {"Code": "Success", "AccessKeyId": self.server.keys.access, "SecretAccessKey": self.server.keys.secret}
        return self._say(json.dumps(answer | {"Token": "", "Expiration": expires.strftime("%Y-%m-%dT%H:%M:%SZ")}))

    def _say(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


def test_a_machines_role_is_refreshed_by_the_clients_own_chain(
    url: str, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = _Metadata(_unset(monkeypatch))
    thread = threading.Thread(target=metadata.serve_forever)
    thread.start()
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "false")
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://127.0.0.1:{metadata.server_port}")
    try:
        with open_store(url) as store:
            store.put("k", b"1")
            metadata.keys = new = _new_keys()
            server.change_keys(new)
            assert store.get("k") == b"1"
            assert metadata.asked >= 2
    finally:
        metadata.shutdown()
        thread.join()
        metadata.server_close()


_FAILING = """
import logging, sys, traceback
logging.basicConfig(level=logging.DEBUG)
from headrace.dataio.store.open import open_store
for options in {options!r}:
    store = open_store({url!r}, storage_options=options).inner  # without retries
    print(repr(store), store.location, repr(store.inner._client), repr(store.inner._config))
    for work in (lambda: store.get("k"), lambda: store.put("k", b""), lambda: list(store.list()),
                 lambda: store.put_if_absent("k", b""), lambda: store.put_multipart("k", [bytes(9 << 20)]),
                 lambda: store.stat("k"), lambda: store.get_into("k", 0, memoryview(bytearray(3)))):
        try: work()
        except Exception as error:
            traceback.print_exc()
            print(repr(error), error, error.hint, vars(error))
        else: raise SystemExit("it should have failed")
    store.close()
"""


def test_no_failing_operation_shows_a_secret_anywhere(url: str, server: S3Server, tmp_path: Path) -> None:
    secret, token = "hidden-" + "s" * 33, "hidden-" + "t" * 99
    by_option = {"key": "somebody-else", "secret": secret, "token": token}
    program = _FAILING.format(options=[{}, by_option, {"endpoint_url": "http://127.0.0.1:9"}], url=url)
    environment = os.environ | {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": secret}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=150)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-3000:]
    assert said.count("Traceback") >= 3 * 7
    assert "AccessDeniedError" in said
    assert "hidden-s" not in said
    assert "obstore.exceptions" not in said


def test_values_to_sign_with_have_no_repr_of_them() -> None:
    assert repr(Values("hidden", "hidden", "hidden")) == "Keys()"


_DEBUGGING = """
import logging
logging.basicConfig(level=logging.DEBUG)
from headrace.dataio.core.errors import HeadraceError
from headrace.dataio.store.open import open_store
keys = {"key": "AKIA" + "A" * 16, "secret": "hidden-secret", "token": "hidden-token"}
with open_store("s3://bucket", storage_options={"endpoint_url": "http://127.0.0.1:9", "client": "s3fs", **keys}) as store:
    try: store.get("a")
    except HeadraceError as error: print(type(error).__name__)
"""


def test_a_trainer_that_logs_everything_logs_no_session_token() -> None:
    done = subprocess.run([sys.executable, "-c", _DEBUGGING], capture_output=True, text=True, timeout=150)
    assert done.stdout == "UnreachableError\n", done.stderr[-2000:]
    assert "botocore.auth:" in done.stderr
    assert "x-amz-security-token" in done.stderr
    assert "hidden-" not in done.stderr
