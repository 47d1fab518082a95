"""A job for the tests. Its plan is JSON: what to print, how long to wait for a file, and where to write the arena's digest."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import mmap
import os
import sys
import time
from pathlib import Path


def say(**event: object) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(event), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arena-fd", type=int, required=True)
    parser.add_argument("--plan-fd", type=int, required=True)
    parser.add_argument("--progress-fd", type=int, required=True)
    parser.add_argument("--gate-fd", type=int, required=True)
    options = parser.parse_args()
    with open(options.plan_fd, "rb") as file:
        plan = json.loads(file.read())
    if options.arena_fd < 0:
        say(event="failed", code="transient", message="there is no arena", hint="")
        return 3
    arena = mmap.mmap(options.arena_fd, 0, prot=mmap.PROT_READ)
    say(event="progress", done=0, total=len(arena))
    if "gate" in plan:
        until = time.monotonic() + 60
        while not Path(plan["gate"]).exists() and time.monotonic() < until:
            time.sleep(0.01)
    if "store" in plan and not Path(plan["store"]).exists():
        say(event="failed", code="transient", message="the store is away", hint="", again=True)
        return 3
    digest = hashlib.sha256(arena).hexdigest()
    say(event="progress", done=len(arena), total=len(arena))
    for line in plan.get("lines", ()):
        print(line, flush=True)
    say(event="released")
    if "write" in plan:
        temporary = Path(plan["write"] + ".new")
        temporary.write_text(digest)
        temporary.rename(plan["write"])
    if "die" in plan:
        print(plan["die"], file=sys.stderr)
        return 9
    if "fail" in plan:
        say(event="failed", **plan["fail"])
        return 1
    descriptors = sorted(int(name) for name in os.listdir("/proc/self/fd"))
    say(
        event="done", result={"digest": digest, "descriptors": len(descriptors), "session": os.getsid(0) == os.getpid()}
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
