"""Optimizers that servers can hold, and what tests compare of them."""

import copy
from typing import Any

import torch
from problems import OptimizerMaker, gradients_at
from torch import nn

PLACED: dict[str, OptimizerMaker] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.05),
    "SGD maximize": lambda p: torch.optim.SGD(p, lr=0.01, maximize=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.2),
    "nesterov": lambda p: torch.optim.SGD(
        p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "AMSGrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, betas=(0.8, 0.9)),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, maximize=True),
    "Adagrad": lambda p: torch.optim.Adagrad(
        p, lr=0.05, lr_decay=0.01, weight_decay=0.01, initial_accumulator_value=0.1
    ),
}


def assert_close(found: Any, expected: Any, tolerance: float, where: str = "") -> None:
    """Trees of tensors and other values."""
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, where
        assert found.shape == expected.shape, where
        scale = max(1.0, expected.abs().max().item())
        difference = (found.double() - expected.double()).abs().max().item()
        assert difference <= tolerance * scale, f"{where}: off by {difference}"
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_close(found[key], value, tolerance, f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for i, value in enumerate(expected):
            assert_close(found[i], value, tolerance, f"{where}[{i}]")
    else:
        assert found == expected, where


def state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return copy.deepcopy(optimizer.state_dict())


def two_groups(make: OptimizerMaker, model: nn.Module) -> torch.optim.Optimizer:
    """The last layer learns at a rate of its own."""
    optimizer = make(list(model[0].parameters()))
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.02})
    if isinstance(optimizer, torch.optim.Adagrad):  # which makes state for its first groups only
        optimizer = make([p for group in optimizer.param_groups for p in group["params"]])
    return optimizer


def train(optimizer: torch.optim.Optimizer, model: nn.Module, steps: range) -> None:
    """Steps whose rate a schedule changes, one of them without a gradient for a parameter."""
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
    for step in steps:
        gradients_at(model, 0, step)
        if step % 3 == 1:
            model[0].bias.grad = None
        optimizer.step()
        schedule.step()
