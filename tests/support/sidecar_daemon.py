"""A daemon for the tests, a program of `tests.support.nursery`: a script of the tests runs its jobs."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

from headrace.dataio.core import log
from headrace.dataio.core.errors import UsageError
from headrace.dataio.sidecar.daemon import Daemon
from headrace.dataio.sidecar.settings import Config, cache_tiers
from headrace.dataio.sidecar.tier.config import address
from headrace.dataio.store.open import open_location


def main(configuration: str) -> int:
    """Serve with the options of this JSON object until a signal ends it."""
    options = json.loads(configuration)
    changes = Path(options.pop("changes"))
    log.setup("DEBUG")
    config = Config(
        **{
            **options,
            "socket": Path(options["socket"]),
            "cache_dir": cache_tiers(options["cache_dir"]),
            "metrics_listen": address(options.get("metrics_listen", "off")),
        }
    )

    def changed() -> Config:
        try:
            return replace(config, **json.loads(changes.read_text()))
        except ValueError as error:
            raise UsageError(str(error)) from None

    return 0 if asyncio.run(Daemon(config, open_location, changed).serve()) else 3
