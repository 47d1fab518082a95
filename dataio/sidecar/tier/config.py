"""Configuration of the local tier and its buddy, and the TLS contexts made from it.

Invariants: after `TierConfig.check` the configuration is complete: a daemon that connects to a buddy or accepts copies
has all three TLS files. Both sides use TLS 1.3 with certificates of one CA. Before the daemon reads a message of a peer,
it checks the peer's certificate against the CA, and its names against the configured ones. Only OpenSSL reads the keys.
Failure behaviour: `UsageError` names the missing or wrong setting. A refused peer raises `ssl.SSLError` or
`UnknownPeerError`.
"""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.limits import GIB, parse_bytes

OFF = "off"


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class TierConfig:
    """Configuration of the local tier.

    `folder` is on a tmpfs or a local disk. The tier keeps the newest `steps` steps of each run, within `bytes`. `buddy`
    receives this node's copies, and `listen` is the address on which the daemon accepts copies. `names` are the accepted
    certificate names; if empty, only the buddy's host is accepted. `rate` limits the bytes a second between buddies; None
    means no limit.
    """

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
        """The accepted names: a peer's certificate must contain one."""
        return self.names or ((self.buddy.host,) if self.buddy is not None else ())

    def check(self) -> TierConfig:
        """Return the configuration if it is complete; else raise `UsageError`."""
        if self.buddy is None and self.listen is None:
            return self
        for name in ("cert", "key", "ca"):
            path = getattr(self, name)
            if path is None or not path.is_file():
                raise UsageError(
                    f"a buddy needs tls_{name}: {path or 'it is not set'}",
                    hint="name a PEM file; see docs/explanation/tier.md",
                )
        if self.listen is not None and not self.welcome:
            raise UsageError(
                "buddy_listen needs buddy_names or buddy", hint="list the accepted certificate names in buddy_names"
            )
        return self


def optional_path(text: str) -> Path | None:
    if not text:
        raise UsageError("an empty path")
    return None if text == OFF else Path(text).absolute()


def address(text: str) -> Address | None:
    """Parse `host:port`, `[v6]:port` or `off`."""
    if text == OFF:
        return None
    host, separator, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    valid = host and (":" not in host or text.startswith("[")) and all(c.isalnum() or c in ".-:_" for c in host)
    if not separator or not valid or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"{text!r} is not of the form host:port")
    return Address(host, int(port))


def names(text: str) -> tuple[str, ...]:
    """Parse names of certificates, separated by commas, or `off`."""
    parsed = tuple(name.strip() for name in text.split(",")) if text != OFF else ()
    if not all(parsed):
        raise UsageError(f"{text!r} has an empty name")
    return parsed


def rate(text: str) -> int | None:
    """Parse bytes a second, or `off`."""
    if text == OFF:
        return None
    size = parse_bytes(text)
    if size < 1 << 16:
        raise UsageError(f"{text!r} is less than 64 KiB a second")
    return size


class UnknownPeerError(Exception):
    """The CA signed the certificate, but none of its names is accepted."""


def server_context(config: TierConfig) -> ssl.SSLContext:
    """The TLS context of the listening side."""
    return _context(ssl.PROTOCOL_TLS_SERVER, config)


def client_context(config: TierConfig) -> ssl.SSLContext:
    """The TLS context of the connecting side. `wrap_socket(server_hostname=…)` checks the server's name."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, config)


def require_name(peer: ssl.SSLSocket, welcome: Sequence[str]) -> str:
    """The accepted name in the peer's certificate; `UnknownPeerError` if there is none."""
    certificate = peer.getpeercert() or {}
    certificate_names = names_of(certificate)
    for name in certificate_names:
        if any(same_name(name, accepted) for accepted in welcome):
            return name
    raise UnknownPeerError(f"a certificate for {', '.join(certificate_names)[:200] or 'no name'}")


def names_of(certificate: dict[str, Any]) -> list[str]:
    """The DNS names and IP addresses of a certificate, which has the form that `getpeercert` returns."""
    return [str(value) for kind, value in certificate.get("subjectAltName", ()) if kind in ("DNS", "IP Address")]


def same_name(name: str, accepted: str) -> bool:
    """Compare addresses by value and names without case; there are no wildcards."""
    try:
        return ipaddress.ip_address(name) == ipaddress.ip_address(accepted)
    except ValueError:
        return name.lower() == accepted.lower()


class _ClosingSocket(ssl.SSLSocket):
    """A TLS socket that closes itself when it is freed.

    If the peer has just reset the connection, `wrap_socket` raises. It then leaves a socket that owns the descriptor and
    that no caller can reach (https://github.com/python/cpython, `SSLSocket._create`, Python 3.11 to 3.14).
    """

    def __del__(self) -> None:
        self.close()


def _context(side: int, config: TierConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.sslsocket_class = _ClosingSocket
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    assert config.cert is not None
    assert config.key is not None
    assert config.ca is not None
    try:
        context.load_cert_chain(config.cert, config.key, password=_no_password)
        context.load_verify_locations(config.ca)
    except (OSError, ssl.SSLError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or "it is not PEM"
        raise UsageError(
            f"tls_cert {config.cert}, tls_key and tls_ca {config.ca} cannot be used together: {reason}",
            hint="PEM files; the key is the certificate's and has no password",
        ) from None
    return context


def _no_password() -> str:
    raise UsageError("tls_key is protected by a password", hint="give a key without one, in a file with mode 0600")
