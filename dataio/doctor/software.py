"""The checks of Python, packages, the GPU's libraries and the daemon.

`SUPPORT` is the support table of docs/reference/compatibility.md: the lowest version that works, and the version that all tests
run with. A test compares it with pyproject.toml and constraints.txt.
Failure behaviour: a missing package is no error, because each belongs to an extra. A version in an unknown format gives
the severity `unknown`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from headrace.dataio.core.errors import HeadraceError
from headrace.dataio.core.limits import counted, format_bytes
from headrace.dataio.doctor.findings import Finding, Severity
from headrace.dataio.doctor.machine import Machine, release
from headrace.dataio.sidecar import settings

PYTHON = ("3.11", "3.13")
"""The lowest Python, and the highest that was tried."""
LOSES_SAVES = ((3, 12, 0), (3, 12, 2))
"""From the first to the last of these versions, a program that ends starts no thread, so a save in flight is lost."""
SUPPORT: Mapping[str, tuple[str, str]] = {
    "torch": ("2.10", "2.13.0"),
    "pyarrow": ("20", "26.0.1"),
    "av": ("15", "18.1.0"),
    "numpy": ("2", "2.4.6"),
    "nvidia-dali-cuda130": ("2.4", "2.4.0"),
    "obstore": ("0.12", "0.12.1"),
    "s3fs": ("2026.6", "2026.9.0"),
    "fsspec": ("2026.6", "2026.9.0"),
    "duckdb": ("2", "2.0.0"),
    "ray": ("2.55", "2.60.0"),
}
"""Package → the lowest supported version, and the tested version."""
_DALI = re.compile(r"nvidia-dali-cuda(\d\d)0")
_DRIVERS = {12: 525, 13: 580}
"""Major version of CUDA → the lowest driver that runs its programs."""
_KERNEL_MODULE = re.compile(r"Kernel Module[^\n]*?\s(\d{3,4})\.\d")


def python(machine: Machine) -> Finding:
    """The version of Python."""
    text = machine.python()
    found = release(text)
    if found is None:
        return Finding("Python", "unknown", "its version cannot be read")
    least, most = (release(version) or () for version in PYTHON)
    if found < least:
        return Finding("Python", "error", text, f"install Python {PYTHON[0]} or newer")
    if LOSES_SAVES[0] <= found[:3] <= LOSES_SAVES[1]:
        return Finding(
            "Python", "warning", text, "install 3.12.3 or newer: this one loses a save in flight when the program ends"
        )
    if found[:2] > most:
        return Finding("Python", "note", f"{text}; the newest that was tried is {PYTHON[1]}")
    return Finding("Python", "ok", text)


def packages(machine: Machine) -> Iterable[Finding]:
    """The installed packages of the support table."""
    for name, (least, tested) in SUPPORT.items():
        version = machine.version(name)
        if version is None:
            continue
        found = release(version)
        if found is None:
            yield Finding(name, "unknown", f"the version {version!r} has an unknown format")
        elif found < (release(least) or ()):
            yield Finding(name, "warning", version, f"pip install '{name}>={least}': older versions are not supported")
        elif found[:1] > (release(tested) or ())[:1]:
            yield Finding(name, "note", f"{version}; the tests run with {tested}")
        else:
            yield Finding(name, "ok", version)


def headrace(machine: Machine) -> Finding:
    version = machine.version("headrace")
    return Finding("headrace", "ok" if version else "unknown", version or "it is not installed as a package")


def gpu(machine: Machine) -> Iterable[Finding]:
    """The driver and its libraries, and whether torch and DALI match it."""
    text = machine.text("proc/driver/nvidia/version")
    if text is None and not machine.exists("dev/nvidiactl"):
        yield Finding("GPU", "ok", "this machine has no NVIDIA GPU; decoding uses the processors")
        return
    driver = _KERNEL_MODULE.search(text or "")
    yield (
        Finding("GPU", "ok", f"driver {driver[1]}")
        if driver
        else Finding("GPU", "unknown", "the driver's version cannot be read")
    )
    capabilities = "in a container set NVIDIA_DRIVER_CAPABILITIES=compute,utility,video"
    if machine.library("libcuda.so.1"):
        yield Finding("CUDA driver library", "ok", "libcuda.so.1")
    else:
        yield Finding("CUDA driver library", "error", "libcuda.so.1 cannot be loaded", capabilities)
    if machine.library("libnvcuvid.so.1"):
        yield Finding("NVDEC", "ok", "libnvcuvid.so.1")
    else:
        yield Finding(
            "NVDEC", "warning", "libnvcuvid.so.1 cannot be loaded, so the processors decode video", capabilities
        )
    yield _torch_for_gpu(machine)
    yield _dali(machine, int(driver[1]) if driver else None)


def _torch_for_gpu(machine: Machine) -> Finding:
    version = machine.version("torch")
    if version is None:
        return Finding("torch for this GPU", "note", "torch is not installed in this environment")
    if version.endswith("+cpu"):
        return Finding("torch for this GPU", "warning", f"{version} has no CUDA", "install the CUDA build of torch")
    return Finding("torch for this GPU", "ok", version)


def _dali(machine: Machine, driver: int | None) -> Finding:
    """Whether DALI's CUDA runs on this driver. Checks the packages for CUDA 12 and 13."""
    name = "DALI for this driver"
    found = next((one for one in ("nvidia-dali-cuda130", "nvidia-dali-cuda120") if machine.version(one)), None)
    if found is None:
        return Finding(name, "note", "DALI is not installed, so the processors decode", "pip install 'headrace[dali]'")
    cuda = _DALI.fullmatch(found)
    needed = _DRIVERS.get(int(cuda[1])) if cuda else None
    message = f"{found} {machine.version(found)}"
    if driver is None or needed is None:
        return Finding(name, "unknown", message)
    if driver < needed:
        advice = f"update the driver to {needed} or newer" + (
            ", or install nvidia-dali-cuda120" if needed > 525 else ""
        )
        return Finding(name, "warning", f"{message} needs driver {needed}, and this is {driver}", advice)
    return Finding(name, "ok", message)


def gds(machine: Machine) -> Finding:
    """GPUDirect Storage: the kernel module and cuFile. Without it, bytes pass through main memory."""
    if not machine.exists("dev/nvidiactl"):
        return Finding("GPUDirect Storage", "ok", "not used: this machine has no NVIDIA GPU")
    module, library = machine.exists("proc/driver/nvidia-fs/version"), machine.library("libcufile.so.0")
    if module and library:
        return Finding("GPUDirect Storage", "ok", "nvidia-fs and libcufile.so.0")
    missing = " and ".join([*(["the kernel module nvidia-fs"] * (not module)), *(["libcufile.so.0"] * (not library))])
    return Finding("GPUDirect Storage", "note", f"not available: {missing} is missing", "only needed for gds=True")


def daemon_settings(machine: Machine) -> Finding:
    """Whether the variables of the daemon, and the file that they name, are valid."""
    name = "settings of the daemon"
    given = sum(variable.startswith(settings.PREFIX) for variable in machine.environ)
    try:
        config = settings.read({}, machine.environ).config
        if config.tier is not None:
            config.tier.check()
    except HeadraceError as error:
        return Finding(name, "error", error.message, error.hint or "see headrace sidecar run --help")
    return Finding(name, "ok", f"{counted(given, 'variable')} {settings.PREFIX}*")


def daemon(machine: Machine) -> Iterable[Finding]:
    """Whether the node's daemon answers, its version, and the problems that it reports."""
    socket = machine.socket()
    if socket is None:
        yield Finding("daemon", "ok", "not used: HEADRACE_SIDECAR is off")
        return
    status = machine.daemon()
    if status is None:
        severity: Severity = "warning" if machine.environ.get("HEADRACE_SIDECAR") else "note"
        advice = (
            "start it as this user: headrace sidecar run. Trainers work without it, and each caches and saves by itself"
        )
        yield Finding("daemon", severity, f"no daemon answers on {socket}", advice)
        return
    yield _daemon_version(status.get("version"), machine.version("headrace"))
    if status.get("draining") is True:
        yield Finding("daemon", "warning", "it is draining, and accepts no new work", "start it again")
    yield from _daemon_state(status)


def _daemon_version(theirs: object, ours: str | None) -> Finding:
    if not isinstance(theirs, str):
        return Finding("daemon", "note", "it answers, but does not tell its version: it is older than this program")
    if ours is not None and theirs != ours:
        advice = "restart the daemon to upgrade it; the two work together until then"
        return Finding("daemon", "note", f"it answers; its version is {theirs}, and this program's is {ours}", advice)
    return Finding("daemon", "ok", f"it answers; version {theirs}")


def _daemon_state(status: Mapping[str, object]) -> Iterable[Finding]:
    cache, tier = status.get("cache"), status.get("tier")
    if isinstance(cache, dict) and cache.get("paused"):
        advice = "free space on its disk, or repair it; until then reads go to the store"
        yield Finding("daemon's cache", "warning", f"{cache.get('directory')} cannot be written", advice)
    elif isinstance(cache, dict) and isinstance(cache.get("budget_bytes"), int):
        yield Finding("daemon's cache", "ok", f"{format_bytes(cache['budget_bytes'])} in {cache.get('directory')}")
    if isinstance(tier, dict) and tier.get("trouble"):
        yield Finding(
            "daemon's local tier", "warning", str(tier["trouble"]), "make its directory writable for the daemon"
        )
    buddy = tier.get("buddy") if isinstance(tier, dict) else None
    if isinstance(buddy, dict) and buddy.get("trouble"):
        advice = "see HeadraceBuddyAway in docs/howto/runbook.md"
        yield Finding("daemon's buddy", "warning", f"it gets no copies: {buddy['trouble']}", advice)


CHECKS: tuple[tuple[str, Callable[[Machine], Finding | Iterable[Finding]]], ...] = (
    ("headrace", headrace),
    ("Python", python),
    ("packages", packages),
    ("GPU", gpu),
    ("GPUDirect Storage", gds),
    ("settings of the daemon", daemon_settings),
    ("daemon", daemon),
)
"""Name → check, in the order of the report."""
