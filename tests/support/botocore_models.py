"""botocore's descriptions of S3, which every new session reads again: that takes ten times as long as making a client."""

from __future__ import annotations

import functools


def share() -> None:
    """All later sessions of this process, and of its forks, share what is read now."""
    import botocore.session

    if hasattr(botocore.session.create_loader, "cache_info"):
        return
    botocore.session.create_loader = functools.cache(botocore.session.create_loader)
    session = botocore.session.Session()
    session.set_credentials("none", "none")
    session.create_client("s3", region_name="us-east-1").close()
