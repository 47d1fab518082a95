"""Decides which stores a stored document or another process may name, and with which options.

Purpose: the author of a document may be another person than its reader. The reader opens the stores that a document
names, with the reader's permissions. fsspec has file systems that write files, read local files, or send a token to
any host that an option names.

Invariants: a document may name only the schemes of `_MOUNTED`, and give only their options; other options are dropped.
Another process (a client of the daemon) may also name the file systems of `_SENT`, without options. `public_socket`
connects only to addresses of the public internet. It checks every address that is connected to, so neither a name that
resolves to a private address nor a redirect passes.

Failure behaviour: `UnsupportedError` for another scheme, `UsageError` for a malformed name or value,
`PrivateAddressError` for an address that is not public.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping
from typing import Any

from headrace.dataio.core.errors import UnsupportedError, UsageError

JOINED_URL = "joined:"
"""The URL of the reserved mount for joined shards (`headrace.dataio.store.joined`), which is no store of its own."""
_MOUNTED: Mapping[str, Mapping[str, type]] = {
    "joined": {},
    "file": {"direct": bool},
    "s3": {"endpoint_url": str, "region": str, "path_style": bool, "anon": bool, "requester_pays": bool},
    "http": {"public_only": bool},
    "https": {"public_only": bool},
}
_SENT = {"abfs", "abfss", "az", "ftp", "gcs", "gs", "hdfs", "hf", "local", "oss", "sftp", "ssh", "webhdfs"}
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_REGION = re.compile(r"[a-z0-9-]{1,64}")
_GLOBAL, _NAT64 = ipaddress.ip_network("2000::/3"), ipaddress.ip_network("64:ff9b::/96")
_CLOUD_SERVICES = [ipaddress.ip_network(name) for name in ("192.0.0.0/24", "168.63.129.16/32")]
"""Cloud services for virtual machines at addresses that look public: 192.0.0.192 (Oracle), 168.63.129.16 (Azure)."""


class PrivateAddressError(PermissionError):
    """A server's address is not on the public internet."""


def scheme_of(url: str) -> str:
    """The scheme of `url`, in lower case; `file` for a path."""
    if url == JOINED_URL:
        return "joined"
    scheme, separator, _ = url.partition("://")
    return scheme.lower() if separator else "file"


def mountable(url: str) -> bool:
    """Whether a document may name a store with the scheme of `url`."""
    return scheme_of(url) in _MOUNTED


def allowed_options(url: str, options: Mapping[str, object]) -> dict[str, Any]:
    """Return those of `options` that a document may set for the store at `url`."""
    scheme = scheme_of(url)
    if scheme not in _MOUNTED:
        raise UnsupportedError(f"{url!r}: a document may name {', '.join(_MOUNTED)} only")
    if scheme == "s3" and not _BUCKET.fullmatch(url.partition("://")[2].partition("/")[0]):
        raise UsageError(f"{url!r} names no bucket")
    kinds = _MOUNTED[scheme]
    allowed = {name: value for name, value in options.items() if name in kinds and value is not None}
    for name, value in allowed.items():
        if type(value) is not kinds[name] or (name == "region" and not _REGION.fullmatch(str(value))):
            raise UsageError(f"{url!r}: {value!r:.100} is not a value of the option {name}")
    return allowed


def sendable(url: str, options: Mapping[str, object]) -> bool:
    """Whether another process may be asked to open this store. Secrets are checked elsewhere."""
    scheme = scheme_of(url)
    if scheme in ("http", "https"):
        return not options.keys() - _MOUNTED[scheme].keys()
    return scheme in _MOUNTED or (scheme in _SENT and not options)


def is_public(address: str) -> bool:
    """Whether an IP address is on the public internet.

    Addresses of this machine, of its networks and of its cloud's metadata service are not.
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        embedded = ip.ipv4_mapped or ip.sixtofour
        if ip in _NAT64:
            embedded = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if embedded is not None:
            return is_public(str(embedded))
        if ip not in _GLOBAL:
            return False
    return ip.is_global and not ip.is_multicast and not any(ip in network for network in _CLOUD_SERVICES)


def public_socket(address: tuple[Any, ...]) -> socket.socket:
    """Create a socket for one result of `getaddrinfo`. Raises `PrivateAddressError` if its address is not public."""
    family, kind, protocol, _, target = address
    if not is_public(str(target[0])):
        raise PrivateAddressError(f"{target[0]} is not a public address")
    return socket.socket(family, kind, protocol)
