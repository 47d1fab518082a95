"""Which optional package belongs to which extra of `pip install headrace[…]`.

Purpose: a missing package is one line that names the extra. `pip install headrace` brings what the daemon, the command line and
the formats of checkpoints need; everything else is an extra.
Invariant: an import that fails for another reason stays the error that it is.
Failure behaviour: `MissingExtraError`, which is an `ImportError` too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from headrace.dataio.core.errors import UsageError

EXTRAS = {
    "aiobotocore": "s3",
    "aiohttp": "s3",
    "av": "data",
    "botocore": "s3",
    "duckdb": "sql",
    "fsspec": "s3",
    "nvidia": "dali",
    "obstore": "s3",
    "pyarrow": "data",
    "ray": "ray",
    "s3fs": "s3",
    "simplejpeg": "torch",
    "torch": "torch",
}
"""Top-level module → extra."""


class MissingExtraError(UsageError, ImportError):
    """A package is not installed that belongs to an extra."""

    code = "missing_extra"


@contextlib.contextmanager
def naming_extras() -> Iterator[None]:
    """Turns a failed import of an optional package into a `MissingExtraError` that names its extra.

    Example:
        >>> with naming_extras():
        ...     raise ModuleNotFoundError("No module named 'duckdb'", name="duckdb")
        Traceback (most recent call last):
        ...
        headrace.dataio.core.extras.MissingExtraError: duckdb is not installed (pip install 'headrace[sql]')
    """
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in EXTRAS:
            raise
        raise MissingExtraError(
            f"{module} is not installed", hint=f"pip install 'headrace[{EXTRAS[module]}]'"
        ) from None
