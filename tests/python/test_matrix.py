"""Every optimizer of torch.optim with what people put around it, against the plain optimizer.

Each case trains the same model on the same batches with the plain optimizer and with the wrapped
one, inside workers that live through all cases.
"""

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from problems import OPTIMIZERS, loss_at, make_model, values_of
from torch import nn
from torch.distributed.checkpoint import state_dict as checkpoint
from torch.optim import swa_utils
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau, StepLR

import psplus

STEPS = 6
Workers = Callable[..., list[Any]]

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: StepLR(o, 2, gamma=0.5),
    "OneCycleLR": lambda o: OneCycleLR(
        o, max_lr=0.02, total_steps=STEPS + 1, cycle_momentum="momentum" in o.param_groups[0]
    ),
    "ReduceLROnPlateau": lambda o: ReduceLROnPlateau(o, patience=0, factor=0.5, threshold=1.0),
    "SWA": lambda o: swa_utils.SWALR(o, swa_lr=0.005, anneal_epochs=2),
}
WAYS = ["plain", "scaler", "closure", "state_dict", "checkpoint"]


class Trainer:
    """A loop with a scheduler, an averaged model, and one way of stepping."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module, way: str, rank: int):
        self.optimizer, self.model, self.way, self.rank = optimizer, model, way, rank
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

    def step(self, number: int) -> float:
        if self.way == "closure":
            return float(self.optimizer.step(lambda: self.backward(number)).detach())
        loss = self.backward(number)
        if self.way == "scaler":
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        if self.way == "state_dict" and number == 2:
            self.optimizer.load_state_dict(self.optimizer.state_dict())
        return float(loss.detach())

    def backward(self, number: int) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = loss_at(self.model, self.rank, number)
        (self.scaler.scale(loss) if self.way == "scaler" else loss).backward()
        return loss

    def save_and_load(self) -> None:
        found = checkpoint.get_optimizer_state_dict(self.model, self.optimizer)
        checkpoint.set_optimizer_state_dict(self.model, self.optimizer, found)
        self.optimizer.zero_grad()


def train(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    scheduler: str,
    way: str,
    wrap: Callable[[torch.optim.Optimizer, nn.Module], torch.optim.Optimizer] | None,
    rank: int = 0,
    scheduled_first: bool = False,
) -> dict[str, Any]:
    """Values, averaged values and learning rates after `STEPS` steps."""
    model = make_model()
    plain = make(list(model.parameters()))
    scheduled: LRScheduler | None = SCHEDULERS[scheduler](plain) if scheduled_first else None
    optimizer = plain if wrap is None else wrap(plain, model)
    trainer = Trainer(optimizer, model, way, rank)
    if way == "checkpoint":
        trainer.save_and_load()
    if scheduled is None:
        scheduled = SCHEDULERS[scheduler](optimizer)
    averaged = swa_utils.AveragedModel(model)
    rates = []
    for number in range(STEPS):
        loss = trainer.step(number)
        if way == "checkpoint" and number == 3:
            trainer.save_and_load()
        if isinstance(scheduled, ReduceLROnPlateau):
            scheduled.step(loss)
        else:
            scheduled.step()
        averaged.update_parameters(model)
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
    if isinstance(optimizer, psplus.DistributedOptimizer):
        optimizer.synchronize()
        assert optimizer.stats.pushes == STEPS, optimizer.stats
        optimizer.close()
    return {"values": values_of(model), "swa": values_of(averaged.module), "rates": rates}


def refused_by_torch(name: str, scheduler: str, way: str) -> bool:
    """Whether the plain optimizer does not take this combination either."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(OPTIMIZERS[name], scheduler, way, None)
    except Exception:
        return True
    return False


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """What of a training differs from that of the plain optimizer."""
    wrong = []
    if found["rates"] != expected["rates"]:
        wrong.append(f"learning rates {found['rates']} instead of {expected['rates']}")
    for kind in ("values", "swa"):
        for parameter, value in expected[kind].items():
            off = (found[kind][parameter] - value).abs().max().item()
            if not off <= 2e-6 * max(1.0, value.abs().max().item()):
                wrong.append(f"{kind} of {parameter} off by {off}")
    return wrong


def train_matrix() -> dict[str, Any]:
    """All combinations through a server with one worker; differences from the plain optimizer."""
    wrong, done, refused = [], 0, []
    for name, make in OPTIMIZERS.items():
        session = psplus.connect(server="always")  # a job has 64 wrappers at most

        def wrap(plain: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
            # Not by the model: Muon holds its matrices alone.
            names = dict(model.named_parameters())
            return psplus.wrap(plain, "ps+", named_parameters=names, session=session)  # noqa: B023

        for s, scheduler in enumerate(SCHEDULERS):
            for w, way in enumerate(WAYS):
                case = f"{name}, {scheduler}, {way}"
                if refused_by_torch(name, scheduler, way):
                    refused.append(case)
                    continue
                expected = train(make, scheduler, way, None)
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    found = train(make, scheduler, way, wrap, scheduled_first=(s + w) % 2 == 0)
                done += 1
                told = [str(c.message) for c in caught if "lr_scheduler" in str(c.message)]
                wrong += [f"{case}: {text}" for text in told + differences(found, expected)]
        session.close()
    return {"wrong": wrong, "done": done, "refused": refused}


def test_one_worker_through_a_server(workers: Workers) -> None:
    (found,) = workers(train_matrix, 1, limit=400.0)
    assert found["wrong"] == []
    assert found["done"] + len(found["refused"]) == (len(OPTIMIZERS) * len(SCHEDULERS) * len(WAYS))
    assert found["done"] >= 200, found["refused"]


def train_pair() -> dict[str, Any]:
    """All combinations under BSP; a job for each optimizer."""
    rank, job = int(os.environ["RANK"]), os.environ["PSPLUS_JOB"]
    found: dict[str, Any] = {}
    for name, make in OPTIMIZERS.items():
        os.environ["PSPLUS_JOB"] = f"{job}-{name}"
        session = psplus.connect()

        def wrap(plain: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
            names = dict(model.named_parameters())
            return psplus.wrap(plain, "bsp", named_parameters=names, session=session)  # noqa: B023

        for scheduler in SCHEDULERS:
            for way in WAYS:
                if not refused_by_torch(name, scheduler, way):
                    found[f"{name}, {scheduler}, {way}"] = train(make, scheduler, way, wrap, rank)
        session.close()
    return found


def train_by_mean_deltas(name: str, scheduler: str, way: str, workers: int) -> list[dict[str, Any]]:
    """Plain optimizers side by side, each taking the mean of all deltas; one result a worker."""
    trainers, scheduled, averaged = [], [], []
    for rank in range(workers):
        model = make_model()
        trainer = Trainer(OPTIMIZERS[name](list(model.parameters())), model, way, rank)
        if way == "checkpoint":
            trainer.save_and_load()
        trainers.append(trainer)
        scheduled.append(SCHEDULERS[scheduler](trainer.optimizer))
        averaged.append(swa_utils.AveragedModel(model))
    rates: list[list[list[float]]] = [[] for _ in range(workers)]
    for number in range(STEPS):
        before = values_of(trainers[0].model)
        losses = [trainer.step(number) for trainer in trainers]
        after = [values_of(trainer.model) for trainer in trainers]
        for rank, trainer in enumerate(trainers):
            with torch.no_grad():
                for parameter, value in trainer.model.named_parameters():
                    deltas = [before[parameter].double() - a[parameter].double() for a in after]
                    value.copy_(before[parameter].double() - sum(deltas) / workers)
            if way == "checkpoint" and number == 3:
                trainer.save_and_load()
            if isinstance(scheduled[rank], ReduceLROnPlateau):
                scheduled[rank].step(losses[rank])
            else:
                scheduled[rank].step()
            averaged[rank].update_parameters(trainer.model)
            rates[rank].append([float(g["lr"]) for g in trainer.optimizer.param_groups])
    return [
        {"values": values_of(t.model), "swa": values_of(a.module), "rates": r}
        for t, a, r in zip(trainers, averaged, rates, strict=True)
    ]


def test_two_workers_under_bsp(workers: Workers) -> None:
    found = workers(train_pair, 2, limit=400.0)
    assert found[0].keys() == found[1].keys()
    assert len(found[0]) >= 200
    wrong = []
    for case in found[0]:
        name, scheduler, way = case.split(", ")
        expected = train_by_mean_deltas(name, scheduler, way, 2)
        for of_rank, reference in zip(found, expected, strict=True):
            wrong += [f"{case}: {text}" for text in differences(of_rank[case], reference)]
    assert wrong == []
