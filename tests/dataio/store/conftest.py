"""A proxy that plants faults in front of the S3 server of the tests, and a store that reaches the server through it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from headrace.dataio.testing.fault_proxy import FaultProxy
from headrace.dataio.testing.s3_server import S3Server


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3_server.endpoint) as running:
        yield running


@pytest.fixture
def behind(s3_url: str, proxy: FaultProxy) -> Iterator[Store]:
    """A store behind the proxy, with the default policy of retries."""
    with open_store(s3_url, storage_options={"endpoint_url": proxy.endpoint}) as opened:
        yield opened
