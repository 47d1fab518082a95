"""What `verify` found: for programs, the table on the terminal, `--json` and the exit code.

Invariant: every object that the version names has exactly one report; at most `LISTED` findings of one
are listed, all are counted.
Failure behaviour: none; these are descriptions.
"""

from __future__ import annotations

import msgspec

LISTED = 1000
"""Findings listed of one object, and orphans listed of a dataset."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong. `code` is one of missing, size, structure, header, checksum, pieces, digest, order,
    pages, decode."""

    code: str
    message: str
    key: str | None = None
    ext: str | None = None
    offset: int | None = None


class ObjectReport(msgspec.Struct, frozen=True, kw_only=True):
    """One stored object. `kind` is document, index or shard; `bytes` were read; `members` were checked against their checksums.

    `decoded` samples were decoded to their end. `repaired` says that the object was replaced; the findings are then those of
    the object as it is now. `unrepaired` says why a repair was refused.
    """

    object: str
    kind: str
    bytes: int = 0
    members: int = 0
    decoded: int = 0
    findings: tuple[Finding, ...] = ()
    found: int = 0
    repaired: bool = False
    unrepaired: str = ""


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one version. `orphans` are shards, index parts and other objects that no version names."""

    url: str
    name: str
    version: int
    digest: str
    samples: int
    objects: tuple[ObjectReport, ...]
    orphans: tuple[str, ...]
    orphans_found: int
    seconds: float

    @property
    def damaged(self) -> tuple[ObjectReport, ...]:
        """The objects with something wrong, as they are now."""
        return tuple(report for report in self.objects if report.found)

    @property
    def repaired(self) -> tuple[ObjectReport, ...]:
        """The objects that were replaced."""
        return tuple(report for report in self.objects if report.repaired)

    @property
    def bytes(self) -> int:
        """Bytes read and checked."""
        return sum(report.bytes for report in self.objects)


class VerifyProgress(msgspec.Struct, frozen=True):
    """How far it has come: bytes of the shards of all, objects with findings so far."""

    bytes: int
    bytes_total: int
    shards: int
    shards_total: int
    damaged: int


def report(kind: str, name: str, findings: list[Finding], **more: int) -> ObjectReport:
    """An object's report, its findings counted and cut at `LISTED`."""
    made = ObjectReport(object=name, kind=kind, findings=tuple(findings[:LISTED]), found=len(findings))
    return msgspec.structs.replace(made, **more)
