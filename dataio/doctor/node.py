"""The checks of this node's memory, limits, kernel settings, file systems and clock.

Each check takes a `Machine`, and decides from what it reads. The limits below are those from which Headrace's defaults
work. Sizes are in bytes.
Failure behaviour: a value that cannot be read gives the severity `unknown`, or leaves out its part of the message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from headrace.dataio.core.limits import GIB, KIB, MIB, format_bytes
from headrace.dataio.doctor.findings import Finding
from headrace.dataio.doctor.machine import Machine, whole

LEAST_MEMORY = 2 * GIB
LEAST_SHM = 1 * GIB
LEAST_DESCRIPTORS, GOOD_DESCRIPTORS = 8192, 40_960
"""The daemon's cache keeps up to a fifth of them open, and 8192 at most."""
LEAST_LOCKED = 64 * MIB
LEAST_MAPPINGS = 262_144
"""A trainer maps each file of the cache that it reads, and the allocators of torch map memory too."""
LEAST_BACKLOG = 1024
LEAST_PIDS = 4096
_ESCAPED = re.compile(r"\\([0-7]{3})")
_CGROUP_DEPTH = 32
_MOUNTS = 16
"""How many network mounts are reported at most."""
_OF_VAST = ("remoteports", "spread_reads", "spread_writes")
"""Mount options of VAST's own client. Its manual gives them for NFS 3."""


def memory(machine: Machine) -> Finding:
    """The memory that is available on the machine and below the limits of this process's control groups."""
    lines = dict(line.partition(":")[::2] for line in (machine.text("proc/meminfo") or "").splitlines())
    total, available = (whole(lines.get(name, "").replace("kB", "")) for name in ("MemTotal", "MemAvailable"))
    if total is None or available is None:
        return Finding("memory", "unknown", "/proc/meminfo does not tell it")
    total, available = total * KIB, available * KIB
    message = f"{format_bytes(total)}, of which {format_bytes(available)} are available"
    limits = [*_memory_limits(machine)]
    if limits and min(limits) < total:
        message += f"; the control group's limit is {format_bytes(min(limits))}"
        available = min(available, min(limits))
    if available < LEAST_MEMORY:
        advice = "raise the limit of the container or unit, or stop other programs: the daemon and a loader need 2 GiB"
        return Finding("memory", "warning", message, advice)
    return Finding("memory", "ok", message)


def _memory_limits(machine: Machine) -> Iterator[int]:
    """The limits of this process's control groups, of version 2 and of version 1."""
    files = [f"{group}/memory.max" for group in _groups(machine)]
    for line in (machine.text("proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        kinds, _, name = rest.partition(":")
        if "memory" in kinds.split(",") and ".." not in name.split("/"):
            files += [f"sys/fs/cgroup/memory/{name.strip('/')}/memory.limit_in_bytes"]
    for file in files[: 2 * _CGROUP_DEPTH]:
        if (found := machine.number(file)) is not None:
            yield found


def processors(machine: Machine) -> Finding:
    """The processors that this process may use, and the control group's quota."""
    cores, quotas = machine.cores(), list[float]()
    for group in _groups(machine):
        quota, _, period = (machine.text(f"{group}/cpu.max") or "").strip().partition(" ")
        number, length = whole(quota), whole(period)
        if number is not None and length is not None and number > 0 and length > 0:
            quotas.append(number / length)
    if cores is None:
        return Finding("processors", "unknown", "their number cannot be read")
    if quotas and min(quotas) < cores:
        return Finding(
            "processors",
            "note",
            f"{cores}, but the control group allows the time of {min(quotas):.3g}",
            "set num_threads of the loaders to the quota: a process above its quota is stopped for parts of each second",
        )
    return Finding("processors", "ok", str(cores))


def _groups(machine: Machine) -> Iterator[str]:
    """The folders of this process's control group (version 2) and of its parents."""
    own = (machine.text("proc/self/cgroup") or "").splitlines()
    name = next((line[3:] for line in own if line.startswith("0::")), "")
    parts = [part for part in name.split("/") if part not in ("", "..")][:_CGROUP_DEPTH]
    for count in range(len(parts) + 1):
        yield "/".join(["sys/fs/cgroup", *parts[:count]])


def shared_memory(machine: Machine) -> Finding:
    """The size of /dev/shm, which worker processes of a DataLoader use, and tiers in memory."""
    found = machine.space("dev/shm")
    if found is None:
        return Finding("shared memory", "unknown", "/dev/shm cannot be read")
    total, free = found
    message = f"/dev/shm has {format_bytes(total)}, of which {format_bytes(free)} are free"
    if total < LEAST_SHM:
        advice = "docker run --shm-size=8g; in Kubernetes mount an emptyDir with medium: Memory at /dev/shm"
        return Finding("shared memory", "warning", message, advice)
    return Finding("shared memory", "ok", message)


def descriptors(machine: Machine) -> Finding:
    """The limit of open files. The daemon raises its soft limit to the hard one by itself."""
    found = machine.limit("RLIMIT_NOFILE")
    if found is None:
        return Finding("open files", "unknown", "the limit cannot be read")
    soft, hard = found
    message = f"limit {_limit(soft)}, at most {_limit(hard)}"
    if 0 <= hard < GOOD_DESCRIPTORS:
        advice = "LimitNOFILE=1048576 in the unit, nofile in /etc/security/limits.conf, or docker run --ulimit nofile=1048576"
        return Finding("open files", "warning" if hard < LEAST_DESCRIPTORS else "note", message, advice)
    return Finding("open files", "ok", message)


def locked_memory(machine: Machine) -> Finding:
    """The limit of locked memory. RDMA needs it: GPUDirect Storage, and NCCL over InfiniBand."""
    found = machine.limit("RLIMIT_MEMLOCK")
    if found is None:
        return Finding("locked memory", "unknown", "the limit cannot be read")
    message = f"limit {_limit(found[1]) if found[1] < 0 else format_bytes(found[1])}"
    if 0 <= found[1] < LEAST_LOCKED and machine.exists("dev/infiniband"):
        advice = "LimitMEMLOCK=infinity in the unit, or docker run --ulimit memlock=-1: InfiniBand locks memory"
        return Finding("locked memory", "warning", message, advice)
    return Finding("locked memory", "ok", message)


def processes(machine: Machine) -> Finding:
    """The limit of processes and threads, which is that of the control group."""
    limits = [
        found for found in (machine.number(f"{group}/pids.max") for group in _groups(machine)) if found is not None
    ]
    if not limits:
        return Finding("processes", "ok", "the control group sets no limit")
    message = f"the control group allows {min(limits)} processes and threads"
    if min(limits) < LEAST_PIDS:
        return Finding("processes", "warning", message, "raise TasksMax= of the unit, or docker run --pids-limit=-1")
    return Finding("processes", "ok", message)


def _limit(value: int) -> str:
    return "unlimited" if value < 0 else f"{value:,}"


def kernel_settings(machine: Machine) -> Iterable[Finding]:
    """Three settings of the kernel (sysctl)."""
    overcommit = machine.number("proc/sys/vm/overcommit_memory")
    mappings = machine.number("proc/sys/vm/max_map_count")
    backlog = machine.number("proc/sys/net/core/somaxconn")
    if overcommit == 2:
        yield Finding(
            "vm.overcommit_memory",
            "warning",
            "2: the kernel refuses to reserve more memory than it has",
            "sysctl -w vm.overcommit_memory=0: staging reserves memory of which it uses a part, and CUDA reserves much more",
        )
    else:
        yield _setting("vm.overcommit_memory", overcommit)
    yield _setting("vm.max_map_count", mappings, LEAST_MAPPINGS, "files of the cache are mapped, each by every trainer")
    yield _setting("net.core.somaxconn", backlog, LEAST_BACKLOG, "the ranks of a node connect to the daemon at once")


def _setting(name: str, value: int | None, least: int | None = None, reason: str = "") -> Finding:
    if value is None:
        return Finding(name, "unknown", f"/proc/sys/{name.replace('.', '/')} cannot be read")
    if least is not None and value < least:
        return Finding(name, "note", str(value), f"sysctl -w {name}={least}: {reason}")
    return Finding(name, "ok", str(value))


def network_mounts(machine: Machine) -> Iterable[Finding]:
    """The options of NFS mounts. The kernel's defaults are good for checkpoints, but soft mounts are not."""
    text = machine.text("proc/self/mountinfo")
    if text is None:
        yield Finding("NFS mounts", "unknown", "/proc/self/mountinfo cannot be read")
        return
    found = [entry for entry in map(_mount, text.splitlines()) if entry is not None]
    if not found:
        yield Finding("NFS mounts", "ok", "none")
    for place, options in found[:_MOUNTS]:
        yield _judge_mount(place, options)
    if len(found) > _MOUNTS:
        yield Finding("NFS mounts", "note", f"{len(found) - _MOUNTS} more were not looked at")


def _mount(line: str) -> tuple[str, set[str]] | None:
    """The mount point and the options of an NFS mount; None for any other line."""
    own, _, source = line.partition(" - ")
    fields, more = own.split(" "), source.split(" ")
    if len(fields) < 6 or len(more) < 3 or more[0] not in ("nfs", "nfs4"):
        return None
    place = _ESCAPED.sub(lambda match: chr(int(match[1], 8)), fields[4])
    return place, {*fields[5].split(","), *more[2].split(",")}


def _judge_mount(place: str, options: set[str]) -> Finding:
    name = "NFS mounts"
    if options & {"soft", "softerr"}:
        return Finding(
            name,
            "warning",
            f"{place} is mounted soft: the kernel gives up a write after a time, and a page of the file can be lost",
            "mount it with the option hard",
        )
    if "nolock" in options or options & {"local_lock=all", "local_lock=flock"}:
        return Finding(
            name,
            "warning",
            f"{place} has locks of this machine only",
            "mount it without nolock and local_lock: two machines could hold the same lock",
        )
    if options & {"noac", "actimeo=0", "sync"}:
        slow = ", ".join(sorted(options & {"noac", "actimeo=0", "sync"}))
        return Finding(
            name, "note", f"{place} is mounted with {slow}", "remove it: Headrace does not need it, and it is slow"
        )
    if "vers=3" in options and not any(option.startswith(_OF_VAST) for option in options):
        return Finding(
            name,
            "note",
            f"{place} uses NFS 3: the server keeps the locks of a node that died until the node starts again",
            "mount it with vers=4.1 or newer if the server can: files that killed writers left are then removed sooner",
        )
    return Finding(name, "ok", place)


def clock(machine: Machine) -> Finding:
    """Whether the clock is disciplined. Leases of checkpoints and signatures of S3 requests depend on it."""
    synchronised = machine.clock_synchronised()
    if synchronised is None:
        return Finding("clock", "unknown", "the kernel does not tell whether it is synchronised")
    if not synchronised:
        return Finding(
            "clock",
            "note",
            "the kernel's clock is not synchronised by this machine",
            "run chronyd or systemd-timesyncd, unless the host sets the clock: leases compare the clocks of the nodes",
        )
    return Finding("clock", "ok", "synchronised")


CHECKS: tuple[tuple[str, Callable[[Machine], Finding | Iterable[Finding]]], ...] = (
    ("memory", memory),
    ("processors", processors),
    ("shared memory", shared_memory),
    ("open files", descriptors),
    ("locked memory", locked_memory),
    ("processes", processes),
    ("kernel settings", kernel_settings),
    ("NFS mounts", network_mounts),
    ("clock", clock),
)
"""Name → check, in the order of the report."""
