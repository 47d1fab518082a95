"""The `headrace` command in a forked process, which need not import Headrace again (`tests.support.nursery`)."""

from __future__ import annotations

import subprocess

from headrace.dataio import cli
from headrace.dataio.shards import cli as _shards  # noqa: F401 - imported before the fork, as the next ones
from headrace.dataio.shards import cli_pack as _pack  # noqa: F401
from headrace.dataio.shards import cli_versions as _versions  # noqa: F401
from headrace.dataio.shards import preview as _preview  # noqa: F401
from headrace.dataio.shards.verify import cli as _verify  # noqa: F401
from tests.support import nursery


def main(*arguments: str) -> int:
    """Run in the forked process."""
    return cli.main(list(arguments))


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """What `headrace ARGUMENTS` prints and returns, in the folder and with the variables of this process and `environment`."""
    done = nursery.run(__name__, *map(str, arguments), **environment)
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    return done
