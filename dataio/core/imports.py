"""Optional packages and lazy imports.

Purpose: `pip install headrace` installs the packages that the daemon, the command line and the checkpoint formats need.
All other packages belong to an extra. If one is missing, a one-line error names its extra (`naming_extras`). `exports`
makes a package load the modules of its public names on first use, so importing the package costs nothing.

Invariants: an import that fails for another reason keeps its own error. A name is looked up in its module on every
access. A test checks that a package's `__all__` and its imports for type checkers list the same names.

Failure behaviour: `MissingExtraError`, which is also an `ImportError`; `AttributeError` for an unknown name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from types import ModuleType

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
    """A package of an extra is not installed."""

    code = "missing_extra"


@contextlib.contextmanager
def naming_extras() -> Iterator[None]:
    """Turn a failed import of an optional package into a `MissingExtraError` that names its extra.

    Example:
        >>> with naming_extras():
        ...     raise ModuleNotFoundError("No module named 'duckdb'", name="duckdb")
        Traceback (most recent call last):
        ...
        headrace.dataio.core.imports.MissingExtraError: duckdb is not installed (pip install 'headrace[sql]')
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


def exports(
    package: str, home: Mapping[str, str], load: Callable[[str], ModuleType] = import_module
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Make the functions `__getattr__` and `__dir__` of a package with lazy public names.

    Args:
        package: The package's name, for the error message.
        home: Public name → module that defines it.
        load: Imports a module by its name.

    Returns:
        The two functions.
    """

    def get(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with naming_extras():
            return getattr(load(home[name]), name)

    return get, lambda: sorted(home)
