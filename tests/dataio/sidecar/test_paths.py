"""Which socket is meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.dataio.sidecar.client import Sidecar, open_reader
from headrace.dataio.sidecar.paths import chosen, default_socket
from headrace.dataio.store.open import open_store


def test_a_path_is_meant_as_given_and_none_means_never() -> None:
    assert chosen("/run/a.sock", {"HEADRACE_SIDECAR": "off"}) == Path("/run/a.sock")
    assert chosen(None, {}) is None


def test_auto_follows_the_environment() -> None:
    assert chosen("auto", {"HEADRACE_SIDECAR": "/run/b.sock"}) == Path("/run/b.sock")
    assert chosen("auto", {"XDG_RUNTIME_DIR": "/run/user/1"}) == Path("/run/user/1/headrace/sidecar.sock")
    assert chosen("auto", {"HEADRACE_SIDECAR": "off"}) is None


def test_a_daemon_started_where_clients_are_told_off_takes_the_usual_place() -> None:
    assert default_socket({"HEADRACE_SIDECAR": "off", "XDG_RUNTIME_DIR": "/run/user/1"}).name == "sidecar.sock"


def test_off_reads_inside_the_process_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HEADRACE_SIDECAR", "off")
    assert Sidecar.find() is None
    store = open_store(tmp_path)
    store.put("a", b"abc")
    reader = open_reader(store)
    try:
        assert bytes(reader.read("a", [(1, 2)])[0]) == b"bc"
    finally:
        reader.close()
    assert not caplog.records
