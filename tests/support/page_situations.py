"""What single pages of docs/howto take for granted, made small: sources to pack, runs to compare, a daemon.

`SITUATIONS` has a function for each page that needs more than `tests.support.page_runs.opened` makes.
"""

from __future__ import annotations

import contextlib
import copy
import csv
import io
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.numpy
import torch
from fsspec import register_implementation

from headrace import Checkpointer, Clip, Dataset, VideoLoader, index, pack
from headrace.checkpoint.filesystem import HeadraceFileSystem
from headrace.checkpoint.repository import tags
from headrace.dataio.core import tracing
from headrace.dataio.store.open import open_store
from tests.dataio.sidecar.conftest import RunningDaemon
from tests.support import lerobot_set
from tests.support.embedded_media import cell, write_embedded
from tests.support.page_runs import PageRun, Prepare
from tests.support.pictures import picture
from tests.support.written_media import write_clip, write_wav

FIRST_SAVES = {"dcp", "metadata", "publishing", "trackers", "fsspec"}
"""Pages that save the first steps of the run "exp42"."""
CHANGES = {
    "buckets": {
        "64 * 16": "8 * 16",
        "multiple=8": "multiple=1",
        "--multiple 8": "--multiple 1",
        "67108864": "8388608",
        "32 * 512": "7 * 512",
        "(2, 5, 15), budget=600": "(2, 3), budget=6",
    },
    "fields": {'device="cuda"': 'device="cpu"'},
    "debug-a-slow-run": {"8MiB --rounds 1": "8KiB --rounds 1 --seconds 0.05"},
    "trainers": {"max_steps=10_000": 'max_steps=2, accelerator="cpu", enable_progress_bar=False, logger=False'},
    "versions": {"between 2": "between 1", "720": "48"},
    "vast-and-nfs": {"8MiB,64MiB": "8KiB --threads 1 --rounds 1 --seconds 0.05"},
}
"""Settings of a page that are too large for datasets of eight clips, or need a GPU."""
IN_A_BUCKET = {"indexing", "lerobot", "mounts", "s3-credentials", "versions"}
"""Pages that need the S3 server, since a dataset may refer to other folders of its bucket, but not of a disk."""


def _clip(path: Path, seed: int, **fields: Any) -> Path:
    """A clip of a second with its JSON. `seed` makes its bytes different from those of other clips."""
    write_clip(path, frames=30 + seed)
    path.with_suffix(".json").write_text(json.dumps({"caption": f"a dog, number {seed}", **fields}))
    return path


def _table(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    found = list(rows)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(found[0]))
        writer.writeheader()
        writer.writerows(found)


def _tar(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def _upload(folder: Path, url: str) -> None:
    with open_store(url) as store:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                store.put(str(path.relative_to(folder)), path.read_bytes())


def _damage(dataset: Path, key: str) -> None:
    """Change bytes of the sample in its shard."""
    with Dataset(dataset) as found:
        sample = next(sample for sample in found if sample.key == key)
    offset = sample.members[0].offset + 200
    shard = dataset / sample.shard
    data = bytearray(shard.read_bytes())
    data[offset : offset + 8] = bytes(255 - byte for byte in data[offset : offset + 8])
    shard.unlink()  # it may be a hard link
    shard.write_bytes(data)


def packing(run: PageRun) -> None:
    here = run.folder
    for number, name in enumerate(("clips/a.mp4", "clips/b.mp4", "new/c.mp4", "media/one/d.mp4", "media/e.mp4")):
        _clip(here / name, number)
    for number in range(5):
        write_clip(here / "listed" / f"f{number}.mp4", frames=20 + number)
    _table(here / "list.csv", [{"path": "listed/f0.mp4", "key": "f0", "license": "cc"}])
    _table(here / "urls.csv", [{"url": "listed/f1.mp4", "name": "first", "title": "a dog"}])
    _table(here / "cameras.csv", [{"front": "listed/f2.mp4", "left": "listed/f3.mp4"}])
    _tar(here / "old-shards" / "0.tar", {"g.mp4": (here / "listed/f4.mp4").read_bytes(), "g.txt": b"a cat"})
    (here / "image.png").write_bytes(picture("png", 64, 48))
    images = [cell(here / "image.png")] * 2
    write_embedded(here / "train-0.parquet", {"image": images, "mask": images}, {"id": ["x", "y"]})
    shutil.copytree(here / "clips", run.bucket / "incoming")


def indexing(run: PageRun) -> None:
    url, local = run.places["s3://bucket"], run.folder / "upload"
    for number in range(4):
        _clip(local / "raw" / f"{number % 2}" / f"{number}.mp4", number)
        write_clip(local / "episodes" / f"{number // 2}" / f"cam{number % 2}.mp4", frames=20 + number)
    for number in range(2):
        clip = (local / "raw" / "0" / f"{2 * number}.mp4").read_bytes()
        _tar(local / "webdataset" / f"{number:03}.tar", {f"clip_{number}.mp4": clip, f"clip_{number}.txt": b"a dog"})
    _upload(local, url)
    front, left = (f"{url}/episodes/0/cam{number}.mp4" for number in range(2))
    _table(run.folder / "cameras.csv", [{"front_url": front, "left_url": left, "weather": "rain"}])


def lerobot(run: PageRun) -> None:
    local = run.folder / "upload"
    lerobot_set.write(local / "so101", lerobot_set.LeRobotSet(lengths=(40, 44)))
    _upload(local, run.places["s3://bucket"])


def mounts(run: PageRun) -> None:
    url, local = run.places["s3://bucket"], run.folder / "upload"
    _clip(local / "raw" / "0.mp4", 0)
    _upload(local, url)
    index(f"{url}/raw", f"{url}/datasets/clips", workers=1).close()


def versions(run: PageRun) -> None:
    url = run.places["s3://bucket"]
    for name, numbers in (("set", range(8)), ("other", range(8, 10)), ("more", range(10, 12))):
        for number in numbers:
            _clip(run.folder / name / f"clip_{number:02}.mp4", number)
        with pack([run.folder / name], f"{url}/{name}", workers=1) as dataset:
            if name == "set":
                dataset.tag("release-1")


def looking_after(run: PageRun) -> None:
    for name in ("ds", "copy"):
        shutil.copytree(run.bucket / "clips", run.bucket / name)
    _damage(run.bucket / "ds", "made_05")


def damaged_samples(run: PageRun) -> None:
    _damage(run.bucket / "clips", "made_07")


def fields(run: PageRun) -> None:
    media, robots = run.folder / "media", run.folder / "robots"
    for number in range(4):
        clip = write_clip(media / f"clip_{number}.mp4", frames=70)
        write_wav(clip.with_suffix(".wav"), 2.5)
        np.save(media / f"clip_{number}.latent.npy", np.full((4, 8), number, np.float32))
        embedding = np.ones((2 + number, 8), np.float32)
        safetensors.numpy.save_file({"emb": embedding}, media / f"clip_{number}.t5.safetensors")
        texts = {"caption": "a dog", "captions": ["a dog runs", "a brown dog"], "scores": [0.9, 0.1]}
        clip.with_suffix(".json").write_text(json.dumps({**texts, "camera": {"pose": [1, 2, 3]}}))
    for number in range(2):
        write_clip(robots / f"{number}.mp4", frames=60)
        write_clip(robots / f"{number}.cam1.mp4", frames=60)
        times = [row / 30 for row in range(60)]
        values = {"state": [[time, 0.0] for time in times], "action": [[0.0, time] for time in times]}
        pq.write_table(pa.table({"timestamp": times, **values}), robots / f"{number}.rows.parquet")
    shutil.rmtree(run.bucket / "clips")
    pack([media], run.bucket / "clips", workers=1).close()
    pack([robots], run.bucket / "robots", workers=1, group="dot").close()


def own_fields(run: PageRun) -> None:
    scans = {f"{number}.points.bin": np.ones((3 + number, 4), np.float32).tobytes() for number in range(2)}
    _tar(run.folder / "tars" / "0.tar", scans)


def latents(run: PageRun) -> None:
    (run.folder / "media").symlink_to(run.bucket / "media")
    clip = io.BytesIO()
    np.save(clip, np.zeros(4, np.float32))
    files = {f"{key}.json": b'{"caption": "a dog"}' for key in "abcd"}
    files |= {f"{key}.latent.npy": clip.getvalue() for key in "abcd"}
    _tar(run.folder / "tars" / "0.tar", dict(sorted(files.items())))


def compare_copy(run: PageRun) -> None:
    model, checkpointer = run.names["model"], run.names["checkpointer"]
    for step in (1300, 1400):
        with torch.no_grad():
            model["head"].weight[0] += 1
        checkpointer.save(step, run.names["state"]).result(60)
    with open_store(str(run.repository)) as store:
        tags.tag(store, "best", "exp42", 1400)


def export_import(run: PageRun) -> None:
    checkpointer, state = run.names["checkpointer"], run.names["state"]
    checkpointer.save(1300, state | {"ema": {"w": torch.ones(3)}}).result(60)


def publishing(run: PageRun) -> None:
    rounds = iter((True, False))
    run.names["serving"] = lambda: next(rounds)
    run.names["no_requests"] = contextlib.nullcontext
    run.names["served"] = copy.deepcopy(run.names["model"]).to(torch.bfloat16)


def fsspec(run: PageRun) -> None:
    register_implementation("headrace", HeadraceFileSystem, clobber=True)  # as the entry point of the package does
    run.stack.callback(HeadraceFileSystem.clear_instance_cache)
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(8, 4)})
    pq.write_table(pa.table({"score": [0.5]}), run.folder / "scores.parquet")
    with Checkpointer(run.repository, run="exp42", sidecar=None) as checkpointer:
        for step in (1000, 2000):
            checkpointer.put_artifact(step, "scores.parquet", run.folder / "scores.parquet")
            checkpointer.save(step, {"model": model}).result(60)


def trackers(run: PageRun) -> None:
    import mlflow

    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri((run.folder / "mlruns").as_uri())
    run.stack.callback(mlflow.set_tracking_uri, before)
    run.stack.callback(mlflow.end_run)
    run.names["send"] = print


def trainers(run: PageRun) -> None:
    import lightning
    from accelerate.state import AcceleratorState

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def training_step(self, batch: dict[str, Any], number: int) -> torch.Tensor:
            return (batch["video"].float().mean() * self.weight).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    run.names["module"] = Module()

    run.stack.callback(AcceleratorState._reset_state, reset_partial_state=True)
    model = Path("llama-hf")
    model.mkdir()
    safetensors.numpy.save_file({"lm_head.weight": np.ones((4, 4), np.float32)}, model / "model.safetensors")
    (model / "config.json").write_text("{}")


def daemon(run: PageRun) -> None:
    """A daemon of this node, whose socket is in `HEADRACE_SIDECAR`."""
    folder = run.stack.enter_context(tempfile.TemporaryDirectory(prefix="mr-"))  # a socket's path must be short
    running = RunningDaemon(Path(folder), run.folder / "daemon.log")
    run.stack.callback(running.stop)
    running.start()
    os.environ["HEADRACE_SIDECAR"] = str(running.socket)  # the test restores it


def debug_a_slow_run(run: PageRun) -> None:
    daemon(run)
    os.environ["HEADRACE_EVENTS"] = str(run.folder / "events")  # the test restores it
    run.stack.callback(setattr, tracing, "_tracer", tracing._tracer)
    tracing._tracer = None
    with VideoLoader(str(run.bucket / "clips"), batch_size=2, clip=Clip(frames=2), sidecar=None) as loader:
        assert len(list(loader)) == 4


def vast_and_nfs(run: PageRun) -> None:
    run.places["/mnt/vast"] = str(run.folder / "vast")
    for name in ("checkpoints", "scratch"):
        (run.folder / "vast" / name).mkdir(parents=True)


SITUATIONS: dict[str, Prepare] = {
    "compare-copy": compare_copy,
    "damaged-samples": damaged_samples,
    "debug-a-slow-run": debug_a_slow_run,
    "export-import": export_import,
    "fields": fields,
    "fsspec": fsspec,
    "indexing": indexing,
    "latents": latents,
    "lerobot": lerobot,
    "mounts": mounts,
    "own-fields": own_fields,
    "looking-after": looking_after,
    "packing": packing,
    "publishing": publishing,
    "runbook": daemon,
    "size-a-sidecar": daemon,
    "trackers": trackers,
    "trainers": trainers,
    "vast-and-nfs": vast_and_nfs,
    "versions": versions,
}
