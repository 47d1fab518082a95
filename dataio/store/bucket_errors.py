"""Turns the errors of botocore, aiohttp and obstore, and the refusals of servers, into Headrace's errors.

Invariants:

* `translated_s3` and `translated_obstore` turn every error of these libraries into one of
  `headrace.dataio.core.errors`. Its text has the object or bucket, the endpoint and the server's own code.
* Time-outs, resets, short bodies, 429 and 5xx are `TransientError`.
* A server that cannot be reached is `UnreachableError`, so a writer knows that its request was never sent.
* obstore reports only text. Status, code and message are taken from the server's XML in it. The text itself is not
  shown, because it repeats requests and responses. Only an error that matches none of the known ones shows the
  beginning of its first line. Secrets are removed before the line is cut, since a part of one may not look like one.
* botocore and aiohttp are imported only after an error.

Failure behaviour: an unknown response becomes a plain `HeadraceError` with its code and message. An error of another
library passes through, because it is a bug.
"""

from __future__ import annotations

import contextlib
import html
import re
from collections.abc import Iterator
from typing import Any, Protocol

from headrace.dataio.core.errors import (
    AccessDeniedError,
    CapacityError,
    ConflictError,
    HeadraceError,
    NotFoundError,
    RangeError,
    SlowDownError,
    TransientError,
    UnsupportedError,
    UsageError,
)
from headrace.dataio.core.redact import redact
from headrace.dataio.store.s3_config import S3Config


class Endpoint(Protocol):
    """The server and the bucket, for error messages."""

    @property
    def endpoint(self) -> str: ...

    @property
    def bucket(self) -> str: ...


class UnreachableError(TransientError):
    """The client could not connect to the endpoint, so it sent no request."""


class PreconditionError(ConflictError):
    """The server refused the request: its precondition is not met, or another request conflicts with it."""


class NoSuchUploadError(NotFoundError):
    """The multipart upload is over: completed, aborted, or expired."""


CHECK_KEYS = "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or the profile, and their permissions for this bucket"
_SLOW_DOWN_HINT = "send less, or ask the operator of the store for more"
CERTIFICATE_HINT = "check the endpoint's certificate, or set AWS_CA_BUNDLE"
REACH_HINT = "check that the server runs, AWS_ENDPOINT_URL, and the network"
NETWORK_HINT = 'check the server and the network; a slow link needs more time: config_kwargs={"read_timeout": SECONDS}'
_TEXT_BYTES = 64 << 10
_SHOWN = 300
_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_CODE = re.compile(r"<Code>\s*([\w.]{1,100})\s*</Code>")
_MESSAGE = re.compile(r"<Message>([^<]{0,1000})</Message>")
_OS_WORDS = re.compile(
    r'kind: (?:ConnectionRefused|ConnectionReset|BrokenPipe|\w*Unreachable),\s*message: "([^"]{1,200})"'
)
_BY_CODE: dict[str, tuple[type[HeadraceError], str]] = {
    "NoSuchUpload": (NoSuchUploadError, "start the upload again"),
    "InvalidRange": (RangeError, "ask for a range inside the object"),
    "PreconditionFailed": (PreconditionError, ""),
    "ConditionalRequestConflict": (PreconditionError, ""),
    "RequestTimeTooSkewed": (AccessDeniedError, "set this machine's clock"),
    "ExpiredToken": (AccessDeniedError, "renew the temporary credentials"),
    "InvalidToken": (AccessDeniedError, "renew the temporary credentials"),
    "EntityTooLarge": (CapacityError, "use put_multipart"),
    "QuotaExceeded": (CapacityError, "free space or raise the quota"),
    "XMinioStorageFull": (CapacityError, "free space on the server"),
    "RequestTimeout": (TransientError, ""),
    "XAmzContentSHA256Mismatch": (TransientError, "the body was changed on its way"),
    "BadDigest": (TransientError, "the body was changed on its way"),
    "AuthorizationHeaderMalformed": (UsageError, "set AWS_REGION to the bucket's region"),
    "PermanentRedirect": (UsageError, "set AWS_REGION or the endpoint to the bucket's own"),
    "InvalidBucketName": (UsageError, "check the URL"),
    "NotImplemented": (
        UnsupportedError,
        "this server lacks the operation; `headrace doctor URL` lists the supported operations",
    ),
}
_BY_STATUS: dict[int, tuple[type[HeadraceError], str]] = {
    401: (AccessDeniedError, CHECK_KEYS),
    403: (AccessDeniedError, CHECK_KEYS),
    404: (NotFoundError, "check the URL and the key"),
    409: (PreconditionError, ""),
    412: (PreconditionError, ""),
    416: (RangeError, "ask for a range inside the object"),
    501: (UnsupportedError, "this server lacks the operation; `headrace doctor URL` lists the supported operations"),
    507: (CapacityError, "free space on the server"),
}


@contextlib.contextmanager
def translated_s3(config: S3Config, doing: str) -> Iterator[None]:
    """Turn errors of botocore and aiohttp into Headrace's. `doing` is for example `reading s3://bucket/key`."""
    try:
        yield
    except HeadraceError:
        raise
    except TimeoutError as error:
        raise TransientError(f"{doing}: {config.endpoint}: {str(error) or 'timed out'}", hint=NETWORK_HINT) from error
    except Exception as error:
        translated = _from_botocore(error, config, doing)
        if translated is None:
            raise
        raise translated from error


def from_answer(
    status: int, code: str, words: str, retry_after: str | None, config: Endpoint, doing: str
) -> HeadraceError:
    """Return the error for a response: HTTP status, S3 code, message (`words`), and the header Retry-After or None."""
    if code in ("NoSuchBucket", "ContainerNotFound"):
        return NotFoundError(
            f"the bucket {config.bucket!r} does not exist at {config.endpoint}",
            hint="check the URL, or create the bucket",
        )
    text = f"{doing}: {config.endpoint} answered {status} {code}" + (f" ({words})" if words else "")
    if code in ("NoSuchKey", "404", "NotFound"):
        return NotFoundError(f"{doing}: it does not exist at {config.endpoint}", hint="check the URL and the key")
    kind, hint = _BY_CODE.get(code) or _BY_STATUS.get(status) or (HeadraceError, "")
    if status in (429, 503) or "SlowDown" in code or "Throttl" in code:
        return SlowDownError(text, seconds=_retry_after_seconds(retry_after), hint=_SLOW_DOWN_HINT)
    if kind is HeadraceError and status >= 500:
        kind, hint = TransientError, "the server is overloaded or in trouble; see its log"
    return kind(text, hint=hint)


def _retry_after_seconds(header: str | None) -> float | None:
    """Parse Retry-After in seconds. A date gives None, and the retry policy then decides."""
    return float(header) if header and header.isdecimal() and len(header) < 6 else None


def _from_botocore(error: Exception, config: Endpoint, doing: str) -> HeadraceError | None:
    """Return the error to raise in place of `error`; None if it is not from botocore, aiohttp or the system."""
    import aiohttp
    import botocore.exceptions as boto

    text = f"{doing}: {config.endpoint}: {str(error) or type(error).__name__}"
    match error:
        case boto.ClientError():
            return _from_client_error(error, config, doing)
        case boto.NoCredentialsError() | boto.PartialCredentialsError() | boto.CredentialRetrievalError():
            return AccessDeniedError(f"{doing}: no credentials were found for {config.endpoint}", hint=CHECK_KEYS)
        case boto.ProfileNotFound() | boto.ParamValidationError() | boto.NoRegionError() | boto.InvalidRegionError():
            return UsageError(text, hint="check the URL, the profile and the region")
        case boto.SSLError() | aiohttp.ClientSSLError():
            return UsageError(text, hint=CERTIFICATE_HINT)
        # aiobotocore raises EndpointConnectionError also for a connection that broke in the middle of a request
        case boto.ConnectTimeoutError() | boto.ProxyConnectionError():
            return UnreachableError(text, hint=REACH_HINT)
        case boto.ConnectionError() | boto.HTTPClientError() if isinstance(
            error.kwargs.get("error"), aiohttp.ClientConnectorError
        ):
            return UnreachableError(text, hint=REACH_HINT)
        case boto.ConnectionError() | boto.HTTPClientError() | aiohttp.ClientError() | OSError():
            return TransientError(text, hint=NETWORK_HINT)
        case boto.IncompleteReadError() | boto.ResponseStreamingError():
            return TransientError(text, hint=NETWORK_HINT)
        case boto.BotoCoreError():
            return HeadraceError(text)
    return None


def _from_client_error(error: Any, config: Endpoint, doing: str) -> HeadraceError:
    details, meta = error.response.get("Error", {}), error.response.get("ResponseMetadata", {})
    status, headers = int(meta.get("HTTPStatusCode", 0)), meta.get("HTTPHeaders", {})
    words = str(details.get("Message", ""))
    return from_answer(status, str(details.get("Code", "")), words, headers.get("retry-after"), config, doing)


@contextlib.contextmanager
def translated_obstore(config: Endpoint, doing: str) -> Iterator[None]:
    """Turn obstore's errors into Headrace's. The original is not kept as the cause, because of its text."""
    from obstore.exceptions import BaseError

    try:
        yield
    except TimeoutError:
        translated: HeadraceError = TransientError(f"{doing}: {config.endpoint}: timed out", hint=NETWORK_HINT)
    except (BaseError, FileNotFoundError) as error:
        translated = _from_obstore(str(error)[:_TEXT_BYTES], config, doing)
    else:
        return
    raise translated from None


def _from_obstore(text: str, config: Endpoint, doing: str) -> HeadraceError:
    if status := _STATUS.search(text):
        code, message = _CODE.search(text), _MESSAGE.search(text)
        words = html.unescape(message[1]) if message else ""
        return from_answer(int(status[1]), code[1] if code else status[1], words, None, config, doing)
    prefix = f"{doing}: {config.endpoint}"
    if "NotPartial" in text:
        return UnsupportedError(
            f"{prefix} answered a request for a range with the whole object",
            hint="Headrace needs a server that supports ranged reads; see `headrace doctor URL`",
        )
    if "Wanted range starting at" in text:
        return RangeError(f"{prefix}: the object ends before the range", hint="ask for a range inside the object")
    if "certificate" in text.lower():
        return UsageError(f"{prefix}: the server's certificate is not trusted", hint=CERTIFICATE_HINT)
    if "kind: Connect," in text:
        return UnreachableError(f"{prefix}: {_connection_failure(text)}", hint=REACH_HINT)
    if "HttpError" in text or "reqwest" in text:
        return TransientError(f"{prefix}: {_connection_failure(text)}", hint=NETWORK_HINT)
    return HeadraceError(f"{prefix}: {_shortened(redact(text.partition(chr(10))[0]))}")


def _shortened(line: str) -> str:
    """Cut the line after a word, to at most `_SHOWN` characters."""
    if len(line) <= _SHOWN:
        return line
    head = line[:_SHOWN]
    return f"{head[: head.rfind(' ')] if ' ' in head[_SHOWN // 2 :] else head}…"


def _connection_failure(text: str) -> str:
    if match := _OS_WORDS.search(text):
        return match[1]
    for mark, words in (
        ("TimedOut", "the read timed out"),
        ("IncompleteBody", "the body ended early"),
        ("dns error", "unknown host"),
    ):
        if mark in text:
            return words
    return "the connection failed"
