"""The drill's part `feed`: a loader that feeds a training step.

It measures batches per second, and how long the device waits for data. A step without the loader, on a
batch that stays on the device, gives the time that the device needs. The idle share is the share of the loop's time
that exceeds it. On a GPU the step is repeated until it takes `_STEP_SECONDS`, like a step of a real video model on
eight clips. The loader then decodes and copies during the step, on another stream.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from headrace.bench.drill.result import PartResult

_STEP_SECONDS = 0.05


def feed(gpu: bool) -> PartResult:
    """Measure the step alone, the loader alone, and both together."""
    import torch

    part = PartResult("feed", "Loader into the device, under a training step")
    part.metric("rate", "batches/s", "1/s", "higher")
    part.metric("idle", "device idle", "%", goal=5)
    part.metric("peak", "device memory at most", "MiB")
    steps, clips = (120, 256) if gpu else (6, 8)
    part.settings = {
        "steps": steps,
        "clips": clips,
        "batch": 8,
        "frames": 16,
        "size": 112,
        "device": "cuda" if gpu else "cpu",
    }
    with tempfile.TemporaryDirectory(prefix="mrb-") as scratch:
        url = _dataset(Path(scratch), clips)
        model = _Model(gpu)
        alone = model.alone(steps)
        part.settings["passes a step"] = model.repeat
        part.add("step alone", "rate", *(1 / seconds for seconds in alone))
        for decoder in _loader_decoders(gpu):
            loader, loop = _loop(url, None, steps, gpu, decoder), _loop(url, model, steps, gpu, decoder)
            part.add(f"loader alone, {decoder}", "rate", steps / loader)
            part.add(f"loader and step, {decoder}", "rate", steps / loop)
            part.add(f"loader and step, {decoder}", "idle", 100 * max(0.0, 1 - statistics.median(alone) * steps / loop))
    if gpu:
        part.add("step alone", "peak", torch.cuda.max_memory_allocated() / 2**20)
    else:
        part.notes.append("no GPU: decoding and step share the cores, so idle is not that of a GPU")
    return part


def _loader_decoders(gpu: bool) -> tuple[str, ...]:
    """Return the decoders to measure.

    With a GPU these are NVDEC and PyAV. The comparison shows how much CPU time NVDEC saves.
    """
    from headrace.loaders.decode import registry

    return ("auto", "pyav") if gpu and registry.missing("dali_gpu") is None else ("pyav",)


def _dataset(scratch: Path, clips: int) -> str:
    from headrace.bench.core.data import make_clip
    from headrace.dataio import pack

    (scratch / "clips").mkdir()
    for number in range(min(clips, 16)):
        make_clip(scratch / "clips", number, seconds=3, width=320, height=240)
    originals = sorted((scratch / "clips").iterdir())
    for number in range(len(originals), clips):
        original = originals[number % len(originals)]
        (scratch / "clips" / f"copy{number:04d}{original.suffix}").write_bytes(original.read_bytes())
    pack([str(scratch / "clips")], str(scratch / "dataset")).close()
    return str(scratch / "dataset")


class _Model:
    """A small 3-D network over clips, in bf16, with AdamW."""

    def __init__(self, gpu: bool) -> None:
        import torch

        self._torch, self.device = torch, torch.device("cuda" if gpu else "cpu")
        wide = 64 if gpu else 4
        self._net = torch.nn.Sequential(
            torch.nn.Conv3d(3, wide, 5, stride=2),
            torch.nn.GELU(),
            torch.nn.Conv3d(wide, 2 * wide, 3, stride=2),
            torch.nn.GELU(),
            torch.nn.AdaptiveAvgPool3d(1),
            torch.nn.Flatten(),
            torch.nn.Linear(2 * wide, 10),
        ).to(self.device)
        self._optimizer = torch.optim.AdamW(self._net.parameters())
        self.repeat = 1
        if gpu:
            self.repeat = max(1, round(_STEP_SECONDS / statistics.median(self.alone(20))))

    def step(self, video: Any) -> None:
        clip = video.to(self.device).transpose(1, 2).to(self._torch.bfloat16) / 255
        for _ in range(self.repeat):
            self._once(clip)

    def _once(self, clip: Any) -> None:
        torch = self._torch
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self._net(clip).float().square().mean()
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._optimizer.step()

    def sync(self) -> None:
        if self.device.type == "cuda":
            self._torch.cuda.synchronize()

    def alone(self, steps: int) -> list[float]:
        video = self._torch.zeros(8, 16, 3, 112, 112, dtype=self._torch.uint8, device=self.device)
        for _ in range(3):
            self.step(video)
        self.sync()
        seconds = []
        for _ in range(5):
            began = time.perf_counter()
            for _ in range(max(1, steps // 5)):
                self.step(video)
            self.sync()
            seconds.append((time.perf_counter() - began) / max(1, steps // 5))
        return seconds


def _loop(url: str, model: _Model | None, steps: int, gpu: bool, decoder: Any) -> float:
    """Return the seconds of `steps` batches, after two that do not count."""
    from headrace.loaders import Clip, VideoLoader

    device = "cuda" if gpu else "cpu"
    batches, began = -2, 0.0
    clip = Clip(frames=16, stride=2)
    with VideoLoader(
        url, batch_size=8, clip=clip, size=(112, 112), device=device, decoder=decoder, sidecar=None, drop_last=False
    ) as loader:
        while batches < steps:
            for batch in loader:
                batches += 1
                if batches == 0:
                    began = time.perf_counter()
                if model:
                    model.step(batch["video"])
                if batches >= steps:
                    break
    if model:
        model.sync()
    return time.perf_counter() - began
