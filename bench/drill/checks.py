"""The drill's parts `checks`, `probe` and `tests`: checks of correctness, facts about the machine, and the GPU tests.

The last check reports how DALI decodes the streams that `headrace.loaders.decode.dali` does not give to it. Its result
is never a failure: if DALI decodes them correctly, the rule is stricter than necessary.

Failure behaviour: if a check or an import needs an absent package, the part has a note. A package that cannot be
imported, a check that fails and a test that fails are errors.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.bench.drill.result import PartResult

_MIB = 1 << 20
_MANY = 128
"""The number of 1080p clips to decode. It is more than DALI's cache of decoders holds."""
_MOST_GROWN = 4096
"""The maximum memory in MiB that decoders may allocate for these clips."""


def run(gpu: bool) -> PartResult:
    """Run all checks. Without a GPU, only list them."""
    part = PartResult("checks", "Checks that need a GPU")
    part.metric("right", "right", "1", "higher")
    part.metric("grown", "device memory allocated by decoders", "MiB", limit=_MOST_GROWN)
    part.metric("wrong", "wrong frames of streams that the loader does not give to DALI", "%")
    for check, packages in CHECKS.items():
        name = check.__name__.replace("_", " ")
        lacking = [package for package in packages if not _is_installed(package)]
        if not gpu or lacking:
            part.notes.append(f"{name}: not checked, {'no GPU' if not gpu else 'missing: ' + ', '.join(lacking)}")
            continue
        try:
            check(part, name)
            part.add(name, "right", 1)
        except Exception as error:
            part.add(name, "right", 0)
            part.fail(name, f"{type(error).__name__}: {error}")
    return part


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False


def _expect(right: bool, wrong: str) -> None:
    if not right:
        raise AssertionError(wrong)


def arena_is_pinned(part: PartResult, name: str) -> None:
    """`cudaHostRegister` accepts a sealed memfd with huge pages."""
    from headrace.checkpoint.saving.arena import Arena

    arena = Arena(64 * _MIB)
    try:
        _expect(arena._pinned, "CUDA did not register the sealed memfd: see the log")
        _expect(arena.tensor.is_pinned(), "torch does not recognise the arena as pinned memory")
    finally:
        arena.close()


def save_has_state_of_the_call(part: PartResult, name: str) -> None:
    """A save has the values that the state had when `save` was called.

    The device is still writing the state when `save` is called, and writes it again as soon as the save allows it.
    """
    import torch

    saves("cuda")
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        saves("cuda")


def saves(device: str, size: int = 64 * _MIB) -> None:
    """Save and restore on the current stream, with eager and with lazy staging."""
    import torch

    from headrace.checkpoint import Checkpointer

    weight = torch.nn.Parameter(torch.zeros(size // 4, device=device))
    optimizer, buffer = torch.optim.SGD([weight], lr=1.0), torch.zeros(size // 16, device=device)
    for mode in ("eager", "lazy"):
        with (
            tempfile.TemporaryDirectory(prefix="mrb-") as folder,
            Checkpointer(folder, run="drill", sidecar=None, staging=mode) as checkpointer,
        ):
            for step in (1, 2):
                _slow(device)
                with torch.no_grad():
                    weight.fill_(step)
                buffer.fill_(step)
                handle = checkpointer.save(step, {"w": weight, "b": buffer, "o": optimizer})
                buffer.fill_(-1)
                weight.grad = torch.full_like(weight, 100.0)
                _slow(device)
                optimizer.step()
                handle.result(120)
                restored = {"w": torch.zeros_like(weight), "b": torch.zeros_like(buffer)}
                _slow(device, 20)
                for tensor in restored.values():
                    tensor.fill_(-2)  # queued on the device before the restore, which must wait for it
                checkpointer.restore(restored, step=step, strict=False)
                for key, tensor in restored.items():
                    _expect(bool((tensor == step).all()), f"{mode}: {key!r} is not what it was at step {step}")


def _slow(device: str, times: int = 1) -> None:
    """Queue some tens of milliseconds of work on the current stream, `times` times."""
    import torch

    if device == "cuda":
        torch.cuda._sleep(50_000_000 * times)  # type: ignore[no-untyped-call]


def batch_is_unchanged_while_another_stream_reads_it(part: PartResult, name: str) -> None:
    """A batch does not change while another stream reads it.

    The trainer drops batches that its stream still reads, while the loader's stream writes the next ones.
    """
    import torch

    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        batches("cuda", 200)


def batches(device: str, count: int) -> None:
    """Deliver `count` batches on the current stream. Each batch has its own values."""
    import torch

    from headrace.loaders.batch.batch import Output
    from headrace.loaders.batch.prefetcher import BatchExecutor
    from headrace.loaders.batch.sample_builder import PlannedBatch, PlannedRead
    from headrace.loaders.interfaces import ProcessedSample, SampleLayout, SampleRef

    def samples(refs: Any, *_: object) -> list[ProcessedSample]:
        return [
            ProcessedSample(ref.sample, {"video": torch.full((4, 3, 64, 64), ref.virtual % 251, dtype=torch.uint8)})
            for ref in refs
        ]

    output = Output(torch.device(device), False, mean=(0.0,) * 3, std=(1.0,) * 3)
    ahead, wrong = (
        BatchExecutor(samples, layout=SampleLayout(("video",)), output=output, num_threads=8),
        torch.zeros((), device=device),
    )
    try:
        for number in range(count):
            refs = [SampleRef(0, 8 * number + n, _sample(n)) for n in range(8)]
            ahead.start(PlannedBatch(refs, [PlannedRead({}, 0)] * 8))
            if number < 3:
                continue
            video, first = ahead.next().tensors()["video"], 8 * (number - 3)
            if number % 10 == 0:
                _slow(device)  # the next batches are made before this one is read
            expected = (torch.arange(first, first + 8, device=device) % 251).float() / 255
            wrong += ((video - expected.view(8, 1, 1, 1, 1)).abs() > 1e-6).any()
            del video
        _expect(float(wrong) == 0, f"{int(wrong)} batches had other contents when they were read")
    finally:
        ahead.close()


def _sample(number: int) -> Any:
    from headrace.dataio.shards.sample import Sample

    return Sample(number, f"key{number}", "shards/0.tar", (), 1.0)


def dali_and_torch_see_the_same_gpus(part: PartResult, name: str) -> None:
    """DALI and torch see the same number of GPUs, and the driver's video library is installed."""
    import torch

    from headrace.loaders.decode import dali
    from headrace.loaders.decode.dali import gpu_count

    _expect(gpu_count() == torch.cuda.device_count(), f"DALI sees {gpu_count()}, torch {torch.cuda.device_count()}")
    _expect(dali.nvdec_missing() is None, str(dali.nvdec_missing()))


def decoders_do_not_accumulate(part: PartResult, name: str) -> None:
    """DALI keeps up to a hundred decoders for reuse. It must also reuse those of 1080p, whose coded height is 1088."""
    import torch

    from headrace.bench.drill.nvdec import make, request_for
    from headrace.loaders.decode.dali import DaliDecoder

    with tempfile.TemporaryDirectory(prefix="mrb-") as folder:
        path = Path(folder) / "clip.mp4"
        make(path, "libx264", 1920, 1080)
        decoder, request = DaliDecoder(0), request_for(path)
        decoder.decode([request] * 16)
        before = torch.cuda.mem_get_info()[0]
        for _ in range(_MANY // 16):
            decoder.decode([request] * 16)
            torch.cuda.empty_cache()
        grown = (before - torch.cuda.mem_get_info()[0]) / _MIB
        decoder.close()
    part.add(name, "grown", grown)
    _expect(grown <= _MOST_GROWN, f"{grown:.0f} MiB for {_MANY} clips")


def decode_streams_not_given_to_dali(part: PartResult, name: str) -> None:
    """Decode AV1 that repeats frames, and interlaced H.264, with DALI.

    If DALI decodes the frames correctly, the rule is too strict.
    """
    from headrace.bench.drill.nvdec import make, request_for
    from headrace.loaders.decode.dali import DaliDecoder
    from headrace.loaders.decode.pyav import PyAVDecoder

    kinds = {"AV1": ("libsvtav1", "mkv", None), "interlaced": ("libx264", "mp4", {"x264-params": "interlaced=1"})}
    with tempfile.TemporaryDirectory(prefix="mrb-") as folder:
        for kind, (encoder, suffix, options) in kinds.items():
            path = Path(folder) / f"{kind}.{suffix}"
            make(path, encoder, 640, 368, options)
            request: Any = request_for(path)
            cpu: Any = PyAVDecoder().decode([request])[0]
            with _without_nvdec_check():
                gpu: Any = DaliDecoder(0).decode([request])[0]
            if isinstance(gpu, Exception):
                part.notes.append(f"{kind}: DALI refuses it by itself: {gpu}")
                continue
            difference = (gpu.frames.cpu().int() - cpu.frames.int()).abs().flatten(1).max(1).values
            part.add(kind, "wrong", 100 * float((difference > 2).float().mean()))


@contextmanager
def _without_nvdec_check() -> Iterator[None]:
    from headrace.loaders.decode import dali

    check = dali.check_nvdec
    dali.check_nvdec = lambda *_: None
    try:
        yield
    finally:
        dali.check_nvdec = check


_DECODING = ("av", "simplejpeg", "nvidia.dali")
CHECKS: dict[Callable[[PartResult, str], None], tuple[str, ...]] = {
    arena_is_pinned: (),
    save_has_state_of_the_call: (),
    batch_is_unchanged_while_another_stream_reads_it: ("av", "simplejpeg"),
    dali_and_torch_see_the_same_gpus: _DECODING,
    decoders_do_not_accumulate: _DECODING,
    decode_streams_not_given_to_dali: _DECODING,
}
"""Each check, and the packages that it needs."""


# --- the machine, and the GPU tests of the test suite


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

    described: dict[str, object] = {"capability": torch.cuda.get_device_capability(0), "cuda": torch.version.cuda}
    if shutil.which("nvidia-smi"):
        completed = subprocess.run(
            ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"], capture_output=True, text=True, timeout=60
        )
        described |= dict(
            zip(
                _QUERY.split(","), (value.strip() for value in completed.stdout.split("\n")[0].split(",")), strict=False
            )
        )
    described["video_library"] = _library("libnvcuvid.so.1")
    try:
        backend = importlib.import_module("nvidia.dali.backend_impl")
        described["dali_gpus"] = backend.GetCUDADeviceCount()
    except Exception as error:
        described["dali_gpus"] = f"{type(error).__name__}: {error}"
    return described


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
    """Return the test files that have tests for a GPU. Other files may need packages that are absent."""
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
    completed = subprocess.run(
        command if gpu else [*command, "--collect-only"],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        env=environ,
    )
    out = completed.stdout
    if not gpu:
        count = re.search(r"(\d+)/\d+ tests collected|(\d+) tests? collected", out)
        if count is None:
            raise RuntimeError(f"pytest collected nothing: {(out + completed.stderr)[-400:]}")
        part.add("pytest -m gpu", "collected", int(count[1] or count[2]))
        return part
    if skipped := re.search(r"(\d+) skipped", out):
        part.notes.append(f"{skipped[1]} skipped: " + "; ".join(re.findall(r"^SKIPPED.*", out, re.M))[:400])
    for name in ("passed", "failed"):
        match = re.search(rf"(\d+) {name}", out)
        part.add("pytest -m gpu", name, int(match[1]) if match else 0)
    if completed.returncode not in (0, 5):
        part.fail("pytest -m gpu", "\n".join(re.findall(r"^(?:FAILED|ERROR).*", out, re.M))[:400] or out[-400:])
    return part
