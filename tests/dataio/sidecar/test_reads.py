"""The stores that the daemon keeps open: none is closed while it is in use."""

from __future__ import annotations

import threading
import time

from headrace.dataio.sidecar.reads import StoreCache
from headrace.dataio.store.base import Location
from tests.support.memory_store import MemoryStore
from tests.support.waiting import wait_for

WHERE = Location("memory://a", {}, True)


class Closing(MemoryStore):
    """A store that notes its close."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = threading.Event()

    @property
    def location(self) -> Location:
        return WHERE

    def close(self) -> None:
        self.closed.set()


def test_a_replaced_store_is_closed_when_its_last_user_is_done() -> None:
    opened, replaced = list[Closing](), list[object]()

    def opener(location: Location) -> Closing:
        opened.append(Closing())
        return opened[-1]

    stores = StoreCache(opener, close_delay=0.02)
    first, second = stores.acquire(WHERE), stores.acquire(WHERE)
    stores.renew(lambda source, store: replaced.append(store))
    new = stores.acquire(WHERE)
    assert replaced == [new.store] == [opened[1]]
    stores.release(first)
    time.sleep(0.2)
    assert not opened[0].closed.is_set()
    stores.release(second)
    assert opened[0].closed.wait(150)
    assert not opened[1].closed.is_set()
    stores.release(new)
    assert new.users == 0


def test_a_replaced_store_is_not_closed_while_a_fetch_reads_from_it() -> None:
    opened, busy = list[Closing](), [True]

    def opener(location: Location) -> Closing:
        opened.append(Closing())
        return opened[-1]

    stores = StoreCache(opener, busy=lambda store: store is opened[0] and busy[0], close_delay=0.02)
    stores.release(stores.acquire(WHERE))
    stores.renew(lambda source, store: None)
    time.sleep(0.2)
    assert not opened[0].closed.is_set()
    busy[0] = False
    wait_for(opened[0].closed.is_set)
