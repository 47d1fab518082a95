"""One list of names: flags, environment, file."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.limits import GIB, MIB
from headrace.dataio.sidecar import settings
from headrace.dataio.sidecar.settings import CacheTier
from tests.dataio.sidecar.conftest import RunningDaemon, wait_for


def file(tmp_path: Path, text: str) -> dict[str, str]:
    path = tmp_path / "sidecar.toml"
    path.write_text(text)
    return {"config": str(path)}


def test_nothing_said_gives_the_defaults() -> None:
    found = settings.read({}, {})
    assert (found.config.cache_bytes, found.config.http_port, found.log_level) == (20 * GIB, 0, "INFO")


def test_a_flag_counts_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    flags = file(
        tmp_path, 'cache_bytes = "3GiB"\nclients = 9\nkeep_cache = false\ndrain_seconds = 1.5\nhttp_port = "off"\n'
    )
    environ = {"HEADRACE_SIDECAR_CACHE_BYTES": "4GiB", "HEADRACE_SIDECAR_CLIENTS": "8", "HEADRACE_SIDECAR": "/x/s"}
    config = settings.read({**flags, "clients": "7"}, environ).config
    assert (config.clients, config.cache_bytes, config.keep_cache) == (7, 4 * GIB, False)
    assert (config.drain_seconds, config.http_port, config.socket) == (1.5, None, Path("/x/s"))


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    environ = {"HEADRACE_SIDECAR_CONFIG": file(tmp_path, "clients = 5")["config"]}
    assert settings.read({}, environ).config.clients == 5


@pytest.mark.parametrize(
    ("flags", "environ", "text", "named"),
    [
        ({"clients": "0"}, {}, "", "--clients"),
        ({"cache_bytes": "lots"}, {}, "", "--cache-bytes"),
        ({"http_port": "70000"}, {}, "", "--http-port"),
        ({}, {"HEADRACE_SIDECAR_FETCH_THREADS": "many"}, "", "HEADRACE_SIDECAR_FETCH_THREADS"),
        ({}, {"HEADRACE_SIDECAR_CASHE_BYTES": "1GiB"}, "", "HEADRACE_SIDECAR_CASHE_BYTES in the environment"),
        ({}, {}, "drain_seconds = -1", "drain_seconds in "),
        ({}, {}, "cashe_bytes = 1", "cashe_bytes in "),
        ({}, {}, "clients = [1]", "clients in "),
        ({}, {}, 'keep_cache = "maybe"', "keep_cache in "),
        ({}, {}, 'log_level = "LOUD"', "log_level in "),
        ({"cache_dir": "/a=much,/b"}, {}, "", "--cache-dir"),
        ({"cache_dir": "/a,/a=1GiB"}, {}, "", "--cache-dir"),
        ({}, {}, "cache_dir = [1]", "cache_dir in "),
        ({}, {}, "clients = ", "is not valid TOML"),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, flags: dict[str, str], environ: dict[str, str], text: str, named: str
) -> None:
    with pytest.raises(UsageError) as found:
        settings.read({**flags, **(file(tmp_path, text) if text else {})}, environ)
    assert named in found.value.message


@pytest.mark.parametrize("text", ['cache_dir = ["/a=1GiB", "/b"]', 'cache_dir = "/a=1GiB, /b"'])
def test_the_cache_may_have_tiers_with_bytes_of_their_own(tmp_path: Path, text: str) -> None:
    config = settings.read(file(tmp_path, text), {}).config
    assert config.tiers == (CacheTier(Path("/a"), GIB), CacheTier(Path("/b")))
    assert settings.read({"cache_dir": "/a"}, {}).config.tiers == (CacheTier(Path("/a")),)


def test_a_file_that_is_not_there_is_an_error() -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        settings.read({"config": "/nowhere/sidecar.toml"}, {})


def test_sighup_reads_limits_again_and_keeps_them_when_the_file_is_wrong(daemon: RunningDaemon) -> None:
    assert daemon.status()["cache"]["budget_bytes"] == 64 * MIB
    daemon.configuration.write_text('{"cache_bytes": 33554432, "http_port": 1}')
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGHUP)
    wait_for(lambda: daemon.status()["cache"]["budget_bytes"] == 32 * MIB)
    assert "http_port can only be changed by a restart" in daemon.log.read_text()
    daemon.configuration.write_text('{"cache_bytes": "x"')
    daemon.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "the configuration is unchanged" in daemon.log.read_text())
    assert daemon.status()["cache"]["budget_bytes"] == 32 * MIB


def test_the_page_names_every_setting_and_no_other() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "sidecar.md").read_text()
    table = page.partition("## Settings")[2].partition("\n## ")[0]
    first = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert {name for cell in first for name in re.findall(r"`(\w+)`", cell)} == {s.name for s in settings.SETTINGS}
