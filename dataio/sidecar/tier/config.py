"""What the daemon is told of its tier and its buddy, as plain values.

Invariant: what `TierConfig.check` returned for is complete: whoever talks to buddies has a tier and all three TLS files.
Failure behaviour: `UsageError` naming the setting that is missing or wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.limits import GIB, parse_bytes

OFF = "off"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a buddy listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class TierConfig:
    """`folder` is on a tmpfs or a local disk; `steps` of each run stay, within `bytes`. `names`: whose certificates are let in,
    empty for the buddy's host alone. `rate`: bytes a second to the buddy at most, None for no bound."""

    folder: Path
    bytes: int = 8 * GIB
    steps: int = 2
    buddy: Address | None = None
    listen: Address | None = None
    names: tuple[str, ...] = ()
    rate: int | None = None
    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    @property
    def welcome(self) -> tuple[str, ...]:
        """Names of which a peer's certificate must have one."""
        return self.names or ((self.buddy.host,) if self.buddy is not None else ())

    def check(self) -> TierConfig:
        """Itself, when it is complete."""
        if self.buddy is None and self.listen is None:
            return self
        for name in ("cert", "key", "ca"):
            path = getattr(self, name)
            if path is None or not path.is_file():
                raise UsageError(
                    f"a buddy needs tls_{name}: {path or 'it is not set'}", hint="name a PEM file; see docs/sidecar.md"
                )
        if self.listen is not None and not self.welcome:
            raise UsageError("buddy_listen needs buddy_names or buddy", hint="say whose certificates are let in")
        return self


def optional_path(text: str) -> Path | None:
    if not text:
        raise UsageError("an empty path")
    return None if text == OFF else Path(text).absolute()


def address(text: str) -> Address | None:
    """`host:port`, `[v6]:port` or off."""
    if text == OFF:
        return None
    host, separator, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    plain = host and (":" not in host or text.startswith("[")) and all(c.isalnum() or c in ".-:_" for c in host)
    if not separator or not plain or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"{text!r} is no host:port")
    return Address(host, int(port))


def names(text: str) -> tuple[str, ...]:
    """Names of certificates, parted by commas, or off."""
    found = tuple(name.strip() for name in text.split(",")) if text != OFF else ()
    if not all(found):
        raise UsageError(f"{text!r} has an empty name")
    return found


def rate(text: str) -> int | None:
    """Bytes a second, or off."""
    if text == OFF:
        return None
    size = parse_bytes(text)
    if size < 1 << 16:
        raise UsageError(f"{text!r} is less than 64 KiB a second")
    return size
