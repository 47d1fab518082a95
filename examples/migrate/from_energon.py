"""Index the tars of a data set of Megatron Energon where they lie: one dataset for each of its splits.

    python examples/migrate/from_energon.py s3://bucket/energon s3://bucket/datasets

`s3://bucket/datasets/train` then has the samples of the split "train". Nothing is copied. The script reads
`.nv-meta/split.yaml` and `.nv-meta/.info.json`, which `energon prepare` wrote, and compares the number of samples of
each tar. Samples that the splits exclude are left out. It needs PyYAML and braceexpand, as Energon does.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from typing import Any

import braceexpand
import yaml
from tars import print_skipped

from headrace import Dataset, index, open_store
from headrace.dataio.core.errors import NotFoundError
from headrace.dataio.store.base import Store

META = ".nv-meta"


def document(store: Store, *names: str) -> dict[str, Any]:
    """The first of these documents that exists. YAML includes JSON."""
    for name in names:
        if store.exists(f"{META}/{name}"):
            found: dict[str, Any] = yaml.safe_load(store.get(f"{META}/{name}", max_bytes=256 << 20))
            return found
    raise NotFoundError(f"there is no {META}/{names[0]}", hint="run `energon prepare` on the folder")


def expanded(names: list[str]) -> list[str]:
    """The names, with braces such as `{000..999}` written out."""
    return [one for name in names for one in braceexpand.braceexpand(name)]


def keys_by_tar(dataset: Dataset, tars: list[str]) -> dict[str, list[str]]:
    """The keys of the samples of each tar, in order."""
    table, names, found = dataset.columns(["shard", "key"]), dict[str, str](), defaultdict[str, list[str]](list)
    for shard, key in zip(table["shard"].to_pylist(), table["key"].to_pylist(), strict=True):
        if shard not in names:  # a shard is `mounts/ID/NAME`, where NAME begins at the deepest folder of all tars
            end = "/" + shard.split("/", 2)[-1]
            names[shard] = next(name for name in tars if f"/{name}".endswith(end) or f"/{shard}".endswith(f"/{name}"))
        found[names[shard]].append(key)
    return found


def index_split(source: str, url: str, tars: list[str], keys: str) -> Dataset:
    """Index the tars of a split that are not in the dataset yet."""
    patterns = [f"{source.rstrip('/')}/{name}" for name in tars]
    dataset = index(patterns, url, layout="tars", follow=True, keys=keys, trust_mounts=True)
    print_skipped(dataset)
    return dataset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="the folder or URL with .nv-meta")
    parser.add_argument("datasets", help="where the datasets are written, one folder for each split")
    parser.add_argument("--keys", default="member", choices=["member", "shard"], help="as for `headrace index`")
    args = parser.parse_args()
    with open_store(args.source) as store:
        splits = document(store, "split.yaml", "split.json")
        counts: dict[str, int] = document(store, ".info.json", ".info.yaml")["shard_counts"]
    excluded, complete = set(expanded(splits.get("exclude") or [])), True
    for split, names in splits["split_parts"].items():
        tars = [name for name in expanded(names) if name not in excluded]
        if not tars:
            continue
        with index_split(args.source, f"{args.datasets.rstrip('/')}/{split}", tars, args.keys) as dataset:
            found, removed = keys_by_tar(dataset, tars), list[str]()
            left_out = {tar: [n for n in range(counts[tar]) if f"{tar}/{n}" in excluded] for tar in tars}
            wrong = {tar for tar in tars if len(found[tar]) not in (counts[tar], counts[tar] - len(left_out[tar]))}
            for tar in sorted(wrong):
                print(f"{tar} has {len(found[tar])} samples here, and {counts[tar]} in Energon", file=sys.stderr)
            for tar in (tar for tar in tars if len(found[tar]) == counts[tar]):  # else they were removed before
                removed += [found[tar][n] for n in left_out[tar]]
            total = len(dataset) - len(removed)
            if removed:
                dataset.remove(removed, message="excluded by split.yaml").close()
            print(f"{split}: {len(tars)} tars, {total} samples, {sum(map(len, left_out.values()))} excluded")
            complete &= not wrong
    sys.exit(0 if complete else 1)


if __name__ == "__main__":
    main()
