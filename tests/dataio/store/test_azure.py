"""Azure Blob Storage through obstore, on Azurite: the contract, bad input, and a server that is silent."""

from __future__ import annotations

import asyncio
import socket
import uuid
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest

from headrace.dataio.core.errors import (
    AccessDeniedError,
    CapacityError,
    NotFoundError,
    TransientError,
    UsageError,
)
from headrace.dataio.store import retry
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from headrace.dataio.testing.conformance import StoreConformance
from tests.support import azurite

azure = pytest.importorskip("headrace.dataio.store.azure", reason="the extra s3 is not installed")
needs_azurite = pytest.mark.skipif(not azurite.installed(), reason="npm install -g azurite")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with azurite.start_azurite(tmp_path_factory.mktemp("azurite"), "headrace") as variables:
        yield variables


@pytest.fixture
def az_url(server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    return f"az://headrace/{uuid.uuid4().hex}"


@needs_azurite
class TestAzure(StoreConformance):
    many = 1050

    @pytest.fixture
    def store_url(self, az_url: str) -> str:
        return az_url

    @pytest.fixture
    def store(self, store_url: str) -> Iterator[Store]:
        with open_store(store_url) as opened:
            yield opened


@needs_azurite
def test_a_missing_container_is_named(az_url: str) -> None:
    with open_store("az://missing/x") as store:
        for operation in (lambda: store.get("k"), lambda: store.put("k", b""), lambda: list(store.list())):
            with pytest.raises(NotFoundError, match="'missing'"):
                operation()


@needs_azurite
def test_a_wrong_key_is_access_denied_and_never_shown(az_url: str) -> None:
    secret = "aGlkZGVuLXNlY3JldA=="
    with open_store(az_url, storage_options={"account_key": secret}) as store:
        for operation in (lambda: store.get("k"), lambda: store.put("k", b""), lambda: list(store.list())):
            with pytest.raises(AccessDeniedError, match="AZURE_STORAGE_ACCOUNT_KEY") as caught:
                operation()
            assert secret not in f"{caught.value!r} {caught.value}"
        assert not store.location.shareable
        assert secret not in f"{store!r} {store.location}"


@needs_azurite
def test_an_object_above_the_limit_of_one_write_is_a_capacity_error(
    az_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(azure, "WRITE_BYTES", 4)
    with open_store(az_url) as store, pytest.raises(CapacityError, match="at most"):
        store.put_multipart("k", [b"123", b"45"])


@needs_azurite
def test_a_listing_that_is_too_long_to_sort_is_a_capacity_error(az_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(azure, "LISTED", 1)
    with open_store(az_url) as store:
        store.put("a", b"1")
        store.put("b", b"1")
        with pytest.raises(CapacityError, match="longer prefix"):
            list(store.list())


def test_a_name_that_ends_in_a_slash_is_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, stored = {"empty": 0, "folder": 0, "folder/a": 1, "full": 7, "full/b": 1}, {"empty", "folder/a", "full/b"}
    asked: list[str] = []

    async def pages(container: Any, prefix: str | None) -> AsyncIterator[list[dict[str, object]]]:
        yield [{"path": name, "size": size, "last_modified": datetime.now(UTC)} for name, size in sizes.items()]

    async def head(container: Any, key: str) -> None:
        asked.append(key)
        if key not in stored:
            raise FileNotFoundError(key)

    async def send(client: Any, doing: str, request: Any, seconds: float | None) -> Any:
        return await request(None)

    monkeypatch.setattr(azure.obstore, "list", pages)
    monkeypatch.setattr(azure.obstore, "head_async", head)
    monkeypatch.setattr(azure.AzureClient, "_send", send)
    client = azure.AzureClient(azure.AzureConfig("c", "", {}))
    assert [name for name, _ in asyncio.run(client.list_all("listing", ""))] == ["empty", "folder/a", "full/b"]
    assert sorted(asked) == ["empty", "folder", "full"]


def test_folders_of_a_container_that_are_sorted_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    async def paths(*_: object) -> list[str]:
        return ["x/a", "x/b"]

    monkeypatch.setattr(azure, "LISTED", 1)
    with azure.AzureStore(azure.AzureConfig("c", "x", {})) as store:
        monkeypatch.setattr(store._client, "_send", paths)
        with pytest.raises(CapacityError, match="longer prefix"):
            list(store.list_folders())
        monkeypatch.setattr(azure, "LISTED", 2)
        assert list(store.list_folders()) == ["a", "b"]


@pytest.mark.parametrize("url", ["az://", "az://user@container/x", "az://container/x?sig=1"])
def test_a_url_names_a_container_and_a_prefix(url: str) -> None:
    with pytest.raises(UsageError, match="az://container/prefix"):
        open_store(url)


def test_an_unknown_option_is_a_usage_error() -> None:
    with (
        open_store("az://c/x", storage_options={"account_name": "a", "bogus": 1}) as store,
        pytest.raises(UsageError, match="account_name"),
    ):
        store.get("k")


def test_a_silent_server_is_given_up_after_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(azure, "CONNECT_SECONDS", 0.2)
    monkeypatch.setattr(azure, "READ_SECONDS", 0.2)
    monkeypatch.setattr(azure.limits, "LEAST_RATE", azure.limits.GIB)
    for module in (azure, retry):
        monkeypatch.setattr(module, "Policy", partial(retry.Policy, attempts=2))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}/a"
        options = {"account_name": "a", "account_key": "aGlkZGVu", "endpoint": endpoint}
        with open_store("az://c/x", storage_options=options) as store:
            for operation in (
                lambda: store.get("k"),
                lambda: store.put("k", b"1"),
                lambda: list(store.list()),
                lambda: list(store.list_folders()),
                lambda: store.delete_many(["k"]),
            ):
                with pytest.raises(TransientError):
                    operation()
