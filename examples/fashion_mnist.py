"""Train a small convolutional network with BatchNorm on Fashion-MNIST, under any psplus scheme.

apt-get install dataset-fashion-mnist                                                # the data
python examples/fashion_mnist.py                                                     # one worker
torchrun --standalone --nproc-per-node 2 examples/fashion_mnist.py                   # two, PS+
torchrun --standalone --nproc-per-node 2 examples/fashion_mnist.py --scheme bsp
"""

import argparse
import gzip
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import psplus

FOLDER = Path("/usr/share/datasets/fashion-mnist")  # of Debian's package
HEADER = {1: 8, 3: 16}  # bytes before the values of a file with labels or images


def load(folder: Path, part: str, kind: str) -> torch.Tensor:
    """Images (N, 28, 28) or labels (N,) as uint8; ``part`` is train or t10k."""
    dimensions = 3 if kind == "images" else 1
    raw = gzip.decompress((folder / f"{part}-{kind}-idx{dimensions}-ubyte.gz").read_bytes())
    values = torch.frombuffer(bytearray(raw), dtype=torch.uint8, offset=HEADER[dimensions])
    return values.view(-1, 28, 28) if kind == "images" else values


def load_part(folder: Path, part: str) -> TensorDataset:
    """Images as float32 (N, 1, 28, 28), about standard normal, and labels as int64."""
    images = load(folder, part, "images").unsqueeze(1).float().div_(255)
    return TensorDataset(images.sub_(0.286).div_(0.353), load(folder, part, "labels").long())


def make_model() -> nn.Module:
    """Two convolutions and a linear layer, 20,000 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 10),
    )


def accuracy_of(model: nn.Module, data: TensorDataset) -> float:
    """Share of the images that the model names rightly."""
    model.eval()
    with torch.no_grad():
        right = [(model(x).argmax(1) == y).sum() for x, y in DataLoader(data, batch_size=500)]
    model.train()
    return torch.stack(right).sum().item() / len(data)


def train(args: argparse.Namespace) -> None:
    """Train in this process, and let rank 0 tell how it goes."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(rank)
    training, test = load_part(args.data, "train"), load_part(args.data, "t10k")
    sampler = DistributedSampler(training, num_replicas=world, rank=rank)
    loader = DataLoader(training, args.batch_size, sampler=sampler, drop_last=True)
    steps = min(args.steps or len(loader), len(loader))

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    bound = {"staleness_bound": args.staleness_bound} if args.scheme == "ssp" else {}
    with psplus.wrap(optimizer, args.scheme, model=model, **bound) as optimizer:
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=args.lr, total_steps=args.epochs * steps
        )
        for epoch in range(args.epochs):
            sampler.set_epoch(epoch)
            begin, before = time.perf_counter(), optimizer.step_vector.sum().item()
            for _, (images, labels) in zip(range(steps), loader, strict=False):
                loss = nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
            seconds = time.perf_counter() - begin
            made = optimizer.step_vector.sum().item() - before  # by all workers
            if rank == 0:  # the others need not wait for it
                with optimizer.evaluation():
                    accuracy = accuracy_of(model, test)
                speed = made * args.batch_size / seconds
                print(f"epoch {epoch + 1}: {accuracy:.1%} right, {speed:,.0f} samples/s")
        optimizer.synchronize()
        if rank == 0:
            workers = f"{world} worker{'s' * (world > 1)}"
            print(f"{args.scheme}, {workers}: {accuracy_of(model, test):.1%} right")


def main() -> None:
    """Parse the options and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scheme", default="ps+", help="ps+ (the default), bsp, ssp or asp")
    parser.add_argument(
        "--staleness-bound", type=int, default=4, help="of ssp, in steps (default: 4)"
    )
    parser.add_argument("--epochs", type=int, default=3, help="passes over the data (default: 3)")
    parser.add_argument("--steps", type=int, help="of each worker in an epoch; default: all data")
    parser.add_argument("--batch-size", type=int, default=50, help="of each worker (default: 50)")
    parser.add_argument(
        "--lr", type=float, default=0.05, help="the largest of its cycle (default: 0.05)"
    )
    parser.add_argument("--data", type=Path, default=FOLDER, help="where the four files are")
    args = parser.parse_args()
    if not (args.data / "train-images-idx3-ubyte.gz").exists():
        parser.exit(
            1,
            f"no Fashion-MNIST in {args.data}; on Debian or Ubuntu\n"
            "    sudo apt-get install dataset-fashion-mnist\n"
            "puts it where this example looks; --data names another folder\n",
        )
    train(args)


if __name__ == "__main__":
    main()
