"""`headrace bench lerobot`: clips of two cameras, states and actions of a LeRobot data set, compared with other readers.

A sample is two frames of each camera, the state, and 16 actions, at a random instant of an episode. The same data set
is read from the disk, whose files the page cache holds, and from a store with latency.

- Headrace reads the files in place, as `index` describes them, in two threads.
- LeRobot's own reader reads the files, in two worker processes. From the store, it downloads all files first, as it
  does from the Hub. It gives float32 frames, and Headrace gives uint8.
- Lance reads a table with the videos of each episode as blobs, and PyAV decodes them, in two threads.
- Decoding alone decodes the frames of open local files with PyAV, in two threads, and reads no rows. It is the lower
  bound.

Peers that are not installed are skipped and named. `--peer-python` names the interpreter of both.

Invariant: every candidate delivers as many samples, and its actions are those of its state's frame.

Failure behaviour: a candidate that fails is named, and the others continue.
"""

from __future__ import annotations

import itertools
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.bench.core.command import Job, benchmark
from headrace.bench.core.measure import Candidate, TreeMemory, alternate, command_of, cpu_seconds
from headrace.bench.core.processes import server
from headrace.bench.core.results import Metric, Part
from headrace.bench.peers import lerobot as peers
from headrace.dataio.core.cli import argument, positive_float, positive_int
from headrace.dataio.core.errors import UsageError

LOCAL_EPOCHS = 3
"""Epochs from the disk. The first one warms up, and the others are measured."""
OURS, LEROBOT, LANCE, FLOOR = "Headrace", "LeRobotDataset", "Lance and PyAV", "decoding alone"
STORE = ", from the store"
METRICS = {
    "samples_per_s": Metric("samples/s", "1/s", "higher"),
    "first_epoch_s": Metric("first epoch s", "s", "lower"),
    "first_batch_s": Metric("first batch s", "s", "lower"),
    "cpu_s_per_1k": Metric("CPU s per 1k", "s", "lower"),
    "peak_mib": Metric("peak PSS MiB", "MiB", "lower"),
}


@benchmark(
    "lerobot",
    "Two cameras, states and actions of a LeRobot data set, compared with LeRobot's reader and Lance.",
    argument(
        "--episodes", type=positive_int, default=24, help="of 4 s, 320x240, a multiple of 6 (default: %(default)s)"
    ),
    argument(
        "--clips", type=positive_int, default=12, help="samples of each episode in an epoch (default: %(default)s)"
    ),
    argument("--latency", type=positive_float, default=30.0, help="of the store, in ms (default: %(default)s)"),
    argument("--peer-python", help="an interpreter with lerobot and pylance, msgspec and xxhash"),
)
def lerobot(job: Job, part: Part) -> None:
    """Make the data set in every format, and measure all candidates in turn."""
    args, folder = job.args, job.scratch / "bench"
    if args.episodes % peers.PER_FILE:
        raise UsageError(f"--episodes {args.episodes}: a file has {peers.PER_FILE}", hint="give a multiple of that")
    python, names = args.peer_python or "", [OURS, FLOOR]
    job.progress("making the data set", 0.0)
    make(folder, args.episodes)
    environ = {"LD_LIBRARY_PATH": _ffmpeg_of(python, folder), "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    for name, package in ((LEROBOT, "lerobot"), (LANCE, "lance")):
        if _has(python, package):
            names.append(name)
        else:
            part.notes.append(f"{name} is skipped, since {package} is not installed.")
    if LANCE in names:
        _call(python, "headrace.bench.peers.lerobot:to_lance", str(folder))
    part.title = (
        f"LeRobot: {args.episodes} episodes of two cameras, {args.clips} samples of each, batches of {peers.BATCH}"
    )
    part.settings = {"episodes": args.episodes, "clips": args.clips, "latency_ms": args.latency}
    part.metrics, part.against = METRICS, FLOOR
    with server(job.scratch, delay=args.latency / 1000) as store:
        candidates = [
            Candidate(
                name + (STORE if port else ""),
                "headrace.bench.workloads.lerobot:measure",
                (name, str(folder), args.episodes, args.clips, port),
                python=python if name in (LEROBOT, LANCE) else "",
                environ=store.environ | (environ if name in (LEROBOT, LANCE) else {}),
            )
            for port in (0, store.port)
            for name in names
            if not (port and name == FLOOR)
        ]
        alternate(candidates, job.rounds, job.progress, part.candidates)


def make(folder: Path, episodes: int) -> None:
    """Write the data set, and index it in place."""
    from headrace.dataio import index

    peers.make(folder / "set/robot", episodes)
    index(folder / "set/robot", folder / "set", workers=2).close()


def _has(python: str, package: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return subprocess.run([*command_of("", python=python)[:1], "-c", code], check=False).returncode == 0


def _ffmpeg_of(python: str, folder: Path) -> str:
    """The folder where torchcodec finds the FFmpeg of that interpreter's PyAV."""
    code = (
        "import sys; from pathlib import Path; from headrace.bench.peers.source import ffmpeg_libraries; "
        "print(ffmpeg_libraries(Path(sys.argv[1])))"
    )
    command = [*command_of("", python=python)[:1], "-c", code, str(folder)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _call(python: str, function: str, *arguments: Any) -> None:
    completed = subprocess.run(
        command_of(function, *arguments, python=python), capture_output=True, text=True, check=False
    )
    if completed.returncode:
        raise RuntimeError(f"{function}: {completed.stderr[-500:]}")


# --- the candidates, each in its own process


def ours(folder: str, episodes: int, per_episode: int, port: int) -> Iterator[Iterator[int]]:
    """Yield epochs of `Loader`."""
    from headrace.loaders import Clip, Loader, Rows, Video

    del episodes
    url = f"s3://{Path(folder).name}/set" if port else str(Path(folder) / "set")
    offsets = tuple(number / peers.FPS for number in range(peers.ACTIONS))
    clip = Clip(2, stride=peers.STEP, per_video=per_episode)
    fields: dict[str, Any] = {
        "front": Video(clip, file="front.mp4"),
        "wrist": Video(file="wrist.mp4", like="front"),
        "state": Rows("rows.safetensors", "observation.state", like="front"),
        "action": Rows("rows.safetensors", "action", like="front", offsets=offsets),
    }
    options: dict[str, Any] = {"seed": 1, "sidecar": None, "num_threads": peers.WORKERS, "drop_last": False}
    with Loader(url, peers.BATCH, fields=fields, trust_mounts=True, **options) as loader:
        while True:
            yield (_checked(batch) for batch in loader)


def _checked(batch: Any) -> int:
    for state, actions in zip(batch["state"][:, 0, 0], batch["action"][:, :, 0], strict=True):
        peers.check_rows(state, actions)
    assert all(tuple(batch[name].shape[1:]) == (2, 3, *peers.SIZE) for name in ("front", "wrist"))
    return len(batch["state"])


READERS = {OURS: ours, LEROBOT: peers.lerobot, LANCE: peers.lance, FLOOR: peers.decode_only}


def measure(name: str, folder: str, episodes: int, per_episode: int, port: int) -> dict[str, float]:
    """Measure one candidate. From the store (`port`), one epoch; from the disk, also later epochs."""
    memory, samples, began, cpu = TreeMemory(), episodes * per_episode, time.perf_counter(), cpu_seconds()
    epochs = READERS[name](folder, episodes, per_episode, port)
    figures, ends, first_batch = dict[str, float](), [began], 0.0
    for epoch in itertools.islice(epochs, 1 if port else LOCAL_EPOCHS):
        count = 0
        for size in epoch:
            first_batch = first_batch or time.perf_counter() - began
            count += size
        if count != samples:
            raise ValueError(f"an epoch had {count} samples, and not {samples}")
        ends.append(time.perf_counter())
    figures |= {"first_epoch_s": ends[1] - began, "first_batch_s": first_batch}
    if len(ends) > 2:
        figures["samples_per_s"] = samples * (len(ends) - 2) / (ends[-1] - ends[1])
    del epochs, epoch  # worker processes end, and their CPU time counts
    figures["cpu_s_per_1k"] = (cpu_seconds() - cpu) / samples / (len(ends) - 1) * 1000
    return figures | {"peak_mib": memory.stop()}
