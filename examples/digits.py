"""Train scikit-learn's handwritten digits: one process, DDP, or any psplus scheme.

python examples/digits.py                                                 # one worker
torchrun --standalone --nproc-per-node 2 examples/digits.py               # two, PS+
torchrun --standalone --nproc-per-node 2 examples/digits.py --scheme ddp  # two, all-reduce
python examples/digits.py --compare --workers 2 --plot digits.png         # all of it, compared
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

import psplus

TRAINING_IMAGES = 1400  # of 1,797; the rest measures accuracy


def load_data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Training images (1400, 64) and labels, test images and labels; the same on every worker."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
    labels = torch.tensor(digits.target)[order]
    n = TRAINING_IMAGES
    return images[:n], labels[:n], images[n:], labels[n:]


def train(args: argparse.Namespace) -> dict | None:
    """Train in this process; rank 0 returns what it measured."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(args.seed)
    images, labels, test_images, test_labels = load_data()

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    net = model
    if args.scheme == "ddp":
        dist.init_process_group("gloo")
        net = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    if args.scheme not in ("ddp", "single"):
        bound = {"staleness_bound": args.staleness_bound} if args.scheme == "ssp" else {}
        optimizer = psplus.wrap(optimizer, args.scheme, model=model, **bound)
    evaluation = getattr(optimizer, "evaluation", nullcontext)

    curve, seconds, samples = [], 0.0, 0
    for epoch in range(args.epochs):
        # One permutation for all; every worker takes its own part of it.
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
        mine = order[rank::world][: len(labels) // world]
        begin = time.perf_counter()
        for batch in mine.split(args.batch_size):
            loss = nn.functional.cross_entropy(net(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        seconds += time.perf_counter() - begin
        samples += len(mine) * world
        if rank == 0:
            with evaluation(), torch.no_grad():
                output = model(test_images)
                test_loss = nn.functional.cross_entropy(output, test_labels).item()
                accuracy = (output.argmax(1) == test_labels).double().mean().item()
            curve.append({"seconds": seconds, "loss": test_loss, "accuracy": accuracy})

    if args.scheme == "ddp":
        # Gloo's thread must have let go of its last work before the interpreter ends; else torch
        # aborts the process now and then.
        time.sleep(0.2)
        dist.destroy_process_group()
    elif args.scheme != "single":
        optimizer.synchronize()
        optimizer.close()
    if rank != 0:
        return None
    with torch.no_grad():
        accuracy = (model(test_images).argmax(1) == test_labels).double().mean().item()
    return {
        "scheme": args.scheme,
        "workers": world,
        "accuracy": accuracy,
        "seconds": seconds,
        "samples_per_second": samples / seconds,
        "curve": curve,
    }


def run(scheme: str, workers: int, args: argparse.Namespace) -> dict:
    """Train under torchrun with ``workers`` processes; returns what rank 0 measured."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*torchrun, f"--nproc-per-node={workers}", __file__]
        for name in ("epochs", "batch_size", "lr", "seed", "staleness_bound"):
            command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
        command += ["--scheme", scheme, "--result", str(result)]
        # One thread each: workers share the cores, as they would in a real run.
        subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
        return json.loads(result.read_text())


def compare(args: argparse.Namespace) -> None:
    """Run one worker, DDP and PS+ one after the other; print a table and plot the curves."""
    runs = [run("single", 1, args), run("ddp", args.workers, args), run("ps+", args.workers, args)]
    print(f"{'scheme':<8}{'workers':>8}{'accuracy':>10}{'seconds':>9}{'samples/s':>11}")
    for r in runs:
        print(
            f"{r['scheme']:<8}{r['workers']:>8}{r['accuracy']:>10.1%}{r['seconds']:>9.2f}"
            f"{r['samples_per_second']:>11,.0f}"
        )
    if args.plot:
        plot(runs, args.plot)
        print(f"curves: {args.plot}")


def plot(runs: list[dict], path: str) -> None:
    """Test loss and accuracy against training time, one line a run."""
    import matplotlib

    matplotlib.use("Agg")  # draws into a file; needs no screen
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for r in runs:
        seconds = [point["seconds"] for point in r["curve"]]
        for axis, value in zip(axes, ("loss", "accuracy"), strict=True):
            label = f"{r['scheme']}, {r['workers']} worker{'s' * (r['workers'] > 1)}"
            axis.plot(seconds, [point[value] for point in r["curve"]], label=label)
            axis.set(xlabel="training time, seconds", ylabel=f"test {value}")
    axes[0].set_yscale("log")
    axes[1].legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Parse the options and train or compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--scheme", default="ps+", help="ps+ (the default), bsp, ssp, asp, ddp or single"
    )
    parser.add_argument(
        "--staleness-bound", type=int, default=4, help="of ssp, in steps (default: 4)"
    )
    parser.add_argument("--epochs", type=int, default=20, help="passes over the data (default: 20)")
    parser.add_argument("--batch-size", type=int, default=16, help="of each worker (default: 16)")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate (default: 0.1)")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights (default: 0)")
    parser.add_argument(
        "--compare", action="store_true", help="run one worker, DDP and PS+ in turn"
    )
    parser.add_argument("--workers", type=int, default=2, help="with --compare (default: 2)")
    parser.add_argument("--plot", metavar="FILE", help="with --compare: where to draw the curves")
    parser.add_argument("--result", metavar="FILE", help="where rank 0 writes what it measured")
    args = parser.parse_args()
    if args.compare:
        compare(args)
        return
    result = train(args)
    if result is None:
        return
    if args.result:
        Path(args.result).write_text(json.dumps(result))
    else:
        print(f"{result['accuracy']:.1%} of the test digits right, {result['seconds']:.2f} s")


if __name__ == "__main__":
    main()
