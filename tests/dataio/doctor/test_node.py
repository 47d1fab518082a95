"""What `headrace doctor` says of nodes: good ones, limited ones, and ones whose files hold nonsense."""

from __future__ import annotations

import json
import re
import threading
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataio.cli import main
from headrace.dataio.core.errors import AccessDeniedError, TransientError
from headrace.dataio.core.limits import GIB, MIB
from headrace.dataio.doctor import cli, node, software
from headrace.dataio.doctor.findings import SEVERITIES, TEXT, Finding, exit_code, run
from headrace.dataio.doctor.machine import Machine, release, whole

ROOT = Path(__file__).parents[3]
MEMINFO = "MemTotal:       65536000 kB\nMemFree: 1 kB\nMemAvailable:   60000000 kB\n"
DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Wed Sep 10 2026\nGCC version:  12\n"
NFS3 = "36 35 0:50 / /mnt rw,relatime shared:1 - nfs server:/export rw,vers=3,{},addr=10.0.0.1\n"
NFS = "36 35 0:50 / {} rw,relatime shared:1 - nfs4 server:/export rw,vers=4.2,{},addr=10.0.0.1\n"


@dataclass(frozen=True)
class Fake(Machine):
    """A machine that consists of these values. `files` has paths without the first slash."""

    files: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    libraries: frozenset[str] = frozenset()
    shm: tuple[int, int] | None = (64 * GIB, 32 * GIB)
    nofile: tuple[int, int] | None = (1024, 1048576)
    status: dict[str, object] | None = None
    interpreter: str = "3.11.9"
    disciplined: bool | None = True

    def text(self, path: str) -> str | None:
        return self.files.get(path)

    def exists(self, path: str) -> bool:
        return path in self.files

    def space(self, path: str) -> tuple[int, int] | None:
        return self.shm

    def limit(self, name: str) -> tuple[int, int] | None:
        return self.nofile if name == "RLIMIT_NOFILE" else (65536, 65536)

    def version(self, distribution: str) -> str | None:
        return self.versions.get(distribution)

    def library(self, name: str) -> bool:
        return name in self.libraries

    def python(self) -> str:
        return self.interpreter

    def cores(self) -> int | None:
        return 64

    def clock_synchronised(self) -> bool | None:
        return self.disciplined

    def socket(self) -> Path | None:
        return Path("/run/headrace/sidecar.sock")

    def daemon(self) -> dict[str, object] | None:
        return self.status


def found_by(check: Any, machine: Machine) -> dict[str, Finding]:
    answer: Finding | Iterable[Finding] = check(machine)
    return {one.name: one for one in ([answer] if isinstance(answer, Finding) else answer)}


def only(check: Any, machine: Machine) -> Finding:
    (one,) = found_by(check, machine).values()
    return one


GROUP = {"proc/self/cgroup": "0::/slice/job\n"}
MEMORY = {"proc/meminfo": MEMINFO, **GROUP}
VERSION_1 = {
    "proc/meminfo": MEMINFO,
    "proc/self/cgroup": "5:cpu,memory:/slurm/job\n",
    "sys/fs/cgroup/memory/slurm/job/memory.limit_in_bytes": "1073741824\n",
}
GPU = {"dev/nvidiactl": ""}
GDS = GPU | {"proc/driver/nvidia-fs/version": ""}


@pytest.mark.parametrize(
    ("check", "machine", "severity", "says"),
    [
        (node.memory, Fake(files={"proc/meminfo": MEMINFO}), "ok", "62.5 GiB"),
        (
            node.memory,
            Fake(files={**MEMORY, "sys/fs/cgroup/slice/memory.max": "1073741824\n"}),
            "warning",
            "limit is 1.0 GiB",
        ),
        (node.memory, Fake(files={**MEMORY, "sys/fs/cgroup/slice/memory.max": "max\n"}), "ok", "62.5 GiB"),
        (node.memory, Fake(files={"proc/meminfo": "MemTotal: many\n"}), "unknown", ""),
        (node.memory, Fake(), "unknown", ""),
        (node.memory, Fake(files=VERSION_1), "warning", "limit is 1.0 GiB"),
        (node.processors, Fake(), "ok", "64"),
        (
            node.processors,
            Fake(files={**GROUP, "sys/fs/cgroup/slice/job/cpu.max": "400000 100000\n"}),
            "note",
            "the time of 4",
        ),
        (node.processors, Fake(files={**GROUP, "sys/fs/cgroup/cpu.max": "max 100000\n"}), "ok", "64"),
        (node.processors, Fake(files={**GROUP, "sys/fs/cgroup/cpu.max": "1 0\n"}), "ok", "64"),
        (node.shared_memory, Fake(), "ok", "64.0 GiB"),
        (node.shared_memory, Fake(shm=(64 * MIB, 0)), "warning", "64.0 MiB"),
        (node.shared_memory, Fake(shm=None), "unknown", ""),
        (node.descriptors, Fake(), "ok", "1,048,576"),
        (node.descriptors, Fake(nofile=(1024, -1)), "ok", "unlimited"),
        (node.descriptors, Fake(nofile=(1024, 20000)), "note", "20,000"),
        (node.descriptors, Fake(nofile=(1024, 4096)), "warning", "4,096"),
        (node.descriptors, Fake(nofile=None), "unknown", ""),
        (node.locked_memory, Fake(), "ok", "64.0 KiB"),
        (node.locked_memory, Fake(files={"dev/infiniband": ""}), "warning", "64.0 KiB"),
        (node.processes, Fake(), "ok", "no limit"),
        (node.processes, Fake(files={**GROUP, "sys/fs/cgroup/slice/pids.max": "100\n"}), "warning", "100"),
        (node.network_mounts, Fake(files={"proc/self/mountinfo": "1 2 0:1 / / rw - ext4 /dev/sda rw\n"}), "ok", "none"),
        (
            node.network_mounts,
            Fake(files={"proc/self/mountinfo": NFS.format("/mnt/a\\040b", "hard")}),
            "ok",
            "/mnt/a b",
        ),
        (
            node.network_mounts,
            Fake(files={"proc/self/mountinfo": NFS.format("/mnt", "soft")}),
            "warning",
            "mounted soft",
        ),
        (
            node.network_mounts,
            Fake(files={"proc/self/mountinfo": NFS.format("/mnt", "hard,local_lock=all")}),
            "warning",
            "locks",
        ),
        (node.network_mounts, Fake(files={"proc/self/mountinfo": NFS.format("/mnt", "hard,noac")}), "note", "noac"),
        (
            node.network_mounts,
            Fake(files={"proc/self/mountinfo": NFS3.format("hard")}),
            "note",
            "uses NFS 3: the server",
        ),
        (node.network_mounts, Fake(files={"proc/self/mountinfo": NFS3.format("spread_reads")}), "ok", "/mnt"),
        (
            node.network_mounts,
            Fake(files={"proc/self/mountinfo": NFS3.format("soft,remoteports=dns")}),
            "warning",
            "soft",
        ),
        (node.network_mounts, Fake(), "unknown", ""),
        (node.clock, Fake(), "ok", ""),
        (node.clock, Fake(disciplined=False), "note", "not synchronised"),
        (node.clock, Fake(disciplined=None), "unknown", ""),
        (software.python, Fake(), "ok", "3.11.9"),
        (software.python, Fake(interpreter="3.10.1"), "error", "3.10.1"),
        (software.python, Fake(interpreter="3.12.1"), "warning", "3.12.1"),
        (software.python, Fake(interpreter="3.12.3"), "ok", "3.12.3"),
        (software.python, Fake(interpreter="3.14.0"), "note", "3.14.0"),
        (software.python, Fake(interpreter="pypy"), "unknown", ""),
        (software.headrace, Fake(), "unknown", ""),
        (software.packages, Fake(versions={"torch": "2.10.0+cu130"}), "ok", "2.10.0"),
        (software.packages, Fake(versions={"torch": "2.9.1"}), "warning", "2.9.1"),
        (software.packages, Fake(versions={"torch": "3.0.0.dev1"}), "note", "3.0.0"),
        (software.packages, Fake(versions={"torch": "nightly"}), "unknown", "nightly"),
        (software.gds, Fake(), "ok", "no NVIDIA GPU"),
        (software.gds, Fake(files=GPU), "note", "nvidia-fs and libcufile"),
        (software.gds, Fake(files=GDS, libraries=frozenset({"libcufile.so.0"})), "ok", ""),
        (
            software.daemon_settings,
            Fake(environ={"HEADRACE_SIDECAR_CLIENTS": "9"}),
            "ok",
            "1 variable HEADRACE_SIDECAR_*",
        ),
        (
            software.daemon_settings,
            Fake(environ={"HEADRACE_SIDECAR_CLIENTS": "x"}),
            "error",
            "HEADRACE_SIDECAR_CLIENTS",
        ),
        (software.daemon_settings, Fake(environ={"HEADRACE_SIDECAR_CLIENT": "9"}), "error", "is not a setting"),
        (software.daemon_settings, Fake(environ={"HEADRACE_SIDECAR_CONFIG": "/none"}), "error", "cannot be read"),
        (software.daemon, Fake(environ={}), "note", "no daemon answers"),
        (
            software.daemon,
            Fake(environ={"HEADRACE_SIDECAR": "/run/headrace/sidecar.sock"}),
            "warning",
            "no daemon answers",
        ),
        (software.daemon, Fake(status={"version": "0.1.0"}, versions={"headrace": "0.1.0"}), "ok", "0.1.0"),
        (software.daemon, Fake(status={"version": "0.0.9"}, versions={"headrace": "0.1.0"}), "note", "0.0.9"),
        (software.daemon, Fake(status={}, versions={"headrace": "0.1.0"}), "note", "older than this program"),
    ],
)
def test_a_check_judges_what_it_reads(check: Any, machine: Fake, severity: str, says: str) -> None:
    one = only(check, machine)
    assert one.severity == severity, one
    assert says in one.message
    assert bool(one.advice) or severity not in ("warning", "error")


@pytest.mark.parametrize(
    ("driver", "dali", "libraries", "expected"),
    [
        ("580.65.06", "nvidia-dali-cuda130", {"libcuda.so.1", "libnvcuvid.so.1"}, ["ok", "ok", "ok", "ok"]),
        ("570.1", "nvidia-dali-cuda130", {"libcuda.so.1", "libnvcuvid.so.1"}, ["ok", "ok", "ok", "warning"]),
        ("570.1", "nvidia-dali-cuda120", {"libcuda.so.1"}, ["ok", "ok", "warning", "ok"]),
        ("580.65.06", "", set(), ["ok", "error", "warning", "note"]),
        ("?", "nvidia-dali-cuda130", {"libcuda.so.1", "libnvcuvid.so.1"}, ["unknown", "ok", "ok", "unknown"]),
    ],
)
def test_the_driver_must_match_what_is_installed(
    driver: str, dali: str, libraries: set[str], expected: list[str]
) -> None:
    versions = {"torch": "2.13.0+cpu"} | ({dali: "2.4.0"} if dali else {})
    files = {"proc/driver/nvidia/version": DRIVER.format(driver)}
    found = found_by(software.gpu, Fake(files=files, versions=versions, libraries=frozenset(libraries)))
    names = ["GPU", "CUDA driver library", "NVDEC", "DALI for this driver"]
    assert [found[name].severity for name in names] == expected
    assert found["torch for this GPU"].severity == "warning"


def test_a_daemon_in_trouble_is_described() -> None:
    status: dict[str, object] = {
        "version": "1",
        "draining": True,
        "cache": {"paused": True, "directory": "/nvme"},
        "tier": {"trouble": "read-only", "buddy": {"trouble": "tls"}},
    }
    found = [*software.daemon(Fake(status=status))]
    assert [one.name for one in found if one.severity == "warning"] == [
        "daemon",
        "daemon's cache",
        "daemon's local tier",
        "daemon's buddy",
    ]


def test_settings_of_the_kernel_are_compared() -> None:
    files = {"proc/sys/vm/overcommit_memory": "2\n", "proc/sys/vm/max_map_count": "65530\n"}
    found = found_by(node.kernel_settings, Fake(files=files))
    assert {name: one.severity for name, one in found.items()} == {
        "vm.overcommit_memory": "warning",
        "vm.max_map_count": "note",
        "net.core.somaxconn": "unknown",
    }
    assert found["vm.max_map_count"].advice.startswith("sysctl -w vm.max_map_count=262144")


def test_a_thousand_mounts_are_a_short_report() -> None:
    text = "".join(NFS.format(f"/mnt/{number}", "soft") for number in range(1000))
    found = [*node.network_mounts(Fake(files={"proc/self/mountinfo": text}))]
    assert len(found) == node._MOUNTS + 1
    assert found[-1].message == "984 more were not looked at"


LEAF = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
KEYS = st.sampled_from(["paused", "directory", "budget_bytes", "trouble", "buddy"]) | st.text(max_size=5)
ROW = st.dictionaries(KEYS, LEAF, max_size=3)
JSON = LEAF | st.lists(LEAF, max_size=3) | st.dictionaries(KEYS, LEAF | ROW, max_size=4)
NONSENSE = st.text(max_size=40) | st.sampled_from(["9" * 400, "-1", "0::/../..", "1 2 3 4 5 - nfs x", "\x00", "٣"])
FILES = [
    "proc/meminfo",
    "proc/self/cgroup",
    "sys/fs/cgroup/memory.max",
    "sys/fs/cgroup/cpu.max",
    "sys/fs/cgroup/pids.max",
    "proc/sys/vm/overcommit_memory",
    "proc/sys/vm/max_map_count",
    "proc/self/mountinfo",
    "proc/driver/nvidia/version",
]
STATUS = st.dictionaries(st.sampled_from(["version", "draining", "cache", "tier"]), JSON)


@given(
    files=st.dictionaries(st.sampled_from(FILES), NONSENSE),
    versions=st.dictionaries(st.sampled_from([*software.SUPPORT, "headrace"]), NONSENSE),
    status=st.none() | STATUS,
    interpreter=NONSENSE,
)
def test_no_check_raises_whatever_it_reads(
    files: dict[str, str], versions: dict[str, str], status: dict[str, object] | None, interpreter: str
) -> None:
    machine = Fake(files=files, versions=versions, status=status, interpreter=interpreter)
    for _, check in (*node.CHECKS, *software.CHECKS):
        for one in found_by(check, machine).values():
            assert one.severity in SEVERITIES


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("2.10.0+cu130", (2, 10, 0)),
        ("2.13.0rc1", (2, 13, 0)),
        ("3", (3,)),
        ("x", None),
        ("", None),
        ("9" * 50, None),
        (None, None),
    ],
)
def test_a_version_is_its_leading_numbers(text: str | None, numbers: tuple[int, ...] | None) -> None:
    assert release(text) == numbers


def test_a_number_is_digits_only() -> None:
    assert [whole(text) for text in ("12\n", "-1", "max", "", None, "1e3", "9" * 20, "٣")] == [12, -1] + [None] * 6


# --- running checks


def test_a_check_that_hangs_or_fails_is_unknown_and_shows_no_secret() -> None:
    hang = threading.Event()
    (hung,) = run("slow", lambda: [Finding("slow", "ok")] if hang.wait(60) else [], 0.05)
    hang.set()
    assert (hung.severity, hung.message) == ("unknown", "no answer within 0.05 seconds")

    def fail() -> Finding:
        raise ValueError("password=hunter2")

    (failed,) = run("bad", fail, 60)
    assert (failed.severity, failed.message) == ("unknown", "it could not be checked: ValueError")

    def refuse() -> Finding:
        raise AccessDeniedError("no access", hint="ask")

    (refused,) = run("refused", refuse, 60)
    assert (refused.severity, refused.message, refused.advice) == ("error", "no access", "ask")


def test_what_a_check_says_is_one_line_of_limited_length() -> None:
    (found,) = run("x", lambda: Finding("x", "ok", "a\n\x1b[31m" + "b" * 10_000), 60)
    assert "\n" not in found.message
    assert "\x1b" not in found.message
    assert len(found.message) == TEXT


@pytest.mark.parametrize(
    ("severities", "code"),
    [([], 0), (["ok", "unknown", "note"], 0), (["warning", "ok"], 1), (["warning", "error"], 2)],
)
def test_the_exit_code_follows_from_the_gravest_finding(severities: list[Any], code: int) -> None:
    assert exit_code([Finding("x", severity) for severity in severities]) == code
    assert exit_code([], TransientError("away")) == 3


# --- the command


def test_the_command_looks_at_this_machine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HEADRACE_SIDECAR", "off")
    assert main(["doctor", "--json"]) in (0, 1, 2)
    report = json.loads(capsys.readouterr().out)
    assert {"ok", "severity", "node", "software"} == set(report)
    names = [one["name"] for one in report["node"]]
    assert {"memory", "processors", "shared memory", "open files", "clock"} <= set(names)
    python = next(one for one in report["software"] if one["name"] == "Python")
    assert python["severity"] != "unknown"


def test_the_command_says_in_words_what_to_change(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "Machine", lambda: Fake(shm=(64 * MIB, 0), files={"proc/meminfo": MEMINFO}))
    assert main(["doctor", "--only", "node"]) == 1
    said = capsys.readouterr().out
    assert "  warning  shared memory          /dev/shm has 64.0 MiB" in said
    assert "next: docker run --shm-size=8g" in said
    assert re.search(r"\d+ checks: 1 warning, 4 unknown", said), said
    assert "software" not in said


def test_findings_of_the_node_are_shown_also_when_the_store_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(cli, "Machine", lambda: Fake(shm=(64 * MIB, 0)))
    (tmp_path / "file").write_text("")
    code = main(["doctor", str(tmp_path / "file" / "store"), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code >= 2
    assert not report["ok"]
    assert report["error"]["message"]
    assert any(one["severity"] == "warning" for one in report["node"])


# --- the support table


def test_the_support_table_is_that_of_the_project_and_of_the_page() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [
        *project["dependencies"],
        *(line for lines in project["optional-dependencies"].values() for line in lines),
    ]
    least = dict(re.findall(r"(?m)^([\w-]+)(?:\[\w+\])?>=([\d.]+)", "\n".join(required)))
    tested = dict(re.findall(r"(?m)^([\w-]+)==([\d.]+)", (ROOT / "constraints.txt").read_text()))
    page = (ROOT / "docs" / "reference" / "compatibility.md").read_text()
    for name, (lowest, used) in software.SUPPORT.items():
        assert least[name] == lowest, name
        assert tested[name] == used, name
        assert f"| `{name}` | {lowest} | {used} |" in page, name
    assert project["requires-python"] == f">={software.PYTHON[0]}"
    assert f"| Python | {software.PYTHON[0]} |" in page


def test_the_page_names_every_check() -> None:
    page = (ROOT / "docs" / "howto" / "doctor.md").read_text()
    names = {name for name, _ in (*node.CHECKS, *software.CHECKS)} - {"headrace", "kernel settings", "packages"}
    assert {name for name in names if f"| {name} |" not in page} == set()
