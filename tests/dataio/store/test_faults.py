"""What a server, a network and a proxy may do to a request, on a real S3 server: each fault fires, and the outcome is right."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from headrace.dataio.core.errors import ConflictError, TransientError
from headrace.dataio.core.limits import MIB
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from headrace.dataio.testing.fault_proxy import Fault, FaultProxy
from tests.support.waiting import wait_for

pytestmark = pytest.mark.s3


@pytest.fixture(params=["s3fs", "obstore"])
def store(request: pytest.FixtureRequest, s3_url: str, proxy: FaultProxy) -> Iterator[Store]:
    if request.param == "obstore":
        pytest.importorskip("obstore", reason="the extra s3 is not installed")
    with open_store(s3_url, storage_options={"endpoint_url": proxy.endpoint, "client": request.param}) as opened:
        yield opened


@pytest.mark.parametrize("fault", [Fault.APPLIED_409, Fault.APPLIED_412, Fault.LOSE_ANSWER])
def test_a_refusal_of_a_write_that_was_applied_is_found_out_by_reading_back(
    store: Store, proxy: FaultProxy, fault: Fault
) -> None:
    proxy.inject(fault, method="PUT")
    assert store.put_if_absent("k", b"mine")
    assert proxy.fired[fault] == 1
    assert not store.put_if_absent("k", b"another's")
    assert store.get("k") == b"mine"


def test_a_conditional_write_that_is_applied_late_changes_nothing(store: Store, proxy: FaultProxy) -> None:
    proxy.inject(Fault.LATE, method="PUT", seconds=0.5)
    assert store.put_if_absent("k", b"mine")
    wait_for(lambda: proxy.later)
    assert proxy.later == [412]
    assert store.get("k") == b"mine"


def test_a_conditional_write_that_is_applied_twice_changes_nothing(store: Store, proxy: FaultProxy) -> None:
    proxy.inject(Fault.TWICE, method="PUT", seconds=0.1)
    assert store.put_if_absent("k", b"mine")
    wait_for(lambda: proxy.later)
    assert proxy.later == [412]
    assert not store.put_if_absent("k", b"another's")
    assert store.get("k") == b"mine"


def test_a_delete_that_is_applied_twice_is_one(store: Store, proxy: FaultProxy) -> None:
    store.put("k", b"1")
    store.put("other", b"2")
    proxy.inject(Fault.TWICE, method="POST", path="delete", seconds=0.1)
    store.delete_many(["k"])
    wait_for(lambda: proxy.later)
    assert proxy.later == [200]
    assert [info.key for info in store.list()] == ["other"]


@pytest.mark.parametrize("times", [1, 2])
def test_an_error_in_an_answer_of_200_is_an_error(store: Store, proxy: FaultProxy, times: int) -> None:
    body = os.urandom(9 * MIB)
    proxy.inject(Fault.ERROR_IN_200, method="POST", path="uploadId", times=times)
    assert store.put_multipart("k", [body]) == len(body)
    assert store.get("k") == body
    proxy.inject(Fault.ERROR_IN_200, method="GET", path="list-type", times=times)
    assert [info.key for info in store.list()] == ["k"]
    proxy.inject(Fault.ERROR_IN_200, method="POST", path="delete", times=times)
    store.delete_many(["k"])
    assert not store.exists("k")
    assert proxy.fired[Fault.ERROR_IN_200] == 3 * times


def test_a_write_that_is_refused_with_a_conflict_is_none(store: Store, proxy: FaultProxy) -> None:
    proxy.inject(Fault.APPLIED_412, method="PUT")
    with pytest.raises((ConflictError, TransientError)):
        store.put("k", b"1")
    assert proxy.fired[Fault.APPLIED_412] == 1
    store.put("k", b"2")
    assert store.get("k") == b"2"
