"""One worker's optimizer step with a server, beside the plain optimizer's own.

Both sides step on models of equal size in turns, one thread each; medians of the turns. Prints one
JSON line a figure: ``value`` is psplus, ``reference`` what it is compared with, ``ratio`` psplus's
time over the reference's, lower is better.
"""

import json
import os
import secrets
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import psplus
from psplus import _C

ELEMENTS = 25_000_000
TINY = 5_000
REPEATS = 9

Optimizer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 1e-4}),
    "momentum": (torch.optim.SGD, {"lr": 1e-4, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 1e-4}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-4}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-4}),
}


def make_parameters(shapes: list[int]) -> list[torch.Tensor]:
    """Parameters with gradients, as a backward pass leaves them."""
    parameters = [torch.randn(n).requires_grad_() for n in shapes]
    for p in parameters:
        p.grad = torch.randn_like(p)
    return parameters


def measure(sides: dict[str, Callable[[], Any]], pause: float) -> dict[str, float]:
    """Median seconds of each, in turns; the server's apply ends in the pause before a step."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(REPEATS + 2):
        for name, run in sides.items():
            time.sleep(pause)
            begin = time.perf_counter()
            run()
            if turn > 1:
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def report(name: str, medians: dict[str, float]) -> None:
    """One line for each pair of a psplus side and a reference."""
    for side in [s for s in medians if s.startswith("psplus")]:
        for reference in [s for s in medians if not s.startswith("psplus")]:
            figure = {
                "name": name,
                "side": side,
                "against": reference,
                "value": round(medians[side] * 1e3, 3),
                "reference": round(medians[reference] * 1e3, 3),
                "ratio": round(medians[side] / medians[reference], 3),
                "unit": "ms",
                "repeats": REPEATS,
                "torch": torch.__version__,
                "kernels": _C.kernel_isa(),
            }
            print(json.dumps(figure), flush=True)


def wrapped(optimizer: torch.optim.Optimizer, **options: Any) -> psplus.DistributedOptimizer:
    """A PS+ optimizer of one worker."""
    return psplus.wrap(optimizer, "ps+", **options)


def with_new_gradients(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """A step whose gradients come from no backward pass, so that the check reads them all."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def step() -> None:
        for p in parameters:
            p.grad = p.grad.detach()
        optimizer.step()

    return step


def bench_large(session: psplus.Session) -> None:
    """A few large parameters: bound by memory."""
    shapes = [ELEMENTS // 5] * 5
    for name, (kind, options) in OPTIMIZERS.items():
        optimizers = {
            "psplus, no check": wrapped(
                kind(make_parameters(shapes), **options), session=session, nonfinite="allow"
            ),
            "default": kind(make_parameters(shapes), **options),
            "fused=True": kind(make_parameters(shapes), fused=True, **options),
        }
        optimizers["psplus, on the server"] = psplus.wrap(
            kind(make_parameters(shapes), **options),
            "asp",
            session=session,
            placement="server",
            nonfinite="allow",
        )
        checked = wrapped(kind(make_parameters(shapes), **options), session=session)
        optimizers["psplus, check of all gradients"] = checked
        sides = {side: o.step for side, o in optimizers.items()}
        sides["psplus, check of all gradients"] = with_new_gradients(checked)
        medians = measure(sides, pause=0.1)
        report(f"{name} step, {ELEMENTS / 1e6:.0f} M parameters", medians)
        for optimizer in optimizers.values():
            if isinstance(optimizer, psplus.DistributedOptimizer):
                optimizer.close()


def bench_without_server() -> None:
    """No server: the inner optimizer runs as it is."""
    shapes = [ELEMENTS // 5] * 5
    kind, options = OPTIMIZERS["momentum"]
    sides = {
        "psplus, no server": wrapped(
            kind(make_parameters(shapes), **options), nonfinite="allow"
        ).step,
        "default": kind(make_parameters(shapes), **options).step,
    }
    report("momentum step, 25 M parameters", measure(sides, pause=0.0))


def bench_tiny(session: psplus.Session) -> None:
    """Thousands of tiny parameters: bound by what is done for each."""
    shapes = [7] * TINY
    for name in ("momentum", "adam"):
        kind, options = OPTIMIZERS[name]
        optimizer = wrapped(kind(make_parameters(shapes), **options), session=session)
        sides = {"psplus": optimizer.step, "default": kind(make_parameters(shapes), **options).step}
        report(f"{name} step, {TINY} parameters of 7", measure(sides, pause=0.02))
        optimizer.close()


def main() -> None:
    """Run all with one worker."""
    os.environ.setdefault("PSPLUS_JOB", secrets.token_hex(8))
    torch.set_num_threads(1)
    session = psplus.connect(server="always")
    bench_large(session)
    bench_tiny(session)
    bench_without_server()
    session.close()


if __name__ == "__main__":
    main()
