"""Index WebDataset tars where they lie, and compare the samples with those that `webdataset` reads.

    python examples/migrate/from_webdataset.py '/data/tars/{0000..0999}.tar' /data/dataset

Nothing is copied. `headrace index` does the same without the comparison. `webdataset` must be installed. It cannot read a
bucket by itself. For tars in a bucket, give the command with which it reads them:

    python examples/migrate/from_webdataset.py 's3://bucket/set/{0000..0999}.tar' s3://bucket/set \\
        --read 'pipe:aws s3 cp s3://bucket/set/{0000..0999}.tar -'
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator

import webdataset as wds
from tars import Sample, compare, print_skipped

from headrace import Dataset, index
from headrace.dataio.core.errors import ConflictError, HeadraceError, UsageError


def check_readable(tars: str) -> None:
    """Raise an error if webdataset cannot open such URLs.

    Raises:
        UsageError: The tars are in a store that webdataset has no handler for.
    """
    scheme, separator, _ = tars.partition("://")
    if separator and not scheme.startswith("pipe:") and scheme not in wds.gopen_schemes:
        command = f"aws s3 cp {tars} -" if scheme == "s3" else f"COMMAND {tars}"
        raise UsageError(
            f"webdataset cannot read {scheme}: URLs",
            hint=f"add a command that prints a tar: --read 'pipe:{command}'",
        )


def prefixes_of(dataset: Dataset) -> list[str]:
    """The paths of the tars without `.tar`, if they stand in front of the keys (`--keys shard`). The longest are first."""
    paths = {re.sub(r"^mounts/[^/]+/|\.tar$", "", shard.key) for shard in dataset.document.shards}
    first = next(iter(dataset.keys), "")
    return sorted(paths, key=len, reverse=True) if any(first.startswith(f"{path}/") for path in paths) else []


def samples_of(tars: str, dataset: Dataset, unreadable: list[str]) -> Iterator[Sample]:
    """The samples that webdataset reads from these tars, as bytes.

    Prints a line for each tar that it cannot read, and adds the tar to `unreadable`. The other tars are read.
    """
    prefixes = prefixes_of(dataset)
    for url in wds.shardlists.expand_urls(tars):
        prefix = next((f"{path}/" for path in prefixes if f"/{path}.tar" in f"/{url}".replace(" ", "/")), "")
        source = wds.WebDataset([url], shardshuffle=False, handler=wds.reraise_exception, empty_check=False)
        try:
            for sample in source:
                key = prefix + sample["__key__"].removeprefix("./")
                yield key, {ext: data for ext, data in sample.items() if not ext.startswith("__")}
        except Exception as error:  # webdataset raises many types
            reason = getattr(error, "strerror", None) or next(iter(error.args), type(error).__name__)
            print(f"{url} cannot be read by webdataset: {reason!s:.200}".replace("\n", " "), file=sys.stderr)
            unreadable.append(url)


def print_mounts(dataset: Dataset) -> None:
    """Print where the tars are, and what a reader of the dataset must do to open them."""
    needed = ""
    try:
        Dataset(dataset.url).close()
    except HeadraceError as error:
        needed = f"; to open them, {error.hint}"
    for mount in dataset.document.mounts:
        print(f"shards stay in {mount.url}{needed}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tars", help="the tars: a path or URL, with braces")
    parser.add_argument("dataset", help="where the index is written")
    parser.add_argument("--read", help="the same tars as webdataset reads them (default: TARS)")
    parser.add_argument(
        "--keys", default="member", choices=["member", "shard"], help="for a new index, as for `headrace index`"
    )
    parser.add_argument("--text-field", help="the field of the JSON that is the text of a sample (default: caption)")
    args = parser.parse_args()
    try:
        check_readable(args.read or args.tars)
        dataset = index(args.tars, args.dataset, layout="tars", keys=args.keys, text_field=args.text_field)
    except ConflictError:  # it was indexed before
        dataset = Dataset(args.dataset, trust_mounts=True)
    except HeadraceError as error:
        sys.exit(str(error))
    with dataset:
        print_skipped(dataset)
        print(f"version {dataset.version}: {len(dataset)} samples")
        print_mounts(dataset)
        unreadable = list[str]()
        equal = compare(samples_of(args.read or args.tars, dataset, unreadable), dataset)
        sys.exit(0 if equal and not unreadable else 1)


if __name__ == "__main__":
    main()
