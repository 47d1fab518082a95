"""Which entries of a state a restore is about: patterns on their paths.

A pattern is a path in the state, with `*` for any run of characters (slashes too), `?` and `[...]` as in a shell: "model" and
"model/*" are the whole model, "*/lora_*" every entry below whose name begins so.

Invariant: an entry is taken if some pattern of `include` (or none is given) and no pattern of `exclude` matches its path
or one of the containers above it. Objects that load their own state are taken whole or not at all; modules, dicts and lists
entry by entry.
Failure behaviour: `UsageError` for more than `MOST` patterns, or one that is not text. `unmatched` are the patterns that have
taken nothing yet: a slip of the pen, or entries of another rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from headrace.dataio.core.errors import UsageError

MOST = 1000


@dataclass(frozen=True, slots=True)
class Selection:
    """`strict`: an entry that only one side has is an error; else it is left as it is."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    strict: bool = True
    cast: bool = False
    _matched: set[str] = field(default_factory=set, compare=False, repr=False)

    @classmethod
    def of(
        cls, include: str | Iterable[str] | None, exclude: str | Iterable[str], strict: bool, cast: bool
    ) -> Selection:
        """From what a caller gives: one pattern or several."""
        return cls(_patterns(include if include is not None else ()), _patterns(exclude), strict, cast)

    def takes(self, path: str) -> bool:
        """Whether the entry at `path` is to be restored."""
        if any(_matches(path, pattern) for pattern in self.exclude):
            return False
        found = [pattern for pattern in self.include if _matches(path, pattern)]
        self._matched.update(found)
        return not self.include or bool(found)

    @property
    def unmatched(self) -> tuple[str, ...]:
        """Patterns of `include` that no path that was asked about has matched."""
        return tuple(pattern for pattern in self.include if pattern not in self._matched)

    @property
    def everything(self) -> bool:
        return not self.include and not self.exclude


def matching(given: str | Iterable[str]) -> Callable[[str], bool]:
    """Whether a path, or a container above it, matches one of these patterns."""
    patterns = _patterns(given)
    return lambda path: any(_matches(path, pattern) for pattern in patterns)


def _patterns(given: str | Iterable[str]) -> tuple[str, ...]:
    several: object = given
    found = (given,) if isinstance(given, str) else tuple(given) if isinstance(several, Iterable) else ("",)
    if len(found) > MOST or not all(isinstance(pattern, str) and pattern for pattern in found):
        raise UsageError(f"patterns are texts, at most {MOST}", hint='for example include=["model/*"]')
    return found


def _matches(path: str, pattern: str) -> bool:
    return fnmatchcase(path, pattern) or fnmatchcase(path, pattern.rstrip("/") + "/*")
