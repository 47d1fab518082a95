"""From what botocore and aiohttp raise to the error of its remedy; for `s3errors.translated_s3`, once something was raised.

Failure behaviour: what is neither botocore's nor aiohttp's nor the system's is nobody's to translate: None.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import botocore.exceptions as boto

from headrace.dataio.core.errors import AccessDeniedError, HeadraceError, TransientError, UsageError
from headrace.dataio.store.s3config import S3Config
from headrace.dataio.store.s3errors import (
    CERTIFICATE_HINT,
    CHECK_KEYS,
    NETWORK_HINT,
    REACH_HINT,
    UnreachableError,
    from_answer,
)


def translation(error: Exception, config: S3Config, doing: str) -> HeadraceError | None:
    """The error to raise instead of `error`."""
    if isinstance(error, boto.ClientError):
        return _from_client_error(error, config, doing)
    if isinstance(error, TimeoutError | boto.BotoCoreError | aiohttp.ClientError | OSError):
        return _from_transport(error, config, doing)
    return None


def _from_client_error(error: Any, config: S3Config, doing: str) -> HeadraceError:
    said, meta = error.response.get("Error", {}), error.response.get("ResponseMetadata", {})
    status, headers = int(meta.get("HTTPStatusCode", 0)), meta.get("HTTPHeaders", {})
    words = str(said.get("Message", ""))
    return from_answer(status, str(said.get("Code", "")), words, headers.get("retry-after"), config, doing)


def _from_transport(error: Exception, config: S3Config, doing: str) -> HeadraceError:
    text = f"{doing}: {config.endpoint}: {_words(error)}"
    match error:
        case boto.NoCredentialsError() | boto.PartialCredentialsError() | boto.CredentialRetrievalError():
            return AccessDeniedError(f"{doing}: no credentials were found for {config.endpoint}", hint=CHECK_KEYS)
        case boto.ProfileNotFound() | boto.ParamValidationError() | boto.NoRegionError() | boto.InvalidRegionError():
            return UsageError(text, hint="check the URL, the profile and the region")
        case boto.SSLError() | aiohttp.ClientSSLError():
            return UsageError(text, hint=CERTIFICATE_HINT)
        case boto.ConnectionError() | boto.HTTPClientError() if _never_connected(error):
            return UnreachableError(text, hint=REACH_HINT)
        case (
            boto.ConnectionError() | boto.HTTPClientError() | aiohttp.ClientError() | asyncio.TimeoutError() | OSError()
        ):
            return TransientError(text, hint=NETWORK_HINT)
        case boto.IncompleteReadError() | boto.ResponseStreamingError():
            return TransientError(text, hint=NETWORK_HINT)
    return HeadraceError(text)


def _never_connected(error: Any) -> bool:
    """aiobotocore says `EndpointConnectionError` for a connection that broke in the middle of a request too."""
    return isinstance(error, boto.ConnectTimeoutError | boto.ProxyConnectionError) or isinstance(
        error.kwargs.get("error"), aiohttp.ClientConnectorError
    )


def _words(error: Exception) -> str:
    return str(error) or ("timed out" if isinstance(error, TimeoutError) else type(error).__name__)
