"""DistributedDataParallel on the CPU: one script, two backends.

torchrun --standalone --nproc-per-node 2 examples/ddp.py --backend gloo
torchrun --standalone --nproc-per-node 2 examples/ddp.py --backend psplus

Fits a fixed random network; both backends end at the same loss, and only the time differs.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn

BATCH = 64  # samples of each worker in a step
INPUTS = 256


def make_model(width: int) -> nn.Module:
    """The network that is trained; ``width`` 1024 has 1.3 million parameters."""
    return nn.Sequential(
        nn.Linear(INPUTS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
    )


def main() -> None:
    """Train, and let rank 0 tell how it went."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--backend",
        default="psplus",
        choices=["gloo", "psplus"],
        help="what carries the gradients (default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=200,
        help="of each worker; the first tenth is not timed (default: %(default)s)",
    )
    parser.add_argument(
        "--width", type=int, default=1024, help="of the hidden layers (default: %(default)s)"
    )
    args = parser.parse_args()

    dist.init_process_group(args.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.parallel.DistributedDataParallel(make_model(args.width))
    teacher = nn.Sequential(nn.Linear(INPUTS, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    samples = torch.Generator().manual_seed(1 + rank)  # every worker draws its own

    losses = []
    for step in range(args.steps):
        if step == args.steps // 10:  # what comes before is warm-up
            dist.barrier()
            begun = time.perf_counter()
        inputs = torch.randn(BATCH, INPUTS, generator=samples)
        with torch.no_grad():
            wanted = teacher(inputs)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(inputs), wanted)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    seconds = time.perf_counter() - begun
    steps = args.steps - args.steps // 10

    loss = torch.stack(losses[-10:]).mean()
    dist.reduce(loss, dst=0)
    if rank == 0:
        print(
            f"{args.backend}: {size} workers, {steps * BATCH * size / seconds:.0f} samples/s, "
            f"loss {loss.item() / size:.5f}"
        )
    if args.backend == "gloo":
        # Its thread must have let go of its last work before the interpreter ends; else torch
        # aborts the process now and then.
        time.sleep(0.2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
