"""`headrace doctor [URL]`: what should be changed on this node, in its daemon, or in a store?

With `--memory` it instead runs `headrace.checkpoint.saving.copy_threads`, a separate program that measures how fast
this machine copies a state.

Invariants: the command changes nothing on the node. With `--json`, exactly one JSON object goes to standard output.
Each check of the node ends after `CHECK_SECONDS` at the latest.
Failure behaviour: a check that fails becomes a finding. An error of the store is reported after the other findings, and
decides the exit code.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Callable, Iterator, Sequence

from headrace.dataio.core.cli import argument, command, count_progress, json_option, positive_int, print_json
from headrace.dataio.core.errors import HeadraceError, UsageError
from headrace.dataio.core.programs import environment, run_module
from headrace.dataio.doctor import node, software
from headrace.dataio.doctor.findings import Finding, exit_code, run, worst
from headrace.dataio.doctor.machine import Machine
from headrace.dataio.doctor.store import Examined, examine

CHECK_SECONDS = 20.0
AREAS = ("node", "software", "store")
_COPIES = "headrace.checkpoint.saving.copy_threads"
_HEADINGS = {"node": "this node", "software": "software on this node"}
_CHECKS = {"node": node.CHECKS, "software": software.CHECKS}


def _up_to_thousand(text: str) -> int:
    return positive_int(text, 1000)


@command(
    "doctor",
    "Look at this node, its daemon and a store, and say what to change.",
    argument("url", nargs="?", help="a store to check too: a path, file:///path or s3://bucket/prefix"),
    argument("--only", choices=AREAS, help="look at one area only (default: all; the store only with URL)"),
    argument("--certify", action="store_true", help="also let many writers race for one key, several times"),
    argument("--writers", type=_up_to_thousand, default=50, help="writers in a race (default: 50)"),
    argument("--rounds", type=_up_to_thousand, default=5, help="races (default: 5)"),
    argument(
        "--memory",
        action="store_true",
        help="instead, measure how fast this machine copies a state, and advise settings",
    ),
    json_option("the report as one JSON object"),
    epilog="severities: ok, unknown, note, warning, error. exit codes: 0 nothing must be changed · 1 warnings · 2 an error, "
    "wrong use, no access, or a store not for several writers · 3 the store is unreachable",
)
def doctor(options: argparse.Namespace) -> int:
    """`headrace doctor [URL]`"""
    if options.memory:
        return subprocess.call(run_module(_COPIES, *(["--json"] if options.json else [])), env=environment())
    if options.only == "store" and options.url is None:
        raise UsageError("--only store needs the URL of a store", hint="headrace doctor URL --only store")
    areas = [area for area in _CHECKS if options.only in (None, area)]
    with count_progress("checking", quiet=options.json) as show:
        found = {area: [*_look(Machine(), area, show)] for area in areas}
        examined = None
        if options.url is not None and options.only in (None, "store"):
            rounds = options.rounds if options.certify else 0
            examined = examine(options.url, rounds=rounds, writers=options.writers, started=show)
    return _report(found, examined, options)


def _look(machine: Machine, area: str, show: Callable[[int, int], None] | None) -> Iterator[Finding]:
    for number, (name, check) in enumerate(_CHECKS[area]):
        if show is not None:
            show(number, len(_CHECKS[area]))
        yield from run(name, lambda check=check: check(machine), CHECK_SECONDS)  # type: ignore[misc]


def _report(found: dict[str, list[Finding]], examined: Examined | None, options: argparse.Namespace) -> int:
    findings = [one for area in found.values() for one in area] + (examined.findings if examined else [])
    error = examined.error if examined is not None else None
    code = exit_code(findings, error)
    if options.json:
        print_json(_as_json(found, examined, findings, error))
        return code
    for area, some in found.items():
        _print(_HEADINGS[area], some)
    if examined is not None:
        _print(" ".join(filter(None, [examined.url, examined.endpoint])), examined.findings)
        print(f"verdict: {examined.verdict}")
        if error is not None:
            raise error
        if worst(examined.findings) == "ok" and not options.certify:
            print("  next: --certify also lets 50 writers race for one key")
    print(_summary(findings))
    return code


def _as_json(
    found: dict[str, list[Finding]], examined: Examined | None, findings: list[Finding], error: HeadraceError | None
) -> dict[str, object]:
    report: dict[str, object] = {"ok": exit_code(findings, error) == 0, "severity": worst(findings)}
    report |= {area: [one.as_json() for one in some] for area, some in found.items()}
    if examined is not None:
        report["store"] = {
            "url": examined.url,
            "verdict": examined.verdict,
            "checks": [one.as_json() for one in examined.findings],
        }
    if error is not None:
        report["error"] = {"code": error.code, "message": error.message, "hint": error.hint}
    return report


def _print(heading: str, findings: Sequence[Finding]) -> None:
    print(heading)
    for found in findings:
        print(f"  {found.severity:8} {found.name:22} {found.message}".rstrip())
        if found.advice:
            print(f"  {'':8} {'':22} next: {found.advice}")


def _summary(findings: Sequence[Finding]) -> str:
    counts = {
        severity: sum(one.severity == severity for one in findings)
        for severity in ("error", "warning", "note", "unknown")
    }
    parts = [
        f"{number} {severity}" + ("s" if number > 1 and severity != "unknown" else "")
        for severity, number in counts.items()
        if number
    ]
    return f"{len(findings)} checks: " + (", ".join(parts) or "nothing to change")
