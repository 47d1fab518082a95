"""Use a bucket of media where it lies: index it, look at it, choose a part by a condition, and train on that part.

    python examples/bucket_in_place.py 's3://bucket/raw/**/*.mp4' s3://bucket/dataset --where 'duration >= 0.5'

No file is copied: the dataset is an index of the bucket. `preview.html` shows frames of the chosen clips. The same from
the command line: `headrace index`, `headrace ls --where`, `headrace preview --where`.
"""

import argparse
import itertools
from pathlib import Path

import torch
from torch import nn

from headrace import Clip, Dataset, VideoLoader, index
from headrace.dataio import preview
from headrace.dataio.core.errors import NotFoundError


def open_or_index(media: str, url: str) -> Dataset:
    """Open the dataset. If there is none, read each file once, and write the index."""
    try:
        return Dataset(url, trust_mounts=True)
    except NotFoundError:
        return index(media, url)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("media", help="pattern or folder of the files")
    parser.add_argument("dataset", help="where the index is, or is written")
    parser.add_argument("--where", default="width > height", help="which clips, as a condition of SQL")
    parser.add_argument("--page", default="preview.html", help="where the page with frames is written")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    with open_or_index(args.media, args.dataset) as dataset:
        seconds = sum(dataset.columns(["duration"])["duration"].to_pylist())
        print(f"{len(dataset)} samples, {seconds:.1f} s, {dataset.total_bytes} bytes of media")
        chosen = dataset.where(args.where)
        print(f"{len(chosen)} samples where {args.where}: {', '.join(chosen.keys[:3])} ...")
        Path(args.page).write_text(preview(chosen))

        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(1), nn.Linear(4 * 3 * 32 * 32, 64), nn.ReLU(), nn.Linear(64, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        with VideoLoader(chosen, batch_size=2, clip=Clip(4), size=(32, 32), columns=["duration"]) as loader:
            batches = itertools.chain.from_iterable(itertools.repeat(loader))  # epoch after epoch
            for step, batch in zip(range(1, args.steps + 1), batches, strict=False):
                seconds = model(batch["video"] / 255).squeeze(1)  # the model learns how long the clip is
                loss = (seconds - torch.tensor(batch["duration"])).square().mean()
                optimizer.zero_grad(), loss.backward(), optimizer.step()
                print(f"step {step} loss {loss:.4f} keys {' '.join(batch['key'])}", flush=True)


if __name__ == "__main__":
    main()
