"""An engine of vLLM's weight transfer: vLLM's workers load the versions of a published name.

`vllm serve ... --weight-transfer-config '{"backend": "headrace"}'` uses it where Headrace is installed. The trainer
publishes a version, and names it to vLLM:

    number = checkpointer.publish("policy", handle, dtype="bfloat16").result().number
    client = HTTPVLLMWeightSyncClient("http://server:8000")
    client.init_weight_transfer_engine({"url": "s3://bucket/checkpoints", "name": "policy"})  # once
    client.start_weight_update()
    client.update_weights({"version": number})
    client.finish_weight_update(str(number))

Each worker keeps the published weights in main memory (`HostCopy`), in addition to the model. A thread fetches and
verifies new versions while the worker serves. So `update_weights` usually only loads tensors.

Invariants:

- The model does not change before the whole version was fetched and verified.
- All workers load the version that the request names.
- With `changed_only`, only the tensors that changed are loaded, in place.

What vLLM's interface does not permit: to change the model in one step. If `load_weights` fails, or the worker dies in it,
the model may hold tensors of two versions. Other workers may have loaded the new version then. vLLM reports the error
to the trainer. The next update loads all tensors again. Until then, the server must not answer requests: pause it
before the update, and resume it after the update has succeeded.

Failure behaviour: `UsageError` for a request that cannot be meant, before anything changes. The errors of
`HostCopy.bring_to`; the model then still holds the version before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from headrace.checkpoint.publishing.host_copy import HostCopy
from headrace.checkpoint.publishing.subscriber import NewVersion, Subscriber
from headrace.dataio.core.errors import UsageError

MAX_TIMEOUT = 3600.0
"""The longest wait for a version that a request may ask for, in seconds. The worker serves nothing meanwhile."""


@dataclass
class PublishedInitInfo(WeightTransferInitInfo):  # type: ignore[misc, unused-ignore]
    """Where the worker finds the weights. The worker's environment gives the credentials of the store.

    Args:
        url (str): The repository.
        name (str): The published name.
        poll (float): Seconds between two looks for a new version, at most 3600. Default: 1.
        changed_only (bool): Load only the tensors that changed, in place. Only for models whose weights vLLM keeps as they
            are loaded: not for quantized ones, nor for kernels that repack weights. Default: False, all tensors are
            loaded through vLLM's layerwise reload.
    """

    url: str
    name: str
    poll: float = 1.0
    changed_only: bool = False

    def __post_init__(self) -> None:
        if not all(isinstance(value, str) and value for value in (self.url, self.name)):
            raise UsageError(
                "url and name are not both given", hint='give {"url": "s3://bucket/runs", "name": "policy"}'
            )
        if not _is_number(self.poll) or not 0 < self.poll <= MAX_TIMEOUT:
            raise UsageError(f"poll is {self.poll!r}", hint=f"give seconds, more than 0 and at most {MAX_TIMEOUT:g}")
        if not isinstance(self.changed_only, bool):
            raise UsageError(f"changed_only is {self.changed_only!r}", hint="give true or false")


@dataclass
class PublishedUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc, unused-ignore]
    """The version to load.

    Args:
        version (int): Its number, which `Checkpointer.publish(...).result().number` gives. An older step is published
            again, under a new number.
        timeout (float): Seconds to wait until it is published and fetched, at most 3600. Default: 600.
    """

    version: int
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if isinstance(self.version, bool) or not isinstance(self.version, int) or self.version < 1:
            raise UsageError(f"version is {self.version!r}", hint="give the number of a published version, from 1 on")
        if not _is_number(self.timeout) or not 0 <= self.timeout <= MAX_TIMEOUT:
            raise UsageError(f"timeout is {self.timeout!r}", hint=f"give seconds, at most {MAX_TIMEOUT:g}")


def _is_number(value: object) -> bool:
    """Whether a field of a request is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class PublishedWeightsEngine(WeightTransferEngine):  # type: ignore[misc, unused-ignore]
    """Loads versions of a published name into vLLM's model. The module's docstring describes it."""

    init_info_cls = PublishedInitInfo
    update_info_cls = PublishedUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._copy: HostCopy | None = None
        self._loaded: NewVersion | None = None
        self._changed_only = self._reloading = False

    def init_transfer_engine(self, init_info: PublishedInitInfo) -> None:
        """Follow the name from now on. A second call follows another name, or the same one again."""
        quantized = getattr(self.model_config, "quantization", None)
        if init_info.changed_only and quantized:
            raise UsageError(
                f"the model is quantized ({quantized}), so changed tensors cannot be loaded in place",
                hint="leave out changed_only: all tensors are loaded and quantized again",
            )
        subscriber = Subscriber(init_info.url, init_info.name, poll=init_info.poll)
        self.shutdown()
        self._copy, self._changed_only = HostCopy(subscriber, init_info.poll), init_info.changed_only
        self._copy.follow()

    def start_weight_update(self) -> None:
        """Begin an update. The model stays as it is until the version is verified."""
        self._required_copy()

    def receive_weights(self, update_info: PublishedUpdateInfo) -> None:
        """Wait for the version, and load it. One version per update."""
        copy = self._required_copy()
        if self._reloading:
            raise UsageError("this update has loaded a version already", hint="call finish_weight_update first")
        version = copy.bring_to(update_info.version, update_info.timeout)
        changed = version.changed_since(self._loaded)
        if changed:
            self._loaded = None  # stays if loading fails
            self._load([(name, copy.tensors[name]) for name in (changed if self._changed_only else copy.tensors)])
        self._loaded = version

    def finish_weight_update(self) -> None:
        """Finish the reload of the layers."""
        if self._reloading:
            self._finish_reload()

    def shutdown(self) -> None:
        """Stop following the name, and release the copy in main memory."""
        if self._copy is not None:
            self._copy.close()
        if self._reloading:
            self._finish_reload()
        self._copy = self._loaded = None

    def _required_copy(self) -> HostCopy:
        if self._copy is None:
            raise UsageError(
                "the worker follows no published name yet",
                hint='call init_weight_transfer_engine({"url": ..., "name": ...}) first',
            )
        return self._copy

    def _load(self, pairs: list[tuple[str, Any]]) -> None:
        if self._changed_only:
            self.model.load_weights(pairs)
            return
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._reloading = True
        try:
            initialize_layerwise_reload(self.model)
            self.model.load_weights(pairs)
        except BaseException:
            self._finish_reload()
            raise

    def _finish_reload(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        self._reloading = False
        try:
            finalize_layerwise_reload(self.model, self.model_config)
        except BaseException:
            self._loaded = None
            raise
