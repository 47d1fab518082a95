"""A daemon for the tests: `daemon_main.py CONFIG.json`, whose jobs are run by a script of the test's own."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from dataio.core import log
from dataio.sidecar.server import Config, Daemon
from dataio.store.open import open_location


def main() -> int:
    options = json.loads(sys.argv[1])
    log.setup("DEBUG")
    config = Config(
        **{
            **options,
            "socket": Path(options["socket"]),
            "cache_dir": Path(options["cache_dir"]),
        }
    )
    return 0 if asyncio.run(Daemon(config, open_location).serve()) else 3


if __name__ == "__main__":
    sys.exit(main())
