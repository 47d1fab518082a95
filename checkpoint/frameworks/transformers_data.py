"""transformers: `LoaderTrainer`, a `Trainer` that trains on a Headrace loader and resumes at its exact batch.

`LoaderTrainer(model, args, train_dataset=loader)` iterates over the loader itself. A `Trainer` alone would put it into a
`DataLoader`, make batches of its batches, and skip batches after a resume by reading them. The checkpoints are those of
the Trainer. Each `checkpoint-<step>` folder also has `headrace_loader_<rank>.json`, the position of the loader. For
checkpoints in a repository, use `RepositoryTrainer`, which is a `LoaderTrainer`.

To train with another Trainer, derive from both, this one first: `class Mine(LoaderTrainer, Seq2SeqTrainer): pass`.

Invariant: batches that were trained on are not read again after a resume. Data other than a loader is handled by the
Trainer as usual.

Failure behaviour:

- `UsageError`, before the first step, for `ignore_data_skip` in a resumed training and for `auto_find_batch_size`.
- `UsageError` if the model's `forward` takes no entry of a batch (`remove_unused_columns`).
- `UnsupportedError`, before the first step, for a Headrace loader in a `DataLoader` that prefetches or has workers.
- `UnsupportedError` for a Headrace loader as the dataset of an evaluation or a prediction.
- `NotFoundError` for a checkpoint without a position, and `MismatchError` if the position is that of other data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers.trainer as trainer_module
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer

from headrace.dataio.core.errors import CorruptionError, NotFoundError, UnsupportedError, UsageError
from headrace.dataio.core.files import write_atomically
from headrace.dataio.core.json import parse_json
from headrace.dataio.core.log import get_logger, warn_once

_log = get_logger(__name__)


class LoaderTrainer(Trainer):  # type: ignore[misc, unused-ignore]
    """A `Trainer` on a Headrace loader. `train(resume_from_checkpoint=...)` continues at the exact batch.

    Args:
        *args: Arguments of `Trainer`. `train_dataset` is the loader; the size of batches is the loader's.
        **options: Keyword arguments of `Trainer`.

    Raises:
        UsageError: from `train`, if `args.auto_find_batch_size` is set, or if a resumed training has
            `args.ignore_data_skip`.

    Example:
        loader = Loader("s3://bucket/clips", 16, fields={"pixel_values": Video(...), "labels": Json("label")})
        trainer = LoaderTrainer(model, TrainingArguments("out", max_steps=1000), train_dataset=loader)
        trainer.train(resume_from_checkpoint=True)
    """

    _loader: LoaderView | None = None

    def get_train_dataloader(self) -> Any:
        """Return a Headrace loader unchanged. For any other dataset, return the Trainer's DataLoader."""
        if is_loader(self.train_dataset):
            return self.train_dataset
        return super().get_train_dataloader()

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the Trainer's DataLoader. A Headrace loader raises `UnsupportedError`."""
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        _refuse_evaluation(self.eval_dataset[chosen] if isinstance(chosen, str) else chosen)
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return the Trainer's DataLoader. A Headrace loader raises `UnsupportedError`."""
        _refuse_evaluation(test_dataset)
        return super().get_test_dataloader(test_dataset)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        loader = loader_in(train_dataloader)
        if loader is not None:
            _check_arguments(self.args, resumes=resume_from_checkpoint is not None)
            train_dataloader = LoaderView(loader, self._entries())
        self._loader = train_dataloader if loader is not None else None
        return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)

    def _entries(self) -> frozenset[str] | None:
        """The entries of a batch that the model's `forward` takes. None stands for all, without `remove_unused_columns`."""
        if not self.args.remove_unused_columns:
            return None
        self._set_signature_columns_if_needed()
        return frozenset(self._signature_columns)

    def _save_rng_state(self, output_dir: str) -> None:
        """Also save the position of the loader. As generators, each rank saves its own."""
        super()._save_rng_state(output_dir)
        if self._loader is not None:
            with write_atomically(_position_file(output_dir, int(self.args.process_index))) as file:
                file.write(json.dumps(self._loader.loader.state_dict()).encode())

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self._loader is not None:
            self._loader.loader.load_state_dict(self._saved_position(checkpoint))
            self._loader.was_moved()

    def _saved_position(self, checkpoint: str) -> Any:
        """The position that this rank saved, or rank 0's if there were fewer ranks."""
        files = [_position_file(checkpoint, rank) for rank in (int(self.args.process_index), 0)]
        for file in files:
            if file.exists():
                return _position_in(file)
        raise NotFoundError(
            f"{checkpoint} has no position of a loader: {files[0].name} is missing",
            hint="resume from a checkpoint that LoaderTrainer has saved; the save of this one may have been interrupted",
        )


def _position_file(checkpoint: str, rank: int) -> Path:
    return Path(checkpoint) / f"headrace_loader_{rank}.json"


def _position_in(file: Path) -> Any:
    try:
        return parse_json(file.read_bytes())
    except ValueError as error:
        raise CorruptionError(f"{file} is not the position of a loader: {error}") from None


def _check_arguments(args: Any, *, resumes: bool) -> None:
    """Raise `UsageError` for arguments of the Trainer that a loader cannot follow."""
    if args.auto_find_batch_size:
        raise UsageError(
            "auto_find_batch_size cannot change the batches of a loader",
            hint="leave it out, and give the loader a smaller batch_size if memory is short",
        )
    if resumes and args.ignore_data_skip:
        raise UsageError(
            "ignore_data_skip=True would begin an epoch of the Trainer in the middle of the loader's epoch",
            hint="leave it out: a loader continues at its saved position, and no batches are read to skip them",
        )
    if args.dataloader_num_workers:
        warn_once(_log, "dataloader_num_workers has no effect on a Headrace loader, which has num_threads=", "job")


def _refuse_evaluation(data: Any) -> None:
    if is_loader(data):
        raise UnsupportedError(
            "Trainer.evaluate averages losses as if all batches had eval_batch_size samples, and a loader's last one may not",
            hint="evaluate in your own loop over a loader with evaluate=True, such as in a callback",
        )


def is_loader(data: Any) -> bool:
    """Whether the object yields batches and has a state, as Headrace loaders do."""
    return isinstance(data, IterableDataset) and hasattr(data, "state_dict") and hasattr(data, "load_state_dict")


def loader_in(data: Any) -> Any:
    """The Headrace loader that the Trainer iterates over, or None if it iterates over anything else."""
    if isinstance(data, LoaderView):
        return data.loader
    if is_loader(data):
        return data
    inner = getattr(data, "dataset", None)
    if not is_loader(inner):
        return None
    if type(data) is DataLoader and data.batch_size is None and data.num_workers == 0:
        return inner
    raise UnsupportedError(
        f"a {type(data).__name__} around {type(inner).__name__} prefetches or splits batches: resuming would not be exact",
        hint="give the loader itself as train_dataset, or return it from get_train_dataloader",
    )


def to_next_batch(loader: Any) -> None:
    """Move past the end of an epoch, where a loader with a restored state would yield no batch.

    A loader in the middle of an epoch is left as it is, so nothing is read here.
    """
    state = loader.state_dict()
    if isinstance(batch := state.get("batch"), int) and batch < len(loader):
        return
    if next(iter(loader), None) is not None:
        loader.load_state_dict(state)


class LoaderView(IterableDataset[Any]):
    """A loader as the Trainer iterates over it.

    After a resume, the loader continues at its saved position, so the Trainer must not skip batches. As with other data,
    the Trainer's `remove_unused_columns` leaves out the entries that the model's `forward` does not take.

    Args:
        loader: the loader.
        entries: the names of the entries to keep; None keeps all.
    """

    def __init__(self, loader: Any, entries: frozenset[str] | None) -> None:
        self.loader, self._entries = loader, entries

    def was_moved(self) -> None:
        """Prepare for the first iteration after a state was loaded."""
        to_next_batch(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield self._chosen(batch)

    def _chosen(self, batch: Any) -> Any:
        if self._entries is None or not isinstance(batch, dict):
            return batch
        chosen = {name: value for name, value in batch.items() if name in self._entries}
        if not chosen:
            raise UsageError(
                f"the model's forward takes none of the entries of a batch: {', '.join(batch)}",
                hint="name the fields as its arguments, or pass TrainingArguments(..., remove_unused_columns=False)",
            )
        return chosen

    def __len__(self) -> int:
        return len(self.loader)


_skip = trainer_module.skip_first_batches


def _skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Replaces the Trainer's function that skips batches. The Trainer calls it when it resumes within an epoch."""
    return dataloader if isinstance(dataloader, LoaderView) else _skip(dataloader, num_batches)


trainer_module.skip_first_batches = _skip_first_batches
