"""Certificates as deploy/buddies makes them, and buddies on loopback addresses."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.dataio.core.limits import MIB
from headrace.dataio.sidecar.tier.config import Address, TierConfig
from headrace.dataio.sidecar.tier.tier_service import TierService

SCRIPT = Path(__file__).parents[4] / "deploy" / "buddies" / "certificates.sh"


def make_certificates(folder: Path, *nodes: str, days: int = 30) -> Path:
    """A CA and a certificate for each node, by the script that people use."""
    if shutil.which("openssl") is None:
        pytest.skip("certificates are made with openssl, which is not here")
    environment = {"DAYS": str(days), "PATH": "/usr/bin:/bin:/usr/local/bin"}
    subprocess.run([SCRIPT, folder, *nodes], check=True, capture_output=True, env=environment, timeout=150)
    return folder


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of one CA: for two loopback addresses, and for a stranger's name."""
    return make_certificates(tmp_path_factory.mktemp("ca"), "127.0.0.1", "127.0.0.2", "stranger.example")


@pytest.fixture(scope="session")
def other_ca(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("other"), "127.0.0.1", "127.0.0.2")


def config(folder: Path, certificates: Path, node: str = "127.0.0.1", **more: object) -> TierConfig:
    folder.mkdir(parents=True, exist_ok=True)
    return TierConfig(
        folder / "tier",
        512 * MIB,
        cert=certificates / f"{node}.pem",
        key=certificates / f"{node}.key",
        ca=certificates / "ca.pem",
        **more,  # type: ignore[arg-type]
    )


@pytest.fixture
def open_tier() -> Iterator[Callable[[TierConfig], TierService]]:
    """Starts tiers, and closes them when the test is over."""
    opened: list[TierService] = []

    def start(config: TierConfig) -> TierService:
        tier = TierService(config)
        opened.append(tier)
        tier.start()
        return tier

    yield start
    for tier in opened:
        tier.close()


@pytest.fixture
def listening(
    tmp_path: Path, certificates: Path, open_tier: Callable[[TierConfig], TierService]
) -> tuple[TierService, Address]:
    """A buddy at 127.0.0.1 that lets 127.0.0.2 in."""
    tier = open_tier(config(tmp_path / "b", certificates, listen=Address("127.0.0.1", 0), names=("127.0.0.2",)))
    return tier, Address("127.0.0.1", port_of(tier))


def port_of(tier: TierService) -> int:
    guests = tier.status()["guests"]
    assert isinstance(guests, dict)
    return int(guests["port"])


def refused(tier: TierService) -> dict[str, int]:
    """Peers that were hung up on, by reason."""
    guests = tier.status()["guests"]
    assert isinstance(guests, dict)
    return {reason: count for reason, count in guests["refused"].items() if count}
