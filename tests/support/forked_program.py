"""One program that a shell starts, in a fork of the nursery: `forked_program PROGRAM SOURCE WORDS`. See `forked_programs`."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile

import torch.distributed.run

import headrace.checkpoint.api
import headrace.checkpoint.publishing.subscriber
import headrace.dataio.cli
import headrace.dataio.shards.ingest
import headrace.loaders.audio_loader
import headrace.loaders.video_loader


def main(program: str, source: str, *words: str) -> None:
    """In the fork: run the program."""
    tempfile.tempdir = None  # that of this environment
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.argv = [program, *words]
    if program == "headrace":
        sys.exit(headrace.dataio.cli.main(list(words)))
    if program == "torchrun":
        torch.distributed.run.main(list(words))
        return
    sys.argv = [word for word in words if word != "-u"]
    sys.path.insert(0, os.getcwd())
    if sys.argv[0] == "-":
        exec(compile(source, "<stdin>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
