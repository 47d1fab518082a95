"""The machine (card, link, driver, versions), and the GPU tests of the test suite.

Failure behaviour: a package that is absent is a note; one that cannot be imported, and a test that fails, are errors.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from headrace.bench.drill.result import PartResult

_QUERY = "name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max,clocks.max.sm,persistence_mode"
_IMPORTS = (
    *(
        "torch",
        "numpy",
        "msgspec",
        "blake3",
        "zstandard",
        "xxhash",
        "prometheus_client",
        "fsspec",
        "rich",
        "pyarrow",
        "duckdb",
    ),
    *("av", "simplejpeg", "nvidia.dali", "headrace.dataio"),
)


def probe(gpu: bool) -> PartResult:
    """Describe the machine in the settings of the part, and try every import."""
    part = PartResult("probe", "The machine")
    part.metric("imports", "packages that can be imported", "1", "higher")
    for name in _IMPORTS:
        try:
            importlib.import_module(name)
            part.add("this machine", "imports", 1)
        except ModuleNotFoundError as error:
            part.notes.append(f"absent: {error.name} (for {name})")
        except Exception as error:
            part.fail("this machine", f"import {name}: {type(error).__name__}: {error}")
    part.settings = {"python": sys.version.split()[0], "cpus": len(os.sched_getaffinity(0))}
    part.settings |= {name: _version(name) for name in ("torch", "numpy", "nvidia-dali-cuda130", "av")}
    part.settings |= _card() if gpu else {}
    if not gpu:
        part.notes.append("no GPU: torch.cuda.is_available() is False")
    return part


def _card() -> dict[str, object]:
    import torch

    found: dict[str, object] = {"capability": torch.cuda.get_device_capability(0), "cuda": torch.version.cuda}
    if shutil.which("nvidia-smi"):
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"], capture_output=True, text=True, timeout=60
        )
        found |= dict(
            zip(_QUERY.split(","), (value.strip() for value in done.stdout.split("\n")[0].split(",")), strict=False)
        )
    found["video_library"] = _library("libnvcuvid.so.1")
    try:
        backend = importlib.import_module("nvidia.dali.backend_impl")
        found["dali_gpus"] = backend.GetCUDADeviceCount()
    except Exception as error:
        found["dali_gpus"] = f"{type(error).__name__}: {error}"
    return found


def _library(name: str) -> str:
    """Try to load the driver's library. Containers often have CUDA without it."""
    try:
        ctypes.CDLL(name)
    except OSError as error:
        return str(error)
    return "found"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


_ROOT = Path(__file__).resolve().parents[2]
_CLIPS = _ROOT / ".drill" / "media"
"""Real clips, if they were copied to this machine."""
_SECONDS = 500


def files() -> list[str]:
    """The test files that have tests for a GPU. Other files may need packages that are absent."""
    marked = (path for path in (_ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text())
    return sorted(str(path.relative_to(_ROOT)) for path in marked)


def suite(gpu: bool) -> PartResult:
    """Run the GPU tests. Return the counts of pytest's last line, and the names of failed tests."""
    part = PartResult("tests", "The test suite with -m gpu")
    part.metric("passed", "passed", "1", "higher")
    part.metric("failed", "failed", "1", goal=0)
    part.metric("collected", "collected", "1", "higher")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *files()]
    environ = {**({"HEADRACE_TESTS_MEDIA": str(_CLIPS)} if _CLIPS.is_dir() else {}), **os.environ}
    done = subprocess.run(
        command if gpu else [*command, "--collect-only"],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        env=environ,
    )
    out = done.stdout
    if not gpu:
        found = re.search(r"(\d+)/\d+ tests collected|(\d+) tests? collected", out)
        if found is None:
            raise RuntimeError(f"pytest collected nothing: {(out + done.stderr)[-400:]}")
        part.add("pytest -m gpu", "collected", int(found[1] or found[2]))
        return part
    if skipped := re.search(r"(\d+) skipped", out):
        part.notes.append(f"{skipped[1]} skipped: " + "; ".join(re.findall(r"^SKIPPED.*", out, re.M))[:400])
    for name in ("passed", "failed"):
        match = re.search(rf"(\d+) {name}", out)
        part.add("pytest -m gpu", name, int(match[1]) if match else 0)
    if done.returncode not in (0, 5):
        part.fail("pytest -m gpu", "\n".join(re.findall(r"^(?:FAILED|ERROR).*", out, re.M))[:400] or out[-400:])
    return part
