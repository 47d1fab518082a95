"""One page of a listing of a bucket, asked for over a connection of its own.

Why: obstore lists by folders, without the server's name, and takes the marker `folder/` for an object; botocore, which lists
well, takes half a second to import and more CPU for a page than the server.
Invariants: what comes back has the form and content of botocore's `list_objects_v2`: keys as they are stored, whatever is in
them. The request is signed by AWS Signature Version 4. One request a call, bounded in time and bytes; nothing is kept but the
certificates to trust.
Failure behaviour: the errors of `s3errors`; None when the server sends elsewhere, where botocore is to ask instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import hmac
import ssl
import urllib.parse
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from typing import Any

from headrace.dataio.core import limits
from headrace.dataio.core.errors import HeadraceError, TransientError, UsageError
from headrace.dataio.store.s3config import S3Config
from headrace.dataio.store.s3credentials import Keys
from headrace.dataio.store.s3errors import CERTIFICATE_HINT, NETWORK_HINT, REACH_HINT, UnreachableError, from_answer

_PAGE_BYTES = 16 * limits.MIB
"""A thousand keys of 1 KiB, percent-encoded, are 4 MiB."""
_HEADERS = 100
_EMPTY = hashlib.sha256(b"").hexdigest()
_NAMES = {
    "Prefix": "prefix",
    "ContinuationToken": "continuation-token",
    "MaxKeys": "max-keys",
}


class Pages:
    """Asks for pages; used in one event loop."""

    def __init__(self, config: S3Config) -> None:
        self._config = config
        self._trust: ssl.SSLContext | None = None

    async def page(self, doing: str, keys: Keys | None, parameters: Mapping[str, object]) -> dict[str, Any] | None:
        """botocore's answer to `list_objects_v2`."""
        url = urllib.parse.urlsplit(self._config.bucket_url)
        query = {"list-type": "2", "encoding-type": "url"} | {_NAMES[n]: str(v) for n, v in parameters.items()}
        payer = {"x-amz-request-payer": "requester"} if self._config.options.get("requester_pays") else {}
        headers = signed(
            url, query, payer, keys, self._config.region or "us-east-1", datetime.datetime.now(datetime.UTC)
        )
        status, found, body = await self._exchange(doing, url, query, headers)
        if 300 <= status < 400:
            return None
        if status == 200 and b"<Error" in body[:200]:  # S3 may begin an answer before it knows
            status = 500
        if status != 200:
            raise refusal(status, body, found.get("retry-after"), self._config, doing)
        try:
            return listing(body) | {"ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": found}}
        except (ValueError, ET.ParseError) as error:
            raise HeadraceError(
                f"{doing}: {self._config.endpoint} answered something that is no listing: {error}"
            ) from error

    async def _exchange(
        self,
        doing: str,
        url: urllib.parse.SplitResult,
        query: Mapping[str, str],
        headers: Mapping[str, str],
    ) -> tuple[int, dict[str, str], bytes]:
        where = f"{doing}: {self._config.endpoint}"
        try:
            async with asyncio.timeout(self._config.connect_seconds):
                reader, writer = await asyncio.open_connection(url.hostname, _port(url), ssl=self.trust(url.scheme))
        except ssl.SSLError as error:
            raise UsageError(f"{where}: {error}", hint=CERTIFICATE_HINT) from error
        except OSError as error:
            raise UnreachableError(f"{where}: {str(error) or 'timed out'}", hint=REACH_HINT) from error
        try:
            async with asyncio.timeout(self._config.read_seconds):
                lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
                target = f"{_path(url)}?{canonical(query)}"
                writer.write(f"GET {target} HTTP/1.1\r\n{lines}connection: close\r\n\r\n".encode("ascii"))
                return await _answer(reader)
        except (OSError, EOFError) as error:
            words = "the body ended early" if isinstance(error, EOFError) else str(error) or "the read timed out"
            raise TransientError(f"{where}: {words}", hint=NETWORK_HINT) from error
        except (ValueError, asyncio.LimitOverrunError) as error:
            raise HeadraceError(f"{where} answered something that is no HTTP: {error}") from error
        finally:
            writer.transport.abort()

    def trust(self, scheme: str) -> ssl.SSLContext | None:
        """The certificates to trust; None where none are needed. They are read once."""
        if scheme == "http":
            return None
        if self._trust is None:
            verify = self._config.verify
            self._trust = ssl.create_default_context(cafile=verify if isinstance(verify, str) else None)
            if verify is False:
                self._trust.check_hostname, self._trust.verify_mode = False, ssl.CERT_NONE
        return self._trust


def behind_a_proxy(environ: Mapping[str, str]) -> bool:
    """Whether a variable names a proxy."""
    return any(name.lower() in ("http_proxy", "https_proxy", "all_proxy") and environ[name] for name in environ)


def signed(
    url: urllib.parse.SplitResult,
    query: Mapping[str, str],
    headers: Mapping[str, str],
    keys: Keys | None,
    region: str,
    now: datetime.datetime,
    method: str = "GET",
) -> dict[str, str]:
    """The headers of a request without a body, signed for S3 unless `keys` is None (AWS Signature Version 4)."""
    host = f"[{url.hostname}]" if ":" in (url.hostname or "") else url.hostname or ""
    port = f":{url.port}" if url.port and url.port != _default_port(url) else ""
    stamp = now.strftime("%Y%m%dT%H%M%SZ")
    given = {"host": host + port, "x-amz-content-sha256": _EMPTY, "x-amz-date": stamp, **headers}
    if keys is None:
        return given
    if keys.token:
        given["x-amz-security-token"] = keys.token
    names = ";".join(sorted(given))
    lines = "".join(f"{name}:{given[name].strip()}\n" for name in sorted(given))
    request = "\n".join([method, _path(url), canonical(query), lines, names, _EMPTY])
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    digest = hashlib.sha256(request.encode()).hexdigest()
    key = f"AWS4{keys.secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{digest}".encode(), "sha256").hex()
    which = f"Credential={keys.access}/{scope}, SignedHeaders={names}, Signature={signature}"
    return given | {"authorization": f"AWS4-HMAC-SHA256 {which}"}


def canonical(query: Mapping[str, str]) -> str:
    """The query as it is signed and sent."""
    pairs = sorted((quoted(name), quoted(value)) for name, value in query.items())
    return "&".join(f"{name}={value}" for name, value in pairs)


def refusal(status: int, body: bytes, retry_after: str | None, config: S3Config, doing: str) -> HeadraceError:
    """The error for an answer that is none of success."""
    code = words = ""
    if body.lstrip().startswith(b"<"):
        with contextlib.suppress(ET.ParseError):  # a page for people, or cut short
            said = _parsed(body)
            code, words = _text(said, "Code"), _text(said, "Message")
    return from_answer(status, code or str(status), words, retry_after, config, doing)


def listing(body: bytes) -> dict[str, Any]:
    """The answer's XML in botocore's form."""
    root = _parsed(body)
    if not root.tag.endswith("ListBucketResult"):
        raise ValueError(f"a document of {root.tag[:100]!r}")
    unquoted = urllib.parse.unquote_plus if _text(root, "EncodingType") == "url" else str
    contents = [
        {
            "Key": unquoted(_text(one, "Key")),
            "Size": int(_text(one, "Size")),
            "LastModified": datetime.datetime.fromisoformat(_text(one, "LastModified")),
        }
        for one in root.iterfind("{*}Contents")
    ]
    return {
        "Contents": contents,
        "IsTruncated": _text(root, "IsTruncated") == "true",
        "NextContinuationToken": _text(root, "NextContinuationToken"),
    }


async def _answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Status, headers by small letters, and body. `EOFError` when it ends early, `ValueError` when it is not HTTP."""
    while (status := await _status(reader)) < 200:  # 100 Continue
        await _headers(reader)
    headers = await _headers(reader)
    if "chunked" in headers.get("transfer-encoding", "").lower():
        return status, headers, await _chunked(reader)
    if "content-length" in headers:
        return status, headers, await reader.readexactly(_bounded(int(headers["content-length"])))
    body = bytearray()
    while piece := await reader.read(64 * limits.KIB):
        _bounded(len(body) + len(piece))
        body += piece
    return status, headers, bytes(body)


async def _status(reader: asyncio.StreamReader) -> int:
    version, _, rest = (await _line(reader)).partition(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError(f"a line {version[:100]!r}")
    return int(rest[:3])


async def _headers(reader: asyncio.StreamReader) -> dict[str, str]:
    found: dict[str, str] = {}
    while line := await _line(reader):
        name, _, value = line.partition(":")
        found[name.strip().lower()] = value.strip()
        if len(found) > _HEADERS:
            raise ValueError(f"more than {_HEADERS} headers")
    return found


async def _chunked(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while size := int((await _line(reader)).partition(";")[0], 16):
        _bounded(len(body) + size)
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    return bytes(body)


async def _line(reader: asyncio.StreamReader) -> str:
    return (await reader.readuntil(b"\n")).decode("latin-1").rstrip("\r\n")


def _bounded(size: int) -> int:
    if not 0 <= size <= _PAGE_BYTES:
        raise ValueError(f"a body of {size} bytes")
    return size


def _parsed(body: bytes) -> ET.Element:
    return ET.fromstring(body)


def _text(element: ET.Element, name: str) -> str:
    return element.findtext(f"{{*}}{name}") or ""


def quoted(text: str, safe: str = "") -> str:
    """A part of an address as it is signed and sent."""
    return urllib.parse.quote(text, safe=f"-_.~{safe}")


def _path(url: urllib.parse.SplitResult) -> str:
    return url.path or "/"


def _default_port(url: urllib.parse.SplitResult) -> int:
    return 443 if url.scheme == "https" else 80


def _port(url: urllib.parse.SplitResult) -> int:
    return url.port or _default_port(url)
