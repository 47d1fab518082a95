"""Who a buddy is: TLS 1.3, certificates on both sides, of one CA, with names that were expected.

Invariant: no byte of a peer is looked at before its certificate was checked against the CA and its names against the configured
ones. Keys stay in files that OpenSSL reads; nothing here holds or shows one.
Failure behaviour: `UsageError` for files that cannot be used; `ssl.SSLError` and `StrangerError` for a peer that is refused.
"""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Sequence
from typing import Any

from headrace.dataio.core.errors import UsageError
from headrace.dataio.sidecar.tier.config import TierConfig


class StrangerError(Exception):
    """A certificate of the CA, but not of a name that is let in."""


def server_context(config: TierConfig) -> ssl.SSLContext:
    """For whoever listens."""
    return _context(ssl.PROTOCOL_TLS_SERVER, config)


def client_context(config: TierConfig) -> ssl.SSLContext:
    """For whoever connects; the server's name is checked by `wrap_socket(server_hostname=…)`."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, config)


def require_name(peer: ssl.SSLSocket, welcome: Sequence[str]) -> str:
    """The name by which this peer is let in."""
    certificate = peer.getpeercert() or {}
    found = names_of(certificate)
    for name in found:
        if any(same_name(name, wanted) for wanted in welcome):
            return name
    raise StrangerError(f"a certificate for {', '.join(found)[:200] or 'nobody'}")


def names_of(certificate: dict[str, Any]) -> list[str]:
    """DNS names and addresses of a certificate, in the form of `getpeercert`."""
    return [str(value) for kind, value in certificate.get("subjectAltName", ()) if kind in ("DNS", "IP Address")]


def same_name(name: str, wanted: str) -> bool:
    """Addresses by their value, names without regard to case; no wildcards."""
    try:
        return ipaddress.ip_address(name) == ipaddress.ip_address(wanted)
    except ValueError:
        return name.lower() == wanted.lower()


def _context(side: int, config: TierConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
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
        why = getattr(error, "reason", None) or getattr(error, "strerror", None) or "it is not PEM"
        raise UsageError(
            f"tls_cert {config.cert}, tls_key and tls_ca {config.ca} cannot be used together: {why}",
            hint="PEM files; the key is the certificate's and has no password",
        ) from None
    return context


def _no_password() -> str:
    raise UsageError("tls_key is protected by a password", hint="give a key without one, in a file with mode 0600")
