"""The report of `verify`. Programs, the table on the terminal, `--json` and the exit code all use these types.

Invariant: each object that the version names has exactly one report. A report lists at most `LISTED` findings, but
counts all.
Failure behaviour: none. These types only hold data.
"""

from __future__ import annotations

import msgspec

LISTED = 1000
"""The most findings listed for one object, and the most orphans listed for a dataset."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One fault.

    `code` is one of missing, size, structure, header, checksum, pieces, digest, order, pages, decode.
    """

    code: str
    message: str
    key: str | None = None
    ext: str | None = None
    offset: int | None = None


class ObjectReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report of one stored object.

    `kind` is document, index or shard. `bytes` counts the bytes read, `members` the members whose checksums were
    checked, and `decoded` the samples decoded to their end. `repaired` means that the object was replaced. The findings
    are then those of the new object. `unrepaired` gives the reason why the object could not be repaired.
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
    """The report of one version.

    `orphans` lists shards, index parts and other objects that no version names. `resumed` counts the units of work that
    an earlier, interrupted run had finished.
    """

    url: str
    name: str
    version: int
    digest: str
    samples: int
    objects: tuple[ObjectReport, ...]
    orphans: tuple[str, ...]
    orphans_found: int
    seconds: float
    resumed: int = 0

    @property
    def damaged(self) -> tuple[ObjectReport, ...]:
        """The objects that have faults now."""
        return tuple(report for report in self.objects if report.found)

    @property
    def repaired(self) -> tuple[ObjectReport, ...]:
        """The objects that were replaced."""
        return tuple(report for report in self.objects if report.repaired)

    @property
    def bytes(self) -> int:
        """The bytes read and checked."""
        return sum(report.bytes for report in self.objects)


class VerifyProgress(msgspec.Struct, frozen=True):
    """The progress: bytes and number of shards, done and in total, and the shards with findings so far."""

    bytes: int
    bytes_total: int
    shards: int
    shards_total: int
    damaged: int


def report(kind: str, name: str, findings: list[Finding], **counts: int) -> ObjectReport:
    """Make an object's report. It counts all findings and lists the first `LISTED`."""
    object_report = ObjectReport(object=name, kind=kind, findings=tuple(findings[:LISTED]), found=len(findings))
    return msgspec.structs.replace(object_report, **counts)
