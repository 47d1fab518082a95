"""Credentials of the AWS chain (environment, profiles and files, containers, IMDS) that may change while a store is open.

Purpose: botocore resolves the chain once for a client's life. `Rotating` stands in for what it resolved, and resolves anew when
the server has refused it: so a rewritten credentials file or a changed environment works without a restart. What expires
by itself (IMDS, containers, roles) is refreshed by botocore before it does. Keys in the AWS variables, the chain's first
link, are read here, since botocore takes longer to import than most requests; `s3chain` is imported for all the other links.
Invariants: used in one event loop only. After one refusal the chain is asked once, however many requests were refused. No repr
shows a secret. Keys given as options are not looked up and never change.
Failure behaviour: a chain that knows no credentials gives None, and the request fails as one without credentials; errors of
the chain are botocore's own, translated where the request is.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_LEFT_TO_BOTOCORE = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_CREDENTIAL_EXPIRATION")
"""Variables by which the AWS variables are not all there is to know."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Values to sign with. Equal ones are the same credentials."""

    access: str = field(repr=False)
    secret: str = field(repr=False)
    token: str | None = field(repr=False)

    def for_obstore(self) -> dict[str, object]:
        """The answer of an obstore credential provider: these, for good."""
        return {
            "access_key_id": self.access,
            "secret_access_key": self.secret,
            "token": self.token,
            "expires_at": None,
        }


class Rotating:
    """What the chain gives now; asked for every request."""

    def __init__(self, profile: str | None) -> None:
        self.profile = profile
        self._inner: Any = None  # the variables' keys, or what botocore resolved
        self._lock = asyncio.Lock()
        self.generation = 0
        """Counts the changes seen; a request that was refused says by it which credentials were."""

    async def frozen(self) -> Keys | None:
        """The values of now, or None when the chain knows none."""
        if self._inner is None:
            async with self._lock:
                if self._inner is None:
                    self._inner = await self._resolved()
        return await _values(self._inner)

    async def renew(self, refused: int) -> bool:
        """Resolve the chain again unless that happened since generation `refused`; whether there is something new to try."""
        async with self._lock:
            if self.generation != refused:
                return True
            found = await self._resolved()
            if found is None or await _values(found) == await _values(self._inner):
                return False
            self._inner, self.generation = found, self.generation + 1
            return True

    def __repr__(self) -> str:
        return f"Rotating(generation {self.generation})"

    async def _resolved(self) -> Any:
        if self.profile is None and (keys := of_variables(os.environ)):
            return keys
        from headrace.dataio.store import s3chain

        return await s3chain.resolved(self.profile)


def of_variables(environ: Mapping[str, str]) -> Keys | None:
    """The keys in the AWS variables, if botocore would take just these."""
    if any(environ.get(name) for name in _LEFT_TO_BOTOCORE):
        return None
    access, secret = environ.get("AWS_ACCESS_KEY_ID"), environ.get("AWS_SECRET_ACCESS_KEY")
    token = environ.get("AWS_SECURITY_TOKEN") or environ.get("AWS_SESSION_TOKEN") or None
    return Keys(access, secret, token) if access and secret else None


async def _values(credentials: Any) -> Keys | None:
    if credentials is None or isinstance(credentials, Keys):
        return credentials
    found = await credentials.get_frozen_credentials()
    return Keys(found.access_key, found.secret_key, found.token)
