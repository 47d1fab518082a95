"""Runs commands on units with one Ray cluster, and kills one actor of each run in the middle.

It runs in a separate process, because Ray leaves threads and sockets behind. The arguments are a folder of media, a folder
of tars, a dataset with an index of many parts, and a folder to write to. It prints one JSON object with the number of
killed actors and the results.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import ray

from headrace.dataio import Dataset, index, pack, verify
from headrace.dataio.shards import statistics
from headrace.dataio.shards.ingest import file_units

_MARK = "HEADRACE_TEST_RAY"
"""An environment variable of all processes of this cluster."""


class ActorKiller:
    """A progress callback that kills one actor with SIGKILL when the first unit is finished."""

    def __init__(self) -> None:
        self.killed: list[int] = []

    def __call__(self, *_: Any) -> None:
        if not self.killed and (actors := _actors()):
            os.kill(actors[0], signal.SIGKILL)
            self.killed.append(actors[0])


def _actors() -> list[int]:
    """The processes of actors of this cluster."""
    mark, found = f"{_MARK}={os.environ[_MARK]}".encode(), []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            is_actor = folder.name.isdecimal() and (folder / "cmdline").read_bytes().startswith(b"ray::_UnitActor")
            if is_actor and mark in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return sorted(found)


def main(media: str, tars: str, parts: str, out: str) -> None:
    """Run everything and print the results."""
    killed: dict[str, int] = {}

    def on_ray(name: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        killer = ActorKiller()
        result = call(*arguments, engine="ray", workers=2, progress=killer, **options)
        killed[name] = len(killer.killed)
        return result

    ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
    with on_ray("pack", pack, media, f"{out}/packed", shard_bytes=8192) as packed:
        workers = [[one.groups, one.bytes, one.seconds] for one in packed.report.workers]
        results: dict[str, Any] = {"workers": workers, "skipped": len(packed.report.skipped)}
    on_ray("index", index, tars, f"{out}/indexed", keys="shard").close()
    file_units.UNIT_OBJECTS = 4
    on_ray("files", index, media, f"{out}/files").close()
    report = on_ray("verify", verify, f"{out}/packed", decode="50%", journal=f"{out}/journal")
    results["verify"] = msgspec.to_builtins(report)
    statistics._UNIT_PARTS = 1
    with Dataset(parts) as dataset:
        results["info"] = on_ray("info", statistics.summary, dataset.where("duration > 0.2"), journal=f"{out}/journal")
    ray.shutdown()
    print(json.dumps(results | {"killed": killed}))


if __name__ == "__main__":
    os.environ.setdefault(_MARK, str(os.getpid()))
    main(*sys.argv[1:])
