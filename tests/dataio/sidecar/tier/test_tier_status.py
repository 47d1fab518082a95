"""A daemon with a tier and a buddy that is away: settings by every way, and what people and monitors see."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headrace.dataio.cli import main
from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.limits import MIB
from headrace.dataio.sidecar import settings
from headrace.dataio.sidecar.client import Sidecar
from headrace.dataio.sidecar.tier.config import Address
from headrace.dataio.store.local_tier.records import TierLimits
from headrace.dataio.store.local_tier.tier import LocalTier
from tests.dataio.sidecar.conftest import wait_for
from tests.support.browser import Browser, needs_browser
from tests.support.local_tier import record

SHOTS = os.environ.get("HEADRACE_SCREENSHOTS")
NASTY = "<img src=x onerror=document.title='owned'>"


@dataclass
class Shown:
    socket: Path
    local_tier: LocalTier

    def status(self) -> dict[str, Any]:
        found = Sidecar.find(self.socket)
        assert found is not None
        with found:
            return found.status()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.status()['http_port']}/"


@pytest.fixture
def shown(certificates: Path, tmp_path: Path) -> Iterator[Shown]:
    """The daemon, whose settings come from a file, the environment and flags."""
    with tempfile.TemporaryDirectory(prefix="mr-") as name:
        folder = Path(name)
        local_tier = LocalTier(folder / "tier", TierLimits(64 * MIB, 3))
        for step, committed in ((3, 9.0), (4, 0.0)):
            local_tier.keep("s", f"packs/{step}", bytes(MIB))
            local_tier.put_record(record("s", step, [f"packs/{step}"], committed=committed))
        file = folder / "sidecar.toml"
        file.write_text(f"""
tier_bytes = "64MiB"
tier_steps = 3
buddy = "127.0.0.1:1"
buddy_listen = "127.0.0.1:0"
tls_cert = "{certificates}/127.0.0.1.pem"
tls_key = "{certificates}/127.0.0.1.key"
tls_ca = "{certificates}/ca.pem"
""")
        command = [sys.executable, "-m", "headrace.dataio.cli", "sidecar", "run", "--config", str(file)]
        command += ["--socket", str(folder / "s.sock"), "--cache-dir", f"{folder}/fast=1MiB,{folder}/slow=2MiB"]
        environment = {**os.environ, "HEADRACE_SIDECAR_TIER_DIR": str(folder / "tier")}
        with open(tmp_path / "log", "wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        found = Shown(folder / "s.sock", local_tier)
        try:
            wait_for(lambda: process.poll() is not None or Sidecar.find(found.socket))
            assert process.poll() is None, (tmp_path / "log").read_text()
            wait_for(lambda: "refused" in found.status()["tier"]["buddy"]["trouble"])
            yield found
            process.terminate()
            assert process.wait(150) == 0
        finally:
            process.kill()
            process.wait()


def test_the_terminal_and_the_metrics_show_the_tier(shown: Shown, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sidecar", "status", "--socket", str(shown.socket)]) == 0
    text = capsys.readouterr().out
    assert "steps: run 4 (not committed, 0 of 1 ranks copied), run 3 (0 of 1 ranks copied)" in text
    assert "  tier 1  0 B of 2.0 MiB in " in text
    assert "buddy   127.0.0.1:1 has nothing of this daemon yet, 2 waiting, GETS NO COPIES" in text
    assert "0 connected, 0 refused" in text
    with urllib.request.urlopen(shown.url + "metrics", timeout=120) as answer:
        metrics = answer.read().decode()
    assert "headrace_tier_budget_bytes 6.7108864e+07" in metrics
    for line in (
        "headrace_tier_kept_steps 2.0",
        "headrace_buddy_up 0.0",
        'headrace_buddy_refused_total{reason="tls"} 0.0',
    ):
        assert line in metrics


def test_a_step_without_another_copy_is_forgotten_only_when_told(
    shown: Shown, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["sidecar", "forget", "run", "--socket", str(shown.socket), "--step", "4"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "step 4 of run run, rank 0: NOT KNOWN TO BE COMMITTED" in text
    assert "nothing was removed" in text
    assert shown.local_tier.has("s", "packs/4")
    assert main([*command, "--apply"]) == 0
    assert [r.step for r in shown.local_tier.records()] == [3]
    assert not shown.local_tier.has("s", "packs/4")
    assert main([*command, "--apply"]) == 2
    assert "no such step" in capsys.readouterr().err


@needs_browser
def test_the_page_shows_the_tier_at_both_widths_in_both_schemes(shown: Shown, tmp_path: Path) -> None:
    import msgspec

    shown.local_tier.put_record(msgspec.structs.replace(record("s", 5, ["packs/4"]), run=NASTY))
    with Browser(tmp_path / "profile") as browser:
        for width, scheme in ((1280, "light"), (1280, "dark"), (400, "light"), (400, "dark")):
            browser.look(shown.url, width, 900, scheme)
            browser.wait_until("document.body?.className === 'live' && !document.getElementById('tier').hidden")
            browser.wait_until("document.getElementById('tier').innerText.includes('onerror')")
            text = browser.evaluate("document.getElementById('tier').innerText")
            for wanted in (
                "step 4",
                "only on this node",
                "committed",
                "no copies",
                "Connection refused",
                "0 of 1 copied",
            ):
                assert wanted.lower() in text.lower()
            cache = browser.evaluate("document.getElementById('cache').innerText")
            for wanted in ("Tier 0", "Tier 1", "of 2 MiB", "hits"):
                assert wanted in cache
            assert not any(bad in text for bad in ("NaN", "undefined", "null"))
            assert browser.evaluate("document.images.length") == 0
            assert browser.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), f"too wide at {width}"
            if SHOTS:
                browser.screenshot(Path(SHOTS) / f"page-tier-{width}-{scheme}.png")
        assert browser.errors == []


def test_settings_of_the_tier_are_read_by_their_names(tmp_path: Path) -> None:
    given = {"tier_dir": "/dev/shm/x", "buddy": "node2:9470", "buddy_names": "node3,node4", "buddy_rate": "100MiB"}
    tier = settings.read(given, {}).config.tier
    assert tier is not None
    assert (tier.folder, tier.buddy, tier.names, tier.rate) == (
        Path("/dev/shm/x"),
        Address("node2", 9470),
        ("node3", "node4"),
        100 * MIB,
    )
    assert settings.read({}, {}).config.tier is None
    for name, value in (("tier_steps", "0"), ("tier_bytes", "lots"), ("buddy", "node2"), ("buddy_rate", "1B")):
        with pytest.raises(UsageError, match=f"--{name.replace('_', '-')}"):
            settings.read({name: value}, {})
    with pytest.raises(UsageError, match="need tier_dir"):
        _ = settings.read({"buddy": "node2:1"}, {}).config.tier
