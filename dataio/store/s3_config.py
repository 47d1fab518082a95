"""The configuration of an S3 store: a frozen description made from a URL, options and the AWS variables.

Invariants: options take precedence over variables, and variables over profiles. `S3Config.public` holds only options
that are known not to be secret (`_PUBLIC`). Another process with its own credentials can open the same store from it.
All other options are in `credentials`, which no repr shows.

Failure behaviour: `UsageError` for an unknown option, a URL without a bucket, or secrets inside a URL.
"""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.redact import has_secrets, redact
from headrace.dataio.store.base import check_key

CONNECT_SECONDS, READ_SECONDS = 5.0, 60.0
CONNECTIONS = 32
_CREDENTIALS = ("key", "secret", "token")
_BOTO_CREDENTIALS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
_S3FS_OPTIONS = ("anon", "profile", "use_ssl", "requester_pays", "client_kwargs", "config_kwargs")
_PUBLIC: Mapping[str, frozenset[str] | None] = {
    **dict.fromkeys(("anon", "profile", "use_ssl", "requester_pays")),
    "client_kwargs": frozenset(("verify", "use_ssl", "api_version")),
    "config_kwargs": frozenset(
        (
            *("connect_timeout", "read_timeout", "max_pool_connections", "tcp_keepalive", "retries", "s3", "proxies"),
            *("signature_version", "user_agent", "user_agent_extra", "parameter_validation", "inject_host_prefix"),
            *("use_dualstack_endpoint", "use_fips_endpoint", "request_checksum_calculation"),
            *("response_checksum_validation", "disable_request_compression", "defaults_mode"),
        )
    ),
}
"""Options that may be shown, recorded and sent to the daemon. For an option that is a mapping: its public entries."""
_HEADRACE_OPTIONS = ("endpoint_url", "region", "path_style", "client")
CLIENTS = ("s3fs", "obstore")


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Config:
    """A bucket and how to reach it.

    Args:
        bucket: The bucket.
        prefix: A key prefix without slashes at its ends; `""` for the bucket's root.
        endpoint_url: The server's URL; None for AWS.
        region: The region; None if it is not known.
        path_style: Whether the bucket's name is in the path of a URL, not in the host name.
        options: Further options of s3fs, without secrets.
        shareable: Whether another process can open the store from `public`.
        credentials: Further options of s3fs that are secret, or may be.
        ca_bundle: A file of certificates to trust. Default: those of the system.
        client: One of `CLIENTS`, which must be used, in this process only. Default: the fastest available.
    """

    bucket: str
    prefix: str
    endpoint_url: str | None
    region: str | None
    path_style: bool
    options: Mapping[str, object]
    shareable: bool
    credentials: Mapping[str, object] = field(repr=False)
    ca_bundle: str | None = field(default=None, compare=False)
    client: str | None = field(default=None, compare=False)

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}" if self.prefix else f"s3://{self.bucket}"

    @property
    def endpoint(self) -> str:
        """The endpoint, for messages."""
        return self.endpoint_url or f"AWS ({self.region or 'default region'})"

    @property
    def bucket_url(self) -> str:
        """The bucket's address, without a final slash.

        A bucket's name with dots matches no wildcard certificate, so it is then in the path.
        """
        address = (
            self.endpoint_url or f"https://s3.{self.region}.amazonaws.com{'.cn' if _in_china(self.region) else ''}"
        )
        scheme, _, host = address.rstrip("/").partition("://")
        in_path = self.path_style or "." in self.bucket
        return f"{scheme}://{host}/{self.bucket}" if in_path else f"{scheme}://{self.bucket}.{host}"

    @property
    def public(self) -> dict[str, object]:
        """The options with which another process can open this store."""
        settings = {"endpoint_url": self.endpoint_url, "region": self.region, "path_style": self.path_style}
        return {name: value for name, value in settings.items() if value is not None} | dict(self.options)

    @property
    def keys(self) -> tuple[str, str, str | None] | None:
        """Access key, secret and session token given as options."""
        client = _mapping(self.credentials, "client_kwargs")
        values = [
            self.credentials.get(o) or client.get(b) for o, b in zip(_CREDENTIALS, _BOTO_CREDENTIALS, strict=True)
        ]
        return (
            (str(values[0]), str(values[1]), str(values[2]) if values[2] else None) if values[0] and values[1] else None
        )

    @property
    def anonymous(self) -> bool:
        return bool(self.options.get("anon"))

    @property
    def profile(self) -> str | None:
        """The profile given as option."""
        return str(self.options["profile"]) if self.options.get("profile") else None

    @property
    def uses_chain(self) -> bool:
        """Whether credentials come from the environment, files or the machine's role."""
        return not self.anonymous and not self.keys

    @property
    def connect_seconds(self) -> float:
        return float(str(_mapping(self.options, "config_kwargs").get("connect_timeout", CONNECT_SECONDS)))

    @property
    def read_seconds(self) -> float:
        """How long a server may send nothing within a request, in seconds."""
        return float(str(_mapping(self.options, "config_kwargs").get("read_timeout", READ_SECONDS)))

    @property
    def request_seconds(self) -> float:
        """The time limit of a whole request without its body, in seconds."""
        return self.connect_seconds + self.read_seconds

    @property
    def verify(self) -> object:
        """Which certificates to trust: False for any, a string for those in a file, None for the system's."""
        value = _mapping(self.options, "client_kwargs").get("verify")
        return self.ca_bundle if value is None or value is True else value

    def unsupported_by_obstore(self) -> str | None:
        """Return why obstore cannot serve this configuration, for messages; None if it can."""
        arguments = _merged(self.options, self.credentials)
        config = _mapping(arguments, "config_kwargs")
        unsupported = [
            *(_mapping(arguments, "client_kwargs").keys() - {"verify", *_BOTO_CREDENTIALS}),
            *(config.keys() - {"connect_timeout", "read_timeout", "max_pool_connections", "retries", "s3"}),
            *(_mapping(config, "s3").keys() - {"addressing_style", "payload_signing_enabled"}),
            *(["use_ssl"] if self.options.get("use_ssl") is False else []),
        ]
        if not self.endpoint_url and not self.region:
            return "no region is set (AWS_REGION or the option region)"
        return f"it has no equivalent of the option {sorted(unsupported)[0]}" if unsupported else None

    def full_key(self, key: str) -> str:
        """The key in the bucket: the prefix and the store's key."""
        return f"{self.prefix}/{check_key(key)}" if self.prefix else check_key(key)

    def s3fs_arguments(self) -> dict[str, object]:
        """Return the keyword arguments for `s3fs.S3FileSystem`: no retries, no caches, time-outs, addressing style."""
        arguments = _merged(dict(self.options), dict(self.credentials))
        return arguments | {
            "endpoint_url": self.endpoint_url,
            "client_kwargs": _merged({"region_name": self.region}, _mapping(arguments, "client_kwargs")),
            "config_kwargs": self._config_arguments(_mapping(arguments, "config_kwargs")),
            "asynchronous": True,
            "skip_instance_cache": True,
            "use_listings_cache": False,
        }

    def _config_arguments(self, options: dict[str, object]) -> dict[str, object]:
        style = "path" if self.path_style else "virtual" if self.endpoint_url else "auto"
        defaults: dict[str, object] = {
            "connect_timeout": CONNECT_SECONDS,
            "read_timeout": READ_SECONDS,
            "max_pool_connections": CONNECTIONS,
            # Headrace's formats have their own digests, and servers differ in the checksums that they accept
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            "s3": {"addressing_style": style, "payload_signing_enabled": False},
        }
        return _merged(defaults, options) | {"retries": {"total_max_attempts": 1}}


def parse(url: str, options: Mapping[str, object], environ: Mapping[str, str] = os.environ) -> S3Config:
    """Make the configuration for `s3://bucket/prefix` and the caller's storage options."""
    if unknown := sorted(set(options) - {*_CREDENTIALS, *_S3FS_OPTIONS, *_HEADRACE_OPTIONS}):
        known_options = ", ".join((*_HEADRACE_OPTIONS, *_CREDENTIALS, *_S3FS_OPTIONS))
        raise UsageError(f"unknown S3 storage option {', '.join(unknown)}", hint=f"known are {known_options}")
    bucket, prefix = _bucket_and_prefix(url)
    client = _mapping(options, "client_kwargs")
    if duplicates := [
        b for o, b in zip(_CREDENTIALS, _BOTO_CREDENTIALS, strict=True) if options.get(o) and client.get(b)
    ]:
        raise UsageError(f"{duplicates[0]} in client_kwargs is given twice", hint="leave one of the two out")
    endpoint = _first_given(
        options.get("endpoint_url"), client.pop("endpoint_url", None), *_variables(environ, _ENDPOINTS)
    )
    region = _first_given(options.get("region"), client.pop("region_name", None), *_variables(environ, _REGIONS))
    if endpoint is not None:
        _check_endpoint(endpoint)
    path_style = options.get("path_style", _uses_path_style(options, endpoint))
    other_options = {name: value for name, value in options.items() if name not in _HEADRACE_OPTIONS} | {
        "client_kwargs": client
    }
    other_options = {name: value for name, value in other_options.items() if value not in (None, {})}
    public = _public_options(other_options)
    secret = _secret_options(other_options, public)
    return S3Config(
        bucket=bucket,
        prefix=prefix,
        endpoint_url=endpoint,
        region=region or ("us-east-1" if endpoint else None),
        path_style=bool(path_style),
        options=public,
        shareable=not secret,
        credentials=secret,
        ca_bundle=environ.get("AWS_CA_BUNDLE") or None,
        client=_client(options.get("client") or environ.get("HEADRACE_S3") or None),
    )


_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")


def _client(name: object) -> str | None:
    if name is not None and name not in CLIENTS:
        raise UsageError(
            f"{name!r} is no S3 client", hint=f"set HEADRACE_S3 or the option client to {', '.join(CLIENTS)}"
        )
    return str(name) if name else None


def _bucket_and_prefix(url: str) -> tuple[str, str]:
    bucket, _, prefix = url.partition("://")[2].partition("/")
    query = url.partition("?")[2]
    if "@" in bucket or ":" in bucket or redact(query) != query:
        raise UsageError(
            f"{url!r} contains more than a bucket", hint="put credentials into the AWS variables or a profile"
        )
    if not bucket:
        raise UsageError(f"{url!r} names no bucket", hint="write s3://bucket/prefix")
    prefix = prefix.strip("/")
    return bucket, check_key(prefix) if prefix else ""


def _in_china(region: str | None) -> bool:
    return region is not None and region.startswith("cn-")


def _check_endpoint(endpoint: str) -> None:
    parts = urllib.parse.urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(
            f"the endpoint {endpoint!r} is not a URL", hint="write for example https://storage.example:9000"
        )
    if parts.username or parts.password or parts.query:
        raise UsageError("the endpoint URL contains credentials", hint="put them into the AWS variables or a profile")


def _uses_path_style(options: Mapping[str, object], endpoint: str | None) -> bool:
    """Whether to use path style.

    It is the default for every endpoint except Amazon's, because few servers have a host name for each bucket.
    """
    style = _mapping(_mapping(options, "config_kwargs"), "s3").get("addressing_style", "auto")
    return style == "path" or (style == "auto" and endpoint is not None and ".amazonaws.com" not in endpoint)


def _variables(environ: Mapping[str, str], names: tuple[str, ...]) -> list[str | None]:
    return [environ.get(name) for name in names]


def _first_given(*candidates: object) -> str | None:
    return next((str(c) for c in candidates if c), None)


def _mapping(options: Mapping[str, object], name: str) -> dict[str, object]:
    value = options.get(name) or {}
    if not isinstance(value, Mapping):
        raise UsageError(f"the storage option {name} must be a mapping, not {type(value).__name__}")
    return dict(value)


def _public_options(options: Mapping[str, object]) -> dict[str, object]:
    """Return the options named in `_PUBLIC`, except values that hold a secret, such as the password of a proxy."""
    public: dict[str, object] = {}
    for name, inner in _PUBLIC.items():
        if name not in options or (inner is None and has_secrets({name: options[name]})):
            continue
        value = options[name]
        if inner is not None:
            entries = _mapping(options, name)
            value = {entry: v for entry, v in entries.items() if entry in inner and not has_secrets({entry: v})}
        if value != {}:
            public[name] = value
    return public


def _secret_options(options: Mapping[str, object], public: Mapping[str, object]) -> dict[str, object]:
    """Return the nested `options` without those in `public`."""
    hidden: dict[str, object] = {}
    for name, value in options.items():
        public_value = public.get(name)
        if isinstance(value, Mapping) and isinstance(public_value, Mapping):
            value = {entry: inner for entry, inner in value.items() if entry not in public_value}
        elif name in public:
            continue
        if value not in (None, {}):
            hidden[name] = value
    return hidden


def _merged(base: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    """Return `base` with the entries of `over`. Nested mappings are merged."""
    merged = dict(base)
    for name, value in over.items():
        below = merged.get(name)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            merged[name] = _merged(below, value)
        else:
            merged[name] = value
    return merged
