"""What every room's tests share: real media, and a real S3 server on loopback."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import fsspec.asyn
import pytest
from hypothesis import HealthCheck, settings

from headrace.dataio.shards.workers import worker_pool
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from headrace.dataio.testing.s3_server import S3Server, start_rclone, start_seaweedfs
from tests.support import botocore_models
from tests.support.leftovers import Place

# a busy machine is no failure: examples are bounded in number, not in time; and equal code has equal ones, every time
settings.register_profile(
    "headrace", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], max_examples=50
)
settings.register_profile(  # pytest --hypothesis-profile
    "explore", settings.get_profile("headrace"), derandomize=False, max_examples=100
)
settings.load_profile("headrace")

# Tests start hundreds of processes. Without bytecode files each of them would compile Headrace again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

_SERVERS = {"s3_server", "s3_url", "rclone_server"}
_DAEMONS = {"daemon", "sidecar", "node", "nodes"}
_STARTERS = {"subprocess", "multiprocessing", "tests.support.nursery", "tests.support.headrace_command"}
_START_PROCESS = worker_pool.start_process
_PLACE = pytest.StashKey[Place]()
_FEW_MODULES = 50  # imports of tests that make no collection slow
_frozen_modules = 0
_SAID = 6000  # characters of a failure that are printed at once; the end of the run has all of it
_MEDIA = Path(os.environ.get("HEADRACE_TESTS_MEDIA") or Path(__file__).resolve().parents[2] / "shared" / "media")


@pytest.hookimpl(trylast=True)  # after the terminal's own
def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a script's background; tests interrupt what they start
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["HEADRACE_QUARANTINE"] = "off"  # no test adds to the list of whoever runs it
    worker_pool.start_process = _fork_worker
    if os.environ.get("HEADRACE_TESTS_LEFT") == "error":
        config.stash[_PLACE] = Place()
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if isinstance(terminal, pytest.TerminalReporter) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Failures(terminal))


def _fork_worker(command: Sequence[str]) -> subprocess.Popen[bytes]:
    from tests.support import forked_workers  # it imports PyAV and pyarrow, which some tests do without

    return forked_workers.start(command) or _START_PROCESS(command)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup() -> Generator[None, object, object]:
    try:
        return (yield)
    finally:
        _leave_real_time()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    try:
        return (yield)
    finally:
        _leave_real_time()


def _leave_real_time() -> None:
    """Undo what the SVT-AV1 encoder does to a process of root: it gives the calling thread SCHED_FIFO with priority 99.

    Everything that the thread starts later would inherit it. One browser then takes all cores from all other processes.
    """
    if hasattr(os, "sched_setscheduler") and os.sched_getscheduler(0) != os.SCHED_OTHER:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each test has one of three marks: `s3` (a real S3 server), `process` (starts processes), `unit` (neither)."""
    starters: dict[object, bool] = {}
    for item in items:
        fixtures, module = set(getattr(item, "fixturenames", ())), getattr(item, "module", None)
        if module not in starters:
            starters[module] = not _STARTERS.isdisjoint(
                getattr(value, "__name__", "") for value in vars(module).values() if isinstance(value, ModuleType)
            ) or any(hasattr(module, name) for name in ("launch", "run_part"))
        if fixtures & _SERVERS or item.get_closest_marker("s3"):
            item.add_marker("s3")
        else:
            starts = starters[module] or fixtures & _DAEMONS or item.get_closest_marker("process")
            item.add_marker("process" if starts else "unit")


def pytest_collection_finish() -> None:
    _freeze_modules()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if len(sys.modules) > _frozen_modules + _FEW_MODULES:
        _freeze_modules()


def _freeze_modules() -> None:
    """The collector looks at no import again. With torch and its friends, each full collection would take half a second."""
    global _frozen_modules
    _frozen_modules = len(sys.modules)
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    if (place := config.stash.get(_PLACE, None)) is not None:
        place.close()


class _Failures:
    """Failures are said when they happen: a run that is cut off has named its own."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._terminal.ensure_newline()
            self._terminal.line(f"{report.when} of {report.nodeid} failed:\n{report.longreprtext[-_SAID:]}")


@pytest.fixture(autouse=True, scope="session")
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check the leftovers of all tests of this process. With HEADRACE_TESTS_LEFT=error the last test fails, and lists them."""
    yield
    if (place := request.config.stash.get(_PLACE, None)) is not None:
        left = place.left()
        assert not left, "tests of this process left behind:\n" + "\n".join(left)


@pytest.fixture(autouse=True)
def _log_as_it_was() -> Iterator[None]:
    """Commands of Headrace's own send its log to standard error, which is another for each test."""
    root = logging.getLogger("headrace")
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def real_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of `WorkerPool` are started as in real use: a new interpreter, which imports what it needs."""
    monkeypatch.setattr(worker_pool, "start_process", _START_PROCESS)


@pytest.fixture(scope="session")
def media() -> Path:
    """The folder of real clips next to a development checkout."""
    if not _MEDIA.is_dir():
        pytest.skip("no folder of real clips beside this checkout (../shared/media)")
    return _MEDIA


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A SeaweedFS of this test process, with the bucket `headrace`; started by the first test that needs it."""
    botocore_models.share()
    with start_seaweedfs() as server:
        server.create_bucket("headrace")
        yield server


@pytest.fixture(scope="session")
def rclone_server() -> Iterator[S3Server]:
    """An S3 server that ignores preconditions, with the bucket `headrace`."""
    with start_rclone() as server:
        server.create_bucket("headrace")
        yield server


@pytest.fixture
def s3_url(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a new, empty prefix on the S3 server. The AWS variables are set for it, also for child processes."""
    use_s3_server(s3_server, monkeypatch)
    yield f"s3://headrace/{uuid.uuid4().hex}"
    forget_s3fs_instances()


@pytest.fixture(params=["posix", pytest.param("s3", marks=pytest.mark.s3)])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty store: a directory, then a bucket."""
    return request.getfixturevalue("s3_url") if request.param == "s3" else f"file://{tmp_path / 'store'}"


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    """An empty store, opened: a directory, then a bucket."""
    with open_store(store_url) as opened:
        yield opened


def use_s3_server(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point the AWS variables at `server` for the rest of the test."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)


def forget_s3fs_instances() -> None:
    """Close the s3fs clients that a test left in fsspec's instance cache; the next test has other credentials."""
    s3fs = sys.modules.get("s3fs")
    if s3fs is None:
        return
    for fs in list(s3fs.S3FileSystem._cache.values()):
        if fs._s3 is not None and not fs.asynchronous:
            fsspec.asyn.sync(fs.loop, fs._s3.__aexit__, None, None, None)
            fs._s3 = None
    s3fs.S3FileSystem.clear_instance_cache()
