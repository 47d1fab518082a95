"""The description of a run: what the user gives, and a few facts that are recorded without being asked.

Invariant: only the facts listed in `facts_of_process` are recorded. They hold no environment variable, and no host name,
user name or folder, unless an argument of the script contains it. Values that look like secrets are replaced by `***`,
in arguments and in what the user gives.
Failure behaviour: a fact that cannot be determined is missing. `git` is stopped after `GIT_SECONDS`. `describe` raises
`UsageError` for a value that cannot be stored. An automatic description that cannot be stored is logged, and the step is
saved without it.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib import metadata as packages
from pathlib import Path
from typing import Any

from headrace.checkpoint.format import description
from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.log import get_logger
from headrace.dataio.core.redact import is_secret_name, redact

_log = get_logger(__name__)
GIT_SECONDS = 2.0
"""The time limit of all calls of `git` together, in seconds."""
_HIDDEN = "***"
_ARGUMENTS, _ARGUMENT_CHARACTERS = 256, 1000
_TOKENIZER = re.compile(r"(?i)tokeni[sz]\w*")
"""A word that `is_secret_name` takes for the name of a token."""
RESERVED = ("version", "recorded")
"""Sections of a description that the user cannot give."""


class Description:
    """The description of one trainer's next saves. `describe` and `current` may be called from different threads.

    Args:
        world_size (int): Number of ranks.
        record (bool): Whether to record facts about the process. `records` is the same.
    """

    def __init__(self, world_size: int, record: bool) -> None:
        self._world_size, self.records = world_size, record
        self._lock = threading.Lock()
        self._given: dict[str, object] = {}
        self._facts: dict[str, object] | None = None
        self._stored = ""
        self._encoded: tuple[str, bytes] | None = None

    def describe(self, sections: Mapping[str, object]) -> None:
        """Replace these sections. A section that is None is removed."""
        for name in sections:
            if name in RESERVED:
                raise UsageError(f"a description cannot have a section {name!r}", hint="choose another name")
        given = without_secrets({name: description.plain_json(value, name, 0) for name, value in sections.items()})
        with self._lock:
            merged = {name: value for name, value in (self._given | given).items() if value is not None}
            description.encode(merged)
            self._given, self._encoded = merged, None

    def current(self, *, urgent: bool = False) -> tuple[str, bytes]:
        """The digest of the description, and its bytes if no save has stored them; ("", b"") if there is nothing.

        The first call may run `git`, unless it is `urgent`. An urgent first call returns a description without facts.
        """
        try:
            with self._lock:
                if self.records and self._facts is None and not urgent:
                    self._facts, self._encoded = facts_of_process(self._world_size), None
                if self._encoded is None:
                    data = self._encode()
                    self._encoded = (description.name_of(data) if data else "", data)
                name, data = self._encoded
                return name, b"" if name == self._stored else data
        except Exception as error:  # a description must not fail a save
            _log.warning("the description of the run is not stored: %s", error)
            return "", b""

    def stored(self, name: str) -> None:
        """Report that a step which names this description was committed."""
        self._stored = name

    def _encode(self) -> bytes:
        sections = {**self._given, "recorded": self._facts} if self._facts else self._given
        return description.encode(sections) if sections else b""


def facts_of_process(world_size: int) -> dict[str, object]:
    """The facts that are recorded. This list is complete."""
    script = Path(sys.argv[0]) if sys.argv and sys.argv[0] not in ("", "-c", "-m") else None
    facts: dict[str, object] = {
        "script": script.name if script is not None else "",
        "arguments": redact_arguments(sys.argv[1:]),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "headrace": _version("headrace"),
        "world_size": world_size,
    }
    folder = script.parent if script is not None and script.parent.is_dir() else Path()
    if git := git_facts(folder):
        facts["git"] = git
    return facts


def _version(package: str) -> str | None:
    try:
        return packages.version(package)
    except packages.PackageNotFoundError:
        return None


def git_facts(folder: Path) -> dict[str, object]:
    """The commit of the folder's repository, and whether files that git tracks have changed; {} if there is none.

    Hooks, the file system monitor, the pager and external differences are off. Nothing is written.
    """
    commit = _git(folder, "rev-parse", "--verify", "--quiet", "HEAD")
    if commit is None or not re.fullmatch(r"[0-9a-f]{40,64}", commit.strip()):
        return {}
    changed = _git(folder, "diff-index", "--quiet", "--no-ext-diff", "--no-textconv", "--ignore-submodules=all", "HEAD")
    return {"commit": commit.strip(), "dirty": None if changed is None else changed != ""}


def _git(folder: Path, *arguments: str) -> str | None:
    """The output of `git`; None if it failed. For `diff-index --quiet`, "changed" if there are differences."""
    safe = ["core.hooksPath=/dev/null", "core.fsmonitor=false", "core.pager=cat"]
    command = ["git", "--no-optional-locks", *(part for option in safe for part in ("-c", option)), *arguments]
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    environment |= {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=GIT_SECONDS / 2,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    if arguments[0] == "diff-index":
        return {0: "", 1: "changed"}.get(done.returncode)
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments of a program without values that look like secrets."""
    shown: list[str] = []
    hide_next = False
    for given in arguments[:_ARGUMENTS]:
        argument = given.encode(errors="replace").decode()
        name, equals, value = argument.partition("=")
        is_option = name.startswith("-")
        if hide_next and not is_option:
            shown.append(_HIDDEN)
        elif equals and _is_secret(name.lstrip("-")):
            shown.append(f"{name}={_HIDDEN}")
        else:
            shown.append(f"{redact(name)}{equals}{redact(value)}"[:_ARGUMENT_CHARACTERS])
        hide_next = is_option and not equals and _is_secret(name.lstrip("-"))
    return shown


def _is_secret(name: str) -> bool:
    return is_secret_name(_TOKENIZER.sub("", name))


def without_secrets(value: Any) -> Any:
    """Nested plain data with `***` in place of texts that look like secrets. Numbers stay, such as `max_tokens`."""
    if isinstance(value, dict):
        return {
            name: _HIDDEN if _is_secret(name) and not _is_number(item) else without_secrets(item)
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [without_secrets(item) for item in value]
    return redact(value) if isinstance(value, str) else value


def _is_number(value: object) -> bool:
    return value is None or isinstance(value, int | float)
