"""Which client library talks to S3.

Invariant: `HEADRACE_S3` or the option `client` decides (`s3fs` or `obstore`); without them obstore serves when it is installed
and can do what the options ask for, and s3fs does otherwise. Nobody above this room can tell which it was.
Failure behaviour: insisting on obstore where it cannot serve is an `UnsupportedError` with the reason.
"""

from __future__ import annotations

from headrace.dataio.core.errors import UnsupportedError
from headrace.dataio.core.log import get_logger
from headrace.dataio.store.s3config import S3Config
from headrace.dataio.store.s3session import S3Session

_logger = get_logger(__name__)


def connect(config: S3Config) -> S3Session:
    """A session for `config`; makes no request."""
    if config.client == "s3fs":
        return S3Session(config)
    from headrace.dataio.store.s3fast import FastSession, installed, unavailable

    if not installed():
        reason, hint = "obstore is not installed", "pip install 'headrace[s3]'"
    else:
        found = unavailable(config)
        if found is None:
            return FastSession(config)
        reason, hint = found, "set HEADRACE_S3=s3fs, or leave it unset"
    if config.client == "obstore":
        raise UnsupportedError(f"{config.url} cannot be served by obstore: {reason}", hint=hint)
    _logger.debug("%s is served by s3fs: %s", config.url, reason)
    return S3Session(config)
