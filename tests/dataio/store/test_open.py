"""Opening a store from a URL and options: accepted and refused values, and the handling of secrets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from headrace.dataio.core.errors import UnsupportedError, UsageError
from headrace.dataio.core.metrics import store_requests
from headrace.dataio.store import open as opening
from headrace.dataio.store.base import Location, Store
from headrace.dataio.store.open import open_location, open_store, register_back_end
from headrace.dataio.store.posix import PosixStore
from headrace.dataio.store.s3_config import parse


@pytest.mark.parametrize("form", ["{}", "file://{}", "file://localhost{}", "FILE://{}", "{}/"])
def test_every_way_to_write_a_directory_opens_the_same_store(tmp_path: Path, form: str) -> None:
    folder = tmp_path / "a folder"
    text = form.format(str(folder).replace(" ", "%20") if "://" in form.lower() else folder)
    assert open_store(text).location == open_store(folder).location


def test_a_location_of_an_odd_path_opens_it_again(tmp_path: Path) -> None:
    store = open_store(tmp_path / "ä #?%41")
    store.put("k", b"1")
    assert open_location(store.location).get("k") == b"1"


def test_a_folder_whose_name_is_no_text_is_found_again_by_its_url(tmp_path: Path) -> None:
    store = open_store(os.fsdecode(os.fsencode(tmp_path) + b"/\xff%"))
    store.put("a", b"1")
    assert store.location.url.endswith("/%FF%25")
    assert open_location(store.location).get("a") == b"1"


def test_a_file_and_a_place_of_the_kernel_are_refused_when_they_are_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("file")
    for path in ("file", "link", "file/below/it"):
        with pytest.raises(UsageError, match="/file' is a file, not a directory") as caught:
            open_store(tmp_path / path)
        assert caught.value.hint
    for url in ("/proc", "file:///proc/none", "/sys/kernel"):
        with pytest.raises(UsageError, match="belongs to the kernel"):
            open_store(url)
    open_store(tmp_path / "not/yet/there").close()


def test_an_unknown_scheme_names_the_known_ones() -> None:
    with pytest.raises(UnsupportedError, match=r"file:///path.*s3://bucket/prefix"):
        open_store("gopher://host/x")


def test_a_registered_back_end_serves_its_scheme_with_metrics_and_retries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "_BACK_ENDS", dict(opening._BACK_ENDS))
    given: list[object] = []

    def opener(url: str, options: Mapping[str, object]) -> Store:
        given.extend((url, dict(options)))
        return PosixStore(tmp_path)

    register_back_end("shelved", "shelved", opener)
    with open_store("SHELVED://place", storage_options={"speed": 3}) as store:
        store.put("k", b"1")
    assert given == ["SHELVED://place", {"speed": 3}]
    assert (tmp_path / "k").read_bytes() == b"1"
    assert store_requests.labels("shelved", "put", "ok")._value.get() == 1
    with pytest.raises(UsageError, match="another process"):
        open_location(Location("shelved://place", {}, shareable=True))


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("", {}),
        ("file://host/x", {}),
        ("/data", {"key": "x"}),
        ("s3://", {}),
        ("s3:///x", {}),
        ("s3://bucket/a/../b", {}),
        ("s3://user:pw@bucket/x", {}),
        ("s3://bucket", {"endpoint": "x"}),
        ("s3://bucket", {"endpoint_url": "localhost:9000"}),
        ("s3://bucket", {"endpoint_url": "http://user:hunter2@host"}),
        ("s3://bucket", {"client_kwargs": "x"}),
        ("s3://bucket", {"key": "a", "secret": "hunter2", "client_kwargs": {"aws_secret_access_key": "hunter2"}}),
        ("s3://bucket/x?token=hunter2", {}),
        ("s3://bucket/x?sp=r&sig=hunter2", {}),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error_without_secrets(url: str, options: dict[str, object]) -> None:
    with pytest.raises(UsageError) as caught:
        open_store(url, storage_options=options)
    assert "hunter2" not in str(caught.value)
    assert ":pw" not in str(caught.value)


def test_options_win_over_variables_and_s3s_own_variable_over_the_general_one() -> None:
    environ = {
        "AWS_ENDPOINT_URL": "http://a",
        "AWS_ENDPOINT_URL_S3": "http://b",
        "AWS_REGION": "r1",
        "AWS_DEFAULT_REGION": "r2",
    }
    assert (parse("s3://x", {}, environ).endpoint_url, parse("s3://x", {}, environ).region) == ("http://b", "r1")
    given = {"endpoint_url": "http://c", "client_kwargs": {"region_name": "r3"}}
    assert (parse("s3://x", given, environ).endpoint_url, parse("s3://x", given, environ).region) == ("http://c", "r3")


@pytest.mark.parametrize(
    ("options", "style"),
    [
        ({}, "auto"),
        ({"endpoint_url": "http://host"}, "path"),
        ({"endpoint_url": "http://host", "path_style": False}, "virtual"),
        ({"path_style": True}, "path"),
        ({"endpoint_url": "http://host", "config_kwargs": {"s3": {"addressing_style": "virtual"}}}, "virtual"),
        ({"endpoint_url": "https://s3.eu-west-1.amazonaws.com"}, "virtual"),
    ],
)
def test_the_addressing_style_follows_the_endpoint_unless_it_is_given(options: dict[str, object], style: str) -> None:
    arguments = parse("s3://x", options, {}).s3fs_arguments()
    assert arguments["config_kwargs"]["s3"]["addressing_style"] == style  # type: ignore[index]


def test_the_clients_own_retries_are_off_whatever_is_given() -> None:
    given = {"config_kwargs": {"retries": {"max_attempts": 10}, "read_timeout": 7}}
    config = parse("s3://x", given, {}).s3fs_arguments()["config_kwargs"]
    assert config["retries"] == {"total_max_attempts": 1}  # type: ignore[index]
    assert config["read_timeout"] == 7  # type: ignore[index]


SECRETS = {
    "key": "AK-hidden",
    "secret": "s-hidden",
    "client_kwargs": {"aws_session_token": "t-hidden", "region_name": "eu"},
}


def test_secrets_reach_the_client_and_nothing_else() -> None:
    config = parse("s3://bucket/x", SECRETS, {})
    assert "hidden" not in f"{config!r} {config.public}"
    assert not config.shareable
    arguments = config.s3fs_arguments()
    assert (arguments["key"], arguments["secret"]) == ("AK-hidden", "s-hidden")
    assert arguments["client_kwargs"] == {"aws_session_token": "t-hidden", "region_name": "eu"}


def test_the_password_of_a_proxy_reaches_the_client_and_nothing_else() -> None:
    given = {"config_kwargs": {"proxies": {"http": "http://me:hidden@proxy:1"}, "read_timeout": 7}}
    config = parse("s3://bucket/x", given, {"AWS_REGION": "eu"})
    assert "hidden" not in f"{config!r} {config.public}"
    assert not config.shareable
    assert "proxies" in str(config.unsupported_by_obstore())
    assert config.s3fs_arguments()["config_kwargs"]["proxies"] == given["config_kwargs"]["proxies"]  # type: ignore[index]


def test_a_store_opened_with_secrets_is_not_opened_elsewhere_by_its_location() -> None:
    with open_store("s3://bucket/x", storage_options=SECRETS) as store:
        assert "hidden" not in f"{store!r} {store.location}"
        with pytest.raises(UsageError, match="variables"):
            open_location(store.location)
    with pytest.raises(UsageError):
        open_location(Location("s3://bucket", {"secret": "x"}, shareable=True))


def test_a_profile_is_no_secret_and_travels_with_the_location() -> None:
    config = parse("s3://bucket/x/", {"profile": "train", "anon": False, "region": "eu"}, {})
    assert config.shareable
    assert config.url == "s3://bucket/x"
    assert parse(config.url, config.public, {}) == config


@pytest.mark.parametrize("url", ["s3:/bucket/clips", "gs:/bucket", "az:/container", "https:/host/x", "file:/tmp/x"])
def test_a_url_with_one_slash_is_not_taken_for_a_local_folder(url: str) -> None:
    with pytest.raises(UsageError, match="has one slash after") as caught:
        open_store(url)
    assert f"write {url.partition(':')[0]}://" in caught.value.hint


def test_a_folder_whose_name_looks_like_a_scheme_is_reached_by_its_path(tmp_path: Path) -> None:
    with open_store(f"{tmp_path}/s3:/bucket") as store:
        assert store.location.url.startswith("file://")
