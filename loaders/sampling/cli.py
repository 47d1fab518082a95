"""`headrace order` measures the order in which a loader reads samples.

It reports the quality of the shuffle, the number of reads, and how evenly sources are mixed, also within buckets.

Invariants: the command reads the index and no media files. Standard output holds only results.
Failure behaviour: errors are raised, and `headrace.dataio.cli` reports them. If no bucket fills a batch, the results are
printed before the error; with `--json` they hold it as "error".
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.dataio.core.cli import command, json_option, positive_int, print_json, trust_mounts, version, where
from headrace.dataio.core.errors import UsageError
from headrace.loaders.sampling.buckets import MAX_BUCKETS
from headrace.loaders.sampling.schedule import Population

if TYPE_CHECKING:
    from headrace.dataio.shards.dataset import Dataset
    from headrace.loaders.sampling.buckets import Buckets
    from headrace.loaders.sampling.never_delivered import SmallBucket
    from headrace.loaders.sampling.quality import Balance, BucketBalance, Quality

_SHADES = " ░▒▓█"


@dataclasses.dataclass(frozen=True)
class _InBuckets:
    """What the buckets hold, and how their batches are mixed.

    Args:
        clips: number of clips in each bucket.
        balances: the buckets that have a batch in the first epoch.
        small: the buckets whose clips are never delivered.
        images: number of images that are left out, by the URL of their dataset.
    """

    clips: Sequence[int]
    balances: Sequence[BucketBalance]
    small: Sequence[SmallBucket]
    images: Mapping[str, int]


def _shape(text: str) -> tuple[int, ...]:
    parts = text.lower().split("x")
    if len(parts) not in (2, 3):
        raise argparse.ArgumentTypeError(f"{text!r} is no shape such as 256x256 or 192x336x32")
    return tuple(positive_int(part) for part in parts)


def _pixels(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text[:20]) < 1 << 53:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number of pixels")
    return int(text)


def _weights(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers") from None


def _natural(text: str) -> int:
    return 0 if text == "0" else positive_int(text)


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(positive_int(part) for part in text.split(","))
    if max(counts) > 4096:
        raise argparse.ArgumentTypeError("at most 4096 nodes")
    return counts


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "datasets",
        metavar="DATASET",
        nargs="+",
        help="a folder or s3://bucket/prefix; several are also measured as a mixture",
    )
    version()(parser)
    trust_mounts()(parser)
    where()(parser)
    parser.add_argument(
        "--batch", metavar="N", type=positive_int, default=64, help="size of the global batch (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="the loader's seed (default: %(default)s)")
    parser.add_argument("--epoch", type=_natural, default=0, help="which epoch (default: %(default)s)")
    parser.add_argument("--no-shuffle", action="store_true", help="the order of a loader with shuffle=False")
    parser.add_argument(
        "--batches", type=positive_int, default=256, help="how many batches to measure (default: %(default)s)"
    )
    parser.add_argument(
        "--nodes", metavar="N,N", type=_counts, default=(1, 2, 4, 8), help="numbers of nodes (default: 1,2,4,8)"
    )
    parser.add_argument(
        "--weights", metavar="W,W", type=_weights, help="weights of a mixture (default: the datasets' sizes)"
    )
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="temperature of a mixture (default: %(default)s)"
    )
    shapes = parser.add_argument_group("buckets", "also measure videos in batches of one shape")
    shapes.add_argument(
        "--bucket",
        metavar="HxW[xFRAMES]",
        type=_shape,
        action="append",
        help="a shape, height x width; give one or more",
    )
    shapes.add_argument(
        "--budget", metavar="PIXELS", type=_pixels, help="pixels of a global batch (default: --batch of the largest)"
    )
    shapes.add_argument(
        "--multiple",
        metavar="N",
        type=positive_int,
        default=1,
        help="the clips of a global batch are a multiple of this (default: %(default)s)",
    )
    shapes.add_argument(
        "--frames", metavar="N", type=positive_int, default=16, help="frames of a clip (default: %(default)s)"
    )
    shapes.add_argument(
        "--suggest-buckets",
        metavar="N",
        type=positive_int,
        help="suggest up to N shapes for the videos, and print the share and the cropped pixels of each; "
        "for images, if there are no videos, or with --frames 1",
    )
    shapes.add_argument(
        "--size",
        metavar="HxW",
        type=_shape,
        default=(256, 256),
        help="with --suggest-buckets: height x width, the area of each shape (default: 256x256)",
    )
    json_option()(parser)


@command(
    "order",
    "Compare the order in which a loader reads a dataset's samples with a full shuffle, and count the reads it needs.",
    _add_arguments,
)
def order(args: argparse.Namespace) -> int:
    """Run `headrace order DATASET...`."""
    if len(args.datasets) == 1 and (args.weights is not None or args.temperature != 1.0):
        raise UsageError("--weights and --temperature need several datasets", hint="name the datasets of the mixture")
    if args.suggest_buckets is not None:
        return _suggest_buckets(args)
    from headrace.dataio.shards.dataset import Dataset

    qualities: list[Quality] = []
    sizes = dict[str, Population]()
    cells, images = dict[str, list[Population]](), dict[str, int]()
    buckets = None if args.bucket is None else _buckets(args)
    for url in args.datasets:
        with Dataset(url, args.version, trust_mounts=args.trust_mounts) as dataset:
            chosen = dataset if args.where is None else dataset.where(args.where)
            qualities.append(_measure(chosen, args))
            clips = len(chosen)
            if buckets is not None:
                cells[url], images[url] = _count_by_bucket(chosen, buckets, args)
                clips = sum(cell.samples for cell in cells[url])
            sizes[url] = Population(clips, chosen.total_bytes / len(chosen))
    mixed = _measure_mixture(sizes, args) if len(args.datasets) > 1 else None
    shaped = None if buckets is None else _measure_buckets(buckets, cells, images, args)
    error = None if shaped is None or shaped.balances else _no_batch_error(shaped)
    if args.json:
        print_json(_json(qualities, mixed, shaped, error))
        return 0 if error is None else error.exit_code
    for url, quality in zip(args.datasets, qualities, strict=True):
        print(f"{url}: ", end="")
        _print_quality(quality)
    if mixed is not None:
        _print_mix(mixed)
    if buckets is not None and shaped is not None:
        _print_buckets(buckets, shaped, buckets.batches(args.frames))
        _print_left_out(args.datasets, shaped)
    if error is not None:
        raise error
    return 0


def _suggest_buckets(args: argparse.Namespace) -> int:
    """Run `headrace order DATASET... --suggest-buckets N`."""
    from headrace.dataio.shards.dataset import Dataset
    from headrace.loaders.sampling.suggested_buckets import shapes_of, suggest

    if args.suggest_buckets > MAX_BUCKETS or len(args.size) != 2:
        raise UsageError(f"--suggest-buckets takes at most {MAX_BUCKETS}, and --size a height and a width")
    videos, images = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for url in args.datasets:
        with Dataset.open_lazy(url, args.version, trust_mounts=args.trust_mounts) as dataset:
            found = shapes_of(dataset if args.where is None else dataset.where(args.where))
            videos, images = videos + found.videos, images + found.images
    frames = 1 if images and not videos else args.frames
    shapes, left_out = (videos + images, 0) if frames == 1 else (videos, images.total())
    suggested = suggest(shapes, args.suggest_buckets, args.size)
    waste = sum(bucket.share * bucket.waste for bucket in suggested)
    budget = args.budget or args.batch * frames * args.size[0] * args.size[1]
    if args.json:
        rows = [dataclasses.asdict(one) for one in suggested]
        print_json({"buckets": rows, "frames": frames, "images_left_out": left_out, "waste": waste, "budget": budget})
        return 0
    print(f"{sum(shapes.values())} samples, {len(shapes)} shapes; {waste:.1%} of the pixels are cropped\n")
    print(f"{'bucket':>12}{'share':>9}{'cropped':>9}{'enlarged':>10}")
    for one in suggested:
        print(f"{'x'.join(map(str, one.size)):>12}{one.share:>9.1%}{one.waste:>9.1%}{one.enlarged:>10.1%}")
    if left_out:
        print(f"\n{left_out} images are not counted. With --frames 1, all samples are counted, each as an image")
    shown = ", ".join(f"Bucket({one.size}, 1)" if frames == 1 else f"Bucket({one.size})" for one in suggested)
    multiple = f", multiple={args.multiple}" if args.multiple > 1 else ""
    print(f"\nBuckets(({shown},), budget={budget}{multiple})")
    return 0


def _json(
    qualities: Sequence[Quality], mixed: Balance | None, shaped: _InBuckets | None, error: UsageError | None
) -> dict[str, Any]:
    buckets = dict[str, Any]()
    if error is not None:
        buckets["error"] = {"code": error.code, "message": error.message, "hint": error.hint}
    if shaped is not None:
        buckets["buckets"] = [{**dataclasses.asdict(one), "clips": shaped.clips[one.bucket]} for one in shaped.balances]
        small = [dataclasses.asdict(one) for one in shaped.small]
        buckets["left_out"] = {"images": sum(shaped.images.values()), "buckets": small}
    if mixed is None:
        return dataclasses.asdict(qualities[0]) | buckets
    return {"datasets": [dataclasses.asdict(one) for one in qualities], "mixture": dataclasses.asdict(mixed)} | buckets


def _buckets(args: argparse.Namespace) -> Buckets:
    from headrace.loaders.sampling.buckets import Bucket, Buckets

    shapes = tuple(Bucket((height, width), *frames) for height, width, *frames in args.bucket)
    largest = max(h * w * (f or args.frames) for h, w, f in ((*b.size, b.frames) for b in shapes))
    return Buckets(shapes, args.budget or args.batch * largest, multiple=args.multiple)


def _count_by_bucket(dataset: Dataset, buckets: Buckets, args: argparse.Namespace) -> tuple[list[Population], int]:
    """Count the dataset's videos in each bucket, for clips of consecutive frames, and the images that are left out."""
    import numpy as np

    from headrace.loaders.sampling.suggested_buckets import is_image

    table = dataset.columns(["height", "width", "frames", "video_ext"])
    height, width, frames = (table[name].to_numpy() for name in ("height", "width", "frames"))
    has_video = ~np.isnan(height.astype(np.float64)) & (frames.astype(np.float64) >= 1)
    left_out = np.zeros(len(has_video), np.bool_) if buckets.takes_images(args.frames) else is_image(table)
    has_video &= ~left_out
    tall, wide = height[has_video].astype(np.int64), width[has_video].astype(np.int64)
    chosen = buckets.assign(tall, wide, frames[has_video].astype(np.float64), args.frames)
    mean_bytes = dataset.total_bytes / len(dataset)
    cells = [Population(int((chosen == bucket).sum()), mean_bytes) for bucket in range(len(buckets.buckets))]
    if not len(chosen):
        raise UsageError(f"{dataset.url} holds no video to put into buckets", hint="name datasets of videos")
    return cells, int(left_out.sum())


def _measure_buckets(
    buckets: Buckets, cells: Mapping[str, list[Population]], images: Mapping[str, int], args: argparse.Namespace
) -> _InBuckets:
    """Measure the buckets. With one dataset, a loader never delivers a bucket with fewer clips than a batch."""
    from headrace.loaders.sampling.never_delivered import small_buckets

    clips = [sum(cell.samples for cell in column) for column in zip(*cells.values(), strict=True)]
    small = small_buckets(buckets.names(), clips, buckets.batches(args.frames)) if len(cells) == 1 else []
    never = {one.bucket for one in small}
    if never.issuperset(bucket for bucket, count in enumerate(clips) if count):
        return _InBuckets(clips, [], small, images)
    delivered = {
        url: [Population(0) if bucket in never else cell for bucket, cell in enumerate(row)]
        for url, row in cells.items()
    }
    return _InBuckets(clips, _measure_mixed_buckets(buckets, delivered, args), small, images)


def _no_batch_error(shaped: _InBuckets) -> UsageError:
    """The error of buckets of which none fills a batch. A loader with these buckets stops with it, too."""
    from headrace.loaders.sampling.never_delivered import list_small_buckets

    return UsageError(
        f"no bucket has enough clips for a whole batch: {list_small_buckets(shaped.small)}",
        hint="lower --budget, --batch or --multiple, use fewer buckets, or give the loader drop_last=False",
    )


def _measure_mixed_buckets(
    buckets: Buckets, cells: Mapping[str, Sequence[Population]], args: argparse.Namespace
) -> list[BucketBalance]:
    from headrace.loaders.sampling.mixed_buckets import MixedBuckets
    from headrace.loaders.sampling.quality import bucket_balances

    mixed = MixedBuckets.of(
        cells,
        buckets.batches(args.frames),
        buckets.numbers(args.frames),
        weights=_by_name(cells, args),
        temperature=args.temperature,
        seed=args.seed,
        shuffle=not args.no_shuffle,
    )
    return bucket_balances(mixed, batches=args.batches)


def _by_name(names: Mapping[str, object], args: argparse.Namespace) -> dict[str, float] | None:
    return None if args.weights is None else dict(zip(names, args.weights, strict=True))


def _measure_mixture(sizes: Mapping[str, Population], args: argparse.Namespace) -> Balance:
    from headrace.loaders.sampling.mixture import Mixed
    from headrace.loaders.sampling.quality import balance

    if len(sizes) < len(args.datasets):
        raise UsageError("a dataset was named twice", hint="mix it with another one")
    if args.weights is not None and len(args.weights) != len(sizes):
        raise UsageError(f"{len(args.weights)} weights were given for {len(sizes)} datasets", hint="give one for each")
    mixed = Mixed.of(
        sizes,
        args.batch,
        weights=_by_name(sizes, args),
        temperature=args.temperature,
        seed=args.seed,
        shuffle=not args.no_shuffle,
    )
    return balance(mixed, batches=args.batches)


def _measure(dataset: Dataset, args: argparse.Namespace) -> Quality:
    import pyarrow.compute as pc

    from headrace.loaders.sampling.order import Order
    from headrace.loaders.sampling.quality import quality

    shards = pc.dictionary_encode(dataset.columns(["shard"])["shard"]).combine_chunks()
    measured = Order.of(
        len(dataset),
        args.batch,
        sample_bytes=dataset.total_bytes / len(dataset),
        seed=args.seed,
        shuffle=not args.no_shuffle,
    )
    return quality(measured, shards.indices.to_numpy(), epoch=args.epoch, batches=args.batches, nodes=args.nodes)


def _print_quality(quality: Quality) -> None:
    print(
        f"{quality.samples} samples in {quality.groups} shards, global batches of {quality.batch}; {quality.batches} looked at\n"
    )
    print(f"{'':34}{'this order':>12}{'full shuffle':>14}")
    for name, label in (
        ("distance", "moved, share of the epoch"),
        ("spread", "apart in a batch, share of all"),
        ("neighbours", "next one in the same batch"),
        ("entropy", "bits of shards in a batch"),
    ):
        print(f"{label:34}{getattr(quality.order, name):12.4f}{getattr(quality.full, name):14.4f}")
    for nodes, reads in quality.reads.items():
        print(f"{f'chunks read by {nodes} nodes, of all':34}{reads:12.3f}{quality.full_reads[nodes]:14.3f}")
    print("\nsample number (down) by time in the epoch (across):")
    highest = max(map(max, quality.picture)) or 1
    for row in quality.picture:
        print("".join(_SHADES[-(-n * (len(_SHADES) - 1) // highest)] for n in row))


def _print_mix(balance: Balance) -> None:
    print(f"\nmixed, in batches of {balance.batch}: {'this order':>26}{'drawn':>14}")
    print(f"{'bits of sources in a batch':34}{balance.entropy:12.4f}{balance.drawn_entropy:14.4f}")
    print(f"{'samples off the share, at worst':34}{balance.away:12.1f}{balance.drawn_away:14.1f}")
    for name, share in balance.shares.items():
        print(f"{share:7.2%}  {name}")


def _print_buckets(buckets: Buckets, shaped: _InBuckets, batches: Sequence[int]) -> None:
    titles = (
        f"{'clips':>10}{'batch':>8}{'steps':>8}{'bits of sources':>18}{'drawn':>8}{'off, at worst':>16}{'drawn':>8}"
    )
    print(f"\n{'in buckets':20}{titles}")
    measured = {one.bucket: one for one in shaped.balances}
    for number, (name, clips, batch) in enumerate(zip(buckets.names(), shaped.clips, batches, strict=True)):
        if (bucket := measured.get(number)) is None:
            print(f"{name:20}{clips:10}{batch:8}{0:8.2%}")
            continue
        balance = bucket.balance
        bits = f"{balance.entropy:18.4f}{balance.drawn_entropy:8.4f}"
        off = f"{balance.away:16.1f}{balance.drawn_away:8.1f}"
        print(f"{name:20}{clips:10}{batch:8}{bucket.share:8.2%}{bits}{off}")


def _print_left_out(urls: Sequence[str], shaped: _InBuckets) -> None:
    """Print which samples a loader with these buckets never delivers."""
    from headrace.loaders.sampling.never_delivered import describe_images, describe_small_buckets

    lines = [describe_images(url, images) for url, images in shaped.images.items() if images]
    if shaped.small:
        lines.append(describe_small_buckets(urls[0], shaped.small))
    if lines:
        print("", *lines, sep="\n")
