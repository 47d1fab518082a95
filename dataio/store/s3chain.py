"""botocore's side of the credentials: its chain of providers, and clients that sign with `Rotating`'s.

Invariant: imported only where botocore is needed, which takes half a second.
Failure behaviour: errors are botocore's own.
"""

from __future__ import annotations

from typing import Any

import aiobotocore.session
from aiobotocore.credentials import AioCredentials, create_credential_resolver
from botocore.credentials import ReadOnlyCredentials

from headrace.dataio.store.s3credentials import Rotating


async def resolved(profile: str | None) -> Any:
    """What the chain gives now, which refreshes itself if it expires; None when it knows nothing."""
    session = aiobotocore.session.AioSession(profile=profile)
    return await create_credential_resolver(session).load_credentials()


def session(credentials: Rotating) -> aiobotocore.session.AioSession:
    """A session whose clients are signed by these credentials."""
    made = aiobotocore.session.AioSession(profile=credentials.profile)
    made.register_component("credential_provider", _Given(credentials))
    return made


class _Given:
    """What botocore takes for its chain of providers."""

    def __init__(self, credentials: Rotating) -> None:
        self._credentials = credentials

    async def load_credentials(self) -> AioCredentials:
        return _Signing(self._credentials)


class _Signing(AioCredentials):  # type: ignore[misc] # aiobotocore has no types
    """What botocore asks for every request it signs."""

    def __init__(self, credentials: Rotating) -> None:
        super().__init__("rotating", "rotating", method="headrace")
        self._credentials = credentials

    async def get_frozen_credentials(self) -> Any:
        found = await self._credentials.frozen()
        return ReadOnlyCredentials(found.access, found.secret, found.token) if found else None

    def __repr__(self) -> str:
        return repr(self._credentials)
