"""A daemon for the tests: `daemon_main.py CONFIG.json`, whose jobs are run by a script of the test's own."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path

from headrace.dataio.core import log
from headrace.dataio.core.errors import UsageError
from headrace.dataio.sidecar.daemon import Daemon
from headrace.dataio.sidecar.settings import Config, cache_tiers
from headrace.dataio.store.open import open_location


def main() -> int:
    options = json.loads(sys.argv[1])
    changes = Path(options.pop("changes"))
    log.setup("DEBUG")
    config = Config(
        **{
            **options,
            "socket": Path(options["socket"]),
            "cache_dir": cache_tiers(options["cache_dir"]),
        }
    )

    def changed() -> Config:
        try:
            return replace(config, **json.loads(changes.read_text()))
        except ValueError as error:
            raise UsageError(str(error)) from None

    return 0 if asyncio.run(Daemon(config, open_location, changed).serve()) else 3


if __name__ == "__main__":
    sys.exit(main())
