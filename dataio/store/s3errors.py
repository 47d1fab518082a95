"""From what botocore and aiohttp raise to the error of its remedy.

Invariant: every error inside `translated_s3` leaves it as one of `headrace.dataio.core.errors` that names the object or
bucket, the
endpoint and the server's own code. Time-outs, resets, cut bodies, 429 and 5xx are `TransientError`; a server that cannot
be reached at all is `UnreachableError`, which tells a write that its request was never sent.
Failure behaviour: an unknown answer of the server becomes a plain `HeadraceError` with its code and words; anything that
is neither botocore's nor aiohttp's passes through as the bug it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

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
from headrace.dataio.store.s3config import S3Config


class UnreachableError(TransientError):
    """No connection to the endpoint came about, so no request was sent."""


class PreconditionError(ConflictError):
    """The server answered that a precondition of the request does not hold, or that another request is in its way."""


class NoSuchUploadError(NotFoundError):
    """The multipart upload is over: completed, aborted, or expired."""


CHECK_KEYS = "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or the profile, and what they may do with this bucket"
_SLOW_DOWN_HINT = "send less, or ask the operator of the store for more"
CERTIFICATE_HINT = "check the endpoint's certificate, or set AWS_CA_BUNDLE"
REACH_HINT = "check that the server runs, AWS_ENDPOINT_URL, and the network"
NETWORK_HINT = 'check the server and the network; a slow link needs more time: config_kwargs={"read_timeout": SECONDS}'
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
    "NotImplemented": (UnsupportedError, "this server lacks the operation; `headrace doctor URL` says what it can do"),
}
_BY_STATUS: dict[int, tuple[type[HeadraceError], str]] = {
    401: (AccessDeniedError, CHECK_KEYS),
    403: (AccessDeniedError, CHECK_KEYS),
    404: (NotFoundError, "check the URL and the key"),
    409: (PreconditionError, ""),
    412: (PreconditionError, ""),
    416: (RangeError, "ask for a range inside the object"),
    501: (UnsupportedError, "this server lacks the operation; `headrace doctor URL` says what it can do"),
    507: (CapacityError, "free space on the server"),
}


@contextlib.contextmanager
def translated_s3(config: S3Config, doing: str) -> Iterator[None]:
    """Turn the errors of botocore and aiohttp into Headrace's; `doing` is for example `reading s3://bucket/key`."""
    try:
        yield
    except HeadraceError:
        raise
    except TimeoutError as error:
        raise TransientError(f"{doing}: {config.endpoint}: {str(error) or 'timed out'}", hint=NETWORK_HINT) from error
    except Exception as error:
        from headrace.dataio.store.s3botoerrors import translation

        if (found := translation(error, config, doing)) is None:
            raise
        raise found from error


def from_answer(
    status: int, code: str, words: str, retry_after: str | None, config: S3Config, doing: str
) -> HeadraceError:
    """The error for an answer of the server: HTTP status, S3 code and message, and the header Retry-After if it had one."""
    if code == "NoSuchBucket":
        return NotFoundError(
            f"the bucket {config.bucket!r} does not exist at {config.endpoint}",
            hint="check the URL, or create the bucket",
        )
    text = f"{doing}: {config.endpoint} answered {status} {code}" + (f" ({words})" if words else "")
    if code in ("NoSuchKey", "404", "NotFound"):
        return NotFoundError(f"{doing}: it does not exist at {config.endpoint}", hint="check the URL and the key")
    kind, hint = _BY_CODE.get(code) or _BY_STATUS.get(status) or (HeadraceError, "")
    if status in (429, 503) or "SlowDown" in code or "Throttl" in code:
        return SlowDownError(text, seconds=_seconds(retry_after), hint=_SLOW_DOWN_HINT)
    if kind is HeadraceError and status >= 500:
        kind, hint = TransientError, "the server is overloaded or in trouble; see its log"
    return kind(text, hint=hint)


def _seconds(header: str | None) -> float | None:
    """Retry-After as a number of seconds; the other form, a date, is left to the policy of retries."""
    return float(header) if header and header.isdecimal() and len(header) < 6 else None
