"""The registry of video decoders, and the rule that selects the decoder of each clip.

Purpose: a decoder is one module that calls `register_decoder`. Loaders, `VideoLoader.explain` and the benchmarks use
the registry and name no decoder. A new decoder needs its module and its tests. A decoder of this package also needs its
module's name in `_BUILT_IN`.

Invariants:
- The rule: among the decoders that the option allows, those that support the stream and are available are considered.
  The one with the highest priority decodes the clip. `FALLBACK` supports every stream and is always available.
- `FALLBACK` also decodes every clip that another decoder rejects. So whether a sample counts as damaged does not depend
  on the installed packages.
- The rule depends only on the index entry, the options and the available decoders. So it is the same on every rank with
  the same packages.
- The registry checks whether a decoder is available, and builds it, when the first clip needs it.

Failure behaviour: that of `headrace.loaders.decode.base`. An unavailable decoder is skipped, and one warning gives the
reason. `UsageError` for an option that no decoder has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Literal

from headrace.dataio.core.errors import HeadraceError
from headrace.dataio.core.log import get_logger, is_first, warn_first, warn_once
from headrace.dataio.shards.media.container import IMAGE_EXTENSIONS
from headrace.dataio.shards.sample import Sample, VideoInfo
from headrace.loaders.decode.base import Color, Decoded, Decoder, Request
from headrace.loaders.validation import check_choice

FALLBACK = "pyav"
"""The decoder that supports every stream."""
_BUILT_IN = ("headrace.loaders.decode.pyav", "headrace.loaders.decode.dali")
"""Importing these modules registers the decoders of this package."""

_log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderType:
    """A registered decoder. The fields are the arguments of `register_decoder`."""

    name: str
    build: Callable[[int], Decoder]
    reads: Callable[[VideoInfo, Color], bool]
    missing: Callable[[int], str | None]
    device: Literal["cpu", "cuda"]
    option: str
    automatic: bool
    priority: int
    shares_decoding: bool
    rule: str
    label: Callable[[VideoInfo], str] | None


_registered: dict[str, DecoderType] = {}


def register_decoder(
    name: str,
    build: Callable[[int], Decoder],
    *,
    reads: Callable[[VideoInfo, Color], bool] = lambda info, color: True,
    missing: Callable[[int], str | None] = lambda device_id: None,
    device: Literal["cpu", "cuda"] = "cpu",
    option: str | None = None,
    automatic: bool = False,
    priority: int = 100,
    shares_decoding: bool = False,
    rule: str = "the streams that it reads",
    label: Callable[[VideoInfo], str] | None = None,
) -> None:
    """Register a custom decoder for `VideoLoader`. It replaces a decoder with the same name.

    Call this before a loader is created, in every process that creates one. `headrace.loaders.decode.base` describes
    the contract of a decoder. A decoder also reports how much memory a clip takes (`Decoder.clip_bytes`).

    Args:
        name (str): the decoder's name, which `VideoLoader.explain` shows.
        build (Callable[[int], Decoder]): returns the decoder for the GPU with this index (0 on a CPU). It is called
            once for each loader.
        reads (Callable[[VideoInfo, Color], bool]): a pure function that returns whether the decoder supports a stream,
            from the index entry and the loader's `color`. Default: every stream.
        missing (Callable[[int], str | None]): returns why the decoder is not available on this machine or GPU, or None
            if it is. Default: always available.
        device (str): "cpu", or "cuda" if only loaders with `device="cuda"` use it. Default: "cpu".
        option (str | None): the value of the loaders' `decoder` that allows it. Default: its name.
        automatic (bool): whether `decoder="auto"` allows it as well. Default: False.
        priority (int): of several decoders that support a stream, the one with the highest priority is used. The
            decoders of this package have 0 to 20. Default: 100.
        shares_decoding (bool): whether one call of `decode` is faster than several for clips that begin at the same key
            frame of a video. Default: False.
        rule (str): text for `VideoLoader.explain` that describes the supported streams. Default: "the streams that it
            reads".
        label (Callable[[VideoInfo], str] | None): returns the name that `VideoLoader.explain` shows for a stream.
            Default: the decoder's name.

    Example:
        >>> from headrace.loaders.decode.pyav import PyAVDecoder
        >>> register_decoder("mine", lambda device_id: PyAVDecoder(), reads=lambda info, color: info.codec == "h264")
        >>> loader = VideoLoader(clips, batch_size=2, clip=Clip(frames=4), size=(32, 32), decoder="mine")
        >>> "decoder: mine" in loader.explain()
        True
        >>> loader.close()
    """
    _registered[name] = DecoderType(
        name=name,
        build=build,
        reads=reads,
        missing=missing,
        device=device,
        option=option or name,
        automatic=automatic,
        priority=priority,
        shares_decoding=shares_decoding,
        rule=rule,
        label=label,
    )


def all_decoders() -> dict[str, DecoderType]:
    """Every registered decoder by name."""
    for module in _BUILT_IN:
        import_module(module)
    return dict(_registered)


def check_option(option: str) -> None:
    """Raise `UsageError` unless a decoder has this option."""
    check_choice("decoder", option, ("auto", *sorted({one.option for one in all_decoders().values()})))


def candidates(option: str = "auto", device: str = "cpu") -> tuple[DecoderType, ...]:
    """The decoders that an option allows on a device, in order of preference. The fallback is last."""
    decoders = all_decoders()
    fallback = decoders.pop(FALLBACK)
    allowed = [
        one
        for one in decoders.values()
        if one.device in ("cpu", device) and (one.automatic if option == "auto" else one.option == option)
    ]
    return *sorted(allowed, key=lambda one: -one.priority), fallback


def choose(info: VideoInfo, color: Color, among: Sequence[DecoderType]) -> DecoderType:
    """The decoder for a stream, if all of `among` are available. Pure."""
    return next(one for one in among if one.reads(info, color))


def missing(name: str, device_id: int = 0) -> str | None:
    """Why a decoder is not available on this machine or GPU, or None if it is."""
    return all_decoders()[name].missing(device_id)


def open_decoder(option: str = "auto", device: str = "cpu", device_id: int = 0) -> Decoder:
    """The decoder for a loader.

    Args:
        option: the loader's `decoder`.
        device: "cpu" or "cuda", the device of the batches.
        device_id: index of the GPU.
    """
    among = candidates(option, device)
    if is_first("job"):
        _log.info("%s", _rule(among))
    return among[0].build(device_id) if len(among) == 1 else ChoosingDecoder(among, device_id)


class ChoosingDecoder:
    """Decodes each clip with the first decoder of `among` that supports it. The last one is the fallback."""

    name = "auto"

    def __init__(self, among: Sequence[DecoderType], device_id: int = 0) -> None:
        self._among, self._device_id = tuple(among), device_id
        self._fallback = self._among[-1].build(device_id)
        self._built: dict[str, Decoder | None] = {}
        self._warned_of = set[str]()
        self._lock = threading.Lock()

    def decode(self, requests: Sequence[Request]) -> list[Decoded | HeadraceError]:
        groups = dict[int, tuple[Decoder, list[int]]]()
        for number, request in enumerate(requests):
            decoder = self._decoder_of(request.info, request.color)
            groups.setdefault(id(decoder), (decoder, []))[1].append(number)
        results = dict[int, Decoded | HeadraceError]()
        for decoder, numbers in groups.values():
            results.update(zip(numbers, decoder.decode([requests[n] for n in numbers]), strict=True))
        _, fallback_numbers = groups.get(id(self._fallback), (None, []))
        refused = {n: one for n, one in results.items() if isinstance(one, HeadraceError) and n not in fallback_numbers}
        retried = self._fallback.decode([requests[n] for n in refused]) if refused else []
        for (number, error), result in zip(refused.items(), retried, strict=True):
            results[number] = result
            if isinstance(result, Decoded):
                self._warn_once_a_codec(requests[number].info.codec, error)
        return [results[number] for number in range(len(requests))]

    def clip_bytes(self, info: VideoInfo, frames: int, size: tuple[int, int] | None, color: Color) -> int:
        return self._decoder_of(info, color).clip_bytes(info, frames, size, color)

    def close(self) -> None:
        for decoder in (*self._built.values(), self._fallback):
            if decoder is not None:
                decoder.close()

    def _decoder_of(self, info: VideoInfo, color: Color) -> Decoder:
        for kind in self._among[:-1]:
            if kind.reads(info, color) and (decoder := self._available(kind)) is not None:
                return decoder
        return self._fallback

    def _available(self, kind: DecoderType) -> Decoder | None:
        """The decoder of this type, which is built on first use. None if it is not available."""
        with self._lock:
            if kind.name not in self._built:
                reason = kind.missing(self._device_id)
                if reason is not None:
                    warn_once(_log, f"the decoder {kind.name} is not available, and others are used: {reason}", "node")
                self._built[kind.name] = kind.build(self._device_id) if reason is None else None
            return self._built[kind.name]

    def _warn_once_a_codec(self, codec: str, error: HeadraceError) -> None:
        """Warn once for each codec, since the fallback takes CPU time that the user wanted to save."""
        if codec not in self._warned_of:
            self._warned_of.add(codec)
            warn_first(_log, "node", "%s decodes some %s that the chosen decoder refuses: %s", FALLBACK, codec, error)


def explain(
    sample: Sample, *, color: Color = "bt601", option: str = "auto", device: str = "cpu", device_id: int = 0
) -> str:
    """Text that says which stream of a sample is decoded, by which decoder, and why."""
    info = sample.video
    if info is None:
        return f"sample {sample.key!r} holds no video"
    among = candidates(option, device)
    passed = {one.name: reason for one in among[:-1] if one.reads(info, color) and (reason := one.missing(device_id))}
    kind = choose(info, color, [one for one in among if one.name not in passed])
    picture = " (a picture: one frame)" if info.format in IMAGE_EXTENSIONS else ""
    return "\n".join(
        [
            f"sample {sample.key!r}: stream {info.stream} of its .{info.ext}, {info.codec} {info.width}x{info.height} "
            f"{info.pixel_format}{picture}",
            "stream: the largest; of equal ones the one flagged as default, then the first",
            f"decoder: {kind.name if kind.label is None else kind.label(info)}",
            *[f"not available: {name}: {reason}" for name, reason in passed.items()],
            f"by the rule: {_rule(among)}",
            f"colour: {color}; rotation in the file: {info.rotation} degrees",
        ]
    )


def _rule(among: Sequence[DecoderType]) -> str:
    return "video decoders, the first that reads the stream: " + "; ".join(f"{one.name}: {one.rule}" for one in among)
