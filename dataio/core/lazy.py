"""Public names that load their modules when they are first used.

Purpose: importing a package costs nothing, and a program waits only for what it uses.
Invariants: what a name means is looked up each time, so that a module stays the one place where it is; the package's `__all__`
and the imports that it has for type checkers say the same names (a test holds that).
Failure behaviour: `AttributeError` for other names, as of any module; what importing raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType

from headrace.dataio.core.extras import naming_extras


def exports(
    package: str, home: Mapping[str, str], load: Callable[[str], ModuleType] = import_module
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package: `home` says in which module each public name is, and `load` imports it."""

    def get(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with naming_extras():
            return getattr(load(home[name]), name)

    return get, lambda: sorted(home)
