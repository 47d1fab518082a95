"""Makes a dataset over a LeRobot data set, whose videos stay where they are.

Purpose: each episode becomes one sample (`headrace.dataio.shards.ingest.lerobot_samples`). Its rows are written to the
dataset, and its videos are windows of the long files of the data set.

Invariants:

* A run that is repeated continues after the last recorded unit, and its result is equal, byte for byte, to that of an
  uninterrupted run.
* Nothing is visible before the version document, which is written last.
* With `follow`, only episodes are read that no earlier version has. LeRobot writes the episodes of a new recording to
  new files, so the files of older episodes stay as they are.

Failure behaviour: an episode that cannot be used is skipped, and the report names the reason. Metadata that break a
rule raise `CorruptionError`, and nothing is indexed. An existing dataset raises `ConflictError`, unless it is followed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from headrace.dataio.core import crashpoints, limits
from headrace.dataio.core.errors import ConflictError, UsageError
from headrace.dataio.shards.ingest.lerobot import LeRobotInfo, is_lerobot, read_info
from headrace.dataio.shards.ingest.lerobot_episodes import Episode, read_episodes
from headrace.dataio.shards.ingest.lerobot_plan import LeRobotPlan, LeRobotUnit, lerobot_plan
from headrace.dataio.shards.ingest.lerobot_samples import EpisodeSettings, key_of
from headrace.dataio.shards.ingest.lerobot_units import lerobot_task
from headrace.dataio.shards.ingest.patterns import prefix_in
from headrace.dataio.shards.ingest.plan import PackedUnit
from headrace.dataio.shards.ingest.plan_run import InputReporter, PlanRun, check_new_keys
from headrace.dataio.shards.ingest.report import PackReport, Progress, Skipped
from headrace.dataio.shards.ingest.sources import Gathered
from headrace.dataio.shards.units.engine import RunReport, find_engine
from headrace.dataio.shards.units.journal import Done, StoredJournal
from headrace.dataio.shards.versions import documents as versions
from headrace.dataio.shards.versions import history
from headrace.dataio.shards.versions.mounting import JOINED_MOUNT, mount_of
from headrace.dataio.store.base import Store
from headrace.dataio.store.mounts import PREFIX
from headrace.dataio.store.open import open_store
