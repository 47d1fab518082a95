"""Credentials of the AWS chain (environment, profiles, files, containers, IMDS) that may change while a store is open.

Purpose: a botocore client resolves the chain only once. `CredentialChain` resolves it again when the server refuses a
request. So a rewritten credentials file or a changed environment takes effect without a restart. botocore itself
refreshes credentials that expire (IMDS, containers, roles). This module reads the chain's first link, the AWS
variables. It imports botocore only for the other links, because the import takes a quarter of a second.

Invariants: a chain is used in one event loop. If the server refuses several requests, the chain is resolved only once.
No repr shows a secret. Keys that are given as options do not use the chain, and never change.

Failure behaviour: an empty chain gives None, and the request then fails as one without credentials. Errors of the chain
are botocore's own; the caller translates them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_LEFT_TO_BOTOCORE = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_CREDENTIAL_EXPIRATION")
"""If one of these variables is set, only botocore knows which keys to use."""


@dataclass(frozen=True, slots=True)
class Keys:
    """An access key, its secret and a session token or None, to sign requests with."""

    access: str = field(repr=False)
    secret: str = field(repr=False)
    token: str | None = field(repr=False)

    def for_obstore(self) -> dict[str, object]:
        """Return these keys as a credential provider of obstore does, without an expiry."""
        return {
            "access_key_id": self.access,
            "secret_access_key": self.secret,
            "token": self.token,
            "expires_at": None,
        }


class CredentialChain:
    """The chain's current credentials, looked up for every request."""

    def __init__(self, profile: str | None) -> None:
        self.profile = profile
        self._resolved: Any = None  # Keys from the variables, or botocore's credentials
        self._lock = asyncio.Lock()
        self.generation = 0
        """The number of changes so far. It tells which credentials a refused request had used."""

    @property
    def fixed(self) -> Keys | None:
        """The current keys, if they came from the AWS variables and so never expire; else None."""
        return self._resolved if isinstance(self._resolved, Keys) else None

    async def current(self) -> Keys | None:
        """The current keys; None if the chain is empty."""
        if self._resolved is None:
            async with self._lock:
                if self._resolved is None:
                    self._resolved = await self._resolve()
        return await _keys_of(self._resolved)

    async def renew(self, refused: int) -> bool:
        """Resolve the chain again, unless that happened after generation `refused`.

        Returns whether there are new keys.
        """
        async with self._lock:
            if self.generation != refused:
                return True
            renewed = await self._resolve()
            if renewed is None or await _keys_of(renewed) == await _keys_of(self._resolved):
                return False
            self._resolved, self.generation = renewed, self.generation + 1
            return True

    def __repr__(self) -> str:
        return f"CredentialChain(generation {self.generation})"

    async def _resolve(self) -> Any:
        if self.profile is None and (keys := keys_of_variables(os.environ)):
            return keys
        import aiobotocore.session
        from aiobotocore.credentials import create_credential_resolver

        session = aiobotocore.session.AioSession(profile=self.profile)
        return await create_credential_resolver(session).load_credentials()


def keys_of_variables(environ: Mapping[str, str]) -> Keys | None:
    """The keys in the AWS variables, if botocore would use exactly these."""
    if any(environ.get(name) for name in _LEFT_TO_BOTOCORE):
        return None
    access, secret = environ.get("AWS_ACCESS_KEY_ID"), environ.get("AWS_SECRET_ACCESS_KEY")
    token = environ.get("AWS_SECURITY_TOKEN") or environ.get("AWS_SESSION_TOKEN") or None
    return Keys(access, secret, token) if access and secret else None


async def _keys_of(credentials: Any) -> Keys | None:
    if credentials is None or isinstance(credentials, Keys):
        return credentials
    frozen = await credentials.get_frozen_credentials()
    return Keys(frozen.access_key, frozen.secret_key, frozen.token)


def botocore_session(chain: CredentialChain) -> Any:
    """Make an aiobotocore session. Its clients sign with the chain's current keys."""
    import aiobotocore.session
    from aiobotocore.credentials import AioCredentials
    from botocore.credentials import ReadOnlyCredentials

    class Signing(AioCredentials):  # type: ignore[misc]  # aiobotocore has no types
        """Credentials that botocore requests again for every request that it signs."""

        async def get_frozen_credentials(self) -> Any:
            keys = await chain.current()
            return ReadOnlyCredentials(keys.access, keys.secret, keys.token) if keys else None

        def __repr__(self) -> str:
            return repr(chain)

    class Provider:
        """Replaces botocore's chain of providers."""

        async def load_credentials(self) -> Any:
            return Signing("rotating", "rotating", method="headrace")

    session = aiobotocore.session.AioSession(profile=chain.profile)
    session.register_component("credential_provider", Provider())
    return session
