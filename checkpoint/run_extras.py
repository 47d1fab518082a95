"""`RunExtras`: what a trainer does with its run in addition to saving and restoring the state.

- `put_artifact` and `describe`: files and descriptions that are committed with steps
- `publish`: weights for inference servers

Invariant: none of these changes the state that `save` stores.
Failure behaviour: errors of `headrace.dataio.core.errors`. A version that cannot be published fails its future only.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING

import torch

from headrace.checkpoint.handle import Handle
from headrace.checkpoint.open_run import OpenRun

if TYPE_CHECKING:
    from headrace.checkpoint.publishing.records import Published


class RunExtras(OpenRun):
    """The methods of `Checkpointer` that neither save nor restore the state."""

    def put_artifact(self, step: int, name: str, source: str | os.PathLike[str] | bytes) -> int:
        """Store a file with a step, such as samples, a log or a configuration. Call it before `save(step, ...)`.

        The file is read at once. Later changes of the file change nothing. 1 GiB of artifacts waits in memory. A file for
        which nothing is left is copied to a file without a name, next to it or in the temporary folder. Its step is then
        committed by this process, not by the daemon. Any rank may call it; an artifact belongs to the rank that gave it.
        `headrace ckpt artifacts` and `read_artifact` read it. `restore` ignores it.

        Args:
            step (int): The step's number.
            name (str): A name such as "samples/0.png": letters, digits, ' ', '.', '-', '+' and '_', with '/' between
                folders.
            source (str | os.PathLike[str] | bytes): The path of a file, or its contents.

        Returns:
            int: The number of bytes.

        Raises:
            UsageError: The name, or a source that is not a file.
            NotFoundError: The file does not exist.
            ConflictError: The step has an artifact of this name.
            CapacityError: More than 256 artifacts, more than 1 GiB of bytes, or more than 256 GiB of files wait for their
                steps, or no disk has space for the copy.

        Example:
            >>> import tempfile
            >>> folder = tempfile.mkdtemp()
            >>> with Checkpointer(folder, run="exp42", sidecar=None) as checkpointer:
            ...     _ = checkpointer.put_artifact(1, "log.txt", b"warm-up done")
            ...     _ = checkpointer.save(1, {"epoch": 3}).result(timeout=60)
            >>> from headrace.checkpoint import read_artifact
            >>> read_artifact(folder, run="exp42", name="log.txt")
            b'warm-up done'
        """
        self._check_open()
        return self._attachments.put(step, name, source)

    def describe(self, **sections: object) -> None:
        """Describe the run: its configuration, its code, or anything else that belongs to its start.

        Later steps refer to the description. It is stored once, and once more after each change. Texts that look like
        secrets are replaced by `***`. With several ranks, the description of rank 0 is stored.

        Args:
            **sections (object): Nested dicts, lists, numbers, texts, booleans and None, by name, such as
                `config={"lr": 1e-3}`; 256 KiB together. None removes a section.

        Raises:
            UsageError: A value cannot be stored; the message names it.

        Example:
            >>> import tempfile
            >>> with Checkpointer(tempfile.mkdtemp(), run="exp42", sidecar=None) as checkpointer:
            ...     checkpointer.describe(config={"lr": 1e-3, "layers": 12}, code="3f2a9c1")
        """
        self._check_open()
        self._description.describe(sections)

    def publish(
        self,
        name: str,
        step: int | str | Handle = "latest",
        *,
        include: str | Iterable[str] = "model/*",
        exclude: str | Iterable[str] = (),
        dtype: torch.dtype | str | None = None,
        move: bool = False,
    ) -> Future[Published] | None:
        """Publish the weights of a step as the next version of `name`, in the background.

        `headrace.checkpoint.Subscriber` follows the name. Rank 0 publishes; on the other ranks nothing happens.

        Args:
            name (str): The name: letters, digits, dots, dashes and underscores, at most 80.
            step (int | str | Handle): A step's number, "latest", or the handle of a save. A save that is published by its
                handle is compared with the version before while it is being written. Default: "latest".
            include (str | Iterable[str]): Patterns on paths, as in `restore`. Default: "model/*". If all paths have the
                same first part, the published names leave it out.
            exclude (str | Iterable[str]): Patterns of tensors to leave out. Default: none.
            dtype (torch.dtype | str | None): Convert floating-point tensors to this type. Default: None, as saved.
            move (bool): Publish also if the version before is of another run. Default: False.

        Returns:
            Future[Published] | None: The version, once it is published. None on ranks other than 0.

        Raises:
            UsageError: An argument is invalid.
            DeadlineError: Earlier versions still wait to be published after `timeout`.

        Example:
            >>> import tempfile, torch
            >>> with Checkpointer(tempfile.mkdtemp(), run="exp42", sidecar=None) as checkpointer:
            ...     handle = checkpointer.save(1, {"model": torch.nn.Linear(4, 2)})
            ...     checkpointer.publish("policy", handle, dtype=torch.bfloat16).result(timeout=60).number
            1
        """
        from headrace.checkpoint.publishing.background import BackgroundPublisher
        from headrace.checkpoint.publishing.records import folder
        from headrace.checkpoint.publishing.source import check_choice

        self._check_open()
        folder(name)
        choice = check_choice(include, exclude, dtype)
        if self._ranks.rank:
            return None
        protect = self._retention.protect if self._retention is not None else lambda _: lambda: None
        self._publisher = self._publisher or BackgroundPublisher(
            self._store, self._run, self._wait, self._saver.staging, protect
        )
        future = self._publisher.submit(name, step, choice, move)
        self._trackers.follow_publication(future)
        return future
