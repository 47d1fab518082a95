"""The daemon's configuration: one list of names for the flags, the environment and the configuration file.

Purpose: the setting `cache_bytes` can be given as the flag `--cache-bytes`, as the variable
`HEADRACE_SIDECAR_CACHE_BYTES`, or as the key `cache_bytes` of a TOML file. They take precedence in this order.
`--config` or `HEADRACE_SIDECAR_CONFIG` names the file. `Config` is the result.
Invariant: nothing is ignored: an unknown key, in the file or in the environment, is an error, and so is an invalid
value.
Failure behaviour: `UsageError` names the setting, where it was given, and the allowed values.
"""

from __future__ import annotations

import os
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headrace.dataio.cache.scheduling import JobLimits
from headrace.dataio.core import limits
from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.limits import KIB, memory_bytes, parse_bytes
from headrace.dataio.sidecar.paths import default_socket
from headrace.dataio.sidecar.tier import config as tier
from headrace.dataio.sidecar.tier.config import Address, TierConfig

PREFIX = "HEADRACE_SIDECAR_"
FILE_BYTES = 64 * KIB
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting.

    `parse` converts text to the value. `default` is text too, or None if the default is determined at the start.
    """

    name: str
    parse: Callable[[str], object]
    default: str | None
    help: str
    metavar: str = "N"


@dataclass(frozen=True, slots=True)
class Settings:
    """The configuration and the log level of a daemon."""

    config: Config
    log_level: str


def _path(text: str) -> Path:
    if not text:
        raise UsageError("the path is empty", hint="name a directory or a file")
    return Path(text).absolute()


def cache_tiers(text: str) -> Path | tuple[CacheTier, ...]:
    """Parse `cache_dir`: one path, or several `PATH=SIZE` separated by commas."""
    tiers = []
    for part in text.split(","):
        path, equals, size = part.strip().rpartition("=")
        tiers.append(CacheTier(Path(str(_path(path))), _size(size)) if equals else CacheTier(Path(str(_path(size)))))
    if len({tier.path for tier in tiers}) < len(tiers):
        raise UsageError(f"{text!r} names a directory twice", hint="name each tier once")
    return tiers[0].path if len(tiers) == 1 and tiers[0].bytes is None else tuple(tiers)


def _count(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise UsageError(f"{text!r} is not a number from {least} to {most}")
        return int(text)

    return parse


def _size(text: str) -> int:
    size = parse_bytes(text)
    if size < 1 << 20:
        raise UsageError(f"{text!r} is less than 1 MiB")
    return size


def _limit_or_off(parse: Callable[[str], int]) -> Callable[[str], int]:
    """A parser for a limit. `off` means no limit, and its value is 0."""
    return lambda text: 0 if text == "off" else parse(text)


def _share_of_memory(text: str) -> int:
    if text.endswith("%") and text[:-1].isdecimal() and 1 <= int(text[:-1]) <= 100:
        return memory_bytes() * int(text[:-1]) // 100
    return _size(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 7 * 24 * 3600:
        raise UsageError(f"{text!r} is not a number of seconds from 0 to {7 * 24 * 3600} (a week)")
    return seconds


def _port(text: str) -> int | None:
    if text == "off":
        return None
    if text.isdecimal() and int(text) < 65536:
        return int(text)
    raise UsageError(f"{text!r} is not a port", hint="give a number below 65536, 0 for any free one, or off")


def _switch(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise UsageError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


def _level(text: str) -> str:
    if text not in LEVELS:
        raise UsageError(f"{text!r} is not one of {', '.join(LEVELS)}")
    return text


SETTINGS = (
    Setting(
        "socket",
        _path,
        None,
        "path of the Unix socket; default: $HEADRACE_SIDECAR, else a path in a private directory of this user",
        "PATH",
    ),
    Setting(
        "cache_dir",
        cache_tiers,
        None,
        "cache directory, or several as tiers, fastest first; default: a private directory in the temporary one",
        "PATH[=SIZE][,PATH[=SIZE]...]",
    ),
    Setting(
        "cache_bytes", _size, "20GiB", "maximum size of each cache directory for which cache_dir gives no size", "SIZE"
    ),
    Setting("keep_cache", _switch, "true", "keep the cached files for the next daemon", "true|false"),
    Setting("http_port", _port, "0", "port of the status page on 127.0.0.1; 0 takes any free port", "N|off"),
    Setting(
        "metrics_listen",
        tier.address,
        "off",
        "address that serves /metrics to other machines, and no other page but /livez and /readyz",
        "HOST:PORT|off",
    ),
    Setting("clients", _count(1, 100_000), "1024", "maximum number of connected processes"),
    Setting("running_jobs", _count(1, 1024), "2", "maximum number of staged checkpoints that are uploaded at once"),
    Setting("queued_jobs", _count(0, 65536), "16", "maximum number of staged checkpoints that wait; more are refused"),
    Setting(
        "arena_bytes", _share_of_memory, "25%", "maximum memory that the arenas of staged checkpoints hold", "SIZE|%"
    ),
    Setting(
        "retry_seconds",
        _seconds,
        "3600",
        "how long a failed checkpoint without a trainer is tried again while the store is unavailable",
        "SECONDS",
    ),
    Setting("drain_seconds", _seconds, "300", "how long SIGTERM waits for staged checkpoints", "SECONDS"),
    Setting("fetch_threads", _count(2, 256), "16", "maximum number of concurrent requests from the cache to stores"),
    Setting("fetch_memory", _size, "24MiB", "memory for blocks in flight, 4 MiB each", "SIZE"),
    Setting(
        "job_connections",
        _limit_or_off(_count(1, 256)),
        "off",
        "maximum number of concurrent requests to stores per job",
        "N|off",
    ),
    Setting("job_bytes_in_flight", _limit_or_off(_size), "off", "maximum bytes in flight per job", "SIZE|off"),
    Setting("job_bandwidth", _limit_or_off(_size), "off", "maximum bytes per second per job", "SIZE|off"),
    Setting(
        "tier_dir",
        tier.optional_path,
        "off",
        "directory for the local tier, which keeps the last steps: on a tmpfs or a local disk",
        "PATH|off",
    ),
    Setting("tier_bytes", _size, "8GiB", "maximum size of the local tier", "SIZE"),
    Setting("tier_steps", _count(1, 1000), "2", "number of steps kept per run"),
    Setting(
        "buddy",
        tier.address,
        "off",
        "address of the sidecar that receives copies of this node's steps",
        "HOST:PORT|off",
    ),
    Setting("buddy_listen", tier.address, "off", "address on which this sidecar accepts copies", "HOST:PORT|off"),
    Setting(
        "buddy_names", tier.names, "off", "certificate names that may connect; off: the buddy's host", "NAME,..|off"
    ),
    Setting("buddy_rate", tier.rate, "off", "maximum bytes per second between buddies", "SIZE|off"),
    Setting("tls_cert", tier.optional_path, "off", "this node's TLS certificate, PEM", "PATH|off"),
    Setting("tls_key", tier.optional_path, "off", "the certificate's key, PEM without a password", "PATH|off"),
    Setting("tls_ca", tier.optional_path, "off", "CA of the buddies' certificates, PEM", "PATH|off"),
    Setting("log_level", _level, "INFO", "log level", "|".join(LEVELS)),
)


def read(flags: Mapping[str, str], environ: Mapping[str, str] = os.environ, **more: object) -> Settings:
    """Read all settings.

    Args:
        flags: Values given on the command line, as text, by setting; `config` names the file.
        environ: Environment variables.
        more: Further fields of `Config`, such as `commands`.

    Returns:
        The configuration and the log level.

    Raises:
        UsageError: A name is unknown, a value is invalid, or the file cannot be read.
    """
    file = flags.get("config") or environ.get(PREFIX + "CONFIG")
    sources = [
        ("--{}", flags),
        (PREFIX + "{}", _from_environment(environ)),
        (f"{{}} in {file}", _from_file(Path(file)) if file else {}),
    ]
    values = {setting.name: _value(setting, sources, environ) for setting in SETTINGS}
    level = str(values.pop("log_level"))
    return Settings(Config(**values, **more), level)  # type: ignore[arg-type]  # each parser returns its field's type


def _value(setting: Setting, sources: Sequence[tuple[str, Mapping[str, str]]], environ: Mapping[str, str]) -> object:
    for source_format, values in sources:
        if setting.name in values:
            source = source_format.format(_spelling(setting.name, source_format))
            try:
                return setting.parse(values[setting.name])
            except UsageError as error:
                raise UsageError(f"{source}: {error.message}", hint=error.hint or setting.help) from None
    if setting.default is not None:
        return setting.parse(setting.default)
    return default_socket(environ).absolute() if setting.name == "socket" else default_cache()


def _spelling(name: str, source_format: str) -> str:
    if source_format.startswith("--"):
        return name.replace("_", "-")
    return name.upper() if source_format.startswith(PREFIX) else name


def _from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    values = {name.removeprefix(PREFIX).lower(): value for name, value in environ.items() if name.startswith(PREFIX)}
    values.pop("config", None)
    _only_known(values, "the environment", lambda name: PREFIX + name.upper())
    return values


def _from_file(path: Path) -> dict[str, str]:
    try:
        with path.open("rb") as file:
            text = file.read(FILE_BYTES + 1)
        if len(text) > FILE_BYTES:
            raise UsageError(f"{path} is larger than {FILE_BYTES} bytes")
        document = tomllib.loads(text.decode())
    except OSError as error:
        raise UsageError(f"the configuration {path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # of TOML, or of UTF-8
        raise UsageError(f"{path} is not valid TOML: {error}") from None
    _only_known(document, str(path), str)
    return {name: _text(name, value, path) for name, value in document.items()}


def _text(name: str, value: object, path: Path) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    if name == "cache_dir" and isinstance(value, list) and value and all(isinstance(part, str) for part in value):
        return ",".join(value)
    raise UsageError(f"{name} in {path} must be a string, a number, true or false, not {type(value).__name__}")


def _only_known(values: Mapping[str, object], source: str, spelling: Callable[[str], str]) -> None:
    names = [setting.name for setting in SETTINGS]
    for name in values:
        if name not in names:
            raise UsageError(
                f"{spelling(name)} in {source} is not a setting", hint=f"the settings are: {', '.join(names)}"
            )


def default_cache() -> Path:
    return Path(tempfile.gettempdir()) / f"headrace-cache-{os.geteuid()}"


RESTART = (
    "socket",
    "cache_dir",
    "keep_cache",
    "http_port",
    "metrics_listen",
    "running_jobs",
    "queued_jobs",
    "retry_seconds",
    "fetch_threads",
    "fetch_memory",
    "tier_dir",
    "tier_bytes",
    "tier_steps",
    "buddy",
    "buddy_listen",
    "buddy_names",
    "buddy_rate",
    "tls_cert",
    "tls_key",
    "tls_ca",
    "commands",
)
"""Settings that SIGHUP does not change."""


@dataclass(frozen=True, slots=True)
class CacheTier:
    """A directory of the cache, and its maximum size in bytes; None means `cache_bytes`."""

    path: Path
    bytes: int | None = None

    def __str__(self) -> str:
        return str(self.path)


@dataclass(frozen=True, slots=True)
class Config:
    """The daemon's configuration; sizes are in bytes, times in seconds.

    `http_port` None means no status endpoint, 0 any free port. `cache_dir` is one directory, or several tiers with the
    fastest first. `job_connections`, `job_bytes_in_flight` and `job_bandwidth` (bytes a second) apply to each job; 0
    means no limit.
    """

    socket: Path
    cache_dir: Path | tuple[CacheTier, ...]
    cache_bytes: int = 20 * limits.GIB
    http_port: int | None = 0
    metrics_listen: Address | None = None
    clients: int = 1024
    running_jobs: int = 2
    queued_jobs: int = 16
    arena_bytes: int = field(default_factory=lambda: limits.memory_bytes() // 4)
    lost_seconds: float = 60.0
    retry_seconds: float = 3600.0
    drain_seconds: float = 300.0
    fetch_threads: int = 16
    fetch_memory: int = 24 * limits.MIB
    keep_cache: bool = True
    job_connections: int = 0
    job_bytes_in_flight: int = 0
    job_bandwidth: int = 0
    tier_dir: Path | None = None
    tier_bytes: int = 8 * limits.GIB
    tier_steps: int = 2
    buddy: Address | None = None
    buddy_listen: Address | None = None
    buddy_names: tuple[str, ...] = ()
    buddy_rate: int | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None
    commands: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def tier(self) -> TierConfig | None:
        """The local tier and its buddies, None without a tier; `UsageError` for buddies without a tier."""
        if self.tier_dir is None:
            if self.buddy is not None or self.buddy_listen is not None:
                raise UsageError(
                    "buddy and buddy_listen need tier_dir", hint="name a directory on a tmpfs or local disk"
                )
            return None
        return TierConfig(
            self.tier_dir,
            self.tier_bytes,
            self.tier_steps,
            self.buddy,
            self.buddy_listen,
            self.buddy_names,
            self.buddy_rate,
            self.tls_cert,
            self.tls_key,
            self.tls_ca,
        )

    @property
    def job_limits(self) -> JobLimits:
        return JobLimits(self.job_connections, self.job_bytes_in_flight, self.job_bandwidth)

    @property
    def tiers(self) -> tuple[CacheTier, ...]:
        """The cache's tiers, at least one, fastest first."""
        return (CacheTier(self.cache_dir),) if isinstance(self.cache_dir, Path) else self.cache_dir
