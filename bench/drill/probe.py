"""What is here: the card, its link, the driver, the versions, and what torch, DALI and cuFile say of it."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import os
import shutil
import subprocess
import sys

from headrace.bench.drill.result import PartResult

LINE = "the machine: card, PCIe link, driver, versions, what torch, DALI and cuFile see"
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


def run(gpu: bool) -> PartResult:
    """Facts as settings; an import that fails is an error, a package that is not there is none."""
    part = PartResult("probe", "The machine")
    part.metric("imports", "packages that can be imported", "1", "higher")
    for name in _IMPORTS:
        try:
            importlib.import_module(name)
            part.add("this machine", "imports", 1)
        except ModuleNotFoundError as error:
            part.notes.append(f"not here: {error.name} (for {name})")
        except Exception as error:
            part.fail("this machine", f"import {name}: {type(error).__name__}: {error}")
    part.settings = {"python": sys.version.split()[0], "cpus": len(os.sched_getaffinity(0))}
    part.settings |= {name: _version(name) for name in ("torch", "numpy", "nvidia-dali-cuda130", "av")}
    part.settings |= _card() if gpu else {}
    if not gpu:
        part.notes.append("no GPU is here: torch.cuda.is_available() is False")
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
    """Whether the driver's library is here: containers are often given CUDA without it."""
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
