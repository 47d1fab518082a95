"""Reports the samples that are repeated or lost when a loader loads a state that does not match it.

Purpose: report the cost of changing the batch size, or of adding samples to the dataset, during a run.
Invariants: the loader continues at the batch before which the same number of the epoch's samples were delivered,
rounded down to whole batches. `again` and `missed` are exact in two cases; otherwise they are None:

- Dataset and clips are the same, and the epoch has at most `MAX_COUNTED` clips. Then they are counted from the old
  order, which is a pure function of the state.
- The state is that of a mixture. Then they are counted from its counters.

Failure behaviour: it raises no errors of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from headrace.dataio.core.errors import HeadraceError
from headrace.loaders.sampling.mixed_buckets import MixedBuckets
from headrace.loaders.sampling.mixture import Mixed
from headrace.loaders.sampling.order import Order
from headrace.loaders.sampling.permutation import I64
from headrace.loaders.sampling.plan import OrderPlan
from headrace.loaders.sampling.schedule import Plain
from headrace.loaders.sampling.state import Difference, Position, differences, resolved

MAX_COUNTED = 1 << 22
_WORDS = {"drop_last", "evaluation"}


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """The result of loading a state that does not match. It is true if any field differs.

    Args:
        fields: the fields that differ.
        epoch, batch: the position at which the loader continues.
        again: number of clips of this epoch that are delivered again; None if unknown.
        missed: number of clips of this epoch that are not delivered; None if unknown.
        quarantine_dropped: True if the quarantine was dropped, since its ids now belong to other samples.
    """

    fields: tuple[Difference, ...]
    epoch: int
    batch: int
    again: int | None
    missed: int | None
    quarantine_dropped: bool = False

    def __bool__(self) -> bool:
        return bool(self.fields)

    def also(self, difference: Difference) -> Loss:
        """This loss with one more field."""
        return replace(self, fields=(*self.fields, difference))

    def __str__(self) -> str:
        if not self:
            return "nothing is lost"
        repeated = "an unknown number of" if self.again is None else str(self.again)
        lost = "an unknown number" if self.missed is None else str(self.missed)
        dropped = "; the quarantine is dropped" if self.quarantine_dropped else ""
        fields = "; ".join(map(str, self.fields))
        going = f"Continuing at batch {self.batch} of epoch {self.epoch}"
        return f"{fields}. {going}: {repeated} clips are delivered again, {lost} are not delivered{dropped}"


def forced(plan: OrderPlan, saved: Mapping[str, Any], position: Position) -> tuple[Position, Loss]:
    """The position at which `plan` continues after a state that may not match it, and the loss."""
    plan = plan.of(position.epoch)
    fingerprint = plan.fingerprint(position.epoch, position.batch)
    saved = resolved(fingerprint.values(), saved)
    differing = tuple(differences(fingerprint, saved))
    if not differing and position.batch <= plan.schedule.batches:
        return position, Loss(fields=(), epoch=position.epoch, batch=position.batch, again=0, missed=0)
    other_samples = any("digest" in one.field or one.field == "sources" for one in differing)
    batch = _batch(plan, saved, position)
    again, missed = (None, None) if other_samples else _count_loss(plan, saved, position, batch)
    dropped = other_samples and bool(position.quarantine)
    new = Position(
        position.epoch, batch, quarantine=() if other_samples else position.quarantine, listed=position.listed
    )
    return new, Loss(
        fields=differing, epoch=new.epoch, batch=batch, again=again, missed=missed, quarantine_dropped=dropped
    )


def _batch(plan: OrderPlan, saved: Mapping[str, Any], position: Position) -> int:
    """The batch of this plan before which as many clips were delivered as before the saved batch."""
    old, new = saved.get("global_batch"), plan.schedule.described(0, 0).get("global_batch")
    if isinstance(old, int) and isinstance(new, int) and old > 0:
        return min(plan.schedule.batches, position.batch * old // new)
    return min(plan.schedule.batches, position.batch)


def _count_loss(
    plan: OrderPlan, saved: Mapping[str, Any], position: Position, batch: int
) -> tuple[int | None, int | None]:
    """The number of clips that are delivered again, and the number that are not delivered."""
    schedule = plan.schedule
    if isinstance(schedule, (Mixed, MixedBuckets)) and _has_counters(saved.get("sources")):
        taken = schedule.taken(position.epoch, batch)
        moved = [taken[name] - old[2] for name, old in saved["sources"].items()]
        return sum(-n for n in moved if n < 0), sum(n for n in moved if n > 0)
    old = _old_order(plan, saved)
    if old is None or not isinstance(schedule, Plain) or schedule.order.samples > MAX_COUNTED:
        return None, None
    delivered, pending = np.zeros((2, old.samples), np.bool_)
    delivered[old.take(position.epoch, np.arange(min(old.samples, position.batch * old.batch)))] = True
    end = schedule.order.samples if not schedule.drop_last else schedule.order.full_batches * schedule.order.batch
    positions: I64 = np.arange(batch * schedule.order.batch, end, dtype=np.int64)
    pending[schedule.order.take(position.epoch, positions)] = True
    return int((delivered & pending).sum()), int((~delivered & ~pending).sum())


def _has_counters(sources: Any) -> bool:
    """Whether a state counts the samples of each source; the state of an evaluation does not."""
    return isinstance(sources, dict) and all(isinstance(row[2], int) for row in sources.values())


def _old_order(plan: OrderPlan, saved: Mapping[str, Any]) -> Order | None:
    """The order of the saved state, if it was a plain order of the same clips."""
    saved_order, clip = saved.get("order"), plan.fingerprint(0, 0).values()["clip"]
    if not isinstance(saved_order, list) or not _same_parts(saved.get("clip"), clip):
        return None
    built = [one for one in saved_order if isinstance(one, int)]
    if len(built) not in (0, 3) or not {one for one in saved_order if isinstance(one, str)} <= _WORDS:
        return None
    try:
        chunk, lanes, window = built or (1, 1, 1)
        return Order(
            plan.order.samples,
            saved["global_batch"],
            chunk,
            lanes=lanes,
            window=window,
            seed=saved["seed"],
            shuffle=bool(built),
        )
    except (HeadraceError, TypeError, KeyError):
        return None


def _same_parts(old: Any, current: Any) -> bool:
    """Whether every sample has the same number of parts in both descriptions.

    A description contains the length of a part, then the word for how parts start, then the values that determine their
    number.
    """
    if old == current:
        return True
    if not isinstance(old, list) or not isinstance(current, list):
        return False
    word = next((at for at, value in enumerate(current) if isinstance(value, str)), len(current))
    return current[word:] == old[word:] and current[word : word + 1] in (["random"], ["center"])
