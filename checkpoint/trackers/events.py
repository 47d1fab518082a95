"""What a tracker is given: a committed step or a published version, as plain values.

Purpose: trackers show where a step is and what it cost. They upload no tensors.
Invariant: no secret is passed on: the URL is redacted, and metadata that looks like a secret becomes `***`. Names of
numbers are valid names of metrics in MLflow, TensorBoard and W&B. No two numbers of an event have the same name.
Failure behaviour: `digest` is "" if the step's decision could not be read.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from headrace.checkpoint.format import metadata as step_metadata
from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import Decision, decode
from headrace.checkpoint.format.metadata import Metadata
from headrace.checkpoint.handle import SaveResult
from headrace.checkpoint.publishing.records import Published, key_of
from headrace.checkpoint.recording import without_secrets
from headrace.dataio.core import json
from headrace.dataio.core.errors import HeadraceError
from headrace.dataio.core.limits import JSON_DOCUMENT_BYTES
from headrace.dataio.core.log import get_logger
from headrace.dataio.core.redact import redact
from headrace.dataio.store.base import Store

_log = get_logger(__name__)
TEXT_CHARACTERS = 4000
"""A text of the metadata is cut to this length. Trackers refuse much longer texts."""
_NOT_IN_NAMES = re.compile(r"[^\w./-]")


@dataclass(frozen=True, slots=True)
class CommittedStep:
    """A committed step.

    Attributes:
        url (str): The repository, without secrets.
        run (str), timeline (int), step (int), attempt (str): Name of the committed attempt.
        digest (str): The digest of the step's decision, in hexadecimal digits. The decision has the digests of all
            manifests, and these have the digests of all chunks. "" if it could not be read.
        bytes_state (int): Bytes of the state, on all ranks. Only rank 0's if `digest` is "". So are the next two.
        bytes_written (int): Bytes that the save wrote to packs.
        bytes_deduplicated (int): Bytes that were not written because they were stored already.
        seconds (float): Seconds from the end of staging to the commit.
        stall (float): Seconds for which `save` blocked the training loop.
        wait_seconds (float): Seconds for which the training loop waited for the copy later.
        metadata (Metadata): What `save` was given as `metadata`.
    """

    url: str
    run: str
    timeline: int
    step: int
    attempt: str
    digest: str
    bytes_state: int
    bytes_written: int
    bytes_deduplicated: int
    seconds: float
    stall: float
    wait_seconds: float
    metadata: Metadata = field(default_factory=dict)

    @property
    def reference(self) -> str:
        """URL of the step's decision, a small JSON document that names everything else."""
        return f"{self.url.rstrip('/')}/{names.decision(self.run, self.timeline, self.step, self.attempt)}"

    def numbers(self) -> dict[str, float]:
        """Values that trackers show as curves, by name. Those of the metadata are called `metadata/<name>`."""
        own = {
            "bytes_state": self.bytes_state,
            "bytes_written": self.bytes_written,
            "bytes_deduplicated": self.bytes_deduplicated,
            "seconds": self.seconds,
            "stall_seconds": self.stall,
            "wait_seconds": self.wait_seconds,
        }
        given = [(f"metadata/{name}", value) for name, value in self.metadata.items() if _is_number(value)]
        return _named([*own.items(), *given])

    def texts(self) -> dict[str, str]:
        """The other values, by name."""
        own = {"url": self.url, "run": self.run, "timeline": str(self.timeline), "step": str(self.step)}
        own |= {"attempt": self.attempt, "digest": self.digest}
        given = {f"metadata/{name}": _text(value) for name, value in self.metadata.items() if not _is_number(value)}
        return own | given

    def document(self) -> dict[str, Any]:
        """All values, for a JSON document."""
        values = {name: step_metadata.printable(value) for name, value in self.metadata.items()}
        return asdict(self) | {"metadata": values, "reference": self.reference}


@dataclass(frozen=True, slots=True)
class PublishedVersion:
    """A published version of a name.

    Attributes:
        url (str): The repository, without secrets.
        name (str), version (int): What subscribers follow.
        run (str), timeline (int), step (int), attempt (str): The step whose weights are published.
        digest (str): The digest of the table of its tensors, in hexadecimal digits.
        bytes (int): Bytes of all published tensors.
        bytes_update (int): Bytes of the differences from the version before; 0 if there are none.
    """

    url: str
    name: str
    version: int
    run: str
    timeline: int
    step: int
    attempt: str
    digest: str
    bytes: int
    bytes_update: int

    @property
    def reference(self) -> str:
        """URL of the version's record, a small JSON document that names everything else."""
        return f"{self.url.rstrip('/')}/{key_of(self.name, self.version)}"

    def numbers(self) -> dict[str, float]:
        """Values that trackers show as curves, by name."""
        values = {"version": self.version, "bytes": self.bytes, "bytes_update": self.bytes_update}
        return _named(values.items())

    def texts(self) -> dict[str, str]:
        """The other values, by name."""
        return {"url": self.url, "name": self.name, "version": str(self.version), "run": self.run} | {
            "step": str(self.step),
            "digest": self.digest,
        }

    def document(self) -> dict[str, Any]:
        """All values, for a JSON document."""
        return asdict(self) | {"reference": self.reference}


class Tracker(abc.ABC):
    """Base class of trackers. `Checkpointer` calls them on rank 0 only.

    `start` is called in the trainer's thread. All other methods are called in one thread of the tracker's own, one call
    at a time. If one of these raises an error, the first is logged, and training continues.

    Example:
        >>> class Printing(Tracker):
        ...     def committed(self, step: CommittedStep) -> None:
        ...         print(step.step, step.metadata)
    """

    def start(self) -> None:  # noqa: B027
        """Find the experiment to log to, when the checkpointer is created. Raise `UsageError` if there is none."""

    @abc.abstractmethod
    def committed(self, step: CommittedStep) -> None:
        """Log a committed step."""

    def published(self, version: PublishedVersion) -> None:  # noqa: B027
        """Log a published version."""

    def close(self) -> None:  # noqa: B027
        """Release what the tracker opened itself, after its last event."""


def committed_step(store: Store, saved: SaveResult, metadata: Mapping[str, Any]) -> CommittedStep:
    """The event of a committed save. Reads the step's decision: one request."""
    digest, sizes = "", (saved.bytes_state, saved.bytes_written, saved.bytes_deduplicated)
    key = names.decision(saved.run, saved.timeline, saved.step, saved.attempt)
    try:
        data = store.get(key, max_bytes=JSON_DOCUMENT_BYTES)
        totals, digest = decode(data, Decision, key).totals, json.digest_of(data)
        if totals is not None:
            sizes = (totals.bytes_state, totals.bytes_written, totals.bytes_deduplicated)
    except HeadraceError as error:
        _log.warning("step %s is logged without its digest: %s", saved.step, error)
    return CommittedStep(
        redact(store.location.url),
        saved.run,
        saved.timeline,
        saved.step,
        saved.attempt,
        digest,
        *sizes,
        saved.seconds,
        saved.stall,
        saved.wait_seconds,
        without_secrets(dict(metadata)),
    )


def published_version(store: Store, record: Published) -> PublishedVersion:
    """The event of a published version."""
    return PublishedVersion(
        redact(store.location.url),
        record.name,
        record.number,
        record.run,
        record.timeline,
        record.step,
        record.attempt,
        record.weights.digest,
        record.bytes,
        0 if record.update is None else record.update.size,
    )


def safe_name(name: str) -> str:
    """A name that every tracker accepts: letters, digits, `.`, `-`, `_`, and `/` between parts.

    Example:
        >>> safe_name("eval/acc @ 5%")
        'eval/acc___5_'
        >>> safe_name("../x//y")
        '_/x/_/y'
    """
    parts = _NOT_IN_NAMES.sub("_", name).split("/")
    return "/".join(part if part.strip(".") else "_" for part in parts)


def _named(values: Iterable[tuple[str, Any]]) -> dict[str, float]:
    """The values by safe names. A name that another value has already gets `_` at its end."""
    named: dict[str, float] = {}
    for given, value in values:
        name = safe_name(given)
        while name in named:
            name += "_"
        named[name] = float(value)
    return named


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: object) -> str:
    text = value if isinstance(value, str) else {None: "null", True: "true", False: "false"}.get(value, repr(value))  # type: ignore[call-overload]
    return str(text)[:TEXT_CHARACTERS]
