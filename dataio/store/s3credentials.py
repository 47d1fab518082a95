"""Credentials of the AWS chain (environment, profiles and files, containers, IMDS) that may change while a store is open.

Purpose: botocore resolves the chain once for a client's life. `Rotating` stands in for what it resolved, and resolves anew when
the server has refused it: so a rewritten credentials file or a changed environment works without a restart. What expires
by itself (IMDS, containers, roles) is refreshed by botocore before it does.
Invariants: used in one event loop only. After one refusal the chain is asked once, however many requests were refused. No repr
shows a secret. Keys given as options are not looked up and never change.
Failure behaviour: a chain that knows no credentials gives None, and the request fails as one without credentials; errors of
the chain are botocore's own, translated where the request is.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import aiobotocore.session
from aiobotocore.credentials import AioCredentials, create_credential_resolver


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


class Rotating(AioCredentials):  # type: ignore[misc] # aiobotocore has no types
    """What the chain gives now; botocore asks `get_frozen_credentials` for every request it signs."""

    def __init__(self, profile: str | None) -> None:
        super().__init__("rotating", "rotating", method="millrace")
        self._profile, self._inner, self._lock = profile, None, asyncio.Lock()
        self.generation = 0
        """Counts the changes seen; a request that was refused says by it which credentials were."""

    def session(self) -> aiobotocore.session.AioSession:
        """A session whose clients are signed by these credentials."""
        session = self._new_session()
        session.register_component("credential_provider", _Given(self))
        return session

    async def get_frozen_credentials(self) -> Any:
        """access_key, secret_key and token of now, or None when the chain knows none."""
        if self._inner is None:
            async with self._lock:
                if self._inner is None:
                    self._inner = await self._resolved()
        return await self._inner.get_frozen_credentials() if self._inner is not None else None

    async def renew(self, refused: int) -> bool:
        """Resolve the chain again unless that happened since generation `refused`; whether there is something new to try."""
        async with self._lock:
            if self.generation != refused:
                return True
            found = await self._resolved()
            if found is None or await _frozen(found) == await _frozen(self._inner):
                return False
            self._inner, self.generation = found, self.generation + 1
            return True

    def __repr__(self) -> str:
        return f"Rotating(generation {self.generation})"

    def _new_session(self) -> aiobotocore.session.AioSession:
        return aiobotocore.session.AioSession(profile=self._profile)

    async def _resolved(self) -> Any:
        return await create_credential_resolver(self._new_session()).load_credentials()


class _Given:
    """What botocore takes for its chain of providers."""

    def __init__(self, credentials: Rotating) -> None:
        self._credentials = credentials

    async def load_credentials(self) -> Rotating:
        return self._credentials


async def _frozen(credentials: Any) -> Any:
    return await credentials.get_frozen_credentials() if credentials is not None else None
