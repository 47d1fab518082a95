"""The examples in the docstrings of the public classes run."""

from __future__ import annotations

import doctest

import pytest

from headrace.checkpoint import RNG, Checkpointer, copy, diff, export, import_checkpoint, read
from headrace.checkpoint.dcp import RepositoryReader, RepositoryWriter
from headrace.checkpoint.publishing.host_copy import HostCopy


@pytest.mark.parametrize(
    "shown",
    [
        Checkpointer,
        Checkpointer.save,
        Checkpointer.restore,
        read,
        copy,
        diff,
        export,
        import_checkpoint,
        RNG,
        RepositoryWriter,
        RepositoryReader,
        HostCopy,
    ],
    ids=lambda shown: shown.__qualname__,
)
@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_the_example_of_a_docstring_runs(shown: object) -> None:
    known: dict[str, object] = {"Checkpointer": Checkpointer, "read": read, "RNG": RNG}
    known.update(copy=copy, diff=diff, HostCopy=HostCopy)
    known.update(RepositoryReader=RepositoryReader, RepositoryWriter=RepositoryWriter)
    (found,) = doctest.DocTestFinder(recurse=False).find(shown, "example", globs=known)
    assert found.examples
    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(found).failed == 0
