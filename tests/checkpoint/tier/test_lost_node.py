"""Two nodes: real daemons on loopback addresses, real trainers, a real S3 server whose requests are counted; one node is lost."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.dataio.testing.fault_proxy import Fault, FaultProxy
from headrace.dataio.testing.s3_server import S3Server, start_seaweedfs
from tests.dataio.sidecar.tier.conftest import make_certificates
from tests.support.tier_nodes import Node, free_port, tls_files
from tests.support.waiting import wait_for

STEP_BYTES = 1_400_000 * 4


@pytest.fixture
def node(s3_server: S3Server) -> Iterator[Callable[..., Node]]:
    """Makes nodes; whatever still runs on them is killed at the end."""
    made: list[Node] = []

    def make(proxy: FaultProxy | None = None, **options: object) -> Node:
        folder = Path(tempfile.mkdtemp(prefix="mr-"))
        environment = s3_server.environment() | ({"AWS_ENDPOINT_URL": proxy.endpoint} if proxy is not None else {})
        made.append(Node(folder, {**os.environ, **environment, "NODE": str(folder)}, options))
        return made[-1]

    yield make
    for each in made:
        each.kill()
        shutil.rmtree(each.folder, ignore_errors=True)


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    """In front of the S3 server: it sees every request of every node, and refuses those that it is told to."""
    with FaultProxy(s3_server.endpoint) as made:
        yield made


def refuse(proxy: FaultProxy, method: str, path: str, times: int = 1 << 30) -> None:
    proxy.inject(Fault.REFUSE, times=times, method=method, path=path)


@pytest.mark.soak  # the short version is in test_checkpointer
@pytest.mark.s3
def test_a_trainer_that_starts_again_on_its_node_reads_no_pack_from_the_store(
    node: Callable[..., Node], s3_url: str, proxy: FaultProxy
) -> None:
    here = node(proxy)
    here.start()
    trainer, lines = here.train("save", s3_url, 3)
    assert [(line["step"], line["committed_by"]) for line in lines] == [(n, "sidecar") for n in (1, 2, 3)]
    assert all(0 < line["kept"] < 60 for line in lines)
    trainer.kill()
    wait_for(lambda: [s["step"] for s in here.status()["kept"]] == [3, 2])  # tier_steps is 2
    refuse(proxy, "GET", "/packs/", 1)
    _, restored = here.train("restore", s3_url)
    assert restored == [{"step": 3, "same": True}]
    assert proxy.fired[Fault.REFUSE] == 0  # no pack was asked for
    shutil.rmtree(here.tier)  # a tier that is gone is done without
    _, restored = here.train("restore", s3_url)
    assert restored == [{"step": 3, "same": True}]
    assert proxy.fired[Fault.REFUSE] == 1  # and now somebody did


@pytest.mark.soak  # the short version is in test_kept_steps
@pytest.mark.s3
def test_a_trainer_that_starts_again_needs_no_store_at_all(node: Callable[..., Node]) -> None:
    with start_seaweedfs() as server:
        server.create_bucket("headrace")
        here = node()
        here.environment.update(server.environment())
        here.start()
        trainer, _ = here.train("save", "s3://headrace/run", 2)
        trainer.kill()
        wait_for(lambda: all(s["committed"] for s in here.status()["kept"]))
        server.stop()
        _, restored = here.train("restore", "s3://headrace/run")
        assert restored == [{"step": 2, "same": True}]
        assert "the store cannot be reached: restoring step 2" in (here.folder / "log").read_text()


def buddies(node: Callable[..., Node], folder: Path, proxy: FaultProxy) -> tuple[Node, Node, dict[str, object]]:
    """Node A, whose buddy is B; and what a new node needs to have B as its buddy, too."""
    certificates = make_certificates(folder / "tls", "127.0.0.1", "127.0.0.2")

    there = f"127.0.0.2:{free_port('127.0.0.2')}"
    b = node(proxy, buddy_listen=there, buddy_names="127.0.0.1", **tls_files(certificates, "127.0.0.2"))
    b.start()
    a = node(proxy, buddy=there, **tls_files(certificates, "127.0.0.1"))
    a.start()
    return a, b, {"buddy": there, **tls_files(certificates, "127.0.0.1")}


@pytest.mark.s3
def test_losing_a_node_loses_nothing_its_buddy_gives_the_newest_step(
    node: Callable[..., Node], s3_url: str, proxy: FaultProxy, tmp_path: Path
) -> None:
    a, b, options = buddies(node, tmp_path, proxy)
    a.train("save", s3_url, 3)
    wait_for(lambda: [(c["run"], c["step"]) for c in a.status()["buddy"]["copies"]] == [("exp", 3)])
    wait_for(lambda: a.status()["buddy"]["waiting"] == 0)
    assert a.status()["buddy"]["sent_bytes"] > STEP_BYTES
    assert a.kill() >= 2  # daemon and trainer, at least
    shutil.rmtree(a.tier)
    refuse(proxy, "GET", "/packs/")
    _, restored = b.train("restore", s3_url)
    assert restored == [{"step": 3, "same": True}]
    new = node(proxy, **options)
    new.start()
    _, restored = new.train("restore", s3_url)
    assert restored == [{"step": 3, "same": True}]
    assert new.status()["recalled"]["found"] >= 3
    assert new.status()["recalled"]["failed"] == 0
    wait_for(lambda: [s["guest"] for s in new.status()["kept"]] == [True, True])  # the status is drawn up now and then
    assert proxy.fired[Fault.REFUSE] == 0  # not one pack came from the store


@pytest.mark.soak  # the short version is in test_kept_steps
@pytest.mark.s3
def test_a_step_that_never_reached_the_store_is_committed_from_the_buddy(
    node: Callable[..., Node], s3_url: str, proxy: FaultProxy, tmp_path: Path
) -> None:
    a, _, options = buddies(node, tmp_path, proxy)
    a.train("save", s3_url, 1)
    wait_for(lambda: a.status()["buddy"]["waiting"] == 0 and a.status()["buddy"]["copies"])
    for process in a.processes[1:]:
        process.kill()
    for method in ("PUT", "POST"):
        refuse(proxy, method, "/packs/")
    _, lines = a.train("again", s3_url, 1)
    assert lines[0]["step"] == 2
    assert "kept in this node's tier" in lines[0]["error"]
    assert proxy.fired[Fault.REFUSE] > 0
    wait_for(lambda: [c["step"] for c in a.status()["buddy"]["copies"]] == [2])
    assert a.kill() >= 2
    shutil.rmtree(a.tier)
    with FaultProxy(proxy_upstream(proxy)) as well:
        new = node(well, **options)
        new.start()
        _, restored = new.train("restore", s3_url)
    assert restored == [{"step": 2, "same": True}]
    assert "step 2 of run exp was committed from the node's tier" in (new.folder / "log").read_text()


def proxy_upstream(proxy: FaultProxy) -> str:
    host, port = proxy._upstream
    return f"http://{host}:{port}"
