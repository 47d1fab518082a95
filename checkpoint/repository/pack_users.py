"""Lists packs for a collection, and finds the packs that live attempts need.

An attempt needs its own packs, and packs of other attempts whose chunks it references. Its decision names those other
attempts (`Totals`). Its documents, which are its manifests or their groups, name the packs. They are read only to
decide which packs stay. The documents of a decided attempt never change, so they are read once while the attempt is
live.
Cost: a `PackUsers` lists the packs of an attempt again only if an attempt that needed them is no longer live. It
reads one COMMIT for each attempt that keeps packs of a removed one, because another collection may have removed its
step. A new `PackUsers` finds packs that appear later, for example packs that a store wrote for a late request.
Invariant: a pack that a live attempt names counts as needed.
Failure behaviour: errors of the store are raised. If a document of a live attempt is missing, every pack counts as
needed. An unreadable document raises `CorruptionError`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from headrace.checkpoint.format import group, names, own_digest
from headrace.checkpoint.format import manifest as manifests
from headrace.checkpoint.format.documents import StepOfRun
from headrace.checkpoint.format.manifest import PackName
from headrace.checkpoint.repository import commit
from headrace.checkpoint.repository.inventory import Inventory, SeenAttempt, many
from headrace.dataio.core.errors import NotFoundError
from headrace.dataio.store.base import ObjectInfo, Store

Packs = dict[str, frozenset[str]]
"""Keys of packs, by the id of the attempt that wrote them."""


class PackUsers:
    """Lists packs of one repository, and finds those that live attempts need.

    Args:
        store: The repository.
        at_once: The maximum number of live attempts whose own packs one call of `look` lists. The listing finds packs
            that a replaced worker left. Default: None, no limit.
    """

    def __init__(self, store: Store, at_once: int | None = None) -> None:
        self._store = store
        self._at_once = at_once
        # by live attempt, the packs of other attempts that it names
        self._named: dict[str, Packs] = {}
        # equal sets of packs, each stored once to save memory
        self._interned: dict[frozenset[str], frozenset[str]] = {}
        # by attempt whose packs need no second listing, the live attempts that needed its packs
        self._done: dict[str, frozenset[str]] = {}
        self._live: dict[str, SeenAttempt] = {}
        # by attempt, the other live attempts that need its packs
        self._users: dict[str, list[SeenAttempt]] = {}
        # the attempts whose packs the last look listed
        self._listed: list[str] = []
        # whether `_users` is complete; False if a document of a live attempt is missing
        self._users_are_known = True
        # the live attempts that had a decision at the last look
        self._decided: set[str] = set()
        self.doubtful: set[StepOfRun] = set()
        """Steps that another collection has perhaps removed, although the last look saw live attempts of them."""

    def look(self, inventory: Inventory, live: Iterable[SeenAttempt]) -> Iterator[tuple[str, list[ObjectInfo]]]:
        """List the packs of attempts, and yield each attempt with its packs.

        Attempts whose packs need no second listing are left out.
        """
        self.doubtful = set()
        self._live = by_id = {attempt.attempt: attempt for attempt in live}
        # an attempt that had no decision may have written more manifests since the last look
        decided = {each for each, attempt in by_id.items() if attempt.decision is not None}
        self._named = {each: packs for each, packs in self._named.items() if each in decided & self._decided}
        self._decided = decided
        self._interned = {packs: packs for each in self._named.values() for packs in each.values()}
        self._find_users(list(by_id.values()))
        folders = [name for name in self._store.list_folders(names.PACKS) if names.is_id(name)]
        self._listed = to_list = self._to_list(folders, inventory)
        yield from ((each, []) for each in sorted(inventory.attempts.keys() - set(folders)))
        yield from many(self._list, to_list)

    def done(self) -> None:
        """Report that the caller deleted all packs of the last look that no live attempt needs."""
        for attempt in self._listed if self._users_are_known else ():
            live_attempt = self._live.get(attempt)
            if live_attempt is None or live_attempt.decision is not None:
                users = [*self._users.get(attempt, ()), *([live_attempt] if live_attempt is not None else [])]
                self._done[attempt] = frozenset(each.attempt for each in users)

    def _find_users(self, live: list[SeenAttempt]) -> None:
        """Find which live attempts need packs of which other attempts."""
        self._users_are_known = all(self._others(user) is not None for user in live)
        self._users = defaultdict(list)
        for user in live:
            for other in self._others(user) or ():
                self._users[other].append(user)

    def _others(self, attempt: SeenAttempt) -> Iterable[str] | None:
        """The other attempts whose packs this one names; None if one of its documents is missing."""
        totals = attempt.decision.totals if attempt.decision is not None else None
        return totals.attempts if totals is not None else self._of_others(attempt)

    def _to_list(self, folders: list[str], inventory: Inventory) -> list[str]:
        own_folders, other_folders = list[str](), list[str]()
        for name in folders:
            if name in self._live:
                if name not in self._done:
                    own_folders.append(name)
            elif name not in inventory.attempts or not self._is_done(name):
                other_folders.append(name)
        return other_folders + own_folders[: self._at_once]

    def _is_done(self, ended: str) -> bool:
        """Whether all attempts that needed packs of this one at the last look are still live."""
        users = self._done.get(ended)
        return users is not None and users <= self._live.keys()

    def _list(self, attempt: str) -> tuple[str, list[ObjectInfo]]:
        return attempt, list(self._store.list(names.packs(attempt)))

    def needed(self, attempt: str, packs: Iterable[str]) -> set[str]:
        """Which of these packs of the attempt live attempts need. If this is unknown, all count as needed.

        The documents of the newest attempts are read first. Those of older attempts are read only while some packs are
        not known to be needed.
        """
        unused = set(packs)
        needed_packs = set[str]()
        for user, part in self._parts(attempt) if self._users_are_known else ((None, None),):
            more = unused if part is None else unused & part
            if more and user is not None:
                self._check(user)
            needed_packs |= more
            unused -= needed_packs
            if not unused:
                break
        return needed_packs

    def _check(self, user: SeenAttempt) -> None:
        """Doubt the step of a live attempt if another collection has removed it since it was read."""
        at = user.step
        current = commit.find_commit(self._store, names.commit(at.run, at.timeline, at.step))
        if current is not None and current.tombstone:
            self.doubtful.add(at)

    def _parts(self, attempt: str) -> Iterator[tuple[SeenAttempt | None, frozenset[str] | None]]:
        """Other live attempts, and the packs of `attempt` that they name; None if one of their documents is missing.

        The first are the packs that `attempt` names itself, if it is live.
        """
        if attempt in self._live:
            own_packs = self._packs_of(self._live[attempt])
            yield None, None if own_packs is None else own_packs[attempt]
        for user in sorted(self._users.get(attempt, ()), key=lambda user: user.attempt, reverse=True):
            packs = self._of_others(user)
            yield user, None if packs is None else packs.get(attempt, frozenset())

    def _of_others(self, attempt: SeenAttempt) -> Packs | None:
        """The packs of other attempts that this one names."""
        by_attempt = self._named.get(attempt.attempt)
        if by_attempt is None:
            packs = self._packs_of(attempt)
            if packs is None:
                return None
            by_attempt = {
                other: self._interned.setdefault(keys, keys)
                for other, keys in packs.items()
                if other != attempt.attempt
            }
            self._named[attempt.attempt] = by_attempt
        return by_attempt

    def _packs_of(self, attempt: SeenAttempt) -> Packs | None:
        """All packs that the attempt names; None if one of its documents is missing."""
        keys = attempt.keys_naming_packs()
        documents = list(many(self._read, keys))
        if len(documents) < len(keys):
            self.doubtful.add(attempt.step)
            return None
        by_attempt: dict[str, set[str]] = {attempt.attempt: set()}
        for packs in documents:
            for pack in packs:
                by_attempt.setdefault(pack.attempt, set()).add(pack.key)
        return {attempt_id: frozenset(keys) for attempt_id, keys in by_attempt.items()}

    def _read(self, key: str) -> tuple[PackName, ...] | None:
        at = names.parse_step_key(key)
        try:
            data = own_digest.fetch(self._store, key, max_bytes=manifests.MAX_BYTES)
        except NotFoundError:  # another collector is removing the attempt
            return None
        is_group = at is not None and at.kind == "group"
        return group.decode(data, key).packs if is_group else manifests.decode(data, key).packs
