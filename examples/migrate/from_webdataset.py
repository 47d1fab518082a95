"""Index WebDataset tars where they lie, and compare the samples with those that `webdataset` reads.

    python examples/migrate/from_webdataset.py '/data/tars/{0000..0999}.tar' /data/dataset

Nothing is copied. `headrace index` does the same without the comparison. `webdataset` must be installed. It cannot read a
bucket by itself. For tars in a bucket, give the command with which it reads them:

    python examples/migrate/from_webdataset.py 's3://bucket/set/{0000..0999}.tar' s3://bucket/set \\
        --read 'pipe:aws s3 cp s3://bucket/set/{0000..0999}.tar -'
"""

from __future__ import annotations

import argparse
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


def samples_of(tars: str) -> Iterator[Sample]:
    """The samples that webdataset reads from these tars, as bytes."""
    source = wds.WebDataset(tars, shardshuffle=False, handler=wds.reraise_exception, empty_check=False)
    for sample in source:
        yield sample["__key__"], {ext: data for ext, data in sample.items() if not ext.startswith("__")}


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
        sys.exit(0 if compare(samples_of(args.read or args.tars), dataset) else 1)


if __name__ == "__main__":
    main()
