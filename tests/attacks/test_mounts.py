"""A dataset whose document names stores to be opened for its reader: files written, private files and hosts read, tokens sent."""

from __future__ import annotations

import http.server
import threading
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.dataio import Dataset, cli, index
from headrace.dataio.core.errors import AccessDeniedError, CorruptionError, HeadraceError, UnsupportedError, UsageError
from headrace.dataio.shards.ingest.pack import append
from headrace.dataio.shards.verify.dataset_check import verify
from headrace.dataio.shards.versions import documents
from headrace.dataio.shards.versions.documents import Mount
from headrace.dataio.shards.versions.mounting import mount_of, with_mounts
from headrace.dataio.store import url_policy
from headrace.dataio.store.base import Location, Store
from headrace.dataio.store.mounts import Mounts
from headrace.dataio.store.open import open_location, open_store
from tests.attacks import forge

GIVEN = {"key": "AKIAEXPLICITKEY00000", "secret": "explicit/secret", "token": "SESSIONTOKEN", "region": "us-east-1"}
SIGNED = ("authorization", "x-amz-security-token")


class Server:
    """An HTTP server that writes down what it is asked; `location` is where it sends its callers on to."""

    def __init__(self, host: str = "127.0.0.1", location: str = "") -> None:
        asked: list[dict[str, str]] = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append({name.lower(): value for name, value in self.headers.items()} | {"path": self.path})
                self.send_response(302 if location else 404)
                self.send_header("location", location)
                self.send_header("content-length", "0")
                self.end_headers()

            do_HEAD = do_CONNECT = do_GET

            def log_message(self, *_: object) -> None: ...

        self.asked, self._server = asked, http.server.ThreadingHTTPServer((host, 0), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://{host}:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def attacker() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAOFTHEPROCESS0000")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "processsecret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "PROCESSTOKEN")


def mounted(
    base: Store, url: str, options: dict[str, Any] | None = None, *, trust: bool = False, given: Any = ()
) -> Store:
    """`base` with what a version that mounts `url` as m1 names."""
    mount = Mount(name="m1", url=url, options=options or {})
    document = documents.new_document("x", (), (), version=1, parent=None, message="", mounts=(mount,))
    return with_mounts(base, document, False, dict(given), trust)[0]


def asked_for(store: Store) -> HeadraceError | None:
    """What reading an object of the mount raises."""
    with store:
        try:
            store.get("mounts/m1/a")
        except HeadraceError as error:
            return error
    return None


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("simplecache://{server}", {"target_protocol": "http", "cache_storage": "{victim}", "same_names": True}),
        ("filecache://{server}", {"target_protocol": "http", "cache_storage": "{victim}", "same_names": True}),
        ("SimpleCache://{server}", {"target_protocol": "http", "cache_storage": "{victim}"}),
        ("blockcache://{server}", {"target_protocol": "http", "cache_storage": "{victim}"}),
        ("reference://", {"fo": {"version": 1, "refs": {"a": ["{{ cycler.__init__ }}"]}}, "simple_templates": False}),
        ("reference:///", {"fo": "{server}/r.json"}),
        ("zip:///", {"fo": "{server}/z.zip"}),
        ("dir:///x", {"path": "/etc", "target_protocol": "file"}),
        ("local:///etc", {}),
        ("hf://datasets/a/b", {"endpoint": "{server}"}),
        ("github://x", {"org": "o", "repo": "r"}),
        ("gs://bucket/x", {"endpoint_url": "{server}"}),
        ("arrow_hdfs://127.0.0.1:9/x", {}),
        ("memory://x", {}),
        ("bad\x1b]0;title\x07://x", {}),
    ],
)
def test_other_file_systems_are_named_by_no_document(
    tmp_path: Path, attacker: Server, monkeypatch: pytest.MonkeyPatch, url: str, options: dict[str, Any], trust: bool
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_reader")
    victim = tmp_path / "victim"

    def filled(text: object) -> Any:
        return text.format(server=attacker.url, victim=victim) if isinstance(text, str) and "{{" not in text else text

    with open_store(tmp_path / "ds") as base, pytest.raises(UnsupportedError, match="may not name") as caught:
        mounted(base, filled(url), {name: filled(value) for name, value in options.items()}, trust=trust)
    assert str(caught.value).isprintable()
    assert 'storage_options={"mounts": ' in caught.value.hint
    assert not victim.exists()
    assert attacker.asked == []


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://2130706433#/x", {}),
        ("s3://host?x/y", {}),
        ("s3://b/x", {"region": "x@evil.example:443/"}),
        ("s3://b/x", {"endpoint_url": "https://user:pw@evil.example"}),
        ("s3://b/x", {"endpoint_url": ["https://evil.example"]}),
        ("s3://b/x", {"anon": "yes"}),
        ("file://host/etc", {}),
        ("/etc", {"direct": "x"}),
        ("/etc", {"mounts": {"m2": {"url": "/"}}}),
    ],
)
def test_values_that_cannot_be_meant_are_refused(tmp_path: Path, url: str, options: dict[str, Any]) -> None:
    with open_store(tmp_path) as base, pytest.raises(CorruptionError, match="mount"):
        mounted(base, url, options, trust=True)


# --- credentials


def test_credentials_reach_no_endpoint_that_only_the_document_names(attacker: Server) -> None:
    through = {"proxies": {"http": attacker.url, "https": attacker.url}}
    hidden = {
        "client_kwargs": {"endpoint_url": attacker.url, "verify": False},
        "config_kwargs": through,
        "profile": "x",
    }
    for base_options, given in (({}, GIVEN), ({"endpoint_url": "http://127.0.0.1:1"}, GIVEN), ({}, {})):
        with open_store("s3://honest/ds", storage_options={**base_options, **given}) as base:
            store = mounted(base, "s3://evil/x", hidden, given=given)
            assert store.location.options["mounts"]["m1"]["options"].keys() <= {"region", "path_style"}  # type: ignore[index]
            store.close()
            with pytest.raises(UsageError, match=f"another endpoint.*{attacker.port}.*trust_mounts"):
                mounted(base, "s3://evil/x", {"endpoint_url": attacker.url}, given=given)
            error = asked_for(mounted(base, "s3://evil/x", {"endpoint_url": attacker.url}, given=given, trust=True))
            assert error is not None
    assert attacker.asked, "the trusted endpoint was not asked"
    assert not [name for headers in attacker.asked for name in SIGNED if name in headers]


@pytest.mark.parametrize("named", ["option", "variable"])
def test_the_endpoint_that_the_caller_names_gets_the_credentials_of_its_own(
    attacker: Server, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    given: dict[str, Any] = {**GIVEN, "endpoint_url": attacker.url} if named == "option" else {}
    if named == "variable":
        monkeypatch.setenv("AWS_ENDPOINT_URL", attacker.url)
    with open_store("s3://honest/ds", storage_options=given) as base:
        assert asked_for(mounted(base, "s3://other/x", {"endpoint_url": attacker.url + "/"}, given=given)) is not None
    expected = "AKIAEXPLICITKEY00000" if given else "AKIAOFTHEPROCESS0000"
    assert {expected in headers["authorization"] for headers in attacker.asked} == {True}


def test_a_reader_does_not_pay_for_the_requests_of_another_bucket(tmp_path: Path) -> None:
    with open_store("s3://mine/ds") as base:
        mounted(base, "s3://mine/tars", {"requester_pays": True}).close()
        with pytest.raises(UsageError, match="pay"):
            mounted(base, "s3://yours/tars", {"requester_pays": True})
        mounted(base, "s3://yours/tars", {"requester_pays": True}, trust=True).close()
    with open_store(tmp_path) as base, pytest.raises(UsageError, match="pay"):
        mounted(base, "s3://yours/tars", {"requester_pays": True})


# --- folders of this machine


def test_a_folder_outside_the_dataset_needs_trust(tmp_path: Path) -> None:
    inside, outside = tmp_path / "ds" / "more", tmp_path / "private"
    for folder in (inside, outside):
        folder.mkdir(parents=True)
        (folder / "a").write_bytes(b"1")
    (tmp_path / "ds" / "link").symlink_to(outside)
    with open_store(tmp_path / "ds") as base:
        with mounted(base, f"file://{inside}") as store:
            assert store.get("mounts/m1/a") == b"1"
        for url in (
            f"file://{outside}",
            f"FILE://{outside}",
            str(outside),
            f"file://{tmp_path}/ds/link",
            f"{tmp_path}/ds",
        ):
            with pytest.raises(UsageError, match=r"outside the dataset.*trust_mounts=True \(--trust-mounts"):
                mounted(base, url)
        with mounted(base, f"file://{outside}", trust=True) as store:
            assert store.get("mounts/m1/a") == b"1"


def test_trust_is_given_to_everything_that_opens_a_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tars = forge.good(tmp_path / "tars") / "shards"
    place = tmp_path / "ds"
    index(tars, place).close()  # the indexer named the folder itself
    with wave.open(str(tmp_path / "new.wav"), "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(bytes(1600))
    for opener in (Dataset, Dataset.open_lazy, verify):
        with pytest.raises(UsageError, match="trust_mounts"):
            opener(place)
    assert not verify(place, trust_mounts=True).damaged
    with Dataset(place, trust_mounts=True) as dataset:
        assert dataset.read(dataset.sample(1), "bin") == b"22222"
        assert len(dataset.remove(["b"])) == 1
    with Dataset.open_lazy(place, trust_mounts=True) as dataset:
        assert len(dataset) == 1
    with pytest.raises(UsageError, match="trust_mounts"):
        append(tmp_path / "new.wav", place, workers=1)
    with append(tmp_path / "new.wav", place, workers=1, trust_mounts=True) as dataset:
        assert list(dataset.keys) == ["a", "new"]
    with pytest.raises(UsageError, match="neither True nor False"):
        Dataset(place, trust_mounts="no")  # type: ignore[arg-type]
    for command in (["info"], ["ls"], ["cat", "a"], ["verify"], ["order"]):
        words = [command[0], str(place), *command[1:]]
        assert cli.main(words) == 2, command
        assert cli.main([*words, "--trust-mounts"]) == 0, command
    assert "--trust-mounts" in capsys.readouterr().err


def test_loaders_take_trust_too(tmp_path: Path) -> None:
    from headrace.loaders import FileLoader, Mixture

    index(forge.good(tmp_path / "tars") / "shards", tmp_path / "ds").close()
    how: dict[str, Any] = {"files": ["bin"], "batch_size": 2, "rank": 0, "world_size": 1, "sidecar": None}
    for place in (str(tmp_path / "ds"), Mixture({"one": str(tmp_path / "ds")})):
        with pytest.raises(UsageError, match="trust_mounts"):
            FileLoader(place, **how)
        with FileLoader(place, trust_mounts=True, **how) as loader:
            assert len(next(iter(loader))["key"]) == 2


def test_what_the_caller_merges_is_named_by_the_caller(tmp_path: Path) -> None:
    one, two = forge.good(tmp_path / "one"), forge.good(tmp_path / "two")
    with Dataset(one) as dataset, Dataset(two) as other:
        dataset.remove(["a"])
        with dataset.merge(other.where("key = 'a'")) as merged:
            assert sorted(merged.keys) == ["a", "b"]
    with pytest.raises(UsageError, match="trust_mounts"):
        Dataset(one)
    # a mount of that name that lies elsewhere is another one
    with Dataset(one, trust_mounts=True) as again:
        mount = again.document.mounts[0]
        assert mount == mount_of(Location(f"file://{two}", {}, True))
    with (
        open_store(one, storage_options={"mounts": {"other": {"url": f"file://{two}"}}}) as base,
        pytest.raises(UsageError, match="trust"),
    ):
        mounted(base, f"file://{tmp_path}/else")


def test_mounts_that_the_caller_opens_are_those_that_are_read(tmp_path: Path) -> None:
    tars = forge.good(tmp_path / "tars") / "shards"
    with index(tars, tmp_path / "ds") as dataset:
        name = dataset.document.mounts[0].name
    with Dataset(tmp_path / "ds", storage_options={"mounts": {name: {"url": f"file://{tars}"}}}) as dataset:
        assert dataset.read(dataset.sample(1), "bin") == b"22222"


@pytest.mark.parametrize("trust", [False, True])
def test_a_mount_that_the_caller_opens_is_kept_when_the_document_has_others(tmp_path: Path, trust: bool) -> None:
    folders = [tmp_path / name for name in ("ds", "ds/below", "old", "new")]
    for folder in folders:
        folder.mkdir()
        (folder / "a").write_bytes(folder.name.encode())
    place, below, old, new = folders
    mounts = (Mount(name="m1", url=f"file://{old}"), Mount(name="m2", url=f"file://{below}"))
    document = documents.new_document("x", (), (), version=1, parent=None, message="", mounts=mounts)
    for owned in (True, False):
        base = open_store(place, storage_options={"mounts": {"m1": {"url": f"file://{new}"}}})
        assert isinstance(base, Mounts)
        closed: list[str] = []
        base.mounted["m1"].close = lambda closed=closed: closed.append("m1")  # type: ignore[method-assign, misc]
        store, to_close = with_mounts(base, document, owned, {}, trust)
        assert to_close
        assert [store.get(f"mounts/{name}/a") for name in ("m1", "m2")] == [b"new", b"below"]
        store.close()
        assert closed == ["m1"] * owned
        base.close()


# --- hosts


def test_a_private_host_needs_trust_whatever_it_is_called(tmp_path: Path, attacker: Server) -> None:
    urls = [attacker.url, f"http://localhost:{attacker.port}", f"http://0.0.0.0:{attacker.port}"]
    with open_store(tmp_path) as base:
        for url in urls:
            error = asked_for(mounted(base, url))
            assert isinstance(error, AccessDeniedError), (url, error)
            assert "not a public address" in error.message
            assert "trust_mounts" in error.hint
        assert attacker.asked == []
        assert asked_for(mounted(base, attacker.url, {"headers": {"x-secret": "1"}}, trust=True)) is not None
    assert attacker.asked
    assert not [headers for headers in attacker.asked if "x-secret" in headers]
    with open_store(attacker.url + "/ds") as base:  # the server that the dataset itself is read from
        count = len(attacker.asked)
        asked_for(mounted(base, attacker.url + "/tars"))
        assert len(attacker.asked) > count


def test_a_public_server_cannot_send_the_reader_on_to_a_private_one(
    tmp_path: Path, attacker: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    public = Server("127.0.0.2", location=attacker.url + "/latest/meta-data")
    monkeypatch.setattr(url_policy, "is_public", lambda address: address == "127.0.0.2")
    try:
        with open_store(tmp_path) as base:
            error = asked_for(mounted(base, public.url))
    finally:
        public.close()
    assert public.asked, "the public server was not asked"
    assert isinstance(error, AccessDeniedError)
    assert attacker.asked == []


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        ("127.0.0.1", False),
        ("0.0.0.0", False),
        ("10.1.2.3", False),
        ("100.64.0.1", False),
        ("169.254.169.254", False),
        ("172.16.0.1", False),
        ("192.168.0.1", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("::", False),
        ("fe80::1%eth0", False),
        ("fd00:ec2::254", False),
        ("fec0::1", False),
        ("ff02::1", False),
        ("::ffff:169.254.169.254", False),
        ("::ffff:93.184.216.34", True),
        ("64:ff9b::a9fe:a9fe", False),
        ("2002:a9fe:a9fe::1", False),
        ("2002:5db8:d822::1", True),
        ("64:ff9b::5db8:d822", True),
        ("64:ff9b::a83f:8110", False),
        ("64:ff9b:1::5db8:d822", False),
        ("192.0.0.8", False),
        ("192.0.0.192", False),
        ("168.63.129.16", False),
        ("::ffff:168.63.129.16", False),
        ("::a9fe:a9fe", False),
        ("::5db8:d822", False),
        ("::ffff:0:a9fe:a9fe", False),
        ("::ffff:0:5db8:d822", False),
        ("2001:0:5db8:d822::a247:27dd", False),
        ("4000::1", False),
    ],
)
def test_which_addresses_are_public(address: str, public: bool) -> None:
    assert url_policy.is_public(address) is public


# --- another process


def test_the_daemon_opens_no_other_file_system_and_keeps_the_guard(tmp_path: Path, attacker: Server) -> None:
    cached = {"target_protocol": "http", "cache_storage": str(tmp_path / "victim"), "same_names": True}
    places: list[tuple[str, dict[str, object]]] = [
        (f"simplecache://{attacker.url}", dict(cached)),
        ("hf://datasets/a/b", {"endpoint": attacker.url}),
        ("local:///etc", {"auto_mkdir": True}),
        (attacker.url, {"get_client": "x"}),
    ]
    for url, options in places:
        with pytest.raises(UsageError, match="not opened for another process"):
            open_location(Location(url, options, True))
        with pytest.raises(UsageError, match="not opened for another process"):
            open_location(Location(str(tmp_path), {"mounts": {"m1": {"url": url, "options": options}}}, True))
    with open_store(tmp_path) as base, mounted(base, attacker.url) as store:
        assert store.location.shareable
        error = asked_for(open_location(store.location))
    assert isinstance(error, AccessDeniedError)
    assert attacker.asked == []
    assert not (tmp_path / "victim").exists()


def test_what_is_recorded_are_the_allowed_options_only() -> None:
    given = {**GIVEN, "endpoint_url": "http://127.0.0.1:1", "anon": False, "config_kwargs": {"read_timeout": 5}}
    with open_store("s3://b/x", storage_options={"client_kwargs": {"verify": "/my/ca.pem"}, **given}) as store:
        assert mount_of(store.location).options == {
            "endpoint_url": "http://127.0.0.1:1",
            "region": "us-east-1",
            "path_style": True,
            "anon": False,
        }
    assert mount_of(Location("gs://b/x", {"project": "mine"}, True)).options == {}


def test_escapes_reach_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, evil = forge.good(tmp_path / "good"), "\x1b]0;title\x07"
    changes: list[Any] = [
        lambda d: d["shards"][0].update(key=f"shards/{evil}.tar"),
        lambda d: d["index"][0].update(key=f"index/{evil}.parquet"),
        lambda d: d.update(name=evil, message=evil, created=evil),
        lambda d: d.update(mounts=[{"name": "m1", "url": f"bad{evil}://x", "options": {}}]),
    ]
    for number, change in enumerate(changes):
        copy = forge.copy(folder, tmp_path / str(number))
        forge.change_document(copy, change)
        for words in (["info"], ["verify"], ["ls"], ["log"], ["info", "--trust-mounts"]):
            cli.main([words[0], str(copy), *words[1:]])
    cli.main(["info", f"bad{evil}://x"])
    cli.main([f"in{evil}fo"])
    said = capsys.readouterr()
    assert "title" in said.err
    assert "\x1b" not in said.out + said.err


def test_options_of_s3_that_are_not_known_to_be_public_are_kept_as_secrets_are() -> None:
    given: dict[str, Any] = {
        "client_kwargs": {"verify": False, "custom": "hunter2"},
        "config_kwargs": {"read_timeout": 5, "proxies_config": {"x": ["hunter2"]}, "proxies": {"http": "http://p:1"}},
    }
    with open_store("s3://b/x", storage_options={"endpoint_url": "http://127.0.0.1:1", **given}) as store:
        location = store.location
        assert location.options["client_kwargs"] == {"verify": False}
        assert location.options["config_kwargs"] == {"read_timeout": 5, "proxies": {"http": "http://p:1"}}
        assert not location.shareable
        assert "hunter2" not in f"{store!r} {location!r}"
    del given["client_kwargs"]["custom"], given["config_kwargs"]["proxies_config"]
    with open_store("s3://b/x", storage_options={"endpoint_url": "http://127.0.0.1:1", **given}) as store:
        assert store.location.shareable
