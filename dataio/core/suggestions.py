"""Hints for mistyped names: "did you mean ...?".

Purpose: an error that names an unknown argument or column also names the one that the caller probably meant.
Invariant: only names that exist are suggested.
Failure behaviour: if no name is similar, there is no hint.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

ClassT = TypeVar("ClassT", bound=type)


def did_you_mean(name: str, known: Iterable[str], other_names: Mapping[str, str] | None = None) -> str:
    """Return " (did you mean NAME?)", or "" if no known name is similar.

    Args:
        name: The unknown name.
        known: The names that exist.
        other_names: Names that other libraries use, and what replaces each here, such as `{"seconds":
            "window=Window(seconds)"}`. The part before "=" must be a known name. Default: None.

    Example:
        >>> did_you_mean("heigth", ["width", "height"])
        ' (did you mean height?)'
    """
    import difflib  # only mistakes need it

    names = list(known)
    suggestion = (other_names or {}).get(name) or next(iter(difflib.get_close_matches(name, names, 1)), "")
    return f" (did you mean {suggestion}?)" if suggestion.partition("=")[0] in names else ""


def suggests_arguments(**other_names: str) -> Callable[[ClassT], ClassT]:
    """Class decorator: a `TypeError` for an unknown keyword argument names the one that may be meant.

    Args:
        other_names: Names that other libraries use, and the argument that replaces each.

    Example:
        >>> @suggests_arguments(num_frames="frames")
        ... class Clip:
        ...     def __init__(self, frames: int = 16) -> None: ...
        >>> Clip(num_frames=8)
        Traceback (most recent call last):
        ...
        TypeError: Clip() has no argument 'num_frames' (did you mean frames?)
    """

    def decorate(decorated: ClassT) -> ClassT:
        init: Callable[..., None] = vars(decorated)["__init__"]
        arguments = list(inspect.signature(init).parameters)[1:]

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **kwargs: Any) -> None:
            for name in kwargs:
                if name not in arguments:
                    suggestion = did_you_mean(name, arguments, other_names)
                    raise TypeError(f"{type(self).__name__}() has no argument {name!r}{suggestion}")
            init(self, *args, **kwargs)

        decorated.__init__ = checked  # type: ignore[misc]
        return decorated

    return decorate
